"""Bodies forwarded to a real server on loopback."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import orjson
import pytest
from aiohttp import web

from bottega.errors import EndpointError, ServerFailedError, UnreachableError
from bottega.gateway.errors import MisconfiguredError
from bottega.gateway.request.upstreams import HttpUpstream
from bottega.generation import RetryPolicy
from bottega.openai_api.client import Breaker, PausedError, Tolerance
from bottega.openai_api.errors import RequestRejectedError
from bottega.types import Completion, Usage
from tests.gateway.upstreams import (
    BODY,
    CHUNKS,
    completed,
    events,
    lines,
    seen,
    signal_on_disconnect,
    streamed,
    upstream,
)
from tests.server import Answer, Server, ok, raw, refuse, reply, slowly


async def test_only_the_model_of_a_body_changes(endpoint: Server) -> None:
    completion = await completed(upstream(endpoint), BODY | {"stream": True, "stream_options": {}})
    assert endpoint.bodies == [BODY | {"model": "m"}]
    assert completion.completions == (Completion("fine"),)
    assert (completion.model, completion.usage) == ("m", Usage(10, 2))


async def test_operator_fields_win_and_none_removes_a_field(endpoint: Server) -> None:
    target = upstream(endpoint, extra_body={"x": 1, "temperature": None})
    await completed(target, BODY | {"temperature": 1, "seed": None})
    assert endpoint.bodies == [BODY | {"model": "m", "x": 1, "seed": None}]


async def test_reply_bytes_are_unchanged(endpoint: Server) -> None:
    sent = b'{ "choices" : [{"message":{"content":"\\u00e4"},"odd":1}], "usage":{}, "model":"n" }'
    endpoint.answers = [raw(sent, kind="application/json")]
    completion = await completed(upstream(endpoint))
    assert (completion.payload, completion.model, completion.usage) == (sent, "n", Usage())


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        ({"content": None, "refusal": "no"}, ""),
        ({"content": None, "tool_calls": [{"id": "1"}]}, None),
    ],
)
async def test_content_lists_are_normalized(
    endpoint: Server, message: dict[str, object], content: str | None
) -> None:
    usage = {"prompt_tokens": 3}
    endpoint.answers = [reply({"choices": [{"message": message}], "usage": usage, "odd": 1})]
    completion = orjson.loads((await completed(upstream(endpoint))).payload)
    assert completion["choices"][0]["message"] == message | {"content": content}
    assert (completion["usage"], completion["odd"]) == (usage, 1)


async def test_missing_usage_is_unknown_and_sent_as_zero(endpoint: Server) -> None:
    endpoint.answers = [ok("a", usage=None)]
    completion = await completed(upstream(endpoint))
    assert completion.usage is None
    assert orjson.loads(completion.payload)["usage"]["total_tokens"] == 0


async def test_rejection_keeps_the_upstream_fields(
    endpoint: Server,
) -> None:
    message = "This model's maximum context length is 4096 tokens, key SECRETKEY"
    error = {"message": message, "type": "bad", "code": "context_length_exceeded", "param": None}
    endpoint.answers = [reply({"error": error}, 400)]
    for call in (completed, streamed):
        with pytest.raises(RequestRejectedError) as caught:
            await call(upstream(endpoint, api_key="SECRETKEY"))
        refused = caught.value
        assert refused.detail == message.replace("SECRETKEY", "[redacted]")
        assert (refused.status, refused.kind, refused.code, refused.param) == (
            400,
            "bad",
            "context_length_exceeded",
            None,
        )
    assert len(endpoint.bodies) == 2


@pytest.mark.parametrize(
    ("status", "code"),
    [(401, "key"), (402, None), (403, "no"), (404, "no"), (429, "insufficient_quota"), (302, "")],
)
async def test_operator_errors_become_502(endpoint: Server, status: int, code: str) -> None:
    endpoint.answers = [refuse(status, code=code)]
    for call in (completed, streamed):
        with pytest.raises(MisconfiguredError) as caught:
            await call(upstream(endpoint))
        assert (caught.value.status, caught.value.retryable) == (502, False)
    assert len(endpoint.bodies) == 2


@pytest.mark.parametrize("call", [completed, streamed])
async def test_failures_are_retried_after_the_requested_wait(endpoint: Server, call: Any) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    last = ok("a") if call is completed else events(lines(*CHUNKS))
    endpoint.answers = [refuse(429, "later", retry_after="3"), refuse(503), last]
    await call(upstream(endpoint, retries=RetryPolicy(3, sleep=sleep, random=lambda: 0.5)))
    assert waits == [pytest.approx(3 * 1.05), 0.5]
    endpoint.answers = [refuse(503, x_should_retry="false")]
    with pytest.raises(ServerFailedError):
        await call(upstream(endpoint))
    assert len(endpoint.bodies) == 4


UNKNOWN = "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens'."


@pytest.mark.parametrize(
    ("sent", "message", "accepted"),
    [
        ("max_tokens", UNKNOWN, "max_completion_tokens"),
        ("max_completion_tokens", "unknown field max_completion_tokens", "max_tokens"),
    ],
)
async def test_other_token_limit_name_is_used_after_a_rejection(
    endpoint: Server, sent: str, message: str, accepted: str
) -> None:
    endpoint.answers = [refuse(400, message), ok("a")]
    target = upstream(endpoint)
    await target.complete(BODY | {sent: 5})
    await completed(target, BODY | {sent: 6})
    limits = [[body.get(sent), body.get(accepted)] for body in endpoint.bodies]
    assert limits == [[5, None], [None, 5], [None, 6]]


NEW, OLD = "max_completion_tokens", "max_tokens"


def accepting(*names: str) -> Answer:
    """Return the answer of a server that knows only these names of the token limit."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        for name in {NEW, OLD} - {*names}:
            if name in body:
                return await refuse(400, f"Unsupported parameter: {name}")(request)
        return await ok("a")(request)

    return answer


@pytest.mark.parametrize("sent", [OLD, NEW])
@pytest.mark.parametrize(("first", "second"), [(OLD, NEW), (NEW, OLD)])
async def test_name_of_the_token_limit_is_learned_again(
    endpoint: Server, sent: str, first: str, second: str
) -> None:
    """Another model may be served under the same name."""
    target, names = upstream(endpoint), list[str]()
    for accepted in (first, second, first):
        endpoint.answers = [accepting(accepted)]
        for _ in range(2):
            await target.complete(BODY | {sent: 5})
            names += [name for name in (OLD, NEW) if name in endpoint.bodies[-1]]
        assert [one.get(name) for one in endpoint.bodies[-2:] for name in (accepted,)] == [5, 5]
    await target.aclose()
    assert names == [first, first, second, second, first, first]
    assert len(endpoint.bodies) == 6 + (3 if sent != first else 2)


async def test_both_names_of_the_token_limit_may_be_rejected(endpoint: Server) -> None:
    endpoint.answers = [accepting()]
    target = upstream(endpoint)
    for _ in range(2):
        with pytest.raises(RequestRejectedError, match="Unsupported parameter"):
            await target.complete(BODY | {OLD: 5})
    endpoint.answers = [accepting(NEW)]
    await completed(target, BODY | {OLD: 5})
    assert len(endpoint.bodies) == 2 * 2 + 2


async def test_a_request_without_a_limit_gets_that_of_the_tier(endpoint: Server) -> None:
    target = upstream(endpoint, max_tokens=7)
    for fields in ({}, {"max_tokens": None}, {"max_tokens": 3}, {"max_completion_tokens": 4}):
        await completed(target, BODY | fields)
    found = [(one.get("max_tokens"), one.get("max_completion_tokens")) for one in endpoint.bodies]
    assert found == [(7, None), (7, None), (3, None), (None, 4)]


async def test_too_high_token_limit_is_a_client_error(endpoint: Server) -> None:
    endpoint.answers = [refuse(400, "max_tokens or max_completion_tokens is too large: 9")]
    with pytest.raises(RequestRejectedError):
        await completed(upstream(endpoint), BODY | {"max_tokens": 9})
    assert len(endpoint.bodies) == 1


async def test_stream_options_are_dropped_if_unsupported(endpoint: Server) -> None:
    endpoint.answers = [
        refuse(422, "extra field not permitted: stream_options"),
        events(lines(*CHUNKS)),
    ]
    assert await streamed(upstream(endpoint)) == CHUNKS
    assert "stream_options" not in endpoint.bodies[1]


@pytest.mark.parametrize("call", [completed, streamed])
async def test_cancelling_a_call_ends_its_request(endpoint: Server, call: Any) -> None:
    gone = threading.Event()
    endpoint.answers = [signal_on_disconnect(slowly(ok("late"), 30.0), gone)]
    target = upstream(endpoint, breaker=Breaker(Tolerance(failures=1)))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await call(target)
    assert await seen(gone)
    assert target.breaker.state == "closed"


@pytest.mark.parametrize("call", [completed, streamed])
async def test_failing_upstream_is_paused(endpoint: Server, call: Any) -> None:
    endpoint.answers = [refuse(500)]
    target = upstream(endpoint, breaker=Breaker(Tolerance(failures=2)))
    with pytest.raises(ServerFailedError, match="answered 500: no") as own:
        await call(target)  # its third attempt is not sent: the error is that of its second
    assert 0 < (own.value.retry_after or 0) <= 1
    with pytest.raises(PausedError, match="answered 500: no") as caught:
        await call(target)
    assert len(endpoint.bodies) == 2
    assert 0 < caught.value.retry_after <= 1
    with pytest.raises(PausedError):
        await target.check()


async def test_rejections_do_not_open_the_breaker(endpoint: Server) -> None:
    endpoint.answers = [
        refuse(400),
        refuse(401),
        refuse(429, "slower"),
        refuse(422),
    ]
    target = upstream(endpoint, retries=0, breaker=Breaker(Tolerance(failures=1)))
    for _ in endpoint.answers:
        with pytest.raises(EndpointError):
            await completed(target)
    assert target.breaker.state == "closed"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (reply({"data": []}), None),
        (refuse(404), None),
        (refuse(401), MisconfiguredError),
        (refuse(500), ServerFailedError),
    ],
)
async def test_check_calls_no_model(
    endpoint: Server, answer: Answer, kind: type[Exception] | None
) -> None:
    endpoint.answers = [answer]
    target = upstream(endpoint)
    if kind is None:
        await target.check()
    else:
        with pytest.raises(kind):
            await target.check()
    await target.aclose()
    assert endpoint.paths == ["/v1/models"]


async def test_missing_server_is_unreachable(endpoint: Server) -> None:
    target = HttpUpstream("m", base_url="http://127.0.0.1:9/v1", retries=0)
    for call in (target.check(), completed(target), streamed(target)):
        with pytest.raises(UnreachableError):
            await call
