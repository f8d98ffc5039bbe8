"""Experiments: variants of requests, and their report."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from bottega.cli.app import app
from bottega.errors import NotFoundError, SettingError
from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.experiment_report import experiment_report
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import FILE, Account, Entry, Feedback, ShadowSample
from bottega.gateway.accounting.reports import add_feedback
from bottega.gateway.config.config_file import parse_config
from bottega.gateway.config.overrides import Experiment, Overrides
from bottega.gateway.running.build import build
from bottega.openai_api.request import BodyLimits, ChatRequest, parse_request
from tests.gateway.gateways import ENVIRONMENT, gateway_config, run_gateway
from tests.gateway.harness import client, user_messages
from tests.gateway.test_config import TWO
from tests.server import Server

SHOTS = Experiment("more-shots", "question", 0.5, Overrides(), Overrides(shots=4))
TEAM = Account("t", "team", "ns")


def chat(text: str = "hi", **more: Any) -> ChatRequest:
    body = {"model": "bottega", "messages": [{"role": "user", "content": text}], **more}
    return parse_request(body, BodyLimits())


def variant(experiment: Experiment, account: Account = TEAM, **more: Any) -> str:
    return experiment.assign(Overrides(), account, "ns", chat(**more))[0]


def test_share_of_units_get_the_variant() -> None:
    for share in (0.0, 0.2, 1.0):
        experiment = replace(SHOTS, share=share)
        found = [variant(experiment, text=str(number)) for number in range(2000)]
        assert abs(found.count("more-shots:b") / 2000 - share) < 0.03
        assert set(found) <= {"more-shots:a", "more-shots:b"}


def test_assignment_is_stable_and_differs_between_experiments() -> None:
    texts = [str(number) for number in range(200)]
    first = [variant(SHOTS, text=text)[-1] for text in texts]
    # These values must never change: a restart would mix the variants.
    assert "".join(first[:16]) == "bbaaaaabbaabbaba"
    other = [variant(replace(SHOTS, name="other"), text=text)[-1] for text in texts]
    assert 60 < sum(a == b for a, b in zip(first, other, strict=True)) < 140


@pytest.mark.parametrize("unit", ["question", "user", "account", "namespace"])
def test_equal_units_get_the_same_variant(unit: Any) -> None:
    experiment = replace(SHOTS, unit=unit)
    numbers = range(40)
    by_unit = {
        "question": [variant(experiment, text=str(n)) for n in numbers],
        "user": [variant(experiment, user=str(n)) for n in numbers],
        "account": [variant(experiment, replace(TEAM, id=str(n))) for n in numbers],
        "namespace": [experiment.assign(Overrides(), TEAM, str(n), chat())[0] for n in numbers],
    }
    varying = {name for name, found in by_unit.items() if len(set(found)) == 2}
    # Names of users are the client's own, so the account is a part of the unit.
    assert varying == ({"user", "account"} if unit == "user" else {unit})


def test_requests_with_options_belong_to_no_variant() -> None:
    for own in (Overrides(tier="x"), Overrides(shots=0), Overrides(retrieve=False)):
        assert SHOTS.assign(own, TEAM, "ns", chat()) == ("", own)
    kept = Overrides(namespace="ns/x", store=False)
    name, overrides = replace(SHOTS, share=1).assign(kept, TEAM, "ns/x", chat())
    assert (name, overrides) == ("more-shots:b", replace(kept, shots=4))


@contextmanager
def gateway(folder: Path, endpoint: Server, section: str) -> Iterator[openai.OpenAI]:
    config = gateway_config(folder, endpoint.url, f"\n[experiment]\n{section}")
    config = replace(config, cache=replace(config.cache, embed="pixels"))
    with run_gateway(build(config, ENVIRONMENT)) as url, client(url) as real:
        yield real


def ask(real: openai.OpenAI, shade: int, model: str = "bottega", **more: Any) -> Any:
    return real.chat.completions.with_raw_response.create(
        model=model, messages=user_messages(shade), **more
    )


def test_variants_answer_and_are_reported(endpoint: Server, tmp_path: Path) -> None:
    section = 'name = "hidden"\na = "no-retrieve"\nb = ""\n'
    with gateway(tmp_path, endpoint, section) as real:
        ask(real, 255, "bottega/large")  # fills the cache, and belongs to no variant
        replies = [ask(real, shade) for shade in range(1, 13)]
        assert "x-bottega-variant" not in ask(real, 1, "bottega:shots=1").headers
        again = ask(real, 1)
        for reply in replies:
            name = reply.headers["x-bottega-variant"]
            assert (reply.headers["x-bottega-demonstrations"] == "0") == (name == "hidden:a")
            real.post(
                "/feedback",
                body={"request_id": reply.headers["x-request-id"], "rating": name[-1] == "b"},
                cast_to=object,
            )
        assert again.headers["x-bottega-cache"] == "replayed"
        assert again.headers["x-bottega-variant"] == replies[0].headers["x-bottega-variant"]
    options = ["experiment", "report", "--data", str(tmp_path)]
    result = CliRunner().invoke(app, [*options, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    by_metric = {one["metric"]: one for one in found["comparisons"]}
    names = [reply.headers["x-bottega-variant"] for reply in [*replies, again]]
    assert found["experiment"] == "hidden"
    assert found["requests"] == [names.count("hidden:a"), names.count("hidden:b")]
    assert sum(found["replayed"]) == 1
    assert (by_metric["rating"]["a"]["value"], by_metric["rating"]["b"]["value"]) == (0.0, 1.0)
    assert by_metric["rating"]["difference"]["value"] == 1.0
    assert by_metric["agreement"]["a"] is None
    assert by_metric["seconds"]["a"]["low"] is None  # too few
    text = CliRunner().invoke(app, options)
    assert text.exit_code == 0 and "'hidden'" in text.stdout


@pytest.mark.parametrize("unit", ["account", "user"])
def test_accounts_with_the_same_body_keep_their_variants(
    endpoint: Server, tmp_path: Path, unit: Any
) -> None:
    with closing(Accounts(tmp_path / FILE)) as accounts:
        keys = [accounts.add(str(number)) for number in range(20)]
    experiment = replace(SHOTS, name="who", unit=unit, b=Overrides(master_rate=1.0))
    expected = {variant(experiment, account) for account, _ in keys}
    assert len(expected) == 2
    section = f'name = "who"\nunit = "{unit}"\nb = "master-rate=1"\n'
    with gateway(tmp_path, endpoint, section) as real:
        for _ in range(2):
            for account, key in keys:
                reply = ask(real.with_options(api_key=key), 1)
                name = reply.headers["x-bottega-variant"]
                assert name == variant(experiment, account)
                if name == "who:b":
                    assert reply.headers["x-bottega-route"] == "large"


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ('a = "shots=2"', "experiment.name is missing"),
        ('name = "A b"\nb = "shots=2"', "not a valid name"),
        ('name = "x"\nb = "shots=many"', "experiment.b shots is invalid"),
        ('name = "x"\nb = "route=other"', "experiment.b route is invalid"),
        ('name = "x"\na = "no-store"', "experiment.a must not set"),
        ('name = "x"\na = "namespace=y"', "experiment.a must not set"),
        ('name = "x"', "experiment.b must differ"),
        ('name = "x"\nshare = 2', "experiment.share"),
        ('name = "x"\nunit = "day"', "experiment.unit"),
    ],
)
def test_invalid_experiments_are_rejected(section: str, expected: str) -> None:
    with pytest.raises(SettingError, match=expected):
        parse_config(f"{TWO}\n[experiment]\n{section}")


@pytest.fixture(params=["file", "postgres"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    location = str(tmp_path / "gateway.db")
    if request.param == "postgres":
        location = request.getfixturevalue("gateway_database")
    with closing(Ledger(location)) as opened:
        yield opened


def test_report_compares_variants(ledger: Ledger) -> None:
    rng = random.Random(0)
    ledger.set_master("large")
    for number in range(1300):
        name, time = rng.choice("ab"), 1000.0 + number
        state: Any = "failed" if name == "a" and number % 10 == 0 else "answered"
        common = (time, f"r{number}", "t", "ns")
        cost = (0.001 if name == "a" else 0.002) + rng.choice((-1e-5, 1e-5))
        entry = Entry(*common, "small", "m", state, 2, cost_usd=cost)
        status = 502 if state == "failed" else 200
        ledger.record(replace(entry, seconds=1.0, variant=f"x:{name}", status=status))
        ledger.record(Entry(*common, "large", "m", "shadow", cost_usd=0.1))
        agrees = 0.9 if name == "b" else 0.2
        ledger.record_shadow(ShadowSample(time, f"r{number}", "ns", 0.5, agrees, 0.0))
        # Measured for the gate, not drawn at random.
        others = ShadowSample(time, f"r{number}", "ns", 0.5, 1.0 - agrees, 0.0, sampled=False)
        ledger.record_shadow(others)
        if number % 3 == 0 and number < 600:
            ledger.flush()
            rating = float(name == "b")
            add_feedback(ledger, Feedback(time, f"r{number}", "t", "ns", "small", rating))
    rejected = Entry(1.0, "bad", "t", "ns", "", "m", "failed", status=400, variant="x:a")
    ledger.record(rejected)
    ledger.record(Entry(3000.0, "r", "t", "ns", "small", "m", "answered", variant="other:b"))
    ledger.flush()
    found = {one.metric: one for one in experiment_report(ledger, "x").comparisons}
    agreement = found["agreement"]
    assert agreement.a and agreement.b and agreement.difference
    assert (agreement.a.value, agreement.b.value) == pytest.approx((0.2, 0.9))
    low, high = agreement.difference.low, agreement.difference.high
    assert low is not None and high is not None and 0.5 < low < 0.7 < high
    # Both intervals hold together only if each is wider than on its own.
    assert agreement.a.high is not None and agreement.b.low is not None
    assert low < agreement.b.low - agreement.a.high
    assert found["rating"].difference and (found["rating"].difference.low or 0) > 0.5
    assert found["failed"].a and 0.05 < found["failed"].a.value < 0.2
    assert found["failed"].b and found["failed"].b.value == 0
    costs, seconds = found["cost_usd"].difference, found["seconds"].difference
    assert costs and (costs.value, costs.low, costs.high) == pytest.approx((0.001,) * 3, abs=2e-5)
    assert seconds and (seconds.value, seconds.low) == (0.0, None)  # all are equal
    assert found["master"].a and found["master"].a.value == 0
    assert experiment_report(ledger).experiment == "other"
    with pytest.raises(NotFoundError, match="no request belongs"):
        experiment_report(ledger, "x", since=1e9)
