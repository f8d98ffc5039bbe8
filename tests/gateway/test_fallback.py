"""Fallback for tiers that failed or do not support a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import openai
import pytest

from bottega.errors import RejectedError, ServerFailedError
from bottega.gateway.completion import Fallback
from bottega.gateway.errors import reason_of
from bottega.gateway.ports import TierCapabilities
from bottega.generation import ScriptedGenerator
from bottega.openai_api.errors import RequestRejectedError
from bottega.pipeline import FixedRouter
from bottega.protocols import Router, Tier
from bottega.types import Answer, Query
from tests.gateway.harness import client, harness, raw, user_messages


def test_request_goes_to_a_tier_that_supports_it(tmp_path: Path) -> None:
    with harness(tmp_path, capabilities={"apprentice": TierCapabilities(images=1)}) as server:
        assert raw(server, user_messages(1)).headers["x-bottega-route"] == "apprentice"
        assert raw(server, user_messages(1, 2)).headers["x-bottega-route"] == "master"
        with pytest.raises(openai.BadRequestError) as refused:
            raw(server, user_messages(1, 2), "bottega/apprentice")
        assert refused.value.code == "unsupported_by_tier"
        assert [server.wait(n).entry().reason for n in (1, 2, 3)] == [
            "",  # the router of this test gives no reason
            "apprentice does not support the request",
            "tier requested by the client; failed: unsupported by tier",
        ]


def test_another_tier_answers_after_a_failure(tmp_path: Path) -> None:
    broken = ScriptedGenerator([ServerFailedError("down", status=500)] * 2 + ["fine"])
    with harness(tmp_path, apprentice=broken) as server:
        assert raw(server, user_messages(1)).headers["x-bottega-route"] == "master"
        with pytest.raises(openai.InternalServerError) as failed:
            raw(server, user_messages(2), "bottega/apprentice")
        assert failed.value.response.headers["x-should-retry"] == "false"
        assert raw(server, user_messages(3)).parse().choices[0].message.content == "fine"


def test_client_gets_the_upstream_rejection(tmp_path: Path) -> None:
    strict = ScriptedGenerator([RejectedError("the prompt is too long", status=400)])
    with harness(tmp_path, apprentice=strict) as server:
        with pytest.raises(openai.BadRequestError, match="too long"):
            raw(server, user_messages(1))
        record = server.wait(1)
        assert (record.state, record.status) == ("failed", 400)


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
    with harness(tmp_path, apprentice=ScriptedGenerator([error] * 2)) as server:
        with pytest.raises(openai.BadRequestError) as refused:
            raw(server, user_messages(1))
        assert refused.value.code == code  # the client is told
        assert server.wait(1).entry().reason == f"failed: {shown}"
        assert reason_of(error) == shown


DOWN = ServerFailedError("down", status=500)


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
