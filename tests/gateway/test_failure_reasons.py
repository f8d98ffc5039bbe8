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

import openai
import pytest
from aiohttp import web

from bottega.errors import RejectedError
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.savings import savings
from bottega.gateway.config.gateway_settings import TraceSettings
from bottega.gateway.running.build import build
from bottega.gateway.telemetry.logs import log_to
from bottega.generation import ScriptedGenerator
from bottega.openai_api.client import Breaker, Tolerance
from bottega.recording import StoredTrace, TraceStore
from bottega.types import Trace
from tests.gateway.gateways import ENVIRONMENT, ask, gateway_config, run_gateway
from tests.gateway.harness import Harness, harness, user_messages
from tests.gateway.harness import raw as raw_request
from tests.gateway.upstreams import events as sent_events
from tests.gateway.upstreams import lines as stream_lines
from tests.gateway.upstreams import upstream
from tests.server import Answer, Server, cut, ok, raw, refuse, reply, stall

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
    ("answer", "reason", "words", "code"),
    [
        (
            refuse(400, WORDS, code="context_length_exceeded"),
            "RequestRejectedError 400 code=context_length_exceeded type=error",
            WORDS,
            "context_length_exceeded",
        ),
        (
            reply({"error": NOT_ALLOWED}, 422),
            "RequestRejectedError 422 type=invalid param=messages[0].content",
            WORDS,
            "RequestRejectedError",
        ),
        (
            refuse(401, WORDS, code="invalid_api_key"),
            "MisconfiguredError: tiers.{tier}: {url} answered 401 code=invalid_api_key type=error:",
            WORDS,
            "upstream_misconfigured",
        ),
        (
            reply(OVERLOADED, 529),
            "ServerFailedError 529 type=overloaded_error",
            WORDS,
            "upstream_failed",
        ),
        (
            refuse(408, WORDS),
            "EndpointTimeoutError: {url} answered 408 type=error",
            WORDS,
            "upstream_timeout",
        ),
        (
            raw(b"<html>"),
            "GarbledError: {url} sent a web page, not JSON",
            "a web page",
            "upstream_failed",
        ),
        (
            reply({}),
            "GarbledError: {url} sent a reply without choices",
            "without choices",
            "upstream_failed",
        ),
        (
            cut(),
            "ServerFailedError: {url} cut the connection before the end of its reply",
            "cut the connection",
            "upstream_failed",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_failed_request_names_its_tier_and_its_reason(
    endpoint: Server, tmp_path: Path, answer: Answer, reason: str, words: str, code: str
) -> None:
    endpoint.answers = [answer]
    lines, traces = logged_and_traced(endpoint, tmp_path)
    for tier in ("large", "small"):
        wanted = reason.format(tier=tier, url=endpoint.url)
        assert any(wanted in line["event"] for line in lines)
    [request] = [line for line in lines if line["event"] == "request"]
    assert request["route"] == "small", "the last tier that was asked"
    assert request["reason"] == code
    [trace] = traces
    assert (trace.id, trace.tier) == (request["request"], "small")
    assert trace.reason.count(words) == 2


@pytest.mark.parametrize(
    ("answer", "state"), [(refuse(429, "slow down"), "failed"), (refuse(400, "wrong"), "rejected")]
)
def test_a_rate_limit_of_all_tiers_is_not_the_clients_error(
    endpoint: Server, tmp_path: Path, answer: Answer, state: str
) -> None:
    endpoint.answers = [answer]
    logged_and_traced(endpoint, tmp_path)
    with closing(Ledger(tmp_path / "gateway.db", create=False)) as ledger:
        [route] = savings(ledger).routes
    assert (route.state, route.tier) == (state, "small")


def test_a_replaced_tier_is_explained(endpoint: Server, tmp_path: Path) -> None:
    async def by_model(request: web.Request) -> web.StreamResponse:
        fails = b'"huge"' in await request.read()
        return await (refuse(500, WORDS) if fails else ok("seven"))(request)

    endpoint.answers = [by_model]
    lines, [trace] = logged_and_traced(endpoint, tmp_path)
    assert any("large failed" in one["event"] and " 500" in one["event"] for one in lines)
    assert (trace.tier, trace.answer.text) == ("small", "seven")
    assert WORDS in trace.reason


@pytest.mark.parametrize(
    ("events", "end", "reason", "words"),
    [
        ((BEGUN, OVERLOADED), "", "ServerFailedError 502 type=overloaded_error", WORDS),
        ((BEGUN,), "abort", "ServerFailedError: {url} cut the connection", "cut the connection"),
        ((BEGUN, {"choices": 3}), "", "GarbledError: {url} sent an event without", "without"),
    ],
)
def test_a_stream_that_fails_is_explained(
    endpoint: Server, tmp_path: Path, events: tuple[object, ...], end: str, reason: str, words: str
) -> None:
    endpoint.answers = [sent_events(stream_lines(*events, done=False), end=end)]
    lines, [trace] = logged_and_traced(endpoint, tmp_path, stream=True)
    wanted = f"failed during its stream from large: {reason.format(url=endpoint.url)}"
    assert any(wanted in line["event"] for line in lines)
    [request] = [line for line in lines if line["event"] == "request"]
    assert request["reason"] == "upstream_failed"
    assert words in trace.reason


@pytest.mark.parametrize(
    ("status", "of_large", "of_small"),
    [
        (
            *(401, "export LARGE_KEY=... with a key of this server"),
            'set api_key_env = "NAME" and export NAME=... with a key of this server',
        ),
        (
            *(403, "export LARGE_KEY=... with a key of this server"),
            'set api_key_env = "NAME" and export NAME=... with a key of this server',
        ),
        (
            *(404, "correct model (now 'huge') or base_url, which usually ends in /v1"),
            "correct model (now 'qwen') or base_url, which usually ends in /v1",
        ),
        (302, *["set base_url to the address that it redirects to"] * 2),
        (402, *["the account's quota is used up: check its billing"] * 2),
        (407, *["set HTTPS_PROXY to a proxy that needs no login"] * 2),
    ],
)
def test_hints_for_the_operator_name_settings_of_the_tier(
    endpoint: Server, tmp_path: Path, status: int, of_large: str, of_small: str
) -> None:
    endpoint.answers = [refuse(status)]
    lines, _ = logged_and_traced(endpoint, tmp_path)
    events = [line["event"] for line in lines if line["event"].startswith("request ")]
    for event, hint in zip(events, (of_large, of_small), strict=True):
        assert "MisconfiguredError" in event and event.endswith(f": {hint}")


@pytest.mark.parametrize(
    ("answer", "code", "kind"),
    [
        (stall(), "upstream_timeout", "EndpointTimeoutError: {url} did not finish its reply"),
        (refuse(500, WORDS), "upstream_failed", "ServerFailedError 500 type=error"),
    ],
)
def test_a_pause_names_its_cause(
    endpoint: Server, tmp_path: Path, answer: Answer, code: str, kind: str
) -> None:
    out, never = io.StringIO(), Tolerance(failures=2, pause=60.0)
    breaker = Breaker(never, name="tiers.master")
    endpoint.answers, tier = [answer], upstream(endpoint, breaker=breaker, timeout=0.2)
    codes = []
    with log_to(out), harness(tmp_path, master=tier) as server:
        for number in (1, 2):
            with pytest.raises(openai.InternalServerError) as failed:
                raw_request(server, user_messages(number), "bottega/master")
            codes.append(failed.value.code)
            assert float(failed.value.response.headers["retry-after"]) > 1
    assert codes == [code, "upstream_paused"]
    events = [json.loads(line)["event"] for line in out.getvalue().splitlines()]
    kind = kind.format(url=endpoint.url)
    [paused] = [event for event in events if " is paused for " in event]
    assert paused.startswith(f"tiers.master is paused for 60 s: {kind}")
    [own, later] = [event for event in events if event.startswith("request ")]
    assert f" failed: {kind}" in own and f" failed: PausedError after {kind}" in later
    assert WORDS not in out.getvalue()


def test_a_remembered_rejection_is_logged_with_its_remedy(endpoint: Server, tmp_path: Path) -> None:
    async def by_model(request: web.Request) -> web.StreamResponse:
        error = {"error": {"message": WORDS, "param": "temperature"}}
        rejects = b'"huge"' in await request.read()
        return await (reply(error, 400) if rejects else ok("seven"))(request)

    endpoint.answers, out = [by_model], io.StringIO()
    config = gateway_config(tmp_path, endpoint.url)
    config = dataclasses.replace(config, route=dataclasses.replace(config.route, cold_start=9))
    with log_to(out), run_gateway(build(config, ENVIRONMENT)) as url:
        for text in ("What is 3 + 4?", "What is 5 + 4?"):
            ask(url, text, temperature=0.5)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    first, second = [line for line in lines if line["event"] == "request"]
    [failed] = [line["event"] for line in lines if "large failed" in line["event"]]
    assert failed.startswith(f"request {first['request']}: large failed, using another tier: ")
    assert failed.endswith('; drop_fields = ["temperature"] leaves it out')
    assert "fell back from large" in first["route_reason"]
    assert "large rejected such a request recently" in second["route_reason"]


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
