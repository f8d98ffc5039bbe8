"""Fallback for tiers that failed or do not support a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from bottega.errors import BottegaError, PromptRejectedError, RejectedError, ServerFailedError
from bottega.gateway.accounting.ledger_schema import Account
from bottega.gateway.errors import reason_of
from bottega.gateway.ports import TierCapabilities
from bottega.gateway.request.completion import Fallback
from bottega.generation import ScriptedGenerator
from bottega.openai_api.errors import RequestRejectedError
from bottega.pipeline import FixedRouter
from bottega.protocols import Router, Tier
from bottega.types import Answer, Query
from tests.gateway.harness import client, harness, raw, user_messages
from tests.gateway.upstreams import CHUNKS, USAGE, chunk, events, lines, upstream
from tests.server import Server

DOWN = ServerFailedError("down", status=503)


def test_request_goes_to_a_tier_that_supports_it(tmp_path: Path) -> None:
    with harness(tmp_path, capabilities={"apprentice": TierCapabilities(images=1)}) as server:
        assert raw(server, user_messages(1)).headers["x-bottega-route"] == "apprentice"
        assert raw(server, user_messages(1, 2)).headers["x-bottega-route"] == "master"
        with pytest.raises(openai.BadRequestError) as rejected:
            raw(server, user_messages(1, 2), "bottega/apprentice")
        assert rejected.value.code == "unsupported_by_tier"
        assert [server.wait(n).entry().reason for n in (1, 2, 3)] == [
            "",  # the router of this test gives no reason
            "apprentice does not support the request",
            "tier requested by the client; failed: unsupported by tier",
        ]


def test_another_tier_answers_after_a_failure(tmp_path: Path) -> None:
    broken = ScriptedGenerator([DOWN, DOWN, "fine"])
    with harness(tmp_path, apprentice=broken) as server:
        assert raw(server, user_messages(1)).headers["x-bottega-route"] == "master"
        with pytest.raises(openai.InternalServerError) as failed:
            raw(server, user_messages(2), "bottega/apprentice")
        assert failed.value.response.headers["x-should-retry"] == "false"
        assert raw(server, user_messages(3)).parse().choices[0].message.content == "fine"


def test_client_gets_the_first_rejection_if_all_tiers_reject(tmp_path: Path) -> None:
    strict = ScriptedGenerator([RejectedError("the prompt is too long", status=400)])
    stricter = ScriptedGenerator([RejectedError("no", status=400)], name="big")
    with harness(tmp_path, apprentice=strict, master=stricter) as server:
        with pytest.raises(openai.BadRequestError, match="too long"):
            raw(server, user_messages(1))
        record = server.wait(1)
        assert (record.state, record.status) == ("failed", 400)


def rejection(message: str, status: int = 400, **fields: str) -> RequestRejectedError:
    return RequestRejectedError(RejectedError(message, status=status), message, fields)


REJECTIONS = [
    rejection("'temperature' does not support 0.5 with this model", param="temperature"),
    rejection("Unsupported parameter: 'response_format'"),
    rejection("Unsupported value: 'messages[0].role' does not support 'developer'"),
    rejection("Too many images: this model takes at most 1"),
    rejection("This model's maximum context length is 4096 tokens"),
    rejection("prompt is too long: 9000 tokens > 8192 maximum"),
    rejection("Request entity too large", status=413),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("error", REJECTIONS, ids=str)
def test_what_one_tier_rejects_another_answers(
    tmp_path: Path, error: RequestRejectedError, stream: bool
) -> None:
    messages = [{"role": "developer", "content": "Be short."}, *user_messages(1, 2)]
    strict = ScriptedGenerator([error, *["fine"] * 9])
    with harness(tmp_path, apprentice=strict, replays=False) as server:
        more: dict[str, Any] = {
            "temperature": 0.5,
            "response_format": {"type": "text"},
            "stream": stream,
        }
        answered = raw(server, messages, **more)
        assert answered.headers["x-bottega-route"] == "master"
        # Remembered: the tier is not asked again for the same; for other requests it is.
        assert raw(server, messages, **more).headers["x-bottega-route"] == "master"
        assert raw(server, user_messages(3)).headers["x-bottega-route"] == "apprentice"
        reasons = [server.wait(n).entry().reason for n in (1, 2, 3)]
    assert reasons[0].startswith("fell back from apprentice: ")
    assert reasons[1:] == ["apprentice rejected such a request recently", ""]


@pytest.mark.parametrize("fallback", ["never", "up"])
def test_rejected_request_goes_only_where_fallback_allows(
    tmp_path: Path, fallback: Fallback
) -> None:
    def master_first(tiers: Sequence[Tier]) -> Router:
        return FixedRouter(tiers[-1])

    strict = ScriptedGenerator([REJECTIONS[0]] * 2, name="big")
    with harness(tmp_path, master=strict, route=master_first, fallback=fallback) as server:
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match="temperature"):
                raw(server, user_messages(1), temperature=0.5)


def test_refusal_by_a_policy_is_final(tmp_path: Path) -> None:
    error = rejection("the content was filtered", code="content_filter")
    with harness(tmp_path, apprentice=ScriptedGenerator([error])) as server:
        with pytest.raises(openai.BadRequestError, match="filtered"):
            raw(server, user_messages(1))
        assert server.wait(1).entry().reason == "failed: content filter"


@pytest.mark.parametrize(
    "error",
    [
        rejection("too long", code="string_above_max_length", param="user"),
        rejection("The image is too large: at most 20 MB"),
        rejection("Invalid image data: unsupported format webp"),
        rejection("Invalid image.", param="messages[0].content"),
    ],
    ids=str,
)
def test_an_odd_request_does_not_change_the_tier_of_others(
    tmp_path: Path, error: RequestRejectedError
) -> None:
    strict = ScriptedGenerator([error, *["fine"] * 9])
    with harness(tmp_path, apprentice=strict, replays=False) as server:
        assert raw(server, user_messages(1), user="u" * 65).headers["x-bottega-route"] == "master"
        for messages in (user_messages(2), user_messages(3, text="A longer question? " * 9)):
            assert raw(server, messages).headers["x-bottega-route"] == "apprentice"


def test_rejections_do_not_lead_a_key_to_a_master_that_it_may_not_use(tmp_path: Path) -> None:
    account = Account("a", "team", tiers=("apprentice",))
    strict = ScriptedGenerator([REJECTIONS[0]] * 2)
    with harness(tmp_path, apprentice=strict, authenticate=lambda key: account) as server:
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match="temperature"):
                raw(server, user_messages(1), temperature=0.5)


def test_rejections_lead_a_key_to_another_tier_that_it_may_use(tmp_path: Path) -> None:
    account = Account("a", "team", tiers=("apprentice", "middle"))
    strict = ScriptedGenerator([REJECTIONS[0]])
    middle = {"middle": ScriptedGenerator(lambda prompt: "yes")}
    with harness(
        tmp_path, apprentice=strict, middle=middle, authenticate=lambda key: account
    ) as server:
        answer = raw(server, user_messages(1), temperature=0.5)
    assert answer.headers["x-bottega-route"] == "middle"


TEMPLATE = PromptRejectedError("the chat template rejects the prompt", hint="merge the turns")


@pytest.mark.parametrize("stream", [True, False])
def test_prompt_that_a_chat_template_rejects_goes_to_another_tier(
    tmp_path: Path, stream: bool
) -> None:
    strict = ScriptedGenerator([TEMPLATE] * 3)  # the last ones with and without demonstrations
    with harness(tmp_path, apprentice=strict) as server:
        answered = raw(server, user_messages(1), stream=stream)
        assert answered.headers["x-bottega-route"] == "master"
        with pytest.raises(openai.BadRequestError, match="merge the turns") as rejected:
            raw(server, user_messages(2), "bottega/apprentice", stream=stream)
        assert rejected.value.code == "unsupported"
        reasons = [server.wait(n).entry().reason for n in (1, 2)]
    assert reasons[0] == "fell back from apprentice: unsupported"
    assert server.records[1].route == "apprentice"


@pytest.mark.parametrize("begun", [[], [chunk("")], [USAGE]], ids=["role", "empty", "usage"])
def test_another_tier_answers_until_the_first_content(
    endpoint: Server, tmp_path: Path, begun: list[Any]
) -> None:
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    error = {"error": {"message": "lost a GPU"}}
    endpoint.answers = [events(lines(role, *begun, error)), events(lines(role, *CHUNKS))]
    tiers = {name: upstream(endpoint, retries=0) for name in ("apprentice", "master")}
    with harness(tmp_path, **tiers) as server:  # type: ignore[arg-type]
        answered = raw(server, user_messages(1), stream=True)
        assert answered.headers["x-bottega-route"] == "master"
        text = answered.http_response.text
        assert text.count("lost a GPU") == 0 and text.count('"role"') == 1
        assert server.wait(1).usage.prompt_tokens == 3


def test_failure_of_another_tier_is_reported_before_a_rejection(tmp_path: Path) -> None:
    first, second = ScriptedGenerator([REJECTIONS[0]]), ScriptedGenerator([DOWN])
    with (
        harness(tmp_path, apprentice=first, master=second) as server,
        pytest.raises(openai.InternalServerError),
    ):
        raw(server, user_messages(1), temperature=0.5)


def test_what_all_tiers_reject_is_not_remembered(tmp_path: Path) -> None:
    """A client's invalid value must not change the route of later requests."""
    first = ScriptedGenerator([REJECTIONS[0], "fine"])
    second = ScriptedGenerator([REJECTIONS[0]], name="big")
    with harness(tmp_path, apprentice=first, master=second) as server:
        with pytest.raises(openai.BadRequestError):
            raw(server, user_messages(1), temperature=0.5)
        answered = raw(server, user_messages(1), temperature=0.5)
    assert answered.headers["x-bottega-route"] == "apprentice"


def test_server_that_fails_on_demonstrations_is_tried_without_them(tmp_path: Path) -> None:
    failed = ServerFailedError("slot unavailable", status=500)
    with harness(tmp_path, apprentice=ScriptedGenerator([failed, "fine"])) as server:
        raw(server, user_messages(1), "bottega/master")
        answered = raw(server, user_messages(2))
        assert answered.headers["x-bottega-route"] == "apprentice"
        assert answered.headers["x-bottega-demonstrations"] == "0"
        assert server.wait(2).entry().reason == "apprentice is tried without demonstrations"


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (REJECTIONS[0], 1),
        (rejection("Unsupported parameter: 'top_p'"), 1),
        (rejection("unknown", param="top_p[0]"), 1),
        (rejection("conversation roles must alternate"), 2),
        (rejection("the context length is 4096, got 4000 and 'top_p'"), 2),
        (rejection("too long", code="context_length_exceeded", param="temperature"), 2),
        (ServerFailedError("'temperature' crashed a slot", status=500), 2),
        (DOWN, 1),
    ],
    ids=str,
)
def test_only_what_demonstrations_may_cause_is_tried_without_them(
    tmp_path: Path, error: BottegaError, calls: int, caplog: pytest.LogCaptureFixture
) -> None:
    strict = ScriptedGenerator([error] * 2)
    with harness(tmp_path, apprentice=strict) as server:
        raw(server, user_messages(1), "bottega/master")
        answered = raw(server, user_messages(2), temperature=0.5, top_p=0.5)
        assert answered.headers["x-bottega-route"] == "master"
        record = server.wait(2)
    assert len(strict.calls) == calls
    assert ("tried without demonstrations" in record.route_reason) == (calls == 2)
    lines = [line for line in caplog.messages if "apprentice" in line]
    assert len(lines) == calls
    assert all(line.startswith(f"request {record.request_id}: apprentice ") for line in lines)


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("context_length_exceeded", "context length exceeded"),
        ("ctx: the prompt was 'hunter2'; fixed tier", "RequestRejectedError"),
        ("a" * 65, "RequestRejectedError"),
    ],
)
def test_free_text_of_an_upstream_is_no_reason(tmp_path: Path, code: str, shown: str) -> None:
    rejected = RejectedError("the prompt is too long", status=400)
    error = RequestRejectedError(rejected, "too long", {"code": code})
    first, second = ScriptedGenerator([error]), ScriptedGenerator([error])
    with harness(tmp_path, apprentice=first, master=second) as server:
        with pytest.raises(openai.BadRequestError) as caught:
            raw(server, user_messages(1))
        assert caught.value.code == code  # the client is told
        assert server.wait(1).entry().reason.endswith(f"failed: {shown}")
        assert reason_of(error) == shown


def test_failed_tiers_are_reported(tmp_path: Path) -> None:
    with harness(tmp_path, apprentice=ScriptedGenerator([DOWN, DOWN, "fine"])) as server:
        whole = raw(server, user_messages(1)).headers
        assert (whole["x-bottega-route"], whole["x-bottega-fallback"]) == ("master", "apprentice")
        with client(server.url) as real:
            streamed = real.chat.completions.with_raw_response.create(
                model="bottega", messages=user_messages(2), stream=True
            )
            assert streamed.headers["x-bottega-fallback"] == "apprentice"
            list(streamed.parse())
        assert "x-bottega-fallback" not in raw(server, user_messages(3)).headers
        server.wait(3)
    assert [one.fallback for one in server.records] == ["apprentice", "apprentice", ""]
    reason = "fell back from apprentice: upstream failed"
    assert [one.entry().reason for one in server.records] == [reason, reason, ""]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fallback", "first", "answers"),
    [
        ("any", "master", True),
        ("up", "master", False),
        ("up", "apprentice", True),
        ("never", "master", False),
        ("never", "apprentice", False),
    ],
)
def test_fallback_setting_decides_the_next_tier(
    tmp_path: Path, fallback: Fallback, first: str, answers: bool, stream: bool
) -> None:
    other = "apprentice" if first == "master" else "master"
    parts = {first: ScriptedGenerator([DOWN] * 3), other: ScriptedGenerator(["fine"] * 3)}

    def route(tiers: Sequence[Tier]) -> Router:
        return FixedRouter(next(tier for tier in tiers if tier.name == first))

    with harness(tmp_path, **parts, route=route, fallback=fallback) as server:  # type: ignore[arg-type]
        if answers:
            assert raw(server, user_messages(1), stream=stream).headers["x-bottega-route"] == other
        else:
            with pytest.raises(openai.InternalServerError):
                raw(server, user_messages(1), stream=stream)


def test_unsupported_tier_does_not_count_as_failed(tmp_path: Path) -> None:
    capabilities = {"apprentice": TierCapabilities(images=0)}
    with harness(tmp_path, capabilities=capabilities, fallback="never") as server:
        headers = raw(server, user_messages(1)).headers
    assert headers["x-bottega-route"] == "master"
    assert "x-bottega-fallback" not in headers


@pytest.mark.parametrize("fallback", ["any", "up"])
def test_dismissed_answer_is_used_only_if_fallback_allows_it(
    tmp_path: Path, fallback: Fallback
) -> None:
    async def unsure(query: Query, tier: Tier, answer: Answer, /) -> Tier | None:
        return Tier("master", tier.generator) if tier.name == "apprentice" else None

    with harness(
        tmp_path,
        master=ScriptedGenerator([DOWN]),
        change=lambda pipeline: replace(pipeline, escalate=unsure),
        fallback=fallback,
    ) as server:
        if fallback == "any":
            assert raw(server, user_messages(1)).headers["x-bottega-fallback"] == "master"
            assert server.wait(1).entry().reason == (
                "escalated from apprentice; kept the answer of apprentice: upstream failed"
            )
        else:
            with pytest.raises(openai.InternalServerError):
                raw(server, user_messages(1))
