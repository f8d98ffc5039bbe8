"""Spans and metrics of a gateway, as an OTLP collector receives them."""

from __future__ import annotations

import io
import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bottega.errors import MissingDependencyError
from bottega.gateway.running.build import build, build_for_pipeline
from bottega.gateway.running.tiers import config_of
from bottega.gateway.telemetry.logs import log_to
from bottega.generation import ScriptedGenerator
from bottega.parsing import plain_text
from bottega.pipeline import FixedRouter, Pipeline
from bottega.prompting import InterleavedPrompter
from bottega.protocols import Tier
from bottega.telemetry import open_exporter
from tests.builders import solid_image
from tests.gateway.gateways import ENVIRONMENT, gateway_config, run_gateway
from tests.gateway.harness import client
from tests.gateway.upstreams import CHUNKS, chunk, events, lines
from tests.server import Answer, Server, ok, refuse
from tests.telemetry.collector import Collector, ReceivedSpan

ON = "\n[telemetry]\nenabled = true\n"
TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{CLIENT_SPAN}-01", "tracestate": "shop=cart"}
STEPS = ["route", "retrieve", "rerank", "prompt", "chat qwen"]


@contextmanager
def gateway(folder: Path, endpoint: Server, more: str = ON) -> Iterator[str]:
    """Run a gateway without retries and fallback. The collector has everything after its end."""
    config = gateway_config(folder, endpoint.url, more)
    route = replace(config.route, fallback="never")
    tiers = tuple(replace(tier, retries=0) for tier in config.tiers)
    with run_gateway(build(replace(config, route=route, tiers=tiers), ENVIRONMENT)) as url:
        yield url


def each(*answers: Answer) -> list[Answer]:
    """Return the answers to the calls, apart from the readiness checks of both tiers."""
    return [ok("ready"), ok("ready"), *answers]


def post(
    url: str,
    text: str,
    path: str = "chat/completions",
    given: dict[str, str] | None = None,
    **more: Any,
) -> tuple[bytes, dict[str, str]]:
    body = {"model": "bottega", "messages": [{"role": "user", "content": text}], **more}
    body = {name: value for name, value in body.items() if value is not None}
    headers = {"Content-Type": "application/json", **(given or {})}
    request = urllib.request.Request(f"{url}/{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as reply:
        return reply.read(), {k.lower(): v for k, v in reply.headers.items()}


def server_span(collector: Collector, **more: str) -> ReceivedSpan:
    [found] = [
        one for one in collector.spans if one.kind == "server" and more.items() <= vars(one).items()
    ]
    return found


def calls(endpoint: Server) -> list[dict[str, str]]:
    """Return the headers of the calls, without those of readiness checks."""
    pairs = zip(endpoint.bodies, endpoint.headers, strict=True)
    return [{k.lower(): v for k, v in headers.items()} for body, headers in pairs if body]


def test_one_request_is_a_span_tree(endpoint: Server, tmp_path: Path, collector: Collector) -> None:
    endpoint.answers = [ok("seven", model="qwen-2.5")]
    with gateway(tmp_path, endpoint) as url:
        post(url, "What is 3 + 4?")
        collector.spans.clear()
        _, headers = post(url, "What is 4 + 3?", given=PARENT, temperature=0.5)
    root = server_span(collector, trace=TRACE)
    assert (root.name, root.parent) == ("POST /v1/chat/completions", CLIENT_SPAN)
    spans = [one for one in collector.spans if one.trace == TRACE]
    assert collector.children(root) == [*STEPS, "parse", "record"]
    assert len(spans) == 1 + len(collector.children(root))
    assert not any(one.failed for one in spans)
    assert {one.tracestate for one in spans} == {"shop=cart"}
    assert {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "bottega.request_id": headers["x-request-id"],
        "bottega.state": "answered",
        "bottega.demonstrations": 1,
        "bottega.cost_usd": 12e-6,
    }.items() <= root.attributes.items()
    found = {one.name: one for one in spans}
    assert found["route"].attributes["bottega.tier"] == "small"
    assert found["retrieve"].attributes["bottega.candidates"] == 1
    assert found["rerank"].attributes["bottega.demonstrations"] == 1
    chat = found["chat qwen"]
    assert chat.kind == "client"
    port = int(endpoint.url.rpartition(":")[2].partition("/")[0])
    assert chat.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "qwen",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.model": "qwen-2.5",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 2,
        "server.address": "127.0.0.1",
        "server.port": port,
    }
    assert collector.resources[0]["service.name"] == "bottega"
    upstream = calls(endpoint)[-1]
    assert upstream["traceparent"] == f"00-{TRACE}-{chat.id}-01"
    assert upstream["tracestate"] == "shop=cart"


def test_texts_and_keys_stay_out_unless_content_is_captured(
    endpoint: Server, tmp_path: Path, collector: Collector
) -> None:
    endpoint.answers = [ok("an orange umbrella")]
    with gateway(tmp_path / "default", endpoint) as url:
        post(url, "Which purple thing?", given={"authorization": "Bearer sk-of-the-client"})
    assert collector.named("chat huge").attributes["gen_ai.usage.output_tokens"] == 2
    for secret in (b"purple", b"umbrella", b"sk-of-the-client", ENVIRONMENT["LARGE_KEY"].encode()):
        assert secret not in collector.raw
    collector.spans.clear()
    with gateway(tmp_path / "captured", endpoint, f"{ON}capture_content = true\n") as url:
        image = {"type": "image_url", "image_url": {"url": solid_image(7).data_url}}
        text = {"type": "text", "text": "Which purple thing?"}
        post(url, "", messages=[{"role": "user", "content": [image, text]}])
    captured = collector.named("chat huge").attributes
    assert json.loads(captured["gen_ai.input.messages"]) == [
        {
            "role": "user",
            "parts": [{"type": "image"}, {"type": "text", "content": "Which purple thing?"}],
        }
    ]
    assert json.loads(captured["gen_ai.output.messages"]) == [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": "an orange umbrella"}],
            "finish_reason": "stop",
        }
    ]
    assert b"base64" not in collector.raw


def test_streamed_request(endpoint: Server, tmp_path: Path, collector: Collector) -> None:
    endpoint.answers = each(events(lines(*CHUNKS)))
    with gateway(tmp_path, endpoint) as url:
        body, _ = post(url, "What is 3 + 4?", given=PARENT, stream=True)
    assert body.endswith(b"data: [DONE]\n\n")
    root = server_span(collector)
    steps = ["route", "prompt", "chat huge", "store", "parse", "record"]
    assert collector.children(root) == steps
    chat = collector.named("chat huge").attributes
    assert chat["gen_ai.request.stream"] is True
    assert chat["gen_ai.response.finish_reasons"] == ["stop"]
    assert chat["gen_ai.response.time_to_first_chunk"] > 0
    assert (chat["gen_ai.usage.input_tokens"], chat["gen_ai.usage.output_tokens"]) == (3, 2)
    assert calls(endpoint)[-1]["traceparent"].startswith(f"00-{TRACE}-")
    assert root.attributes["http.response.status_code"] == 200


def test_failures_are_marked(endpoint: Server, tmp_path: Path, collector: Collector) -> None:
    cut = events(lines(chunk("a"), done=False))
    endpoint.answers = each(refuse(400, "too purple"), refuse(500), cut)
    with gateway(tmp_path, endpoint) as url:
        for text, status in ("one", "400"), ("two", "502"):
            with pytest.raises(urllib.error.HTTPError, match=status) as failed:
                post(url, text)
            failed.value.close()
        post(url, "three", stream=True)
    rejected, broken, cut_off = (one for one in collector.spans if one.kind == "server")
    client = {one.parent: one for one in collector.spans if one.kind == "client"}
    assert not rejected.failed  # the client's error, by the conventions
    assert rejected.attributes["http.response.status_code"] == 400
    assert client[rejected.id].attributes["error.type"] == "RequestRejectedError"
    assert client[rejected.id].attributes["http.response.status_code"] == 400
    assert broken.failed
    assert broken.attributes["error.type"] == "upstream_failed"
    assert broken.attributes["http.response.status_code"] == 502
    assert client[broken.id].failed
    assert client[broken.id].attributes["error.type"] == "ServerFailedError"
    assert cut_off.failed
    assert cut_off.attributes["http.response.status_code"] == 200  # sent before the failure
    assert client[cut_off.id].failed
    assert b"too purple" not in collector.raw


def test_other_apis_have_the_same_spans(
    endpoint: Server, tmp_path: Path, collector: Collector
) -> None:
    endpoint.answers = [ok("seven")]
    with gateway(tmp_path, endpoint) as url:
        post(url, "", "responses", input="one", messages=None)
        post(url, "two", "messages", max_tokens=9)
        post(url, "", "embeddings", input="three", messages=None, model="bottega/embedder")
    for name, step in (
        ("responses", "chat huge"),
        ("messages", "chat qwen"),
        ("embeddings", "embed"),
    ):
        root = server_span(collector, name=f"POST /v1/{name}")
        assert step in collector.children(root)


def test_requests_of_a_batch_are_traced(
    endpoint: Server, tmp_path: Path, collector: Collector
) -> None:
    endpoint.answers = [ok("seven")]
    path = "/v1/chat/completions"
    body = {"model": "bottega", "messages": [{"role": "user", "content": "one"}]}
    line = {"custom_id": "a", "method": "POST", "url": path, "body": body}
    with gateway(tmp_path, endpoint) as url, client(url) as real:
        file = real.files.create(file=("a.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = real.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        end = time.monotonic() + 20
        while real.batches.retrieve(batch.id).status != "completed":
            assert time.monotonic() < end
            time.sleep(0.01)
    root = server_span(collector, name=f"POST {path}")
    assert "chat huge" in collector.children(root)
    assert root.attributes["http.response.status_code"] == 200


def test_shadow_calls_are_part_of_the_trace(
    endpoint: Server, tmp_path: Path, collector: Collector
) -> None:
    endpoint.answers = [ok("seven")]
    with gateway(tmp_path, endpoint, f"{ON}[shadow]\nrate = 1.0\n") as url:
        post(url, "What is 3 + 4?")
        post(url, "What is 4 + 3?", given=PARENT)
        end = time.monotonic() + 20
        while len(calls(endpoint)) < 4:  # without examples, and the master's
            assert time.monotonic() < end
            time.sleep(0.01)
    shadow = collector.named("shadow")
    assert shadow.parent == server_span(collector, trace=TRACE).id
    assert sorted(collector.children(shadow)) == ["chat huge", "chat qwen", "store"]


def test_model_calls_are_metrics(endpoint: Server, tmp_path: Path, collector: Collector) -> None:
    endpoint.answers = each(ok("seven"), refuse(500))
    with gateway(tmp_path, endpoint) as url:
        post(url, "one")
        with pytest.raises(urllib.error.HTTPError) as failed:
            post(url, "two")
        failed.value.close()
    found = {
        (name, one["gen_ai.request.model"], one.get("gen_ai.token.type"), one.get("error.type")): (
            total,
            count,
        )
        for name, one, total, count in collector.histograms
    }
    tokens, seconds = "gen_ai.client.token.usage", "gen_ai.client.operation.duration"
    assert found[tokens, "huge", "input", None] == (10, 1)
    assert found[tokens, "huge", "output", None] == (2, 1)
    assert found[seconds, "huge", None, None][1] == 1
    assert found[seconds, "qwen", None, "ServerFailedError"][1] == 1
    assert len(found) == 4


def test_clients_may_name_their_requests(
    endpoint: Server, tmp_path: Path, collector: Collector
) -> None:
    log = io.StringIO()
    with log_to(log), gateway(tmp_path, endpoint) as url:
        _, named = post(url, "one", given={"x-request-id": "order-17/a"})
        _, standard = post(url, "two", given={"x-client-request-id": "b", "x-request-id": "c"})
        for invalid in ("x" * 129, "a b", "a;b", "é"):
            _, headers = post(url, invalid, given={"x-request-id": invalid})
            assert "x-client-request-id" not in headers
    assert (named["x-client-request-id"], standard["x-client-request-id"]) == ("order-17/a", "b")
    assert named["x-request-id"].startswith("req_")  # a client cannot choose the unique id
    ids = {one.attributes.get("bottega.client_request_id") for one in collector.spans}
    assert ids == {None, "order-17/a", "b"}
    requests = [line for line in map(json.loads, log.getvalue().splitlines()) if "request" in line]
    assert requests[0]["client_request"] == "order-17/a"
    assert requests[0]["trace"] in {one.trace for one in collector.spans}
    assert "client_request" not in requests[-1]


def test_off_needs_no_opentelemetry(
    endpoint: Server, tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tracer", "exporters"):
        monkeypatch.delitem(sys.modules, f"bottega.telemetry.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)  # an import of it fails
    endpoint.answers = [ok("seven")]
    with gateway(tmp_path / "off", endpoint, "") as url:
        post(url, "What is 3 + 4?", given=PARENT)
    assert "traceparent" not in calls(endpoint)[0]
    assert collector.raw == b""
    with pytest.raises(MissingDependencyError) as missing:
        build(gateway_config(tmp_path / "on", endpoint.url, ON), ENVIRONMENT)
    assert missing.value.hint == "pip install 'bottega-vlm[otel]'"


def test_a_silent_collector_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}"
        )
        exporter = open_exporter()
        with exporter.tracer.span("route", {}):
            pass
        before, started = set(threading.enumerate()), time.monotonic()
        exporter.close(0.01)
        sending = [one for one in set(threading.enumerate()) - before if one.daemon]
        # They still wait for the collector, unless this machine stood still for a second.
        assert sending or time.monotonic() - started > 1
        for thread in sending:
            thread.join(20)


def test_user_pipelines_keep_their_tracer(collector: Collector, tmp_path: Path) -> None:
    exporter = open_exporter()
    tier = Tier("only", ScriptedGenerator(lambda prompt: "seven"))
    plain = Pipeline(FixedRouter(tier), InterleavedPrompter(), plain_text, tiers=(tier,))
    pipeline = replace(plain, tracer=exporter.tracer)
    config = config_of(pipeline, "shop:pipeline")
    config = replace(config, gateway=replace(config.gateway, data=tmp_path))
    with run_gateway(build_for_pipeline(pipeline, config)) as url:
        post(url, "What is 3 + 4?")
    exporter.close()
    chat = collector.named("chat scripted")
    assert (chat.parent, chat.kind) == (server_span(collector).id, "internal")
    assert chat.attributes["gen_ai.provider.name"] == "bottega"
