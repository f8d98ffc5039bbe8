"""Responses from an endpoint: tools, typed answers, truncated replies."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from openai.types.responses import ResponseFunctionToolCall
from pydantic import BaseModel

from bottega.gateway.apis.responses import responses_endpoint
from bottega.gateway.ports import HttpReply, RequestRecord
from bottega.openai_api.streams import DONE_EVENT, to_event
from tests import server as doubles
from tests.gateway.harness import Harness, client, harness
from tests.gateway.test_responses import checked, raw, streamed
from tests.gateway.upstreams import (
    CHUNKS,
    USAGE,
    chunk,
    events,
    lines,
    seen,
    signal_on_disconnect,
    upstream,
)

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Of a town.",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    "strict": False,
}
CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"a":1}'}}


@pytest.fixture
def server() -> Iterator[doubles.Server]:
    with doubles.running() as endpoint:
        yield endpoint


@pytest.fixture
def gateway(server: doubles.Server, tmp_path: Path) -> Iterator[Harness]:
    with harness(tmp_path, master=upstream(server), replays=False) as endpoint:
        yield endpoint


def reply_with(finish: str = "stop", **message: Any) -> doubles.Answer:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    return doubles.reply({"id": "x", "model": "m-1", "choices": [choice], "usage": usage})


def delta(**more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": more, "finish_reason": None}]}


def test_settings_are_translated_to_chat_fields(gateway: Harness, server: doubles.Server) -> None:
    reply = checked(
        raw(
            gateway,
            "hi",
            "bottega/master",
            max_output_tokens=50,
            reasoning={"effort": "low"},
            text={"format": {"type": "json_object"}, "verbosity": "low"},
            top_p=0.5,
            store=True,
            metadata={"a": "b"},
            tool_choice="auto",
            parallel_tool_calls=False,
            truncation="auto",
            include=["reasoning.encrypted_content"],
            background=False,
            previous_response_id=None,
            extra_body={"top_k": 3},
        )
    )
    assert server.bodies == [
        {
            "model": "m",
            "messages": [{"role": "user", "content": "hi"}],
            "max_completion_tokens": 50,
            "reasoning_effort": "low",
            "response_format": {"type": "json_object"},
            "verbosity": "low",
            "top_p": 0.5,
            "top_k": 3,
        }
    ]
    assert reply.reasoning is not None and reply.reasoning.effort == "low"
    assert (reply.max_output_tokens, reply.top_p, reply.truncation) == (50, 0.5, "disabled")
    assert reply.text is not None and reply.text.verbosity == "low"


def test_usage_contains_details(gateway: Harness, server: doubles.Server) -> None:
    server.answers = [reply_with(content="fine")]
    reply = checked(raw(gateway, "hi", "bottega/master"))
    assert reply.usage is not None and reply.model == "m-1"
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (10, 5)
    assert reply.usage.input_tokens_details.cached_tokens == 4
    assert reply.usage.output_tokens_details.reasoning_tokens == 3


def test_a_typed_answer_is_parsed_by_the_client(gateway: Harness, server: doubles.Server) -> None:
    class Digit(BaseModel):
        value: int

    server.answers = [reply_with(content='{"value": 7}')]
    with client(gateway.url) as real:
        parsed = real.responses.parse(model="bottega/master", input="hi", text_format=Digit)
    assert parsed.output_parsed == Digit(value=7)
    shape = server.bodies[0]["response_format"]
    assert (shape["type"], shape["json_schema"]["name"]) == ("json_schema", "Digit")
    assert shape["json_schema"]["strict"] is True


def test_a_tool_is_called_and_its_answer_goes_back(
    gateway: Harness, server: doubles.Server
) -> None:
    server.answers = [
        reply_with("tool_calls", content=None, tool_calls=[CALLED]),
        doubles.ok("sunny"),
    ]
    first = raw(gateway, "weather?", "bottega/master", tools=[WEATHER], tool_choice="required")
    assert first.headers["x-bottega-cache"] == "passed"
    reply = checked(first)
    (call,) = reply.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.call_id, call.name, call.arguments) == ("c1", "weather", '{"a":1}')
    assert (reply.status, call.status) == ("completed", "completed")
    assert server.bodies[0]["tool_choice"] == "required"
    function = {name: value for name, value in WEATHER.items() if name != "type"}
    assert server.bodies[0]["tools"] == [{"type": "function", "function": function}]

    more = [
        {"role": "user", "content": "weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
        call.to_dict(),
        call.to_dict() | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "20 C"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "21 C"}],
        },
    ]
    assert checked(raw(gateway, more, "bottega/master", tools=[WEATHER])).output_text == "sunny"
    assert server.bodies[1]["messages"] == [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [CALLED, CALLED | {"id": "c2"}],
        },
        {"role": "tool", "content": "20 C", "tool_call_id": "c1"},
        {"role": "tool", "content": "21 C", "tool_call_id": "c2"},
    ]


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        (
            {"type": "function", "name": "weather"},
            {"type": "function", "function": {"name": "weather"}},
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "weather"}],
            },
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "weather"}}],
                },
            },
        ),
    ],
)
def test_a_choice_of_tools_arrives(
    gateway: Harness, server: doubles.Server, choice: Any, sent: Any
) -> None:
    reply = checked(raw(gateway, "hi", "bottega/master", tools=[WEATHER], tool_choice=choice))
    assert server.bodies[0]["tool_choice"] == sent
    assert reply.to_dict()["tool_choice"] == choice


def test_calls_come_as_a_stream(gateway: Harness, server: doubles.Server) -> None:
    def piece(index: int, arguments: str, **more: Any) -> Any:
        return delta(tool_calls=[{"index": index, "function": {"arguments": arguments}, **more}])

    def opened(index: int, id: str) -> Any:
        return delta(tool_calls=[{"index": index, "id": id, "function": {"name": "weather"}}])

    server.answers = [
        events(
            lines(
                delta(role="assistant", content="Let me "),
                delta(content="look."),
                opened(0, "c1"),
                piece(0, '{"town"'),
                opened(1, "c2"),
                piece(1, "{}"),
                piece(0, ':"Rome"}'),
                chunk(finish="tool_calls"),
                USAGE,
            )
        )
    ]
    stream_events = streamed(gateway, "hi", "bottega/master", tools=[WEATHER])
    assert [
        item.item.id for item in stream_events if item.type == "response.output_item.added"
    ] == [item.item.id for item in stream_events if item.type == "response.output_item.done"]
    message, first, second = stream_events[-1].response.output
    assert message.content[0].text == "Let me look."
    assert (first.call_id, first.arguments) == ("c1", '{"town":"Rome"}')
    assert (second.call_id, second.arguments) == ("c2", "{}")
    with (
        client(gateway.url) as real,
        real.responses.stream(model="bottega/master", input="hi", tools=[WEATHER]) as stream,
    ):
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]


def test_calls_without_indexes_or_with_objects_are_supported(
    gateway: Harness, server: doubles.Server
) -> None:
    calls = [{"id": id, "function": {"name": "weather", "arguments": {"n": id}}} for id in "ab"]
    server.answers = [
        reply_with("tool_calls", content="", tool_calls=calls),
        events(lines(delta(tool_calls=calls), chunk(finish="tool_calls"))),
    ]
    whole = checked(raw(gateway, "hi", "bottega/master", tools=[WEATHER])).output
    again = streamed(gateway, "hi", "bottega/master", tools=[WEATHER])[-1].response.output
    seen: list[Any] = [(item.call_id, item.arguments) for item in again]
    assert seen == [("a", '{"n":"a"}'), ("b", '{"n":"b"}')]
    assert [
        (item.call_id, item.arguments) for item in whole if item.type == "function_call"
    ] == seen


@pytest.mark.parametrize(
    ("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")]
)
def test_incomplete_answer_is_marked(
    gateway: Harness, server: doubles.Server, finish: str, reason: str
) -> None:
    server.answers = [
        reply_with(finish, content="Half"),
        events(lines(chunk("Half"), chunk(finish=finish))),
    ]
    plain = checked(raw(gateway, "hi", "bottega/master"))
    last = streamed(gateway, "hi", "bottega/master")[-1]
    assert last.type == "response.incomplete"
    replies: list[Any] = [plain, last.response]
    for reply in replies:
        assert (reply.status, reply.output[0].status) == ("incomplete", "incomplete")
        assert reply.incomplete_details is not None
        assert (reply.incomplete_details.reason, reply.output_text) == (reason, "Half")
    assert gateway.examples() == []


def test_model_refusal_is_returned(gateway: Harness, server: doubles.Server) -> None:
    server.answers = [
        reply_with(content=None, refusal="I will not."),
        events(lines(delta(refusal="I will"), delta(refusal=" not."), chunk(finish="stop"))),
    ]
    plain = checked(raw(gateway, "hi", "bottega/master"))
    last = streamed(gateway, "hi", "bottega/master")[-1].response
    replies: list[Any] = [plain, last]
    for reply in replies:
        assert [part.refusal for part in reply.output[0].content] == ["I will not."]


def test_empty_reply_is_an_empty_message(gateway: Harness, server: doubles.Server) -> None:
    server.answers = [
        reply_with(content=""),
        events(lines(delta(role="assistant"), chunk(finish="stop"))),
    ]
    plain = checked(raw(gateway, "hi", "bottega/master"))
    stream_events = streamed(gateway, "hi", "bottega/master")
    replies: list[Any] = [plain, stream_events[-1].response]
    for reply in replies:
        assert [part.text for part in reply.output[0].content] == [""]


def test_broken_stream_is_an_error_for_the_client(gateway: Harness, server: doubles.Server) -> None:
    server.answers = [events(lines(CHUNKS[0], done=False), end="abort")]
    seen: list[Any] = []
    with client(gateway.url) as real:
        stream = real.responses.create(model="bottega/master", input="hi", stream=True)
        with pytest.raises(openai.APIError, match="failed"):
            for item in stream:
                seen.append(item)
    assert [item.sequence_number for item in seen] == list(range(len(seen)))
    assert [item.type for item in seen].count("response.created") == 1
    failed = seen[-1]
    assert failed.type == "response.failed"
    assert failed.response.status == "failed"
    assert failed.response.error.code == "server_error"
    assert failed.response.output[0].content[0].text == "a"
    assert gateway.wait(1).state == "failed"
    assert gateway.examples() == []


def test_endpoint_errors_reach_the_client(gateway: Harness, server: doubles.Server) -> None:
    server.answers = [doubles.refuse(400, "too long")]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="too long"):
            raw(gateway, "hi", "bottega/master", stream=stream)


async def test_disconnect_ends_the_upstream_call(gateway: Harness, server: doubles.Server) -> None:
    gone = threading.Event()
    server.answers = [signal_on_disconnect(events(lines(chunk("a"), done=False), 30.0), gone)]
    async with openai.AsyncOpenAI(base_url=gateway.url, api_key="x") as real:
        stream = await real.responses.create(model="bottega/master", input="hi", stream=True)
        async for item in stream:
            if item.type == "response.output_text.delta":
                break
        await stream.close()
    assert await seen(gone)
    assert gateway.wait(1).status == 499


async def test_disconnect_between_events_closes_the_upstream_stream() -> None:
    closed = []

    async def chunks() -> AsyncGenerator[bytes]:
        try:
            yield to_event(orjson.dumps(chunk("a")))
            yield DONE_EVENT
        finally:
            closed.append(True)

    source = chunks()  # keeps the only reference

    async def chat(record: RequestRecord, headers: Any, body: Any) -> HttpReply:
        await body()
        return HttpReply({}, events=source)

    async def body() -> bytes:
        return b'{"model": "m", "input": "hi", "stream": true}'

    reply = await responses_endpoint(chat).answer(RequestRecord("req_1"), {}, body)
    assert reply.events is not None
    await anext(reply.events)
    await reply.events.aclose()
    assert closed
