"""Everything that OpenAI's client reads from a provider, clients read through the gateway."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from bottega.gateway.request.upstreams import HttpUpstream
from bottega.openai_api.client import Breaker, Tolerance
from tests.gateway.harness import client, harness
from tests.gateway.provider_shapes import SHAPES, Shape, playing_shapes

if TYPE_CHECKING:
    import anthropic

MODEL: Any = "bottega/master"
REPLY_MODES = [("chat", False), ("chat", True), ("message", False), ("response", True)]
MODES = [*REPLY_MODES, ("message", True), ("response", False)]
EVENT = -1  # an error without a status, within a stream that has begun
UNREAD = 0  # the client raised no error of the API
READ_ERRORS = (
    openai.OpenAIError,
    httpx2.HTTPError,
    ValueError,
    TypeError,
    AttributeError,
    RecursionError,
)
# What the reasons of other protocols for the end of an answer mean.
MEANINGS = {
    **dict.fromkeys(("stop", "eos_token", "end_turn", "COMPLETE", "completed"), "complete"),
    **dict.fromkeys(("tool_calls", "function_call", "tool_use"), "calls"),
    **dict.fromkeys(("length", "MAX_TOKENS", "max_tokens", "model_length"), "length"),
    "max_output_tokens": "length",
    # One word of the Messages API stands for both.
    **dict.fromkeys(("content_filter", "refusal"), "refusal"),
}
# Status by that of the upstream. Faults of the request stay what they are.
OWN_FAULTS = (400, 413, 422)
STATUSES = {
    # Only the operator can change the key, the account, the model's name and the address.
    **dict.fromkeys((307, 401, 402, 403, 404, 405), 502),
    408: 504,  # the upstream was too slow, not the client
    409: 502,  # the client has changed nothing
    429: 429,
    **dict.fromkeys((500, 502, 503, 504, 529), 502),
}


@dataclass
class Reading:
    """What a client reads. Lists have one entry for each choice; `error` is a status."""

    texts: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[list[list[Any]]] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    logprobs: list[list[list[Any]]] = field(default_factory=list)
    usage: list[int] = field(default_factory=lambda: [0, 0, 0])
    others: dict[str, Any] = field(default_factory=dict)
    error: int | None = None
    problem: tuple[Any, ...] = ()  # type, param and code of an error, and its text

    def grow(self, choices: int) -> None:
        while len(self.texts) < choices:
            for texts in (self.texts, self.refusals, self.reasoning, self.finishes):
                texts.append("")
            self.calls.append([])
            self.logprobs.append([])

    @property
    def first(self) -> tuple[Any, ...]:
        """What other APIs tell of the first choice."""
        meaning = "refusal" if self.refusals[0] else MEANINGS[self.finishes[0]]
        if meaning in ("complete", "calls"):
            meaning = "calls" if self.calls[0] else "complete"
        return self.texts[0] or self.refusals[0], self.calls[0], meaning, self.usage


def whole(text: object) -> str:
    """Return a text, or the texts of its parts, with whole characters."""
    found = text_of(text)
    return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def text_of(content: object) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content if isinstance(content, str) else ""


def arguments(given: object) -> object:
    if not isinstance(given, str):
        return given or {}
    try:
        return json.loads(given or "{}")
    except ValueError:
        return given


def usage_of(usage: Any) -> list[int]:
    cached = getattr(getattr(usage, "prompt_tokens_details", None), "cached_tokens", None)
    return [usage.prompt_tokens, usage.completion_tokens, cached or 0] if usage else [0, 0, 0]


def logprobs_of(choice: Any) -> list[list[Any]]:
    tokens = choice.logprobs.content or [] if choice.logprobs else []
    return [[whole(one.token), max(one.logprob, -9999.0)] for one in tokens]


def reasoning_of(message: Any) -> object:
    more = message.model_extra or {}
    return more.get("reasoning_content") or more.get("reasoning")


def others_of(reply: Any) -> dict[str, Any]:
    names = ("service_tier", "system_fingerprint", "citations", "x_groq", "timings", "episode_id")
    return {name: value for name in names if (value := getattr(reply, name, None))}


def read_reply(reply: Any) -> Reading:
    found = Reading(usage=usage_of(reply.usage), others=others_of(reply))
    for number, choice in enumerate(reply.choices):
        found.grow(number + 1)
        message = choice.message
        found.texts[number] = whole(message.content)
        found.refusals[number] = whole(message.refusal)
        found.reasoning[number] = whole(reasoning_of(message))
        found.finishes[number] = choice.finish_reason or "stop"
        found.logprobs[number] = logprobs_of(choice)
        functions = [call.function for call in message.tool_calls or ()]
        functions += [message.function_call] if message.function_call else []
        found.calls[number] = [[one.name, arguments(one.arguments)] for one in functions]
        for name in ("audio", "annotations", "reasoning_details", "thinking_blocks"):
            if value := getattr(message, name, None):
                found.others[name] = value
    return found


def read_stream(chunks: Any, found: Reading, missing: str) -> None:
    """Add what the chunks say, as an application does. `missing` stands for no finish reason."""
    pieces: dict[int, list[Any]] = {}
    for chunk in chunks:
        found.usage = usage_of(chunk.usage) if chunk.usage else found.usage
        found.others |= others_of(chunk)
        for choice in chunk.choices or ():
            number = choice.index or 0
            found.grow(number + 1)
            found.finishes[number] = choice.finish_reason or found.finishes[number]
            found.logprobs[number] += logprobs_of(choice)
            if delta := choice.delta:
                found.texts[number] += text_of(delta.content)
                found.refusals[number] += text_of(delta.refusal)
                found.reasoning[number] += text_of(reasoning_of(delta))
                for call in delta.tool_calls or ():
                    add_piece(pieces.setdefault(number, []), call, call.function)
                if delta.function_call:
                    add_piece(pieces.setdefault(number, []), None, delta.function_call)
    for number, calls in pieces.items():
        found.calls[number] = [[name, arguments(whole(given))] for _, name, given in calls]
    for texts in (found.texts, found.refusals, found.reasoning):
        texts[:] = map(whole, texts)
    found.finishes = [finish or missing for finish in found.finishes]


def add_piece(calls: list[Any], piece: Any, function: Any) -> None:
    """Add a piece to its call: a name begins a call, other pieces go by the index or the id."""
    if function is None:
        return
    index, key = (piece.index, piece.id) if piece else (None, None)
    known = key if index is None else index
    if function.name:
        calls.append([known, function.name, ""])
    given = function.arguments or ""
    call = [call for call in calls if known in (None, call[0])][-1]
    call[2] += given if isinstance(given, str) else json.dumps(given)


def attempt(read: Callable[[Reading], Reading | None]) -> Reading:
    found = Reading()
    try:
        return read(found) or found
    except READ_ERRORS as error:
        is_of_api = isinstance(error, openai.APIError)
        found.error = getattr(error, "status_code", EVENT) if is_of_api else UNREAD
        if isinstance(error, openai.APIStatusError):
            found.problem = (error.type, error.param, error.code, str(error))
        return found


@dataclass(frozen=True)
class Zoo:
    direct: openai.OpenAI
    through: openai.OpenAI
    messages: anthropic.Anthropic

    def chat(self, who: openai.OpenAI, number: int, *, streamed: bool) -> Reading:
        shape = SHAPES[number]
        turns: list[Any] = [{"role": "user", "content": question(number)}]
        more: dict[str, Any] = {"stream_options": {"include_usage": True}} if streamed else {}
        # Without a reason a stream may be cut off, but a reply is complete.
        missing = "length" if shape.stream else "stop"

        def read(found: Reading) -> Reading | None:
            reply = who.chat.completions.create(
                model=MODEL, messages=turns, stream=streamed, **shape.request, **more
            )
            if not streamed:
                return read_reply(reply)
            read_stream(reply, found, missing)
            return None

        return attempt(read)

    def response(self, number: int, *, streamed: bool) -> Reading:
        def read(found: Reading) -> Reading:
            reply: Any = self.through.responses.create(
                model=MODEL, input=question(number), stream=streamed
            )
            if streamed:
                ends = ("response.completed", "response.incomplete")
                [reply] = [event.response for event in reply if event.type in ends]
            return of_response(reply)

        return attempt(read)

    def message(self, number: int, *, streamed: bool) -> Reading:
        from anthropic import APIStatusError

        turns: list[Any] = [{"role": "user", "content": question(number)}]
        given: Any = {"model": MODEL, "max_tokens": 500, "messages": turns}
        try:
            if not streamed:
                return of_message(self.messages.messages.create(**given))
            with self.messages.messages.stream(**given) as events:
                return of_message(events.get_final_message())
        except APIStatusError as error:
            return Reading(error=EVENT if error.status_code == 200 else error.status_code)


def question(number: int) -> str:
    return f"### Task: play shape {number}"  # of an application, not to be remembered


def of_response(response: Any) -> Reading:
    found = Reading()
    found.grow(1)
    for item in response.output:
        if item.type == "function_call":
            found.calls[0].append([item.name, arguments(item.arguments)])
        else:
            found.texts[0] += "".join(getattr(part, "text", "") for part in item.content)
            found.refusals[0] += "".join(getattr(part, "refusal", "") for part in item.content)
    details, usage = response.incomplete_details, response.usage
    found.finishes[0] = details.reason if details else response.status
    if usage:
        cached = usage.input_tokens_details.cached_tokens
        found.usage = [usage.input_tokens, usage.output_tokens, cached]
    return found


def of_message(message: Any) -> Reading:
    found, usage = Reading(), message.usage
    found.grow(1)
    for block in message.content:
        if block.type == "tool_use":
            found.calls[0].append([block.name, block.input])
        else:
            found.texts[0] += block.text
    found.finishes[0] = message.stop_reason
    assert message.stop_reason in (("tool_use", "max_tokens") if found.calls[0] else
                                   ("end_turn", "max_tokens", "refusal"))  # fmt: skip
    found.refusals[0] = found.texts[0] if message.stop_reason == "refusal" else ""
    cached = usage.cache_read_input_tokens
    found.usage = [usage.input_tokens + cached, usage.output_tokens, cached]
    return found


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zoo]:
    """Clients of all providers and of one gateway in front of them."""
    anthropic = pytest.importorskip("anthropic")
    never = Breaker(Tolerance(failures=10_000, rate=1.0, at_least=1000))
    with playing_shapes() as url:
        provider = HttpUpstream(
            "x", base_url=url, api_key="sk-x", timeout=30, retries=0, breaker=never
        )
        folder = tmp_path_factory.mktemp("zoo")
        with (
            harness(folder, master=provider, replays=False) as server,
            client(url) as direct,
            client(server.url) as through,
            anthropic.Anthropic(
                base_url=server.url.removesuffix("/v1"),
                api_key="sk-test",
                max_retries=0,
                timeout=20,
                http_client=anthropic.DefaultHttpxClient(verify=False),
            ) as messages,
        ):
            yield Zoo(direct, through, messages)


def expected_status(shape: Shape, direct: Reading) -> int:
    """Return the status that the gateway makes of the upstream's."""
    status = shape.error or shape.status
    if status in OWN_FAULTS:
        return status
    if "insufficient_quota" in direct.problem:
        return 502  # no wait helps: the operator's affair
    if status >= 500 and "retry-after" in shape.headers:
        return 503  # the client can wait
    return STATUSES[status]


def expected(shape: Shape, direct: Reading) -> Reading:
    """Return what clients of the gateway read where the direct client reads this."""
    if shape.error or shape.status >= 300:
        return replace(direct, error=expected_status(shape, direct))
    if shape.read:
        found = Reading()
        found.grow(1)
        return replace(found, **shape.read)
    assert direct.error is None, "the data file must say what this shape means"
    return direct


def chat_problem(shape: Shape, wanted: Reading, found: Reading, native: bool) -> str:
    """Return the first difference of two readings, empty if there is none."""
    names = ["texts", "refusals", "calls", "finishes", "usage"]
    if not shape.read:
        names += ["reasoning", "logprobs", *(["others"] if native else [])]
    for name in names:
        one, other = getattr(found, name), getattr(wanted, name)
        if one != other:
            return f"{name} {str(one)[:300]}, not {str(other)[:300]}"
    return ""


def error_problem(shape: Shape, wanted: Reading, found: Reading, streamed: bool) -> str:
    may = [wanted.error]
    if shape.stream and streamed:  # the status of a stream that has begun is sent
        may = [EVENT] if any(wanted.texts) else [wanted.error, EVENT]
    if found.error not in may:
        return f"error {found.error}, not {may}"
    if found.problem and wanted.error in OWN_FAULTS:
        pairs = zip(found.problem[:3], wanted.problem[:3], strict=False)
        if any(isinstance(right, str) and right != one for one, right in pairs):
            return f"{found.problem}, not {wanted.problem}"
        return "" if shape.says in found.problem[3] else f"{found.problem[3]!r}"
    return ""


def differences(number: int, zoo: Zoo) -> list[str]:
    """Return how the readings of all APIs differ from the direct one."""
    shape = SHAPES[number]
    native = bool(shape.stream)
    wanted = expected(shape, zoo.chat(zoo.direct, number, streamed=native))
    found = []
    for api, streamed in MODES if shape.stream else REPLY_MODES:
        if shape.end and not streamed and wanted.error is None:
            continue  # a whole reply whose connection breaks may be cut off
        if api == "chat":
            reading = zoo.chat(zoo.through, number, streamed=streamed)
        else:
            reading = getattr(zoo, api)(number, streamed=streamed)
        if wanted.error is not None or reading.error is not None:
            problem = error_problem(shape, wanted, reading, streamed)
        elif api == "chat":
            problem = chat_problem(shape, wanted, reading, streamed == native)
        else:
            is_same = reading.first == wanted.first
            problem = "" if is_same else f"{reading.first}, not {wanted.first}"
        if problem:
            found.append(f"{api}, streamed={streamed}: {problem}")
    return found


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=map(str, SHAPES))
def test_shapes_are_read(zoo: Zoo, number: int) -> None:
    assert differences(number, zoo) == []
