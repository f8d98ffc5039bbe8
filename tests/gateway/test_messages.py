"""The Messages API with the real anthropic client against a real server."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from pydantic import TypeAdapter

from bottega.gateway.accounting.ledger_schema import Account
from bottega.gateway.apis.messages import error_body
from bottega.openai_api.errors import ApiError
from tests import server as doubles
from tests.builders import solid_image
from tests.gateway.harness import QUESTION, Harness, harness
from tests.gateway.test_responses_upstream import CALLED, delta, reply_with
from tests.gateway.upstreams import CHUNKS, USAGE, events, lines, upstream

if TYPE_CHECKING:  # only the worker that runs these tests spends two seconds on the import
    import anthropic
    from anthropic.types import Message

WEATHER: Any = {
    "name": "weather",
    "description": "Of a town.",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}},
}


@pytest.fixture
def server() -> Iterator[doubles.Server]:
    with doubles.running() as endpoint:
        yield endpoint


@pytest.fixture
def gateway(server: doubles.Server, tmp_path: Path) -> Iterator[Harness]:
    with harness(tmp_path, master=upstream(server), replays=False) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with harness(tmp_path_factory.mktemp("shared"), replays=False) as endpoint:
        yield endpoint


def client(harness: Harness) -> anthropic.Anthropic:
    import anthropic

    transport = anthropic.DefaultHttpxClient(verify=False)  # loading certificates takes longer
    url = harness.url.removesuffix("/v1")
    return anthropic.Anthropic(
        base_url=url, api_key="sk-test", max_retries=0, http_client=transport
    )


def image_block(shade: int) -> Any:
    image = solid_image(shade)
    data = base64.b64encode(image.data).decode()
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": image.media_type, "data": data},
    }


def ask(harness: Harness, messages: Any, model: str = "bottega", **more: Any) -> Message:
    """Return a reply whose fields are all valid, also those that the client ignores."""
    from anthropic.types import Message

    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    with client(harness) as real:
        raw = real.messages.with_raw_response.create(
            model=model, messages=messages, **{"max_tokens": 100, **more}
        )
    assert raw.headers["x-request-id"]
    return Message.model_validate_json(raw.text())


def storable_text(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_image_and_question_are_answered_with_demonstrations(shared: Harness) -> None:
    for shade in (10, 20):
        said = ask(
            shared,
            [{"role": "user", "content": [image_block(shade), {"type": "text", "text": QUESTION}]}],
            "bottega/master",
        )
        assert (storable_text(said), said.stop_reason) == (f"{QUESTION} (0 shown)", "end_turn")
    later = [{"role": "user", "content": [image_block(30), {"type": "text", "text": QUESTION}]}]
    assert storable_text(ask(shared, later, "bottega/apprentice")) == f"{QUESTION} (2 shown)"
    assert {len(kept.query.images) for kept in shared.examples()} == {1}


def test_request_is_translated_to_chat_fields(gateway: Harness, server: doubles.Server) -> None:
    server.answers = [reply_with(content="fine")]
    said = ask(
        gateway,
        [
            {"role": "user", "content": "hi"},
            {"role": "system", "content": "Be kind."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "c1", "name": "weather", "input": {"town": "Rome"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [{"type": "text", "text": "rain"}, image_block(7)],
                        "is_error": True,
                    },
                    {"type": "text", "text": "so?"},
                ],
            },
        ],
        "bottega/master",
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        stop_sequences=["END"],
        thinking={"type": "adaptive"},
        output_config={
            "effort": "low",
            "format": {"type": "json_schema", "schema": {"type": "object"}},
        },
        extra_body={"temperature": 0.5},
        metadata={"user_id": "u1"},
        tools=[WEATHER],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    body = server.bodies[0]
    call = {"id": "c1", "type": "function", "function": {}}
    call["function"] = {"name": "weather", "arguments": '{"town":"Rome"}'}
    image = {"type": "image_url", "image_url": {"url": solid_image(7).data_url}}
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "Be kind."},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "content": "Error: rain", "tool_call_id": "c1"},
        {"role": "user", "content": [image, {"type": "text", "text": "so?"}]},
    ]
    assert body["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "Of a town.",
                "parameters": WEATHER["input_schema"],
            },
        }
    ]
    fields = ("tool_choice", "parallel_tool_calls", "stop", "temperature", "user")
    assert [body[name] for name in fields] == ["required", False, ["END"], 0.5, "u1"]
    assert (body["max_completion_tokens"], body["reasoning_effort"]) == (100, "low")
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    usage = said.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (6, 4, 5)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_tool_choice(
    gateway: Harness, server: doubles.Server, choice: Any, expected: object
) -> None:
    server.answers = [reply_with(content="fine")]
    ask(gateway, "hi", "bottega/master", tools=[{**WEATHER, "name": "f"}], tool_choice=choice)
    assert server.bodies[0]["tool_choice"] == expected


def test_tool_calls_become_blocks(gateway: Harness, server: doubles.Server) -> None:
    broken = {"id": "", "function": {"name": "weather", "arguments": "not JSON"}}
    server.answers = [reply_with("tool_calls", content=None, tool_calls=[CALLED, broken])]
    said = ask(gateway, "hi", "bottega/master", tools=[WEATHER])
    assert said.stop_reason == "tool_use"
    first, second = said.content
    assert first.type == second.type == "tool_use"
    assert (first.id, first.name, first.input) == ("c1", "weather", {"a": 1})
    assert second.id.startswith("toolu_") and second.input == {"arguments": "not JSON"}


@pytest.mark.parametrize(
    ("finish", "message", "reason"),
    [
        ("length", {"content": "a"}, "max_tokens"),
        ("content_filter", {"content": "a"}, "refusal"),
        ("stop", {"content": None, "refusal": "no"}, "refusal"),
        ("stop", {"content": ""}, "end_turn"),
    ],
)
def test_stop_reasons(
    gateway: Harness, server: doubles.Server, finish: str, message: Any, reason: str
) -> None:
    server.answers = [reply_with(finish, **message)]
    said = ask(gateway, "hi", "bottega/master")
    assert said.stop_reason == reason
    assert storable_text(said) == (message["content"] or message.get("refusal", ""))


def test_stream_of_text(gateway: Harness, server: doubles.Server) -> None:
    from anthropic.types import RawMessageStreamEvent

    event: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    server.answers = [events(lines(*CHUNKS))]
    with (
        client(gateway) as real,
        real.messages.stream(
            model="bottega/master",
            max_tokens=9,
            messages=[{"role": "user", "content": "hi"}],
        ) as stream,
    ):
        kinds = [event.validate_python(one.to_dict()).type for one in stream if one.type in RAW]
        final = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert {*kinds[2:-3]} == {"content_block_delta"}
    assert storable_text(final) and final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 0 and final.usage.input_tokens > 0


def test_streamed_refusal_is_the_text_and_the_reason(
    gateway: Harness, server: doubles.Server
) -> None:
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    chunks = (delta(refusal="I can"), delta(refusal="not."), delta(content=""), end)
    server.answers = [events(lines(*chunks))]
    with (
        client(gateway) as real,
        real.messages.stream(
            model="bottega/master", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
        ) as stream,
    ):
        final = stream.get_final_message()
    assert (storable_text(final), final.stop_reason) == ("I cannot.", "refusal")


RAW = {
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
}


def test_stream_of_text_and_tools(gateway: Harness, server: doubles.Server) -> None:
    pieces: list[dict[str, Any]] = [
        delta(role="assistant", content="I look."),
        delta(tool_calls=[{"index": 0, "id": "c1", "function": {"name": "weather"}}]),
        delta(tool_calls=[{"index": 1, "id": "c2", "function": {"name": "time"}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"town":'}}]),
        delta(tool_calls=[{"index": 1, "function": {"arguments": "{}"}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '"Rome"}'}}]),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    ]
    server.answers = [events(lines(*pieces, USAGE))]
    with (
        client(gateway) as real,
        real.messages.stream(
            model="bottega/master",
            max_tokens=9,
            messages=[{"role": "user", "content": "hi"}],
            tools=[WEATHER],
        ) as stream,
    ):
        final = stream.get_final_message()
    text, *calls = final.content
    assert text.type == "text" and text.text == "I look."
    made = [(one.id, one.name, one.input) for one in calls if one.type == "tool_use"]
    assert made == [("c1", "weather", {"town": "Rome"}), ("c2", "time", {})]
    assert final.stop_reason == "tool_use"


def test_stream_that_fails_raises(gateway: Harness, server: doubles.Server) -> None:
    import anthropic

    server.answers = [
        events(lines(*CHUNKS[:2], {"error": {"message": "out of memory", "code": 500}}))
    ]
    with client(gateway) as real, pytest.raises(anthropic.APIStatusError):
        list(
            real.messages.create(
                model="bottega/master",
                max_tokens=9,
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
            )
        )
    assert gateway.wait(1).state == "failed"


def image_from(source: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": "image", "source": source}]}]


def deep_call() -> Any:
    """Return a turn with a tool call whose input is nested more deeply than orjson encodes."""
    given = json.loads('{"a":' * 300 + "1" + "}" * 300)
    block = {"type": "tool_use", "id": "x", "name": "weather", "input": given}
    return [{"role": "assistant", "content": [block]}]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
        ({"messages": image_from({"type": "file"})}, "messages[0].content[0].source.type"),
        ({"messages": image_from({"type": "base64", "data": "x"})}, "media_type"),
        (
            {"messages": image_from({"type": "base64", "media_type": "image/png", "data": "eA=="})},
            "messages[0].content[0].source",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"stop_sequences": 5}, "stop_sequences"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"messages": deep_call()}, "nested"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_invalid_requests_name_the_field(
    shared: Harness, path: str, changed: Any, field: str
) -> None:
    import anthropic

    if "count" in path and field == "messages[0].content[0].source":
        return  # images are decoded only for a model
    given = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, **changed}
    with client(shared) as real, pytest.raises(anthropic.BadRequestError) as raised:
        body = {"model": "bottega", **given}
        real.post(path, body=body, cast_to=object)
    error = raised.value.body
    assert isinstance(error, dict)
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert field in error["error"]["message"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (402, "billing_error"),
        (409, "invalid_request_error"),
        (431, "invalid_request_error"),
        (502, "api_error"),
        (504, "timeout_error"),
    ],
)
def test_errors_have_the_types_of_their_status(status: int, kind: str) -> None:
    body = json.loads(error_body(ApiError("no", status=status)))
    assert body == {"type": "error", "error": {"type": kind, "message": "no"}}


def test_other_addresses_of_the_api_have_its_errors(shared: Harness) -> None:
    import anthropic

    with client(shared) as real, pytest.raises(anthropic.NotFoundError) as raised:
        real.post("/v1/messages/batches", body={}, cast_to=object)
    error: Any = raised.value.body
    assert (error["type"], error["error"]["type"]) == ("error", "not_found_error")


# The form of an id of Claude Code: 159 characters.
LONG_ID = f"user_{'0a1b2c3d' * 8}_account__session_{'4e5f6071' * 9}"[:159]


@pytest.mark.parametrize("id", ["u1", "x" * 64, "x" * 65, LONG_ID, "é" * 65, "{" + "a" * 255])
def test_long_ids_of_users_are_shortened(gateway: Harness, server: doubles.Server, id: str) -> None:
    """OpenAI rejects a user of more than 64 characters."""
    server.answers = [reply_with(content="fine")]
    for _ in range(2):
        ask(gateway, "hi", "bottega/master", metadata={"user_id": id})
    ask(gateway, "hi", "bottega/master", metadata={"user_id": id + "2"})
    first, again, other = (body["user"] for body in server.bodies)
    assert first == again != other
    assert (first == id) == (len(id) <= 64)
    assert len(first) <= 64


def count(harness: Harness, messages: Any = "hi", model: str = "bottega", **more: Any) -> int:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    with client(harness) as real:
        return real.messages.count_tokens(model=model, messages=messages, **more).input_tokens


def test_tokens_are_counted_without_a_call(gateway: Harness, server: doubles.Server) -> None:
    short = count(gateway)
    assert 0 < short < count(gateway, "hi " * 400) < 2000
    assert count(gateway, system="Be brief. " * 100) > short + 100
    assert count(gateway, tools=[WEATHER]) > short + 10
    image = [{"role": "user", "content": [image_block(10), {"type": "text", "text": "hi"}]}]
    assert count(gateway, image) > short + 500
    assert server.bodies == []
    record = gateway.wait(5)
    assert (record.status, record.cost_usd, record.route) == (200, 0.0, "")
    assert record.state == "counted"


def test_counts_are_corrected_by_the_usage_of_the_tier(
    gateway: Harness, server: doubles.Server
) -> None:
    text = "word " * 300
    before = count(gateway, text, "bottega/master")
    usage = {"prompt_tokens": 3 * before, "completion_tokens": 1}
    server.answers = [doubles.ok("fine", usage=usage)]
    ask(gateway, text, "bottega/master")
    assert count(gateway, text, "bottega/master") == 3 * before
    assert count(gateway, text, "bottega/apprentice") == before


def test_images_do_not_correct_the_count_of_a_text(
    gateway: Harness, server: doubles.Server
) -> None:
    """An upstream counts 4 tokens an image, far less than the estimate."""
    text = "x" * 900
    image = [{"role": "user", "content": [image_block(10), {"type": "text", "text": "hi"}]}]
    before, most = count(gateway, text), count(gateway, image)
    for number in range(12):
        server.answers = [doubles.ok("fine", usage={"prompt_tokens": 5, "completion_tokens": 1})]
        content = [{"type": "text", "text": f"hi {number}"}, image_block(number + 20)]
        ask(gateway, [{"role": "user", "content": content}], "bottega/master")
    assert count(gateway, text) == before
    assert count(gateway, image) < 20 < most
    mixed = [{"role": "user", "content": [image_block(10), {"type": "text", "text": text}]}]
    assert before - 20 < count(gateway, mixed) < before + 20


def test_counting_needs_the_rights_of_a_message(tmp_path: Path) -> None:
    import anthropic

    accounts = {"sk-test": Account("a", "a", requests_per_minute=3, tiers=("apprentice",))}
    with harness(tmp_path, authenticate=lambda key: accounts.get(key or "")) as own:
        assert count(own, model="bottega/apprentice") > 0
        with pytest.raises(anthropic.NotFoundError, match="claude"):
            count(own, model="claude")
        with pytest.raises(anthropic.PermissionDeniedError, match="tier 'master'"):
            count(own, model="bottega/master")
        with pytest.raises(anthropic.RateLimitError):
            count(own)
        accounts.clear()
        with pytest.raises(anthropic.AuthenticationError):
            count(own)


def test_required_fields(shared: Harness) -> None:
    import anthropic

    with client(shared) as real:
        incomplete: list[dict[str, object]] = [{"max_tokens": 5}, {"messages": []}, {}]
        for given in incomplete:
            with pytest.raises(anthropic.BadRequestError, match="see the Messages reference"):
                real.post("/v1/messages", body={"model": "bottega", **given}, cast_to=object)


def test_keys_and_models(tmp_path: Path) -> None:
    import anthropic

    accounts = {"sk-test": Account("a", "a")}
    with harness(tmp_path, authenticate=lambda key: accounts.get(key or "")) as own:
        assert storable_text(ask(own, "hi"))
        with client(own) as real, pytest.raises(anthropic.NotFoundError) as missing:
            real.messages.create(
                model="claude", max_tokens=5, messages=[{"role": "user", "content": "x"}]
            )
        assert "bottega" in str(missing.value)
        with client(own) as real, pytest.raises(anthropic.AuthenticationError) as refused:
            real.with_options(api_key="wrong").messages.create(
                model="bottega", max_tokens=5, messages=[{"role": "user", "content": "x"}]
            )
        assert orjson.loads(refused.value.response.content)["error"]["type"] == (
            "authentication_error"
        )


def test_repeats_are_shared_with_chat_completions(tmp_path: Path) -> None:
    with harness(tmp_path) as own:
        first, second = ask(own, "hi"), ask(own, "hi")
        assert storable_text(first) == storable_text(second)
        assert own.wait(2).state == "replayed"
