"""Variants of an experiment with a retrieval method or a router of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from aiohttp import web

from bottega.errors import SettingError
from bottega.gateway.accounting.access import ANONYMOUS
from bottega.gateway.accounting.experiment_report import experiment_report
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import FILE
from bottega.gateway.accounting.savings import savings
from bottega.gateway.config.config_file import parse_config
from bottega.gateway.config.gateway_settings import Config
from bottega.gateway.config.overrides import Experiment, Overrides
from bottega.gateway.running.build import build
from bottega.gateway.running.server import GatewayServer
from bottega.knowledge import KnowledgeBase
from bottega.routing import BenefitGate, ShadowSampler
from tests.gateway.gateways import ENVIRONMENT, gateway_config, run_gateway
from tests.gateway.harness import client, harness, raw, user_messages
from tests.gateway.test_config import TWO
from tests.gateway.test_experiments import chat
from tests.gateway.test_shadow import shadow_parts
from tests.server import Server, ok, slowly


def user_of(variant: str, name: str = "try") -> str:
    """Return a user whose requests get this variant of an experiment with the unit user."""
    experiment = Experiment(name, "user", 0.5, Overrides(), Overrides())
    users = map(str, range(100))
    wanted = f"{name}:{variant}"
    return next(
        user
        for user in users
        if experiment.assign(Overrides(), ANONYMOUS, "", chat(user=user))[0] == wanted
    )


A, B = user_of("a"), user_of("b")


def configured(folder: Path, url: str, more: str = "", **cache: Any) -> Config:
    """Return a configuration with an experiment by user; `more` is its tables."""
    text = f'\n[experiment]\nname = "try"\nunit = "user"\n{more}' if more else ""
    cache = {"embed": "pixels", "min_similarity": -1.0, **cache}
    config = gateway_config(folder, url, text, embed=cache["embed"])
    return replace(
        config,
        cache=replace(config.cache, **cache),
        route=replace(config.route, cold_start=0),
    )


@contextmanager
def gateway(config: Config) -> Iterator[tuple[openai.OpenAI, GatewayServer]]:
    server = build(config, ENVIRONMENT)
    with run_gateway(server) as url, client(url) as real:
        yield real, server


def send(
    real: openai.OpenAI, shade: int, text: str, user: str = "", model: str = "bottega", **more: Any
) -> Any:
    messages = user_messages(shade, text=text)
    if user:
        more["user"] = user
    return real.chat.completions.with_raw_response.create(model=model, messages=messages, **more)


async def by_question(request: web.Request) -> web.StreamResponse:
    """Answer with the question itself."""
    body = orjson.loads(await request.read() or b"{}")
    *_, last = body.get("messages", [{"content": ""}])
    texts = last["content"] if isinstance(last["content"], list) else [{"text": last["content"]}]
    return await ok(f"answer to {''.join(one.get('text', '') for one in texts)}")(request)


def demonstration(endpoint: Server) -> str:
    """Return the answer of the first demonstration in the last request to the upstream."""
    messages = endpoint.bodies[-1]["messages"]
    return str(messages[1]["content"]) if len(messages) > 1 else ""


def test_each_variant_shows_the_demonstrations_of_its_retrieval(
    endpoint: Server, tmp_path: Path
) -> None:
    endpoint.answers = [by_question]
    more = '[experiment.b.cache]\nretrieve = "text"\nmin_similarity = 0.2\n'
    with gateway(configured(tmp_path, endpoint.url, more)) as (real, _):
        send(real, 0, "Which metal is liquid?", model="bottega/large")
        send(real, 255, "How tall is the tower?", model="bottega/large")
        found = {}
        for user in (A, B):
            reply = send(real, 250, "Which metal is liquid here?", user)
            found[reply.headers["x-bottega-variant"]] = demonstration(endpoint)
        # The threshold of the variant, whose vectors have another scale, is its own.
        far = send(real, 250, "An unrelated wording", B)
        outside = send(real, 250, "Which metal is liquid here?", model="bottega:shots=1")
    assert found == {
        "try:a": "answer to How tall is the tower?",  # the nearest image
        "try:b": "answer to Which metal is liquid?",  # the nearest text
    }
    assert far.headers["x-bottega-demonstrations"] == "0"
    assert 0 <= float(far.headers["x-bottega-similarity"]) < 0.2  # of the text
    assert "x-bottega-variant" not in outside.headers
    assert demonstration(endpoint) == "answer to How tall is the tower?"


METHODS = (
    "hybrid",
    "keyword-hashtag",
    *(
        pytest.param(one, marks=pytest.mark.slow)
        for one in (
            "crossed",
            "image",
            "text",
            "dual",
            "probe",
            "keywords",
            "hashtag",
            "bm25",
            "nearest",
        )
    ),
)


@pytest.mark.parametrize("retrieve", METHODS)
def test_variant_searches_like_a_gateway_with_its_method(
    endpoint: Server, tmp_path: Path, retrieve: str
) -> None:
    """Also examples from before the experiment are found; after it, its vectors are deleted."""
    endpoint.answers = [by_question]
    configured_method = "dual" if retrieve == "nearest" else "nearest"
    threshold = "" if retrieve in ("bm25", "hybrid") else "min_similarity = -1.0\n"
    more = f'[experiment.b.cache]\nretrieve = "{retrieve}"\n{threshold}'
    old = {"retrieve": configured_method, "embed": "bundled"}
    own: dict[str, Any] = {"retrieve": retrieve, "embed": "bundled"}
    if not threshold:
        own["min_similarity"] = None

    def similarity(config: Config, user: str) -> str:
        with gateway(config) as (real, _):
            send(real, 20, "How tall is the tower?", model="bottega/large")
            reply = send(real, 90, "Which metal is liquid here?", user)
        assert reply.headers["x-bottega-route"] == "small"
        return str(reply.headers["x-bottega-similarity"])

    with gateway(configured(tmp_path / "tried", endpoint.url, **old)) as (real, _):
        send(real, 1, "Which metal is liquid?", model="bottega/large")
    with gateway(configured(tmp_path / "own", endpoint.url, **own)) as (real, _):
        send(real, 1, "Which metal is liquid?", model="bottega/large")
    found = similarity(configured(tmp_path / "tried", endpoint.url, more, **old), B)
    assert found == similarity(configured(tmp_path / "own", endpoint.url, **own), B)
    similarity(configured(tmp_path / "tried", endpoint.url, **old), B)
    with KnowledgeBase.open(tmp_path / "tried" / "cache.db", None) as base:
        assert base.views().keys() == {"default"} and len(base) == 2


def test_routers_of_variants_have_their_own_thresholds(endpoint: Server, tmp_path: Path) -> None:
    more = """
        a.route = { router = "coverage", min_similarity = -1.0 }
        b.route = { router = "coverage", min_similarity = 1.0 }
    """
    with gateway(configured(tmp_path, endpoint.url, more)) as (real, _):
        send(real, 0, "Which metal is liquid?", model="bottega/large")
        routes = {
            user: [
                send(real, shade, "Which metal is liquid?", user).headers["x-bottega-route"]
                for shade in (9, 99)
            ]
            for user in (A, B)
        }
    assert routes == {A: ["small", "small"], B: ["large", "large"]}


def test_only_the_variant_with_confidence_requests_it(endpoint: Server, tmp_path: Path) -> None:
    more = "b.route = { router = 'confidence', min_confidence = 0.5, samples = 3 }\n"
    endpoint.answers = [ok("unsure", "sure", "sure")]
    with gateway(configured(tmp_path, endpoint.url, more)) as (real, _):
        for user in (A, B):
            reply = send(real, 1, "q", user).parse()
            assert len(reply.choices) == (3 if user == A else 1)
    body, sampled = endpoint.bodies[-2:]
    assert ("n" in body, sampled["n"]) == (False, 3)
    assert reply.choices[0].message.content == "sure"


def test_variants_share_the_cold_start(endpoint: Server, tmp_path: Path) -> None:
    config = configured(tmp_path, endpoint.url, "b.route = { router = 'fixed', tier = 'small' }\n")
    config = replace(config, route=replace(config.route, cold_start=3))
    with gateway(config) as (real, _):
        routes = [
            send(real, shade, "q", (A, B)[shade % 2]).headers["x-bottega-route"]
            for shade in range(8)
        ]
    assert routes == ["large"] * 3 + ["small"] * 5


async def test_each_variant_has_its_own_budget(endpoint: Server, tmp_path: Path) -> None:
    more = 'b = "shots=4"\n'
    config = configured(tmp_path, endpoint.url, more)
    budget = replace(config.route, router="budget", usd_per_1k=1.0)
    server = build(replace(config, route=budget), ENVIRONMENT)
    tenant = await server.tenants.open("")
    views = [tenant, *tenant.variants.values()]
    assert len({id(one.pipeline.route) for one in views}) == 3
    assert len({id(one.pipeline.retrieve) for one in views}) == 3  # filters of one search
    assert {one.writer for one in views} == {tenant.writer}
    await server.aclose()


def test_replies_of_variants_are_never_mixed(endpoint: Server, tmp_path: Path) -> None:
    """Not in memory, not with requests under way, and not after a restart with other settings."""
    more = "b.route = { router = 'fixed', tier = '{tier}' }\n"
    endpoint.answers = [slowly(by_question, 0.2)]

    def routes(real: openai.OpenAI) -> dict[str, list[tuple[str, str]]]:
        ready = threading.Barrier(6)

        def one(user: str) -> tuple[str, str]:
            ready.wait()
            headers = send(real, 1, "Which metal is liquid?", user).headers
            return headers["x-bottega-route"], headers["x-bottega-cache"]

        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(one, [A, B] * 3))
        return {"a": sorted(found[::2]), "b": sorted(found[1::2])}

    with gateway(configured(tmp_path, endpoint.url, more.replace("{tier}", "large"))) as (real, _):
        endpoint.bodies.clear()
        first = routes(real)
        assert sorted(body["model"] for body in endpoint.bodies) == ["huge", "qwen"]
        again = send(real, 1, "Which metal is liquid?", B)
    assert {route for route, _ in first["a"]} == {"small"}
    assert {route for route, _ in first["b"]} == {"large"}
    assert [cache for _, cache in first["b"]] == ["none", "replayed", "replayed"]
    assert again.headers["x-bottega-route"] == "large"
    # The master's answer is stored: a restart with the same settings repeats it.
    with gateway(configured(tmp_path, endpoint.url, more.replace("{tier}", "large"))) as (real, _):
        repeated = send(real, 1, "Which metal is liquid?", B)
    assert repeated.headers["x-bottega-cache"] == "replayed"
    with gateway(configured(tmp_path, endpoint.url, more.replace("{tier}", "small"))) as (real, _):
        changed = send(real, 1, "Which metal is liquid?", B)
    assert changed.headers["x-bottega-route"] == "small"
    assert changed.headers["x-bottega-cache"] != "replayed"


def test_report_compares_all_questions_of_variants(endpoint: Server, tmp_path: Path) -> None:
    """Also those for which only one of the methods finds demonstrations. Gates and savings use the
    samples of their method alone."""
    endpoint.answers = [by_question]
    more = 'b.cache = { retrieve = "text", min_similarity = 0.2 }\n[shadow]\nrate = 1.0\n'
    with gateway(configured(tmp_path, endpoint.url, more)) as (real, server):
        send(real, 0, "Which metal is liquid?", model="bottega/large")
        for user in (A, B):
            # Both variants find the first question, only a finds the second one.
            for text in ("Which metal is liquid here?", "An unrelated wording"):
                send(real, 250, text, user)
        rows = shadow_rows(server.ledger, "e.variant, s.retrieve", 4)
    assert rows == [
        ("try:a", "nearest"),
        ("try:a", "nearest"),
        ("try:b", "none"),
        ("try:b", "text"),
    ]
    with closing(Ledger(tmp_path / FILE)) as ledger:
        agreement = experiment_report(ledger).comparisons[0]
        found = savings(ledger).agreement
        assert agreement.metric == "agreement" and agreement.a and agreement.b and found
        assert (agreement.a.n, agreement.b.n, found.n) == (2, 2, 4)
        gates = [ledger.gate("", name) for name in ("nearest", "text")]
        assert [len(orjson.loads(state or "")["samples"]) for state in gates] == [2, 1]


def shadow_rows(ledger: Ledger, columns: str, count: int) -> list[Any]:
    """Return columns of the shadow samples of variants, sorted, once there are `count`."""
    end = time.monotonic() + 30
    while True:
        ledger.flush()
        rows = ledger.read(
            f"SELECT {columns} FROM gateway_shadows AS s JOIN gateway_entries AS e"
            f" ON e.request_id = s.request_id WHERE e.variant != '' ORDER BY {columns}"
        )
        if len(rows) >= count:
            return rows
        assert time.monotonic() < end


def test_agreement_excludes_samples_for_the_gate(endpoint: Server, tmp_path: Path) -> None:
    """A gate with too few samples measures only questions with demonstrations."""
    endpoint.answers = [by_question]
    shadow = "[shadow]\nrate = 1e-9\ngate = true\n"
    more = f'b.cache = {{ retrieve = "text", min_similarity = 0.2 }}\n{shadow}'
    with gateway(configured(tmp_path, endpoint.url, more)) as (real, server):
        send(real, 0, "Which metal is liquid?", model="bottega/large")
        send(real, 250, "Which metal is liquid here?", A)
        assert shadow_rows(server.ledger, "e.variant, s.sampled", 1) == [("try:a", 0)]
        agreement = experiment_report(server.ledger).comparisons[0]
    assert (agreement.metric, agreement.a, agreement.b) == ("agreement", None, None)


@pytest.mark.parametrize("variant", ["no-retrieve", "route=apprentice", "", "no experiment"])
def test_agreement_covers_answers_without_demonstrations(tmp_path: Path, variant: str) -> None:
    """Otherwise a variant that finds fewer demonstrations is compared on other questions."""
    gate = BenefitGate()
    _, customize, change = shadow_parts(gate, gated=False)
    with harness(tmp_path, customize=customize, change=change) as server:
        options = {
            "no-retrieve": Overrides(retrieve=False),
            "route=apprentice": Overrides(tier="apprentice"),
        }.get(variant, Overrides())
        if variant != "no experiment":
            shown = Overrides(shots=1)
            server.gateway.experiment = Experiment("try", "question", 1.0, shown, options)
        raw(server, user_messages(2))
        server.wait(2)  # the answer and the master's
        server.until_measured(1)
    [(similarity, pair)] = server.pairs
    assert similarity is None and pair.shown == pair.hidden
    assert gate.state()["samples"] == []


def test_unmeasured_gate_does_not_measure_answers_without_demonstrations(tmp_path: Path) -> None:
    gate = BenefitGate()
    shadow = ShadowSampler(gate, lambda *_: 1.0, rate=0.0, eager=True)
    with harness(tmp_path, customize=lambda tenant: replace(tenant, shadow=shadow)) as server:
        server.gateway.experiment = Experiment(
            "try", "question", 1.0, Overrides(shots=1), Overrides(retrieve=False)
        )
        raw(server, user_messages(2))
        raw(server, user_messages(3), "bottega/master")
    assert not server.pairs and len(server.records) == 2
    assert shadow.begins()  # its slot is free


EXPERIMENT = f'{TWO}\n[experiment]\nname = "x"\n'


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ("b = 3", "experiment.b must be a table"),
        ('b = { retrieve = "text" }', "experiment.b.retrieve is not a setting"),
        ('b = { options = "shots=many", cache = {} }', "experiment.b.options shots is invalid"),
        ('b.cache = { retrieve = "fuzzy" }', "experiment.b.cache.retrieve must be one of nearest"),
        ('b.cache = { embed = "words" }', "experiment.b.cache.embed is not a setting"),
        ("b.cache = { min_similarity = 2.0 }", "experiment.b.cache.min_similarity must be at most"),
        (
            'b.cache = { retrieve = "bm25", min_similarity = 0.5 }',
            "experiment.b.cache.min_similarity needs similarities, and bm25 has none",
        ),
        (
            'b = { options = "no-retrieve", cache = { retrieve = "text" } }',
            "experiment.b.options must not contain no-retrieve",
        ),
        ('b.cache = { retrieve = "nearest" }', "experiment.b must differ from a"),
        ("b.route = { cold_start = 3 }", "experiment.b.route.cold_start is not a setting"),
        ('b.route = { router = "coverage" }', "experiment.b.route router 'coverage' needs"),
        (
            "b.route = { min_similarity = 0.5 }",
            "experiment.b.route.min_similarity is not a setting of the router 'random'",
        ),
        ('b.route = { router = "fixed", tier = "x" }', "experiment.b.route.tier is not one of"),
        (
            'b = { options = "route=small", route = { router = "fixed" } }',
            "experiment.b.options must not contain route or master-rate",
        ),
        (
            'b = { cache = { retrieve = "bm25" },'
            ' route = { router = "coverage", min_similarity = 0.5 } }',
            "experiment.b.route.min_similarity needs similarities",
        ),
    ],
)
def test_invalid_variants_are_rejected(tables: str, expected: str) -> None:
    with pytest.raises(SettingError) as error:
        parse_config(EXPERIMENT + tables)
    assert expected in str(error.value) and error.value.hint


def test_budget_of_a_variant_needs_prices(tmp_path: Path) -> None:
    text = 'b.route = { router = "budget", usd_per_1k = 1.0 }\n'
    config = parse_config(EXPERIMENT.replace('"openai:qwen"', '"openai:unpriced"') + text)
    config = replace(config, gateway=replace(config.gateway, data=tmp_path))
    with pytest.raises(SettingError, match=r"needs the price of tiers\.small"):
        build(config, ENVIRONMENT)


def test_defaults_of_variants() -> None:
    text = """
        b.cache = { retrieve = "hybrid" }
        a = { cache = { retrieve = "image" }, route = { master_rate = 0.4 } }
    """
    config = parse_config(f"{TWO}\n[cache]\nmin_similarity = 0.7\n[experiment]\nname = 'x'\n{text}")
    a, b = (config.of_variant(one) for one in config.experiment.variants.values())
    # A threshold for the vectors of one method says nothing about those of another.
    assert (a.cache.retrieve, a.cache.min_similarity) == ("image", 0.3)
    assert (b.cache.retrieve, b.cache.min_similarity) == ("hybrid", None)
    assert (a.route.router, a.route.master_rate) == ("random", 0.4)
    assert b.route == config.route and config.cache.min_similarity == 0.7
    same = parse_config(EXPERIMENT + "b.cache = { min_similarity = 0.5 }")
    found = same.of_variant(same.experiment.b).cache
    assert (found.retrieve, found.min_similarity) == ("nearest", 0.5)
