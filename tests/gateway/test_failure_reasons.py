"""Reasons of failures: codes in the log, the upstream's own words in the trace alone."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bottega.errors import RejectedError
from bottega.gateway.config.settings import TraceSettings
from bottega.gateway.running.build import build
from bottega.gateway.telemetry.logs import log_to
from bottega.generation import ScriptedGenerator
from bottega.recording import StoredTrace, TraceStore
from bottega.types import Trace
from tests.gateway.gateways import ENVIRONMENT, ask, gateway_config, run_gateway
from tests.gateway.harness import Harness, harness
from tests.server import Answer, Server, cut, ok, raw, refuse, reply

WORDS = "you wrote: my diagnosis is confidential"
NOT_ALLOWED = {"message": WORDS, "type": "invalid", "code": WORDS, "param": "messages[0].content"}
OVERLOADED = {"error": {"message": WORDS, "type": "overloaded_error"}}
BEGUN = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}


def logged_and_traced(
    endpoint: Server, folder: Path, **fields: Any
) -> tuple[list[dict[str, Any]], list[StoredTrace]]:
    config = gateway_config(folder, endpoint.url)
    tiers = tuple(dataclasses.replace(tier, retries=0) for tier in config.tiers)
    config = dataclasses.replace(config, tiers=tiers, traces=TraceSettings("texts"))
    out = io.StringIO()
    with (
        log_to(out),
        run_gateway(build(config, ENVIRONMENT), ready=False) as url,
        # The log and the trace tell more.
        contextlib.suppress(urllib.error.HTTPError, json.JSONDecodeError),
    ):
        ask(url, "What is 3 + 4?", **fields)
    assert WORDS not in out.getvalue()
    with closing(TraceStore.open(folder / "traces.db")) as traces:
        return [json.loads(line) for line in out.getvalue().splitlines()], traces.search()


@pytest.mark.parametrize(
    ("answer", "reason", "words"),
    [
        (
            refuse(400, WORDS, code="context_length_exceeded"),
            "RequestRejectedError 400 code=context_length_exceeded type=error",
            WORDS,
        ),
        (
            reply({"error": NOT_ALLOWED}, 422),
            "RequestRejectedError 422 type=invalid param=messages[0].content",
            WORDS,
        ),
        (
            refuse(401, WORDS, code="invalid_api_key"),
            "MisconfiguredError: tiers.{tier}: {url} answered 401 code=invalid_api_key type=error:"
            " set OPENAI_API_KEY",
            WORDS,
        ),
        (reply(OVERLOADED, 529), "ServerFailedError 529 type=overloaded_error", WORDS),
        (refuse(408, WORDS), "EndpointTimeoutError: {url} answered 408 type=error", WORDS),
        (raw(b"<html>"), "GarbledError: {url} sent a web page, not JSON", "a web page"),
        (reply({}), "GarbledError: {url} sent a reply without choices", "without choices"),
        (cut(), "ServerFailedError", "cut the connection"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_failed_request_names_its_tier_and_its_reason(
    endpoint: Server, tmp_path: Path, answer: Answer, reason: str, words: str
) -> None:
    endpoint.answers = [answer]
    lines, traces = logged_and_traced(endpoint, tmp_path)
    for tier in ("large", "small"):
        wanted = reason.format(tier=tier, url=endpoint.url)
        assert any(wanted in line["event"] for line in lines)
    [request] = [line for line in lines if line["event"] == "request"]
    assert request["route"] == "small", "the last tier that was asked"
    [trace] = traces
    assert (trace.id, trace.tier) == (request["request"], "small")
    assert trace.reason.count(words) == 2


def test_a_replaced_tier_is_explained(endpoint: Server, tmp_path: Path) -> None:
    async def by_model(request: web.Request) -> web.StreamResponse:
        fails = b'"huge"' in await request.read()
        return await (refuse(500, WORDS) if fails else ok("seven"))(request)

    endpoint.answers = [by_model]
    lines, [trace] = logged_and_traced(endpoint, tmp_path)
    assert any("large failed" in one["event"] and " 500" in one["event"] for one in lines)
    assert (trace.tier, trace.answer.text) == ("small", "seven")
    assert WORDS in trace.reason


def test_a_stream_that_fails_is_explained(endpoint: Server, tmp_path: Path) -> None:
    events = b"".join(b"data: %s\n\n" % json.dumps(one).encode() for one in (BEGUN, OVERLOADED))
    endpoint.answers = [raw(events, kind="text/event-stream")]
    lines, [trace] = logged_and_traced(endpoint, tmp_path, stream=True)
    assert any("during its stream" in line["event"] for line in lines)
    assert WORDS in trace.reason


def raw_status(server: Harness, number: int, **fields: Any) -> int:
    question = [{"role": "user", "content": f"What is 3 + {number}?"}]
    body = {"model": "bottega", "messages": question, **fields}
    request = urllib.request.Request(
        f"{server.url}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_failed_requests_teach_routers_nothing(tmp_path: Path) -> None:
    refused = RejectedError("no", status=422)
    tiers = ScriptedGenerator(["a", refused, "b"]), ScriptedGenerator([refused, refused])
    seen: list[str] = []

    async def record(trace: Trace, /) -> None:
        seen.append(trace.reply.completions[0].text)

    with harness(
        tmp_path,
        apprentice=tiers[0],
        master=tiers[1],
        change=lambda pipeline: dataclasses.replace(pipeline, record=record),
    ) as server:
        for number, status in ((1, 200), (2, 422), (3, 200)):
            assert raw_status(server, number) == status
    assert seen == ["a", "b"]


def test_local_models_log_nothing_of_the_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = {"type": WORDS, "x": 1}
    out = io.StringIO()
    with harness(tmp_path) as server, log_to(out):
        messages = [{"role": "user", "content": [part]}]
        assert raw_status(server, 1, messages=messages) == 400
    assert "PromptRejectedError" in out.getvalue()
    assert WORDS not in out.getvalue()
