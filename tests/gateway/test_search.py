"""Tree search of a tier: its completions, costs, limits and traces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from bottega.errors import SettingError
from bottega.evaluation.report.explanation import render_explanation
from bottega.gateway.accounting.access import LocalLimiter, Reservation
from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger_schema import FILE, Account
from bottega.gateway.config.config_file import parse_config
from bottega.gateway.ports import TierCapabilities
from bottega.gateway.request import exchange
from bottega.gateway.request.upstreams import LocalUpstream
from bottega.gateway.running.build import build
from bottega.gateway.running.tiers import build_tiers
from bottega.gateway.telemetry.logs import WarningLogger
from bottega.generation import ScriptedGenerator
from bottega.generation.offline import Call
from bottega.openai_api.request import Body
from bottega.openai_api.response import ChatCompletion
from bottega.recipes.rcts import SearchLimits
from bottega.recording import TraceStore, stored_trace
from bottega.types import Candidate, Example, Prompt, Query, Trace, Usage
from tests.gateway.gateways import ENVIRONMENT, ask, gateway_config, run_gateway
from tests.gateway.harness import Harness, client, harness, raw
from tests.server import Server, ok

LABELS = ("cat", "dog", "dog", "dog", "dog", "cat")
SHOWN = [
    Candidate(Example(Query(f"Which animal is number {i}?"), label, id=f"e{i}"), 0.95 - i / 100)
    for i, label in enumerate(LABELS)
]
TURN: list[Any] = [{"role": "user", "content": "Which animal is it?"}]
NO_LIMIT = SearchLimits()


def copies(prompt: Prompt) -> str:
    """Return the answer of the last demonstration."""
    shown = [str(m.parts[-1]) for m in prompt.messages if m.role == "assistant"]
    return shown[-1] if shown else "bird"


async def retrieve(query: Query, k: int, /) -> list[Candidate]:
    return SHOWN[:k]


@contextmanager
def searching(
    folder: Path, apprentice: Any, limits: SearchLimits = NO_LIMIT, **more: Any
) -> Iterator[tuple[Harness, list[Trace], list[str]]]:
    """Run a gateway whose apprentice searches; yield it with its traces and warnings."""
    traces: list[Trace] = []
    warnings: list[str] = []

    async def record(trace: Trace, /) -> None:
        traces.append(trace)

    change = more.pop("change", lambda pipeline: pipeline)
    with harness(
        folder,
        apprentice=apprentice,
        retrieve=retrieve,
        change=lambda pipeline: replace(change(pipeline), record=record),
        **more,
    ) as server:
        completer = server.gateway.completer
        first, *others = completer.served
        completer.served = [replace(first, search=limits), *others]
        completer.warn = WarningLogger(warnings.append)
        yield server, traces, warnings


def answer_of(reply: Any) -> str:
    return str(reply.parse().choices[0].message.content)


def spent(calls: Sequence[Call]) -> int:
    """Return the prompt tokens that the gateway's test price charges: one a word."""
    parts = [part for call in calls for one in call.prompt.messages for part in one.parts]
    return sum(len(part.split()) if isinstance(part, str) else 1 for part in parts)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "POLL_SECONDS", 0.005)


@pytest.mark.parametrize("stream", [False, True])
def test_the_search_answers_and_all_completions_are_charged(tmp_path: Path, stream: bool) -> None:
    model = ScriptedGenerator(copies)
    with searching(tmp_path, model) as (server, traces, warnings):
        if stream:
            with client(server.url) as real:
                chunks = list(
                    real.chat.completions.create(
                        model="bottega",
                        messages=TURN,
                        stream=True,
                        stream_options={"include_usage": True},
                    )
                )
            texts = [one.choices[0].delta.content or "" for one in chunks if one.choices]
            assert "".join(texts) == "dog"
            assert sum(one.usage is not None for one in chunks) == 1
        else:
            reply = raw(server, TURN)
            assert answer_of(reply) == "dog"
            assert reply.headers["x-bottega-search"] == "rcts"
            assert reply.headers["x-bottega-prompt-tokens"] == str(spent(model.calls))
        record = server.wait(1)
    [trace] = traces
    assert warnings == []
    assert trace.tree is not None and trace.tree.ended in ("rollouts", "exhausted")
    assert trace.tree.calls == sum(call.sampling.n for call in model.calls)
    assert trace.tree.usage == record.usage == trace.usage
    assert record.usage.prompt_tokens == spent(model.calls)
    assert record.cost_usd == pytest.approx(spent(model.calls) * 1e-6) == trace.cost_usd
    # The tree's chosen branch is what the client's answer was shown.
    shown = [one.example.id for one in trace.candidates]
    node, path = trace.tree.root, []
    for index in trace.tree.path:
        node = node.children[index]
        assert node.candidate is not None
        path.append(node.candidate.example.id)
    assert shown == path and len(shown) == 2
    assert (record.shots, record.route) == (2, "apprentice")
    assert render_explanation(stored_trace(trace), {}, absent="").count("mutual") >= 1


def test_rewards_ask_labelled_questions_with_the_instructions(tmp_path: Path) -> None:
    model = ScriptedGenerator(copies)
    system = {"role": "system", "content": "Name the animal."}
    with searching(tmp_path, model) as (server, _, _):
        raw(server, [system, *TURN], max_tokens=7, temperature=0.3)
    branches = [call for call in model.calls if call.sampling.temperature == 0.3]
    rewards = [call for call in model.calls if call.sampling.temperature == 0.8]
    assert {call.prompt.messages[-1].parts for call in branches} == {("Which animal is it?",)}
    questions = {str(call.prompt.messages[-1].parts[-1]) for call in rewards}
    assert questions == {one.example.query.text for one in SHOWN[:5]}
    for call in rewards:
        assert call.prompt.messages[0].parts == ("Name the animal.",)
        assert call.prompt.messages[1].parts == ("Which animal is it?",)
    assert {call.sampling.max_tokens for call in model.calls} == {7}


@pytest.mark.parametrize("stream", [False, True])
def test_the_final_answer_of_a_reasoning_tier_is_rewarded_and_sent(
    tmp_path: Path, stream: bool
) -> None:
    model = ScriptedGenerator(lambda prompt: f"It is like the last.\nAnswer: {copies(prompt)[-3:]}")
    with searching(tmp_path, model) as (server, traces, _):
        first, *others = server.gateway.completer.served
        server.gateway.completer.served = [replace(first, reasons=True), *others]
        reply = raw(server, TURN, stream=stream)
        if stream:
            texts = [one.choices[0].delta.content or "" for one in reply.parse()]
            assert "".join(texts) == "dog"
        else:
            assert answer_of(reply) == "dog"
    assert traces[0].answer.rationale == "It is like the last."
    own = [call for call in model.calls if call.sampling.n == 5]
    assert own and all("It is like the last." in str(call.prompt) for call in own)


def test_agreeing_first_answers_end_the_search(tmp_path: Path) -> None:
    model = ScriptedGenerator(lambda prompt: "dog")
    with searching(tmp_path, model) as (server, traces, _):
        assert answer_of(raw(server, TURN)) == "dog"
    assert len(model.calls) == 3
    assert traces[0].tree is not None and traces[0].tree.ended == "agreement"


def test_the_budget_of_completions_holds(tmp_path: Path) -> None:
    model = ScriptedGenerator(copies)
    with searching(tmp_path, model, SearchLimits(calls=16)) as (server, traces, _):
        assert raw(server, TURN).headers["x-bottega-search"] == "rcts"
    assert 8 < sum(call.sampling.n for call in model.calls) <= 16
    assert traces[0].tree is not None and traces[0].tree.ended == "budget"


class SlowSearch(ScriptedGenerator):
    """Generator whose rewards do not end."""

    async def _reply(self, prompt: Prompt, sampling: Any) -> Any:
        if sampling.temperature:
            await asyncio.sleep(30)
        return await super()._reply(prompt, sampling)


class FailingSearch(ScriptedGenerator):
    """Generator whose rewards fail."""

    async def _reply(self, prompt: Prompt, sampling: Any) -> Any:
        if sampling.temperature:
            return await ScriptedGenerator([])._reply(prompt, sampling)
        return await super()._reply(prompt, sampling)


@pytest.mark.parametrize(
    ("kind", "limits", "reason", "before"),
    [
        (SlowSearch, SearchLimits(seconds=0.5), "timeout", 8),
        (FailingSearch, NO_LIMIT, "failed", 8),
        (ScriptedGenerator, SearchLimits(tokens=50_000), "budget", 0),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_without_a_result_the_nearest_demonstrations_are_shown_once(
    tmp_path: Path,
    kind: Callable[..., ScriptedGenerator],
    limits: SearchLimits,
    reason: str,
    before: int,
    stream: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = kind(copies)
    with searching(tmp_path, model, limits) as (server, traces, warnings):
        reply = raw(server, TURN, stream=stream)
        if stream:
            list(reply.parse())
        else:
            assert answer_of(reply) == "cat"  # the nearest example is the last demonstration
        assert reply.headers["x-bottega-search"] == reason
        assert "x-bottega-fallback" not in reply.headers
        record = server.wait(1)
        raw(server, TURN)  # not replayed
        assert server.wait(2).state == "answered"
    assert warnings == ["no search result"] * 2
    trace = traces[0]
    assert (trace.tier, trace.tree) == ("apprentice", None)
    assert trace.reason.endswith(f"no search result: {reason}")
    assert caplog.text.count(f"no search result: {reason} (logged once") == 1
    assert [one.example.id for one in trace.candidates] == ["e1", "e0"]
    assert len(model.calls) == 2 * (before + 1)
    answered = [one for one in model.calls[: before + 1] if not one.sampling.temperature]
    assert record.cost_usd is not None
    charged = record.cost_usd * 1e6
    # Replies that a time-out cuts off are charged, failed ones are not.
    assert (
        charged > spent(answered)
        if reason == "timeout"
        else charged == pytest.approx(spent(answered))
    )


def test_a_failed_tier_is_replaced_after_the_search(tmp_path: Path) -> None:
    with searching(tmp_path, ScriptedGenerator([])) as (server, _, _):
        reply = raw(server, TURN)
    assert reply.headers["x-bottega-route"] == "master"
    assert reply.headers["x-bottega-fallback"] == "apprentice"


@pytest.mark.parametrize(
    ("more", "suffix"), [({"n": 2}, ""), ({}, ":shots=0"), ({}, ":no-retrieve")]
)
def test_requests_without_one_demonstrated_answer_are_not_searched(
    tmp_path: Path, more: dict[str, Any], suffix: str
) -> None:
    model = ScriptedGenerator(copies)
    with searching(tmp_path, model) as (server, _, _):
        reply = raw(server, TURN, f"bottega{suffix}", **more)
    assert len(model.calls) == 1 and "x-bottega-search" not in reply.headers


def test_branches_fit_the_tier(tmp_path: Path) -> None:
    model = ScriptedGenerator(copies)
    small = {"apprentice": TierCapabilities(context=len("Which animal is number 0?cat") // 4 + 6)}
    with searching(tmp_path, model, capabilities=small) as (server, traces, _):
        raw(server, TURN)
    assert len(traces[0].candidates) == 1


async def test_a_client_that_leaves_ends_the_search(tmp_path: Path) -> None:
    """Replies under way are awaited, since they are charged; no other requests follow."""
    model = ScriptedGenerator(copies, latency=0.2)
    with searching(tmp_path, model) as (server, traces, _):
        async with aiohttp.ClientSession() as session:
            body = {"model": "bottega", "messages": TURN}
            url = f"{server.url}/chat/completions"
            request = asyncio.create_task(_post(session, url, body))
            while len(model.calls) < 3:  # noqa: ASYNC110 - the gateway runs in another thread
                await asyncio.sleep(0.005)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        record = await asyncio.to_thread(server.wait, 1)
    assert (record.status, len(model.calls), traces) == (499, 3, [])
    assert record.usage.prompt_tokens == spent(model.calls)


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    async with session.post(url, json=body) as response:
        await response.read()


class MonthlySpending:
    """Ledger stub of a key that has spent nothing."""

    def spent_this_month(self, account: str, /) -> float:
        return 0.0


class ReservingUpstream:
    """Upstream that records the reservation during each call."""

    model = "scripted"

    def __init__(self, limiter: LocalLimiter) -> None:
        self.limiter = limiter
        self.held: list[float] = []

    async def complete(self, body: Body, /) -> ChatCompletion:
        self.held.append(sum(one.usd for one in self.limiter._reservations["a"]))
        return await LocalUpstream(ScriptedGenerator(copies)).complete(body)

    async def check(self) -> None: ...

    async def aclose(self) -> None: ...


@pytest.mark.parametrize("others", [0.0, 1.0])
def test_the_whole_search_is_reserved_before_it_starts(tmp_path: Path, others: float) -> None:
    limiter = LocalLimiter(MonthlySpending())
    account = Account("a", "a", usd_per_month=1.0, tiers=("*",))
    upstream = ReservingUpstream(limiter)
    with searching(tmp_path, upstream, authenticate=lambda key: account) as (server, _, warnings):
        server.gateway.limiter = limiter
        if others:  # of another request: the search no longer fits, one completion does
            other = Reservation(limiter, account)
            other.paid = others - 0.1
            limiter._reservations["a"].add(other)
        reply = raw(server, TURN, max_tokens=10)
        server.wait(1)
    if others:
        assert (reply.headers["x-bottega-search"], len(upstream.held)) == ("budget", 1)
        assert warnings == ["no search result"]
        return
    assert reply.headers["x-bottega-search"] == "rcts"
    # 111 completions with prompts of 8,192 tokens, as long as no usage is known, and a reply.
    assert upstream.held == [pytest.approx(111 * (8192 + 10) * 1e-6)] * len(upstream.held)


CONFIG = """
[gateway]
data = "{folder}"
[tiers.small]
model = "openai:qwen"
base_url = "{url}"
price = [1.0, 1.0]
concurrency = 2
shots = 2
search = "rcts"
search_calls = 40
[tiers.large]
model = "openai:huge"
base_url = "{url}"
api_key_env = "LARGE_KEY"
price = [10.0, 10.0]
[route]
router = "fixed"
cold_start = 3
[cache]
embed = "words"
min_similarity = -1
[traces]
store = "texts"
"""


async def copying(request: web.Request) -> web.StreamResponse:
    """Answer like the last demonstration, without one by the ball's number."""
    if not (payload := await request.read()):
        return await ok("up")(request)  # the readiness check
    body = orjson.loads(payload)
    turns = body["messages"]
    shown = [turn["content"] for turn in turns if turn.get("role") == "assistant"]
    colour = ("red", "blue", "green", "pink")[int(turns[-1]["content"][-2])]
    return await ok(*[shown[-1] if shown else colour] * body.get("n", 1))(request)


def test_configured_search_is_in_the_ledger_the_metrics_and_the_traces(
    endpoint: Server, tmp_path: Path
) -> None:
    accounts = Accounts(tmp_path / FILE)
    _, key = accounts.add("team", usd_per_month=1.0)
    accounts.close()
    endpoint.answers = [copying]
    gateway_server = build(
        parse_config(CONFIG.format(folder=tmp_path, url=endpoint.url)), ENVIRONMENT
    )
    with run_gateway(gateway_server) as url:
        for number in range(3):
            ask(url, f"Which colour has ball number {number}?", key=key)
        _, headers = ask(url, "Which colour has ball number 3?", key=key)
        gateway_server.ledger.flush()
        rows = gateway_server.ledger.read(
            "SELECT prompt_tokens, completion_tokens, cost_usd FROM gateway_entries"
            " WHERE tier = 'small'"
        )
        [account] = gateway_server.accounts.list()
        spent_usd = gateway_server.ledger.spent_this_month(account.id)
    exposition = gateway_server.metrics.exposition().decode()  # all requests have ended
    bodies = [body for body in endpoint.bodies if body.get("model") == "qwen"]
    samples = sum(body.get("n", 1) for body in bodies)
    assert 8 < samples <= 40
    assert endpoint.most_at_once <= 2
    assert headers["x-bottega-search"] == "rcts"
    [(prompt, completion, cost)] = rows
    assert (prompt, completion) == (10 * len(bodies), 2 * len(bodies))
    assert cost == pytest.approx(12e-6 * len(bodies))
    assert spent_usd == pytest.approx(cost + 3 * 120e-6)
    assert f"upstream_seconds_count {len(bodies) + 3}.0" in exposition
    assert f'tokens_total{{kind="prompt",route="small"}} {float(prompt)}' in exposition
    store = TraceStore.open(tmp_path / "traces.db")
    [trace] = store.search(tier="small")
    store.close()
    assert trace.tree is not None and trace.usage == Usage(prompt, completion)
    assert len(trace.demonstrations) == 2


def rejected(folder: Path, settings: str, route: str = "") -> tuple[str, str]:
    config = gateway_config(folder, "http://127.0.0.1:9/v1")
    text = f"""
[tiers.small]
model = "openai:qwen"
base_url = "http://127.0.0.1:9/v1"
{settings}
[tiers.large]
model = "openai:huge"
base_url = "http://127.0.0.1:9/v1"
{route}
"""
    assert config.tiers
    with pytest.raises(SettingError) as error:
        build_tiers(parse_config(text), {"OPENAI_API_KEY": "sk"})
    return str(error.value), error.value.hint


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            'search = "rcts"\nsearch_calls = 12',
            "search_calls is a budget smaller than one rollout, got 12: the first rollout needs 13",
        ),
        (
            'search = "rcts"\nsearch_tokens = 12999\nmax_tokens = 1000',
            "search_tokens is a budget smaller than one rollout, got 12999",
        ),
        ("search_calls = 40", "search_calls has no effect without a search"),
        ('search = "rcts"\nshots = 0', "search needs demonstrations"),
        ('search = "rcts"\nshots = 101', "shots must be at most 100"),
        ('search = "rcts"\nsearch_seconds = 0.0', "search_seconds must be more than 0"),
        ('search = "mcts"', "must be one of"),
    ],
)
def test_invalid_searches_are_rejected_at_start(
    tmp_path: Path, settings: str, problem: str
) -> None:
    message, hint = rejected(tmp_path, settings)
    assert problem in message and hint


def test_sampled_confidence_and_a_search_exclude_each_other(tmp_path: Path) -> None:
    route = '[route]\nrouter = "confidence"\nmin_confidence = 0.5\nsamples = 3'
    message, _ = rejected(tmp_path, 'search = "rcts"', route)
    assert "route.samples must not be set together with tiers.small.search" in message


def test_smallest_budgets_are_accepted(tmp_path: Path) -> None:
    text = """
[tiers.small]
model = "openai:qwen"
base_url = "http://127.0.0.1:9/v1"
search = "rcts"
search_calls = 13
search_tokens = 13000
max_tokens = 1000
"""
    tier_set = build_tiers(parse_config(text + "shots = 2"), {})
    [served] = tier_set.served
    assert served.search == SearchLimits(13, 13000)
    asyncio.run(tier_set.aclose())
