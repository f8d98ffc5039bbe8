"""Cost, storage and fallback of completed requests, as ledger and routers record them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import openai
import orjson
import pytest

from bottega.errors import BottegaError, PromptTooLongError, RejectedError, StoreError
from bottega.gateway.ports import Tenant
from bottega.gateway.telemetry.logs import WarningLogger
from bottega.generation import ScriptedGenerator
from bottega.image import Image
from bottega.openai_api.request import Body
from bottega.openai_api.response import ChatCompletion
from bottega.pipeline import Pipeline
from bottega.protocols import Tier
from bottega.types import Answer, Completion, Example, Query, Trace, Usage
from tests.gateway.harness import client, harness, raw, user_messages

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


class WordUpstream:
    """Upstream that streams words and reports no usage."""

    model = "wordy"

    def __init__(self, usage: Usage | None = None) -> None:
        self.usage = usage

    async def complete(self, body: Body, /) -> ChatCompletion:
        message = {"role": "assistant", "content": "some words"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        payload = orjson.dumps({"model": self.model, "choices": [choice]})
        return ChatCompletion(payload, self.model, (Completion("some words"),), self.usage)

    async def stream(self, body: Body, /) -> AsyncGenerator[bytes]:
        for word in ["words "] * 5000:
            delta = {"role": "assistant", "content": word * 10}
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            yield orjson.dumps({"model": self.model, "choices": [choice]})

    async def check(self) -> None: ...

    async def aclose(self) -> None: ...


def priced(model: str, usage: Usage) -> float:
    return (usage.prompt_tokens + usage.completion_tokens) * 1e-6


@pytest.mark.parametrize("usage", [None, Usage()])
def test_missing_usage_has_no_price(tmp_path: Path, usage: Usage | None) -> None:
    """With a price of zero it would never spend a budget, and a router would prefer it."""
    with harness(tmp_path, apprentice=WordUpstream(usage)) as server:
        server.gateway.finalizer = replace(server.gateway.finalizer, price=priced)
        raw(server, user_messages(1))
        assert server.wait(1).cost_usd is None
        server.gateway.finalizer = replace(server.gateway.finalizer, price=lambda model, usage: 0.0)
        raw(server, user_messages(2))
        assert server.wait(2).cost_usd == 0.0


@pytest.mark.parametrize("usage", [Usage(7, 7), Usage(7, 0), Usage(0, 7)])
def test_any_counted_token_has_a_price(tmp_path: Path, usage: Usage) -> None:
    with harness(tmp_path, apprentice=WordUpstream(usage)) as server:
        server.gateway.finalizer = replace(server.gateway.finalizer, price=priced)
        raw(server, user_messages(1))
        assert server.wait(1).cost_usd == pytest.approx(priced("", usage))


def test_client_that_leaves_a_stream_pays_for_it(tmp_path: Path) -> None:
    with harness(tmp_path, apprentice=WordUpstream()) as server:
        server.gateway.finalizer = replace(server.gateway.finalizer, price=priced)
        with client(server.url) as real:
            stream = real.chat.completions.create(
                model="bottega", messages=user_messages(1), stream=True
            )
            for _ in range(100):
                next(stream)
            stream.close()
        left = server.wait(1)
    assert left.state == "failed"
    assert left.usage.prompt_tokens > 1000  # an image
    assert left.usage.completion_tokens > 100 * 60 / 4
    assert left.cost_usd == pytest.approx(priced("", left.usage))


def test_cost_of_dismissed_answers_is_reported_separately(tmp_path: Path) -> None:
    async def unsure(query: Query, tier: Tier, answer: Answer, /) -> Tier | None:
        return Tier("master", tier.generator) if tier.name == "apprentice" else None

    with harness(tmp_path, change=lambda p: replace(p, escalate=unsure), asks={"n": 2}) as server:
        raw(server, user_messages(1))
        record = server.wait(1)
    assert record.cost_usd is not None
    assert 0 < record.dismissed_usd < record.cost_usd


@pytest.mark.parametrize("usage", [None, Usage(100, 10)])
def test_dismissed_answer_of_unknown_cost_makes_the_total_unknown(
    tmp_path: Path, usage: Usage | None
) -> None:
    async def unsure(query: Query, tier: Tier, answer: Answer, /) -> Tier | None:
        return Tier("master", tier.generator) if tier.name == "apprentice" else None

    change = partial(replace, escalate=unsure)
    with harness(tmp_path, apprentice=WordUpstream(usage), change=change) as server:
        server.gateway.finalizer = replace(server.gateway.finalizer, price=priced)
        raw(server, user_messages(1))
        record = server.wait(1)
    assert record.route == "master"
    if usage is None:
        assert (record.cost_usd, record.dismissed_usd) == (None, 0.0)
    else:
        assert record.dismissed_usd == pytest.approx(110e-6)
        assert record.cost_usd is not None and record.cost_usd > 110e-6
        assert record.usage.prompt_tokens > 100


def recording(traces: list[Trace]) -> Callable[[Pipeline], Pipeline]:
    async def record(trace: Trace, /) -> None:
        traces.append(trace)

    return lambda pipeline: replace(pipeline, record=record)


def test_trace_holds_prompt_and_cost(tmp_path: Path) -> None:
    traces: list[Trace] = []
    before = time.time()
    with harness(tmp_path, change=recording(traces), asks={"n": 2}) as server:
        system = {"role": "system", "content": "Be brief."}
        raw(server, [system, *user_messages(1)], "bottega/master")
        raw(server, [system, *user_messages(2)])
        record = server.wait(2)
        [example] = server.examples()
    trace = traces[-1]
    assert before <= trace.time <= time.time()
    assert (trace.tier, trace.id) == ("apprentice", record.request_id)
    assert [one.example.id for one in trace.candidates] == [example.id]
    assert [message.role for message in trace.prompt.messages] == [
        "system",
        *("user", "assistant"),  # the demonstration
        "user",
    ]
    demonstration = trace.prompt.messages[1].parts
    assert [one for one in demonstration if isinstance(one, Image)] == [*example.query.images]
    assert (trace.cost_usd, trace.reply.usage) == (record.cost_usd, record.usage)
    assert 0 < trace.seconds < 60


def test_bypassed_request_has_a_cost(tmp_path: Path) -> None:
    """A bypassed request, for example with tools, has a cost but no trace."""
    traces: list[Trace] = []
    with harness(tmp_path, master=WordUpstream(Usage(100, 10)), change=recording(traces)) as server:
        server.gateway.finalizer = replace(server.gateway.finalizer, price=priced)
        raw(server, user_messages(1), "bottega/master", tools=TOOLS)
        record = server.wait(1)
    assert record.usage == Usage(100, 10)
    assert record.cost_usd == pytest.approx(110e-6)
    assert traces == []


def test_router_observes_the_cost_despite_a_full_disk(tmp_path: Path) -> None:
    class FullDiskWriter:
        async def store(self, example: Example, /, *, pin: bool = False) -> str | None:
            raise StoreError("the disk is full")

    def customize(tenant: Tenant) -> Tenant:
        return replace(tenant, writer=FullDiskWriter())

    traces: list[Trace] = []
    with harness(tmp_path, customize=customize, change=recording(traces)) as server:
        reply = raw(server, user_messages(1), "bottega/master")
    assert "x-bottega-stored" not in reply.headers
    assert [trace.tier for trace in traces] == ["master"]


def test_request_too_long_with_demonstrations_is_sent_without(tmp_path: Path) -> None:
    long = RejectedError("maximum context length is 4096 tokens", status=400)
    for stream in (False, True):
        apprentice = ScriptedGenerator([long, "alone"])
        folder = tmp_path / str(stream)
        folder.mkdir()
        with harness(folder, apprentice=apprentice) as server:
            raw(server, user_messages(9), "bottega/master")
            with client(server.url) as real:
                reply = real.chat.completions.with_raw_response.create(
                    model="bottega", messages=user_messages(1), stream=stream
                )
            assert reply.headers["x-bottega-route"] == "apprentice"
            assert reply.headers["x-bottega-demonstrations"] == "0"
            assert [len(call.prompt.messages) for call in apprentice.calls] == [3, 1]


@pytest.mark.parametrize(
    "long",
    [
        RejectedError("exceeds the context window", status=400),
        PromptTooLongError("the prompt must have at most 8,192 tokens, got 9,000"),
    ],
)
def test_request_too_long_for_one_tier_goes_to_another(
    tmp_path: Path, long: BottegaError, caplog: pytest.LogCaptureFixture
) -> None:
    with harness(tmp_path, apprentice=ScriptedGenerator([long, long])) as server:
        assert raw(server, user_messages(1)).headers["x-bottega-route"] == "master"
        assert caplog.text.count("apprentice failed, using another tier: ") == 1
        assert "logged once" not in caplog.text
        with pytest.raises(openai.BadRequestError):
            raw(server, user_messages(1), "bottega/apprentice")


def test_unsupported_request_goes_to_another_tier(tmp_path: Path) -> None:
    """A local model does not support log-probabilities."""
    with harness(tmp_path, master=WordUpstream()) as server:
        assert raw(server, user_messages(1), logprobs=True).headers["x-bottega-route"] == "master"
        with pytest.raises(openai.BadRequestError):
            raw(server, user_messages(1), "bottega/apprentice", logprobs=True)


class FailingWriter:
    """ExampleWriter that stores nothing, or fails with `error`."""

    def __init__(self, error: StoreError | None) -> None:
        self.error = error

    async def store(self, example: Example, /, *, pin: bool = False) -> str | None:
        if self.error is not None:
            raise self.error
        return None


@pytest.mark.parametrize(
    ("error", "reason"), [(StoreError("the disk is full"), "not stored"), (None, "not remembered")]
)
def test_failed_storage_is_counted(tmp_path: Path, error: StoreError | None, reason: str) -> None:
    warnings: list[str] = []

    def customize(tenant: Tenant) -> Tenant:
        return replace(tenant, writer=FailingWriter(error))

    with harness(tmp_path, customize=customize) as server:
        server.gateway.finalizer = replace(
            server.gateway.finalizer, warn=WarningLogger(warnings.append)
        )
        assert (
            raw(server, user_messages(1), "bottega/master").headers["x-bottega-route"] == "master"
        )
        server.wait(1)
    assert warnings == [reason]


def test_failed_recording_is_counted(tmp_path: Path) -> None:
    warnings: list[str] = []

    async def fails(trace: Trace, /) -> None:
        raise StoreError("the disk is full")

    with harness(tmp_path, change=partial(replace, record=fails)) as server:
        server.gateway.finalizer = replace(
            server.gateway.finalizer, warn=WarningLogger(warnings.append)
        )
        raw(server, user_messages(1))
        assert server.wait(1).state == "answered"
    assert warnings == ["not recorded"]
