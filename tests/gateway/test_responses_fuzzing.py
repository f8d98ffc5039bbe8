"""Arbitrary JSON gets a client error or a valid reply."""

from __future__ import annotations

import copy
import http.client
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from bottega.openai_api.request import Body
from bottega.openai_api.response import ChatCompletion, parse_completions
from bottega.openai_api.streams import to_chunks
from tests.gateway.harness import Harness, harness
from tests.gateway.test_responses import EVENT, response_input


class AllTools:
    """Tier that accepts every setting and calls a tool if one is offered."""

    model = "m"

    async def complete(self, body: Body, /) -> ChatCompletion:
        payload = _answer(body)
        return ChatCompletion(payload, "m", parse_completions(orjson.loads(payload), "m"))

    async def stream(self, body: Body, /) -> AsyncGenerator[bytes]:
        for step in to_chunks(_answer(body), include_usage=True):
            yield step

    async def check(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


def _answer(body: Body) -> bytes:
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message: dict[str, Any] = {"role": "assistant", "content": "fine"}
    if body.get("tools"):
        message |= {"tool_calls": [called]}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return orjson.dumps({"id": "x", "model": "m", "choices": [choice], "usage": usage})


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with harness(
        tmp_path_factory.mktemp("any"), master=AllTools(), apprentice=AllTools(), replays=False
    ) as server:
        yield server


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False, width=16)
    | st.sampled_from(["", "hi", "user", "message", "function", "auto", "message", "input_text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "name", "format", "id"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
RICH: dict[str, Any] = {
    "model": "bottega",
    "input": [
        *response_input(1),
        {"role": "assistant", "content": [{"type": "output_text", "text": "7"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "ok"},
        {"type": "message", "role": "user", "content": "And?"},
    ],
    "instructions": "Be short.",
    "max_output_tokens": 9,
    "metadata": {"a": "b"},
    "reasoning": {"effort": "low"},
    "text": {"verbosity": "low", "format": {"type": "json_schema", "name": "s", "schema": {}}},
    "stream": True,
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "include": [],
    "store": True,
}


@st.composite
def bodies(draw: st.DrawFn) -> Any:
    """Return valid bodies with one value replaced, removed or added."""
    body = copy.deepcopy(RICH) | {"stream": draw(st.booleans())}
    for _ in range(draw(st.integers(0, 2))):
        node: Any = body
        while True:
            keys = list(range(len(node))) if isinstance(node, list) else list(node)
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if not isinstance(node[key], dict | list) or draw(st.integers(0, 3)) == 0:
                _change(draw, node, key)
                break
            node = node[key]
    _replace_unlisted_values(body)
    return body


def _change(draw: st.DrawFn, node: Any, key: Any) -> None:
    change = draw(st.sampled_from(["replace", "remove", "empty", "add", "repeat"]))
    if change == "replace":
        node[key] = draw(JSON)
    elif change == "remove":
        del node[key]
    elif change == "empty":
        node[key] = None
    elif isinstance(node, dict):
        node["unknown"] = draw(JSON)
    else:
        node.append(copy.deepcopy(node[key]))


def _replace_unlisted_values(body: dict[str, Any]) -> None:
    """Replace strings that only the model validates; the gateway returns them unchanged."""
    for field, name in (("reasoning", "effort"), ("text", "verbosity")):
        section = body.get(field)
        if isinstance(section, dict) and isinstance(section.get(name), str):
            section[name] = "low"


@given(st.integers(0, 9).flatmap(lambda one: bodies() if one else JSON))
@settings(max_examples=80)
def test_any_request_gets_a_client_error_or_a_valid_reply(tool_server: Harness, body: Any) -> None:
    url = urlsplit(tool_server.url)
    connection = http.client.HTTPConnection(url.netloc, timeout=20)
    try:
        connection.request("POST", "/v1/responses", json.dumps(body).encode())
        response = connection.getresponse()
        payload = response.read()
    finally:
        connection.close()
    event(str(response.status))
    if response.status != 200:
        assert 400 <= response.status < 500, payload
        assert json.loads(payload)["error"]["message"]
    elif payload.startswith(b"event:"):
        data = [line for line in payload.split(b"\n") if line.startswith(b"data: ")]
        last = [EVENT.validate_json(line.removeprefix(b"data: ")) for line in data][-1]
        assert last.type in ("response.completed", "response.incomplete")
    else:
        assert Response.model_validate_json(payload).status in ("completed", "incomplete")
