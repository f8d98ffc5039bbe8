"""Exact repeats from answers that are stored in the cache; they survive a restart."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import orjson

from bottega.errors import GarbledError, ServerFailedError
from bottega.gateway.ports import Completed
from bottega.gateway.requests import CHARACTERS_A_TOKEN
from bottega.gateway.response_cache.memory import Remembered
from bottega.generation.openai_format import parse_completions, parse_usage, reported_failure
from bottega.types import Example, Usage


@dataclass(frozen=True)
class StoredRepeats:
    """Finder of stored replies. `lookup` maps an `exact_key` to the time of the answer and the id
    of its example."""

    lookup: Callable[[str], tuple[float, str] | None]

    def find(
        self, key: str, example: Callable[[str], Example | None]
    ) -> tuple[Remembered, float] | None:
        """Return the reply and its age in seconds, None if the example is gone. Blocks."""
        found = self.lookup(key)
        if found is None or (stored := example(found[1])) is None:
            return None
        answered = found[0]
        route, _, model = (stored.source or "").partition(":")
        payload = orjson.dumps(_reply(stored, model, int(answered)))
        return Remembered(payload, route, model), time.time() - answered


def _reply(example: Example, model: str, created: int) -> dict[str, object]:
    """Return a chat completion with zero usage: repeating the answer costs no tokens."""
    message = {"role": "assistant", "content": example.answer}
    return {
        "id": f"chatcmpl-{example.id}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


DONE = b"data: [DONE]\n\n"
# Said whole, by some servers in every chunk; all other text comes in pieces.
WHOLE = {"role", "type", "id", "name", "finish_reason"}
WHERE = "the model"
# Up to this mean length in characters, each event of a stream counts as one token.
MAX_EVENT_CHARACTERS = 8


def events(payload: bytes, *, include_usage: bool) -> tuple[bytes, ...]:
    """The JSON of each event as `Upstream.stream` gives it: the role, the text at once, the end,
    and if asked for the usage (null before). Id and time remain those of the first reply."""
    reply = orjson.loads(payload)
    usage = reply.pop("usage", None)
    choices = reply.pop("choices")
    head = reply | {"object": "chat.completion.chunk"}
    tail = {"usage": None} if include_usage else {}
    chunks = [
        head | {"choices": [{"index": choice.get("index", 0), **step}]} | tail
        for choice in choices
        for step in _steps(choice)
    ]
    if include_usage:
        chunks.append(head | {"choices": [], "usage": usage})
    return tuple(map(orjson.dumps, chunks))


def sse(steps: Iterable[bytes]) -> bytes:
    """The whole body of a streamed reply."""
    return b"".join(b"data: %b\n\n" % step for step in steps) + DONE


def assembled(steps: Iterable[bytes]) -> Completed:
    """What the plain reply would have been. Raises `ServerFailedError` for a stream that reports
    a failure, or that ends before each of its choices does: half a reply is none."""
    head: dict[str, object] = {}
    choices: dict[int, dict[str, object]] = {}
    for step in steps:
        chunk = _parsed(step)
        if failure := reported_failure(chunk):
            raise ServerFailedError(
                f"{WHERE} failed in mid-answer: {failure[1]}", hint="try again", status=failure[0]
            )
        for choice in cast(list[dict[str, object]], chunk.pop("choices", None) or []):
            _add(choices.setdefault(cast(int, choice.get("index", 0)), {}), choice)
        head |= {name: value for name, value in chunk.items() if value is not None}
    if not choices or not all(choice.get("finish_reason") for choice in choices.values()):
        raise ServerFailedError(f"{WHERE}'s reply was cut off", hint="try again")
    plain = [_plain(choices[index]) for index in sorted(choices)]
    body = head | {"object": "chat.completion", "choices": plain}
    return Completed(
        orjson.dumps(body),
        str(head.get("model", "")),
        parse_completions(body, WHERE),
        parse_usage(body) if "usage" in head else None,
    )


def tokens_said(steps: Iterable[bytes]) -> int:
    """Estimate the completion tokens of a stream that ended before its usage. Most servers send one
    event per token; larger pieces are counted by their characters."""
    lengths = [length for step in steps if (length := _characters(step))]
    if sum(lengths) <= MAX_EVENT_CHARACTERS * len(lengths):
        return len(lengths)
    return math.ceil(sum(lengths) / CHARACTERS_A_TOKEN)


def reported_usage(steps: Sequence[bytes]) -> Usage | None:
    """Return the usage that the last event of a stream reports, or None."""
    try:
        usage = parse_usage(_parsed(steps[-1])) if steps else Usage()
    except GarbledError:
        return None
    return usage if usage.prompt_tokens + usage.completion_tokens else None


def _characters(step: bytes) -> int:
    try:
        choices = cast(list[dict[str, object]], _parsed(step).get("choices") or [])
    except GarbledError:
        return 0
    deltas = (cast(Mapping[str, object], choice.get("delta") or {}) for choice in choices)
    return sum(_length(name, said) for one in deltas for name, said in one.items())


def _length(name: str, said: object) -> int:
    """Return the characters of a text, or of a tool call's name and arguments."""
    if isinstance(said, str):
        return 0 if name in WHOLE else len(said)
    return len(orjson.dumps(said)) if name == "tool_calls" and said else 0


def _steps(choice: Mapping[str, object]) -> list[dict[str, object]]:
    message = dict(cast(Mapping[str, object], choice["message"]))
    role, content = message.pop("role", "assistant"), message.pop("content", None)
    rest = {name: value for name, value in message.items() if value is not None}
    deltas: list[dict[str, object]] = [{"role": role, "content": ""}]
    if rest:  # reasoning, for one, comes before the answer
        deltas.append(rest)
    if content:
        deltas.append({"content": content})
    steps: list[dict[str, object]] = [{"delta": delta, "finish_reason": None} for delta in deltas]
    return [*steps, {"delta": {}, "finish_reason": choice.get("finish_reason")}]


def _parsed(step: bytes) -> dict[str, object]:
    try:
        chunk = orjson.loads(step)
    except orjson.JSONDecodeError as error:
        raise GarbledError(f"{WHERE} sent an event that is not JSON", hint="try again") from error
    choices = chunk.get("choices") if isinstance(chunk, dict) else ()
    if not isinstance(choices, list | None) or not all(map(_is_choice, choices or ())):
        raise GarbledError(f"{WHERE} sent an event that is no chunk of a reply", hint="try again")
    return cast(dict[str, object], chunk)


def _is_choice(choice: object) -> bool:
    return (
        isinstance(choice, dict)
        and isinstance(choice.get("index", 0), int)
        and isinstance(choice.get("delta"), dict | None)
    )


def _add(whole: dict[str, object], piece: Mapping[str, object]) -> None:
    for name, value in piece.items():
        if value is not None:
            whole[name] = _joined(whole.get(name), value, name)


def _joined(old: object, new: object, name: str) -> object:
    if isinstance(old, str) and isinstance(new, str) and name not in WHOLE:
        return old + new
    if isinstance(old, list) and isinstance(new, list):
        return _joined_lists(old, new)
    if isinstance(old, dict) and isinstance(new, dict):
        whole = dict(old)
        _add(whole, new)
        return whole
    return new


def _joined_lists(old: list[object], new: list[object]) -> list[object]:
    """Tool calls come in pieces, told apart by their index; all else is appended."""
    whole = list(old)
    places = {_index(value): place for place, value in enumerate(old)}
    for value in new:
        place = None if (index := _index(value)) is None else places.get(index)
        if place is None:
            whole.append(value)
        else:
            whole[place] = _joined(whole[place], value, "")
    return whole


def _index(value: object) -> int | None:
    index = value.get("index") if isinstance(value, dict) else None
    return index if isinstance(index, int) else None


def _plain(choice: Mapping[str, object]) -> dict[str, object]:
    message = dict(cast(Mapping[str, object], choice.get("delta") or {}))
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [
            {name: value for name, value in call.items() if name != "index"}
            for call in calls
            if isinstance(call, dict)
        ]
    said = {"role": "assistant", "content": None if calls else ""}
    rest = {name: value for name, value in choice.items() if name != "delta"}
    return {"index": 0} | rest | {"message": said | message}
