"""Spans of a pipeline in Python, with OpenTelemetry configured by the application."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from opentelemetry import propagate, trace
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from bottega._util.tracing import ModelCall, current_tracer, forwarded_headers, span
from bottega.errors import MissingDependencyError, RejectedError, SettingError
from bottega.generation import OpenAIGenerator, ScriptedGenerator
from bottega.knowledge import KnowledgeBase
from bottega.parsing import plain_text
from bottega.pipeline import FixedRouter, Pipeline
from bottega.prompting import InterleavedPrompter
from bottega.protocols import Tier
from bottega.recipes import rcts, visual_rag
from bottega.telemetry import check_exporter, instrument
from bottega.telemetry.exporters import exported_signals
from bottega.telemetry.tracer import MAX_CONTENT, content_attributes, request_attributes
from bottega.types import Completion, Prompt, Query, Trace
from tests.builders import solid_image
from tests.knowledge.doubles import SeededEmbedder, image_example
from tests.server import Server, ok, refuse

QUERY = Query("What?", (solid_image(7),))


async def no_record(trace: Trace, /) -> None:
    pass


@dataclass
class Telemetry:
    """An application's OpenTelemetry, with spans and metrics in memory."""

    spans: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)
    traces: TracerProvider = field(default_factory=lambda: TracerProvider(shutdown_on_exit=False))
    reader: InMemoryMetricReader = field(default_factory=InMemoryMetricReader)

    def __post_init__(self) -> None:
        self.traces.add_span_processor(SimpleSpanProcessor(self.spans))
        self.meters = MeterProvider([self.reader], shutdown_on_exit=False)

    def instrument(self, pipeline: Pipeline, **more: Any) -> Pipeline:
        return instrument(pipeline, tracer_provider=self.traces, meter_provider=self.meters, **more)

    def ended(self) -> tuple[ReadableSpan, ...]:
        return self.spans.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [one for one in self.ended() if one.name == name]

    def children(self, of: ReadableSpan) -> list[str]:
        return [
            one.name
            for one in self.ended()
            if one.parent is not None and one.parent.span_id == of.context.span_id
        ]


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


@pytest.fixture
def knowledge() -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as opened:
        opened.add(image_example(40 * i, "cat" if i % 2 else "dog") for i in range(24))
        yield opened


def say_cat(prompt: Prompt) -> str:
    return "cat"


async def test_each_step_is_a_span(knowledge: KnowledgeBase, telemetry: Telemetry) -> None:
    pipeline = telemetry.instrument(
        replace(visual_rag(knowledge, ScriptedGenerator(say_cat), shots=2), record=no_record)
    )
    assert (await pipeline.answer(QUERY)).text == "cat"
    [root] = telemetry.named("answer")
    assert root.parent is None
    steps = ["route", "retrieve", "rerank", "prompt", "chat scripted", "parse", "record"]
    assert telemetry.children(root) == steps
    assert len(telemetry.ended()) == 1 + len(steps)
    assert root.attributes is not None
    assert root.attributes["bottega.demonstrations"] == 2
    [chat] = telemetry.named("chat scripted")
    assert chat.kind is trace.SpanKind.INTERNAL  # the model runs in this process
    assert chat.attributes is not None
    assert chat.attributes["gen_ai.usage.output_tokens"] == 1
    assert "gen_ai.input.messages" not in chat.attributes


async def test_an_application_s_span_is_the_parent(
    knowledge: KnowledgeBase, telemetry: Telemetry
) -> None:
    pipeline = telemetry.instrument(visual_rag(knowledge, ScriptedGenerator(say_cat)))
    with trace.get_tracer("shop", tracer_provider=telemetry.traces).start_as_current_span("order"):
        await pipeline.answer(QUERY)
        await asyncio.to_thread(pipeline.answer_sync, QUERY)
    [order] = telemetry.named("order")
    assert telemetry.children(order) == ["answer", "answer"]


async def test_a_search_has_a_span_of_each_call(
    knowledge: KnowledgeBase, telemetry: Telemetry
) -> None:
    model = ScriptedGenerator(lambda prompt: "It is one.\nAnswer: cat", name="small")
    pipeline = telemetry.instrument(rcts(knowledge, model, labels=("cat", "dog"), seed=1))
    await pipeline.answer(QUERY)
    [root], [search] = telemetry.named("answer"), telemetry.named("search")
    assert telemetry.children(root) == ["route", "retrieve", "search"]
    assert telemetry.children(search).count("chat small") == len(model.calls) > 1


async def test_concurrent_queries_have_traces_of_their_own(
    knowledge: KnowledgeBase, telemetry: Telemetry
) -> None:
    pipeline = visual_rag(knowledge, ScriptedGenerator(say_cat, latency=0.01), shots=2)
    await telemetry.instrument(pipeline).answer_batch([QUERY] * 4)
    roots = telemetry.named("answer")
    assert len({one.context.trace_id for one in roots}) == 4
    for root in roots:
        own = [one for one in telemetry.ended() if one.context.trace_id == root.context.trace_id]
        assert sorted(telemetry.children(root)) == sorted(one.name for one in own if one != root)
    count = len(telemetry.ended())
    await pipeline.answer(QUERY)  # the original is not instrumented
    assert len(telemetry.ended()) == count


async def test_endpoints_get_the_trace_and_errors_are_marked(
    endpoint: Server, telemetry: Telemetry
) -> None:
    endpoint.answers = [ok("seven"), refuse(401, "wrong key sk-secret")]
    async with aclosing(OpenAIGenerator("small", base_url=endpoint.url, retries=0)) as model:
        tier = Tier("only", model)
        plain = Pipeline(FixedRouter(tier), InterleavedPrompter(), plain_text)
        pipeline = telemetry.instrument(plain, capture_content=True)
        await pipeline.answer(Query("What is 3 + 4?", (solid_image(7),)))
        with pytest.raises(RejectedError):
            await pipeline.answer(Query("What is 4 + 3?"))
    answered, rejected = telemetry.named("chat small")
    sent = {name.lower(): value for name, value in endpoint.headers[0].items()}
    ids = f"{answered.context.trace_id:032x}-{answered.context.span_id:016x}"
    assert sent["traceparent"].startswith(f"00-{ids}-")
    assert answered.attributes is not None
    assert json.loads(str(answered.attributes["gen_ai.input.messages"])) == [
        {
            "role": "user",
            "parts": [{"type": "image"}, {"type": "text", "content": "What is 3 + 4?"}],
        }
    ]
    assert rejected.attributes is not None
    assert rejected.attributes["error.type"] == "RequestRejectedError"
    assert rejected.attributes["http.response.status_code"] == 401
    assert [one.status.is_ok for one in telemetry.named("answer")] == [True, False]
    assert not any("sk-secret" in one.to_json() for one in telemetry.ended())
    data = telemetry.reader.get_metrics_data()
    assert data is not None
    assert "gen_ai.client.operation.duration" in data.to_json()


async def test_other_propagators_can_be_chosen(
    endpoint: Server, telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_PROPAGATORS", "none")
    monkeypatch.setattr(propagate, "get_global_textmap", lambda: CompositePropagator([]))
    async with aclosing(OpenAIGenerator("small", base_url=endpoint.url)) as model:
        plain = Pipeline(FixedRouter(Tier("only", model)), InterleavedPrompter(), plain_text)
        await telemetry.instrument(plain).answer(Query("What?"))
    assert "traceparent" not in {name.lower() for name in endpoint.headers[0]}


def test_without_a_tracer_nothing_is_created() -> None:
    assert current_tracer() is None
    assert span("route") is span("parse")  # one shared object
    assert forwarded_headers() == {}


def test_the_missing_extra_is_named(
    knowledge: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = visual_rag(knowledge, ScriptedGenerator(say_cat))
    monkeypatch.delitem(sys.modules, "bottega.telemetry.tracer", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingDependencyError, match="opentelemetry") as missing:
        instrument(pipeline)
    assert missing.value.hint == "pip install 'bottega-vlm[otel]'"


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER must be otlp or none"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL must be http"),
        (
            {
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "grpc",
            },
            "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL must be http",
        ),
    ],
)
def test_other_exporters_are_rejected(environment: dict[str, str], problem: str) -> None:
    with pytest.raises(SettingError, match=problem):
        check_exporter(environment)


def test_signals_can_be_turned_off() -> None:
    assert exported_signals({"OTEL_METRICS_EXPORTER": "none"}) == ["TRACES"]
    off = {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}
    assert exported_signals(off) == ["METRICS"]


def test_integers_that_the_protocol_cannot_hold_are_left_out() -> None:
    call = ModelCall("m", fields={"seed": 2**64 - 1, "top_k": -(2**63), "top_p": 1e9, "n": True})
    assert dict(request_attributes(call)) == {
        "gen_ai.request.top_k": -(2**63),
        "gen_ai.request.top_p": 1e9,
    }


def test_captured_texts_are_cut_from_the_first_message_on() -> None:
    turns = [{"role": "user", "content": letter * 40_000} for letter in "abc"]
    reply = Completion("d" * 100_000)
    found = content_attributes(ModelCall("m", fields={"messages": turns}, completions=[reply]))
    messages = json.loads(str(found["gen_ai.input.messages"]))
    texts = [part["content"] for message in messages for part in message["parts"]]
    assert texts == ["", "b" * (MAX_CONTENT - 40_000), "c" * 40_000]
    [output] = json.loads(str(found["gen_ai.output.messages"]))
    assert output["parts"][0]["content"] == "d" * MAX_CONTENT
