from __future__ import annotations

import math
from time import process_time
from typing import Any

import openai
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import EndpointError, GarbledError, ServerFailedError
from bottega.gateway.state.response_cache import is_repeatable
from bottega.openai_api.streams import (
    CHARACTERS_PER_TOKEN,
    DONE_EVENT,
    StreamProgress,
    count_tokens,
    from_chunks,
    reported_usage,
    to_chunks,
    to_event,
)
from bottega.types import Completion, Usage
from tests import server

USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": 3,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def reply(content: str = "A cat.", **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, **more}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_790_000_000,
        "model": "bottega",
        "system_fingerprint": "fp",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": USAGE,
    }


def parsed(payload: dict[str, Any], *, include_usage: bool) -> list[dict[str, Any]]:
    steps = to_chunks(orjson.dumps(payload), include_usage=include_usage)
    return [orjson.loads(step) for step in steps]


def test_complete_reply_becomes_chunks() -> None:
    steps = parsed(reply(), include_usage=False)
    assert [step["choices"][0]["delta"] for step in steps] == [
        {"role": "assistant", "content": ""},
        {"content": "A cat."},
        {},
    ]
    assert [step["choices"][0]["finish_reason"] for step in steps] == [None, None, "stop"]
    for step in steps:
        assert step["object"] == "chat.completion.chunk" and "usage" not in step
        assert (step["id"], step["created"]) == ("chatcmpl-1", 1_790_000_000)


def test_only_the_last_chunk_has_usage() -> None:
    *steps, last = parsed(reply(), include_usage=True)
    assert len(steps) == 3 and all(step["usage"] is None for step in steps)
    assert last["choices"] == [] and last["usage"] == USAGE


def test_other_message_fields_precede_the_text() -> None:
    steps = parsed(reply(reasoning_content="Whiskers.", refusal=None), include_usage=False)
    assert steps[1]["choices"][0]["delta"] == {"reasoning_content": "Whiskers."}


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    head = {"id": "1", "object": "chat.completion.chunk", "created": 2, "model": "m"}
    return orjson.dumps(head | {"choices": [choice]} | more)


def test_chunks_become_a_complete_reply() -> None:
    reply = from_chunks(
        [
            chunk({"role": "assistant", "content": ""}, usage=None),
            chunk({"role": "assistant", "reasoning_content": "Whis"}),
            chunk({"role": "assistant", "reasoning_content": "kers.", "content": "A "}),
            chunk({"content": "cat."}),
            chunk({"content": None}, "stop", usage=None),
            orjson.dumps({"id": "1", "model": "m", "choices": [], "usage": USAGE}),
        ]
    )
    assert reply.completions == (Completion("A cat."),)
    assert (reply.model, reply.usage) == ("m", Usage(12, 3, 4))
    assert orjson.loads(reply.payload) == {
        "id": "1",
        "object": "chat.completion",
        "created": 2,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "A cat.",
                    "reasoning_content": "Whiskers.",
                },
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    }


def test_repeated_finish_reason_is_not_joined() -> None:
    reply = from_chunks([chunk({"content": "a"}, "stop"), chunk({}, "stop")])
    assert is_repeatable(reply.completions)


def test_tool_call_pieces_are_joined() -> None:
    def call(index: int, **function: str) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, "function": function}]}

    first = {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "f"}}]}
    second = {"tool_calls": [{"index": 1, "id": "b", "type": "function", "function": {}}]}
    reply = from_chunks(
        [
            chunk(first),
            chunk(call(0, arguments='{"x"')),
            chunk(second),
            chunk(call(1, name="g", arguments="{}")),
            chunk(call(0, arguments=": 1}")),
            chunk({}, "tool_calls"),
        ]
    )
    message = orjson.loads(reply.payload)["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert not is_repeatable(reply.completions)


def test_choices_are_assembled_separately() -> None:
    def at(index: int, text: str, finish: str | None = None) -> bytes:
        choice = {"index": index, "delta": {"content": text}, "finish_reason": finish}
        return orjson.dumps({"choices": [choice]})

    reply = from_chunks([at(1, "b"), at(0, "a"), at(1, "B", "stop"), at(0, "A", "length")])
    assert reply.completions == (Completion("aA", "length"), Completion("bB", "stop"))
    assert reply.usage is None and not is_repeatable(reply.completions)


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [chunk({"content": "A ca"})],
        [orjson.dumps({"choices": [], "usage": USAGE})],
        [chunk({"content": "A ca"}), b'{"error": {"message": "out of memory", "code": 500}}'],
        [chunk({"content": "A ca"}), chunk({}, "error")],
    ],
)
def test_incomplete_stream_raises(steps: list[bytes]) -> None:
    with pytest.raises(ServerFailedError):
        from_chunks(steps)


@pytest.mark.parametrize(
    "step",
    [b"", b"{", b"[]", b"3", b'{"choices": 3}', b'{"choices": [3]}',
     b'{"choices": [{"delta": "x"}]}', b'{"choices": [{"index": "x"}]}'],
)  # fmt: skip
def test_invalid_chunk_raises(step: bytes) -> None:
    with pytest.raises(GarbledError):
        from_chunks([chunk({"content": "a"}, "stop"), step])


@given(st.text(min_size=1), st.text(min_size=1), st.sampled_from(["stop", "length"]))
def test_round_trip(content: str, reasoning: str, finish: str) -> None:
    whole = reply(content, reasoning_content=reasoning)
    whole["choices"][0]["finish_reason"] = finish
    again = from_chunks(to_chunks(orjson.dumps(whole), include_usage=True))
    assert orjson.loads(again.payload) == whole
    assert again.completions == (Completion(content, finish),)


async def test_openai_client_reads_chunks_of_a_stored_reply(endpoint: server.Server) -> None:
    whole = reply("Una gatta — «bianca».\n\n")
    payloads = to_chunks(orjson.dumps(whole), include_usage=True)
    stream = b"".join(map(to_event, payloads)) + DONE_EVENT
    endpoint.answers = [server.raw(stream, kind="text/event-stream")]
    async with openai.AsyncOpenAI(base_url=endpoint.url, api_key="sk-x") as client:
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="bottega",
                messages=[{"role": "user", "content": "Who is it?"}],
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "Una gatta — «bianca».\n\n"
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 15


def test_tokens_of_a_cut_stream_are_estimated() -> None:
    deltas = [{"content": "x" * 14}, {"reasoning_content": "y" * 7}, {}, None]
    steps = [orjson.dumps({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    steps += [b"no JSON", orjson.dumps({"choices": None, "usage": USAGE}), b"[]"]
    assert count_tokens(steps) == 6  # 21 characters at 3.5 a token
    assert count_tokens(steps[:1] * 2 + steps[1:2] + steps[:1]) == 14
    assert count_tokens([]) == 0


@pytest.mark.parametrize(("prompt", "completion"), [(12, 3), (5, 5), (0, 2), (2, 0)])
def test_usage_of_the_last_chunk(prompt: int, completion: int) -> None:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    steps = to_chunks(orjson.dumps(reply() | {"usage": usage}), include_usage=True)
    assert reported_usage(steps) == Usage(prompt, completion)


def test_stream_without_usage_reports_none() -> None:
    steps = to_chunks(orjson.dumps(reply()), include_usage=False)
    assert reported_usage(steps) is None
    assert reported_usage([]) is None
    assert reported_usage([b"{"]) is None


def test_only_text_and_tool_calls_count_as_tokens() -> None:
    call = {"index": 0, "function": {"name": "find", "arguments": "x" * 400}}

    def count(delta: dict[str, Any]) -> int:
        return count_tokens([orjson.dumps({"choices": [{"index": 0, "delta": delta}]})])

    assert count({"tool_calls": [call]}) == math.ceil(
        len(orjson.dumps([call])) / CHARACTERS_PER_TOKEN
    )
    assert count({"tool_calls": []}) == 0
    assert count({"content": None, "audio": {"data": "x" * 400}}) == 0
    assert count({"role": "assistant"}) == 0
    assert count({"content": "ab"}) == 1


def test_unfinished_choice_raises() -> None:
    ended = {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}
    cut = {"index": 1, "delta": {"content": "b"}, "finish_reason": None}
    steps = [orjson.dumps({"model": "m", "choices": [choice]}) for choice in (ended, cut)]
    with pytest.raises(ServerFailedError, match="cut off"):
        from_chunks(steps)
    steps.append(orjson.dumps({"choices": [cut | {"delta": {}, "finish_reason": "length"}]}))
    assert [one.text for one in from_chunks(steps).completions] == ["a", "b"]


@pytest.mark.parametrize("finish", ["stop", "eos_token", "end_turn", "STOP", "COMPLETE"])
def test_complete_answers_of_other_protocols_are_repeatable(finish: str) -> None:
    chunks = [
        {"choices": [{"index": 0, "delta": {"content": "A cat."}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
    ]
    completed = from_chunks(map(orjson.dumps, chunks))
    assert completed.completions == (Completion("A cat."),)
    assert is_repeatable(completed.completions)
    # The client gets the server's own reason.
    assert orjson.loads(completed.payload)["choices"][0]["finish_reason"] == finish


def test_parallel_calls_with_one_index_stay_apart() -> None:
    def piece(arguments: str, name: str | None = None, **more: str) -> dict[str, Any]:
        call = {"index": 0, "function": {"name": name, "arguments": arguments}, **more}
        return {"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}

    chunks = [
        piece('{"city": "', "weather", id="a"),
        piece('Rome"}'),
        piece('{"city": ', "weather", id="b"),
        piece('"Oslo"}', id="b"),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    ]
    message = orjson.loads(from_chunks(map(orjson.dumps, chunks)).payload)["choices"][0]["message"]
    assert [(call["id"], call["function"]["arguments"]) for call in message["tool_calls"]] == [
        ("a", '{"city": "Rome"}'),
        ("b", '{"city": "Oslo"}'),
    ]


def seconds_to_join(tokens: int) -> float:
    token = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    choice = {"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [token]}}
    chunks = [orjson.dumps({"choices": [choice]})] * tokens
    started = process_time()
    reply = from_chunks([*chunks, chunk({}, "stop")])
    assert reply.completions == (Completion("a" * tokens, logprob=-0.5 * tokens),)
    return process_time() - started


def test_joining_log_probabilities_takes_linear_time() -> None:
    short = min(seconds_to_join(1000) for _ in range(3))
    long = min(seconds_to_join(8000) for _ in range(3))
    assert long < 0.05 + 24 * short  # linear: 8 times, quadratic: 64 times


HALF = "\\ud83d"


@pytest.mark.parametrize(
    "pieces",
    [
        ['{"content":"aHALF"}', '{}, "finish_reason":"stop"'],
        ['{"content":"aHALF"}', 'null, "finish_reason":"stop"'],
        ['{"content":"aHALF"}, "finish_reason":"stop"'],
        ['{"content":"aHALF"}', '{"content":""}, "finish_reason":"stop"'],
        ['{"content":"aHALF"}'],
        ['{"tool_calls":[{"index":1,"function":{"name":"f","arguments":"aHALF"}}]}'],
        ['{"tool_calls":[{"function":{"name":"f","arguments":"aHALF"}}]}', "{}"],
    ],
)
def test_half_a_character_at_the_end_is_replaced(pieces: list[str]) -> None:
    sent = [
        f'{{"choices":[{{"index":0,"delta":{piece.replace("HALF", HALF)}}}]}}' for piece in pieces
    ]
    progress = StreamProgress("x", lambda *_: EndpointError("no", hint=""), 1)
    events = b"".join(to_event(one.encode()) for one in sent) + DONE_EVENT
    whole = from_chunks([*progress.feed(events), *progress.end()])
    message = orjson.loads(whole.payload)["choices"][0]["message"]
    calls = message.get("tool_calls")
    assert (calls[0]["function"]["arguments"] if calls else message["content"]) == "a\ufffd"


def test_added_end_looks_like_the_other_chunks() -> None:
    head = {"id": "c1", "object": "chat.completion.chunk", "created": 7, "model": "m"}
    sent = {**head, "choices": [{"index": 0, "delta": {"content": "a"}}]}
    progress = StreamProgress("x", lambda *_: EndpointError("no", hint=""), 1)
    chunks = [*progress.feed(to_event(orjson.dumps(sent)) + DONE_EVENT), *progress.end()]
    added = orjson.loads(chunks[-1])
    assert added == {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
