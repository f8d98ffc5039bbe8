"""Odd replies that are stored, replayed or not; `provider_shapes` has their shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from bottega.gateway.running.build import build
from tests.gateway.gateways import ENVIRONMENT, gateway_config, run_gateway
from tests.gateway.harness import client, harness
from tests.gateway.test_keep_alive import APIS, ENDS, ERRORS, stream
from tests.gateway.upstreams import CHUNKS, events, lines, upstream
from tests.server import Answer, Server, raw, reply

EVENTS, JSON = "text/event-stream", "application/json"


UNFINISHED = b"""data: {"id":"c","choices":[{"index":0,"delta":{"content":"fine"}}]}

data: [DONE]

"""


@pytest.fixture
def pair(endpoint: Server, tmp_path: Path) -> Any:
    """A client of the endpoint, and one of the gateway in front of it."""
    gateway_server = build(gateway_config(tmp_path, endpoint.url), ENVIRONMENT)
    with (
        run_gateway(gateway_server) as url,
        client(endpoint.url) as direct,
        client(url) as through,
    ):
        yield direct, through


def ask(who: openai.OpenAI, number: int, **more: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": f"Question {number}?"}]
    return who.chat.completions.create(model="bottega", messages=messages, **more)


def calls(endpoint: Server) -> int:
    return sum("messages" in body for body in endpoint.bodies)


def text_of(events: Any) -> str:
    choices = [choice for event in events for choice in event.choices or ()]
    return "".join(choice.delta.content or "" for choice in choices)


def test_answer_without_finish_reason_is_not_repeated(endpoint: Server, pair: Any) -> None:
    _, through = pair
    endpoint.answers = [raw(UNFINISHED, kind=EVENTS)] * 2
    for _ in range(2):
        assert text_of(ask(through, 1, stream=True)) == "fine"
    assert calls(endpoint) == 2


REPLY = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "fine"},
            "finish_reason": "stop",
            "logprobs": {"content": [{"token": "fine", "logprob": "X", "top_logprobs": []}]},
        }
    ],
}
WHOLE = {
    "infinity": orjson.dumps(REPLY).replace(b'"X"', b"-Infinity"),
    "not a number": orjson.dumps(REPLY).replace(b'"X"', b"NaN"),
    "half an emoji": orjson.dumps(REPLY).replace(b'"X"', b"-0.5").replace(b'"fine"', b'"\\ud83d"'),
}


@pytest.mark.parametrize("name", WHOLE)
def test_replies_are_read(endpoint: Server, pair: Any, name: str) -> None:
    direct, through = pair
    endpoint.answers = [raw(WHOLE[name], kind=JSON)] * 2
    expected = ask(direct, 1).choices[0].message.content
    found = ask(through, 1)
    cut = expected.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert found.choices[0].message.content == cut
    # A repeat is read from the cache.
    assert ask(through, 1).choices[0].message.content == cut
    assert calls(endpoint) == 2


def test_long_response_headers_are_read(endpoint: Server, pair: Any) -> None:
    headers = {"x-routing": "y" * 10_240}
    endpoint.answers = [raw(WHOLE["not a number"], kind=JSON, headers=headers)]
    assert ask(pair[1], 1).choices[0].message.content == "fine"


def message(**fields: Any) -> Answer:
    """Return a reply without the model's name."""
    choice = {"index": 0, "message": {"role": "assistant", **fields}, "finish_reason": "stop"}
    return reply({"id": "x", "object": "chat.completion", "choices": [choice]})


def calling(arguments: str) -> list[Any]:
    return [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]


ODD_CALLS: dict[str, dict[str, Any]] = {
    "number": {"tool_calls": 5},
    "object": {"tool_calls": {"index": 0}},
    "list of numbers": {"tool_calls": [5, None]},
    "function is text": {"function_call": "f"},
    "text, beside a function": {"tool_calls": "f", "function_call": {"name": "f"}},
    "deep list": {"tool_calls": calling("[" * 600 + "]" * 600)},
    "deep within a message": {"tool_calls": calling("[" * 252 + "]" * 252)},
    "deep object": {"tool_calls": calling('{"a":' * 600 + "1" + "}" * 600)},
    "too deep to parse": {"tool_calls": calling("[" * 5000 + "]" * 5000)},
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("name", ODD_CALLS)
def test_odd_tool_calls_are_answered(
    endpoint: Server, tmp_path: Path, name: str, path: str, is_stream: bool
) -> None:
    fields = {"content": "fine", **ODD_CALLS[name]}
    piece = {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}
    sent = events(lines(piece, CHUNKS[2])) if is_stream else message(**fields)
    endpoint.answers = [sent]
    with (
        harness(tmp_path, apprentice=upstream(endpoint, retries=0)) as server,
        stream(server, path, stream=is_stream) as response,
    ):
        found = response.read().decode()
        assert (response.status, server.wait(1).state) == (200, "answered")
    assert "fine" in found and (not is_stream or ENDS[path] in found)
    if path == "messages" and "deep" in name and not is_stream:
        arguments = fields["tool_calls"][0]["function"]["arguments"]
        assert orjson.loads(found)["content"][-1]["input"] == {"arguments": arguments}


@pytest.mark.parametrize("path", ["messages", "responses", "completions"])
def test_model_has_a_name(endpoint: Server, tmp_path: Path, path: str) -> None:
    endpoint.answers = [message(content="fine")]
    with (
        harness(tmp_path, apprentice=upstream(endpoint)) as server,
        stream(server, path, stream=False) as response,
    ):
        assert orjson.loads(response.read())["model"] == "m"


FAULTS = {
    "chat/completions": "bottega.gateway.request.chat.from_chunks",
    "responses": "bottega.gateway.apis.responses.ResponseEvents.end",
    "messages": "bottega.gateway.apis.messages.MessageEvents.end",
    "completions": "bottega.gateway.apis.text_completions._CompletionEvents.end",
}


@pytest.mark.parametrize("path", FAULTS)
def test_fault_within_a_stream_is_an_event(
    endpoint: Server, tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        raise TypeError("a fault of the gateway")

    monkeypatch.setattr(FAULTS[path], fail)
    endpoint.answers = [events(lines(*CHUNKS))]
    with (
        harness(tmp_path, apprentice=upstream(endpoint)) as server,
        stream(server, path) as response,
    ):
        found = response.read().decode()
        record = server.wait(1)
    assert (record.state, record.status, record.reason) == ("failed", 500, "TypeError")
    error = ERRORS[path].replace("the model of this gateway failed", "the gateway failed; see")
    assert error.removesuffix('"') in found and ENDS[path] not in found


@pytest.mark.parametrize("path", ["responses", "messages", "completions"])
def test_fault_before_a_stream_has_its_status(
    endpoint: Server, tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        raise TypeError("a fault of the gateway")

    monkeypatch.setattr(FAULTS[path].removesuffix("end") + "take", fail)
    endpoint.answers = [events(lines(*CHUNKS))]
    with (
        harness(tmp_path, apprentice=upstream(endpoint)) as server,
        stream(server, path) as response,
    ):
        error = orjson.loads(response.read())["error"]
        assert (response.status, error["message"]) == (500, "the gateway failed; see its log")
