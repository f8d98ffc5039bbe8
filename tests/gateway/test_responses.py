"""The Responses API with the real openai client against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from bottega.gateway.accounting.ledger_schema import Account
from bottega.generation import ScriptedGenerator
from bottega.types import Prompt
from tests.builders import solid_image
from tests.gateway.harness import QUESTION, Harness, client, harness
from tests.gateway.harness import raw as chat
from tests.gateway.harness import user_messages as chat_messages

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
OF_A_TEXT = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def response_input(*shades: int, text: str = QUESTION, detail: str = "auto") -> list[Any]:
    images = [
        {"type": "input_image", "image_url": solid_image(shade).data_url, "detail": detail}
        for shade in shades
    ]
    return [{"role": "user", "content": [*images, {"type": "input_text", "text": text}]}]


def raw(harness: Harness, given: Any, model: str = "bottega", **more: Any) -> Any:
    with client(harness.url) as real:
        return real.responses.with_raw_response.create(model=model, input=given, **more)


def checked(reply: Any) -> Response:
    """Validate every field against the protocol, also those that the client ignores."""
    return Response.model_validate_json(reply.text if hasattr(reply, "text") else reply)


def streamed(harness: Harness, given: Any, model: str = "bottega", **more: Any) -> list[Any]:
    with client(harness.url) as real:
        events = list(real.responses.create(model=model, input=given, stream=True, **more))
    for number, one in enumerate(events):
        EVENT.validate_python(one.to_dict(mode="json"))
        assert one.sequence_number == number
    return events


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """Send a request that stores nothing."""
    with harness(tmp_path_factory.mktemp("shared")) as server:
        yield server


@pytest.fixture(scope="module")
def real(shared: Harness) -> Iterator[openai.OpenAI]:
    with client(shared.url) as server:
        yield server


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Harness]:
    with harness(tmp_path) as server:
        yield server


def test_question_gets_a_reply(plain: Harness) -> None:
    reply = raw(plain, "hello", "bottega/master", metadata={"a": "b"}, user="u", temperature=0)
    server = checked(reply)
    assert server.output_text == "hello (0 shown)"
    assert server.id == f"resp_{reply.headers['x-request-id'].removeprefix('req_')}"
    assert (server.status, server.model, server.metadata) == ("completed", "big", {"a": "b"})
    assert (server.user, server.temperature, server.top_p) == ("u", 0, None)
    assert server.to_dict()["store"] is False
    usage = server.usage
    assert usage is not None and usage.input_tokens > 0 and usage.output_tokens > 0
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert reply.headers["x-bottega-route"] == "master"


def test_openai_client_reads_the_stream(plain: Harness) -> None:
    events = streamed(plain, response_input(1), "bottega/master")
    kinds = [event.type for event in events]
    assert list(dict.fromkeys(kinds)) == OF_A_TEXT
    expected_text = f"{QUESTION} (0 shown)"
    assert "".join(one.delta for one in events if one.type == OF_A_TEXT[4]) == expected_text
    last = events[-1].response
    assert (last.output_text, last.status) == (expected_text, "completed")
    assert last.usage.input_tokens > 0
    assert {event.response.id for event in events if hasattr(event, "response")} == {last.id}
    assert [example.answer for example in plain.examples()] == [expected_text]


def test_openai_accumulator_reads_the_stream(plain: Harness) -> None:
    with (
        client(plain.url) as real,
        real.responses.stream(model="bottega/master", input="hello") as stream,
    ):
        snapshots = [one.snapshot for one in stream if one.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == "hello (0 shown)"


def test_answers_become_examples_for_both_endpoints(plain: Harness) -> None:
    stored_reply = raw(plain, response_input(1), "bottega/master")
    (example,) = plain.examples()
    assert (example.id, example.query.text) == (stored_reply.headers["x-bottega-stored"], QUESTION)
    assert example.query.images == (solid_image(1),)
    assert raw(plain, response_input(2)).headers["x-bottega-demonstrations"] == "1"
    assert chat(plain, chat_messages(3)).headers["x-bottega-demonstrations"] == "1"


def test_exact_repeat_is_replayed_at_both_endpoints(plain: Harness) -> None:
    first = checked(raw(plain, response_input(1), "bottega/master"))
    again = raw(plain, response_input(1), "bottega/master")
    assert again.headers["x-bottega-cache"] == "replayed"
    assert checked(again).output_text == first.output_text
    assert checked(again).id != first.id
    assert (
        streamed(plain, response_input(1), "bottega/master")[-1].response.output_text
        == first.output_text
    )
    assert plain.wait(3).state == "replayed"
    there = chat(plain, chat_messages(1), "bottega/master")
    assert there.headers["x-bottega-cache"] == "replayed"
    assert (
        raw(plain, response_input(1, detail="low"), "bottega/master").headers["x-bottega-cache"]
        == "none"
    )


def test_other_instructions_are_another_context(plain: Harness) -> None:
    pirate = {"instructions": "Talk like a pirate."}
    assert checked(raw(plain, response_input(1), "bottega/master", **pirate)).instructions
    assert raw(plain, response_input(2)).headers["x-bottega-demonstrations"] == "0"
    assert raw(plain, response_input(2), **pirate).headers["x-bottega-demonstrations"] == "1"


def test_earlier_turns_reach_the_model(tmp_path: Path) -> None:
    seen = ScriptedGenerator(lambda prompt: "fine")
    with harness(tmp_path, apprentice=seen) as server, client(server.url) as real:
        first: Any = real.responses.create(model="bottega", input=response_input(1))
        more = [
            *response_input(1),
            *(item.to_dict() for item in first.output),
            *response_input(2, text="And?"),
        ]
        real.responses.create(model="bottega", input=more, instructions="Be short.")
    roles = [(message.role, len(message.parts)) for message in seen.calls[-1].prompt.messages]
    assert roles == [("system", 1), ("user", 2), ("assistant", 1), ("user", 2)]
    assert seen.calls[-1].prompt.messages[2].parts == ("fine",)


@pytest.mark.parametrize(
    ("change", "param", "expected_text"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "whole conversation"),
        ({"background": True}, "background", "remove it"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "instructions"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [{"type": "file_search", "x": 1}]}, "tools[0].type", "file_search"),
        ({"tools": [{"type": "computer_use_preview"}]}, "tools[0].type", "computer_use_preview"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "Missing"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type", "mcp"),
        ({"tool_choice": "maybe"}, "tool_choice", "auto"),
        ({"extra_body": {"max_tokens": 3}}, "max_tokens", "max_output_tokens"),
        ({"include": ["message.output_text.logprobs"]}, "include", "/v1/chat/completions"),
        ({"max_output_tokens": 0}, "max_output_tokens", "'max_output_tokens'"),
        ({"temperature": "hot"}, "temperature", "a number"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort", "reasoning.effort"),
        ({"reasoning": "much"}, "reasoning", "an object"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        ({"text": {"verbosity": 1}}, "text.verbosity", "text.verbosity"),
        ({"metadata": {"a": 1}}, "metadata.a", "a string"),
        ({"instructions": 1}, "instructions", "a string"),
        ({"stream": "yes"}, "stream", "a boolean"),
        ({"input": None}, "input", "Missing"),
        ({"input": 3}, "input", "an array"),
        ({"input": []}, "input", "empty"),
        ({"input": ["hi"]}, "input[0]", "an object"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "whole conversation"),
        ({"input": [{"type": "mcp_call"}]}, "input[0].type", "mcp_call"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "developer"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content", "empty"),
        ({"input": [{"role": "user"}]}, "input[0].content", "Missing"),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].name", "Missing"),
    ],
)
def test_unsupported_fields_are_rejected_by_name(
    real: openai.OpenAI, change: Any, param: str, expected_text: str
) -> None:
    given = change.pop("input", "hi")
    with pytest.raises(openai.BadRequestError) as refused:
        real.responses.create(model="bottega", input=given, **change)
    assert refused.value.param == param
    assert expected_text in refused.value.message
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "input_file", "file_id": "f"}, ""),
        ({"type": "input_image", "file_id": "f"}, ".file_id"),
        ({"type": "input_image", "image_url": "ftp://x/y.png"}, ".image_url"),
        ({"type": "input_image", "image_url": {"url": "data:"}}, ".image_url"),
        ({"type": "input_image"}, ".image_url"),
        ({"type": "input_audio"}, ".type"),
        ({"type": "input_text", "text": 5}, ".text"),
        ({"text": "x"}, ".type"),
    ],
)
def test_invalid_part_is_reported_by_its_path(real: openai.OpenAI, part: Any, param: str) -> None:
    given = [
        *response_input(1),
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": [part]},
    ]
    with pytest.raises(openai.BadRequestError) as refused:
        real.responses.create(
            model="bottega",
            input=given,
            instructions="They move the numbers of the messages.",
        )
    assert refused.value.param == f"input[2].content[0]{param}"
    assert "messages" not in refused.value.message


def test_deeply_nested_json_is_rejected(shared: Harness) -> None:
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    for more in (
        {"extra_body": {"unknown": deep}},
        {"tools": [{"type": "function", "name": "f", "parameters": {"a": deep}}]},
    ):
        with pytest.raises(openai.BadRequestError, match="nested"):
            raw(shared, "hi", **more)
    for more in ({"tools": [{"type": deep}]}, {"tool_choice": {"type": deep}}):
        with pytest.raises(openai.BadRequestError, match="type an array"):
            raw(shared, "hi", **more)
    # The error does not repeat invalid input.
    checked(raw(shared, "hi", tool_choice={"type": "function", "name": "f", "x": deep}))


def test_body_is_not_read_without_a_key(tmp_path: Path) -> None:
    keys = {"sk-test": Account("a", "a")}
    with harness(tmp_path, authenticate=lambda token: keys.get(token or "")) as server:
        raw(server, "hi")
        with openai.OpenAI(base_url=server.url, api_key="sk-other", max_retries=0) as real:
            with pytest.raises(openai.AuthenticationError):
                real.responses.create(model="bottega", input="hi", background=True)
            with pytest.raises(openai.AuthenticationError):
                real.responses.retrieve("resp_1")


def test_responses_are_not_stored(shared: Harness) -> None:
    with client(shared.url) as real:
        for way in (real.responses.retrieve, real.responses.delete, real.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="not stored"):
                way("resp_1")


def test_failed_tier_gives_the_usual_error(tmp_path: Path) -> None:
    def broken(prompt: Prompt) -> str:
        raise ValueError("secret")

    with harness(tmp_path, apprentice=ScriptedGenerator(broken)) as server:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as failed:
                raw(server, "hi", "bottega/apprentice", stream=stream)
            assert "secret" not in failed.value.message


async def test_events_have_names_and_no_done_marker(plain: Harness) -> None:
    body = {"model": "bottega/master", "input": response_input(1), "stream": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{plain.url}/responses", json=body) as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, end = (await response.read()).decode().split("\n\n")
    assert end == ""
    events.remove(f": stored {plain.examples()[0].id}")
    for one in events:
        name, data = one.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert events[-1].startswith("event: response.completed")
