"""Grafana dashboard and Prometheus alerts of deploy/: they use metrics that a gateway exports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import pytest
import yaml  # type: ignore[import-untyped]

pytest.importorskip("prometheus_client")

from bottega.gateway.telemetry.metrics import Metrics
from tests.gateway.entries import ANSWERED
from tests.paths import ROOT

RULES = ROOT / "deploy/prometheus/alerts.yaml"
RULE_TESTS = ROOT / "deploy/prometheus/alerts_test.yaml"
DASHBOARD = json.loads((ROOT / "deploy/grafana/bottega.json").read_text("utf-8"))
METRIC = re.compile(r"\b(bottega_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"[^"]*"')
GROUPING = re.compile(r"\b(?:by|ignoring|on)\s*\(([^)]*)\)")
OF_PROMETHEUS = {"instance", "job", "le"}


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    return cast(list[dict[str, Any]], group["rules"])


def panels() -> list[dict[str, Any]]:
    return [one for one in DASHBOARD["panels"] if one["type"] != "row"]


def dashboard_queries() -> Iterator[str]:
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Return the labels of each exported metric, by the name of its samples."""
    metrics = Metrics(["small"])
    metrics.observe(ANSWERED)
    metrics.lost_rows(lambda: 0)
    metrics.ready(lambda: True)
    metrics.cache_entries("a", 1)
    metrics.compared[1.0] += 1
    metrics.warned.labels("not stored").inc()
    metrics.breaker("small", type("Breaker", (), {"state": "open"})())
    samples = [sample for family in metrics.collect() for sample in family.samples]
    labels: dict[str, set[str]] = {}
    for sample in samples:
        labels.setdefault(sample.name, set()).update(sample.labels)
    return {name: found for name, found in labels.items() if not name.endswith("_created")}


def check_query(query: str, exported: dict[str, set[str]]) -> set[str]:
    """Check the metrics and labels of a query; return the metrics."""
    used = METRIC.findall(query)
    labels = {label for name, _ in used for label in exported[name]} | OF_PROMETHEUS
    for name, matchers in used:
        assert set(MATCHER.findall(matchers)) <= exported[name] | OF_PROMETHEUS, query
    for names in GROUPING.findall(query):
        assert {name.strip() for name in names.split(",")} <= labels, query
    return {name for name, _ in used}


def test_alerts_use_exported_metrics(exported: dict[str, set[str]]) -> None:
    for rule in rules():
        names = check_query(rule["expr"], exported)
        assert names or rule["expr"].startswith("up{"), rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
        mentioned = set(re.findall(r"bottega_\w+", rule["annotations"]["description"]))
        assert all(any(name.startswith(one) for name in exported) for one in mentioned)
    assert len({rule["alert"] for rule in rules()}) == len(rules())


def test_each_alert_has_a_test_in_which_it_fires() -> None:
    tests = yaml.safe_load(RULE_TESTS.read_text("utf-8"))["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    fired = {case["alertname"] for case in cases if case.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in rules()}


def test_alerts_are_documented() -> None:
    page = (ROOT / "docs/telemetry.md").read_text("utf-8")
    assert {rule["alert"] for rule in rules()} == set(re.findall(r"`(Bottega[A-Z]\w+)`", page))


def test_dashboard_uses_exported_metrics(exported: dict[str, set[str]]) -> None:
    shown = set[str]().union(*(check_query(one, exported) for one in dashboard_queries()))
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown} == families


def test_dashboard_is_well_formed() -> None:
    ids = [one["id"] for one in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        assert panel["title"] and panel["description"].endswith(".")
        assert panel["datasource"]["uid"] == "${datasource}"
        position = panel["gridPos"]
        assert position["x"] + position["w"] <= 24
    for one, other in combinations(DASHBOARD["panels"], 2):
        a, b = one["gridPos"], other["gridPos"]
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], one["title"]


def promtool(*arguments: object) -> None:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("needs promtool, of the Debian package prometheus")
    done = subprocess.run([found, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_alerts() -> None:
    promtool("check", "rules", RULES)


def test_alerts_fire_as_expected() -> None:
    promtool("test", "rules", RULE_TESTS)


def test_promtool_accepts_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    queries = (one.replace("$__rate_interval", "5m") for one in dashboard_queries())
    recorded = [{"record": f"panel:{i}", "expr": one} for i, one in enumerate(queries)]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    promtool("check", "rules", file)
