"""Odd replies that are stored, replayed or not; `provider_shapes` has their shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from bottega.gateway.running.build import build
from tests.gateway.gateways import ENVIRONMENT, gateway_config, run_gateway
from tests.gateway.harness import client
from tests.server import Server, raw

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
