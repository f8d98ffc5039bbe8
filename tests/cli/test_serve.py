from __future__ import annotations

import asyncio
import base64
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any

import openai
import pytest
from aiohttp import web
from PIL import Image as Pillow
from PIL import ImageDraw

from bottega.gateway.config.gateway_settings import ServerSettings
from bottega.gateway.running.process import base_url
from bottega.image import Image
from tests.cli.conftest import Run
from tests.server import Answer, Server, ok

SECRET = "sk-0123456789abcdefghij"


def write_config(folder: Path, url: str) -> Path:
    file = folder / "bottega.toml"
    file.write_text(
        f"""
        [gateway]
        drain_seconds = 20
        [tiers.small]
        model = "openai:qwen"
        base_url = "{url}"
        [tiers.large]
        model = "openai:huge"
        base_url = "{url}"
        api_key_env = "LARGE_KEY"
        [cache]
        embed = "words"
        """
    )
    return file


@contextmanager
def served(*arguments: str, folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "bottega", "serve", "--port", "0", *arguments]
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "LARGE_KEY": SECRET},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            first = process.stdout.readline()
            assert first.startswith("serving http://127.0.0.1:"), _rest(process.stderr)
            yield first.split()[1], process
        finally:
            if process.poll() is None:
                process.kill()


def _rest(stream: IO[str] | None) -> str:
    return "" if stream is None else stream.read()


def wait_for_exit(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return the rest of both streams. `communicate` would lose lines that are already buffered."""
    process.wait(30)
    return _rest(process.stdout), _rest(process.stderr)


def status(url: str | urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(url, timeout=20) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def open_connection(url: str) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(url.split("/")[2], timeout=20)
    connection.request("GET", "/healthz")
    assert connection.getresponse().read()
    return connection


def wait_until_refused(url: str) -> None:
    end = time.monotonic() + 20
    while True:
        try:
            status(url)
        except (urllib.error.URLError, ConnectionError) as error:
            # A connection still in the queue when the socket closes is reset, not refused.
            assert isinstance(getattr(error, "reason", error), ConnectionError)
            return
        assert time.monotonic() < end
        time.sleep(0.01)


def wait_for(url: str, wanted: int) -> None:
    end = time.monotonic() + 60
    while status(url) != wanted:
        assert time.monotonic() < end
        time.sleep(0.05)


def answer_of(url: str) -> str:
    client = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
    with client:
        reply = client.chat.completions.create(
            model="bottega", messages=[{"role": "user", "content": "What is 3 + 4?"}]
        )
    return str(reply.choices[0].message.content)


def answer_after(event: threading.Event, answer: Answer) -> Answer:
    async def later(request: web.Request) -> web.StreamResponse:
        assert await asyncio.to_thread(event.wait, 30)
        return await answer(request)

    return later


def test_a_configured_gateway_lets_requests_finish(endpoint: Server, tmp_path: Path) -> None:
    refused = threading.Event()
    file = write_config(tmp_path, endpoint.url)
    with served("--config", str(file), "--log-format", "json", folder=tmp_path) as (url, process):
        ready = url.removesuffix("/v1") + "/readyz"
        wait_for(ready, 200)
        endpoint.answers = [answer_after(refused, ok("seven"))]
        answers: list[str] = []
        client = threading.Thread(target=lambda: answers.append(answer_of(url)))
        before = len(endpoint.bodies)
        client.start()
        while len(endpoint.bodies) == before:
            time.sleep(0.01)
        with closing(open_connection(url)) as opened:
            process.send_signal(signal.SIGTERM)
            wait_until_refused(ready)
            # An open connection may be used once more, as that of a load balancer may be.
            opened.request("GET", "/v1/models")
            reply = opened.getresponse()
            assert (reply.status, reply.headers["connection"]) == (200, "close")
            reply.read()
        refused.set()
        client.join()
        out, err = wait_for_exit(process)
    assert answers == ["seven"]
    assert process.returncode == 0
    assert "curl" in out
    lines = [json.loads(line) for line in err.splitlines()]
    [line] = [line for line in lines if line["event"] == "request"]
    assert (line["status"], line["state"]) == (200, "answered")
    assert SECRET not in out + err
    assert "3 + 4" not in err
    assert (tmp_path / "bottega-data" / "gateway.db").exists()


def status_with_key(url: str, key: str, model: str) -> int:
    return status(question(url, key, model))


def question(url: str, key: str, model: str = "bottega") -> urllib.request.Request:
    body = {"model": model, "messages": [{"role": "user", "content": "What is 3 + 4?"}]}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)


def variant_with_key(url: str, key: str) -> str:
    with urllib.request.urlopen(question(url, key), timeout=20) as reply:
        return str(reply.headers["x-bottega-variant"])


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="requires SIGHUP")
def test_sighup_reloads_and_metrics_have_a_port(endpoint: Server, tmp_path: Path, run: Run) -> None:
    file = write_config(tmp_path, endpoint.url)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = file.read_text().replace("[gateway]", f"[gateway]\nmetrics_port = {port}")
    text += "[experiment]\nname = 'x'\nb = 'no-retrieve'\nshare = 1.0\n"
    file.write_text(text)
    key = run("keys", "add", "team", "--data", tmp_path / "bottega-data").out.strip()
    with served("--config", str(file), "--log-format", "json", folder=tmp_path) as (url, process):
        root, metrics = url.removesuffix("/v1"), f"http://127.0.0.1:{port}"
        wait_for(f"{root}/readyz", 200)
        assert [status(f"{address}/metrics") for address in (root, metrics)] == [401, 200]
        assert [status(f"{address}/admin/keys") for address in (root, metrics)] == [401, 404]
        assert status_with_key(url, key, "bottega/large") == 403
        assert variant_with_key(url, key) == "x:b"
        file.write_text(text.replace("share = 1.0", "share = 0.0") + '[keys]\ntiers = ["large"]\n')
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: status_with_key(url, key, "bottega/large") == 200)
        assert variant_with_key(url, key) == "x:a"
        file.write_text("[gateway\n")
        process.send_signal(signal.SIGHUP)
        time.sleep(0.1)
        assert status_with_key(url, key, "bottega/large") == 200
        process.send_signal(signal.SIGTERM)
        _, err = wait_for_exit(process)
    events = [json.loads(line)["event"] for line in err.splitlines()]
    assert any("changed: keys.tiers, experiment.share" in event for event in events)
    assert any("not reloaded" in event and "TOML" in event for event in events)
    assert (process.returncode, events[-1]) == (0, "stopped")


def disc_messages(size: int) -> list[Any]:
    image = Pillow.new("RGB", (64, 64), "black")
    ImageDraw.Draw(image).ellipse((8, 8, size, size), fill="red")
    url = Image.from_pillow(image).data_url
    parts = [
        {"type": "text", "text": "What colour is it?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    return [{"role": "user", "content": parts}]


def body_of(command: str, photo: Path) -> Any:
    """Return the request body that a printed shell command sends, for an image of 300 kB."""
    Pillow.effect_noise((600, 600), 90).convert("RGB").save(photo, quality=95)
    printing, _, curl = command.strip().rpartition(" | ")
    assert curl.startswith("curl http") and curl.endswith("-d @-")
    printed = subprocess.run(
        ["sh", "-c", printing], cwd=photo.parent, capture_output=True, check=True
    )
    body = json.loads(printed.stdout)
    url = body["messages"][0]["content"][0]["image_url"]["url"]
    assert base64.b64decode(url.partition("base64,")[2], validate=True) == photo.read_bytes()
    photo.unlink()
    return body


@pytest.mark.slow
def test_the_demo_answers_the_openai_client(tmp_path: Path) -> None:
    """It takes less than 10 seconds of processor time, which does not depend on other load."""
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    with served("--demo", "--log-format", "text", folder=tmp_path) as (url, process):
        client = openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=100)
        with client:
            assert "bottega" in [model.id for model in client.models.list()]
            assert process.stdout is not None
            _, example, loading = (process.stdout.readline() for _ in range(3))
            body = json.loads(example.partition("-d '")[2].rstrip("'\n"))
            shown = client.chat.completions.create(**body)
            prices, _, command = (process.stdout.readline() for _ in range(3))
            own = client.chat.completions.create(**body_of(command, tmp_path / "photo.jpg"))
            reply = client.chat.completions.create(model="bottega", messages=disc_messages(40))
            stream = client.chat.completions.create(
                model="bottega/apprentice", messages=disc_messages(42), stream=True
            )
            streamed = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
        process.send_signal(signal.SIGTERM)
        out, err = wait_for_exit(process)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert shown.choices[0].message.content.endswith("red")
    assert str(reply.choices[0].message.content).endswith("red")
    assert streamed == reply.choices[0].message.content
    assert process.returncode == 0
    assert own.choices[0].message.content
    assert "the models are loading" in loading
    assert "is deleted at exit" in loading
    assert "prices are examples" in prices
    assert "at example prices: spent 0.000" in out
    assert "the master alone would have cost about 0.000" in out
    assert "the apprentice answered" in out
    assert "not ready" not in err
    assert "route=master" in err
    assert list(tmp_path.iterdir()) == []
    assert used.ru_utime + used.ru_stime - before < 10


def test_check_prints_the_configuration(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path, "http://localhost:9/v1")
    unset = run("serve", "--check", "--offline")
    assert unset.code == 2
    assert "LARGE_KEY NOT set" in unset.out
    assert "LARGE_KEY is not set" in unset.err
    monkeypatch.setenv("LARGE_KEY", SECRET)
    done = run("serve", "--check", "--offline", "--port", "9999")
    assert done.code == 0
    assert "LARGE_KEY set" in done.out
    assert "fill the cache" in done.out
    assert "http://127.0.0.1:9999" in done.out
    assert not Path("bottega-data").exists()


def test_invalid_serve_options_are_reported(run: Run, tmp_path: Path) -> None:
    assert "--demo" in run("serve").err
    assert "exclude each other" in run("serve", "--demo", "no_shop:pipeline").err
    assert "module 'no_shop' does not exist" in run("serve", "no_shop:pipeline").err
    assert "json or text" in run("serve", "--demo", "--log-format", "xml").err
    public = run("serve", "--demo", "--host", "0.0.0.0", "--port", 0)
    assert public.code == 2
    assert "need a key" in public.err
    assert "bottega keys add NAME --data FOLDER, then serve --demo --data FOLDER" in public.err
    (tmp_path / "boom.py").write_text("pipeline = 1 / 0\n")
    failed = run("serve", "boom:pipeline")
    assert failed.code == 2
    assert (
        "importing boom failed: ZeroDivisionError: division by zero (boom.py, line 1)" in failed.err
    )
    nowhere = run("serve", "--demo", "--host", "127.0.0.999")
    assert (nowhere.code, "--host 127.0.0.1" in nowhere.err) == (2, True)


def test_a_port_in_use_is_reported(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "--demo", "--port", port)
    assert done.code == 2
    assert f"127.0.0.1:{port}" in done.err
    assert "--port 0" in done.err


@pytest.mark.parametrize(
    ("host", "shown"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("localhost", "localhost")],
)
def test_the_base_url_is_reachable_for_clients(host: str, shown: str) -> None:
    assert base_url(ServerSettings(host), 80) == f"http://{shown}:80/v1"


async def endless_stream(request: web.Request) -> web.StreamResponse:
    """Send one event, and keep the stream open."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    choice = '{"index": 0, "delta": {"content": "se"}, "finish_reason": null}'
    event = f'{{"id": "x", "object": "chat.completion.chunk", "choices": [{choice}]}}'
    await response.write(f"data: {event}\n\n".encode())
    await asyncio.sleep(30)
    return response


@pytest.mark.slow
def test_a_second_signal_stops_at_once(endpoint: Server, tmp_path: Path) -> None:
    file = write_config(tmp_path, endpoint.url)
    with served("--config", str(file), "--log-format", "json", folder=tmp_path) as (url, process):
        wait_for(url.removesuffix("/v1") + "/readyz", 200)
        endpoint.answers = [endless_stream]
        body = {"model": "bottega", "stream": True, "messages": [{"role": "user", "content": "?"}]}
        request = urllib.request.Request(
            f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "text/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            assert b'"se"' in reply.readline()
            process.send_signal(signal.SIGINT)
            wait_until_refused(url.removesuffix("/v1") + "/readyz")
            interrupted = time.monotonic()
            process.send_signal(signal.SIGINT)
            rest = reply.read()
        _, err = wait_for_exit(process)
    assert time.monotonic() - interrupted < 4
    assert b"shutting_down" in rest
    assert process.returncode == 0
    lines = [json.loads(line) for line in err.splitlines()]
    events = [line["event"] for line in lines]
    assert "draining: 1 request in flight" in events
    assert events[-1] == "stopped"
    assert not any("Exception" in event for event in events)
    [line] = [line for line in lines if line["event"] == "request"]
    assert (line["status"], line["reason"]) == (503, "shutting down")


SLOW = """
import sys, time
from bottega.gateway.running import process
from bottega.gateway.running import cache_views
from bottega.cli import main

def load(spec):
    print("loading", file=sys.stderr, flush=True)
    time.sleep(120)

cache_views.open_embedder = load
process.LEAVE_SECONDS = 0.5
main()
"""


@pytest.mark.slow
def test_a_loading_server_can_be_stopped(endpoint: Server, tmp_path: Path) -> None:
    file = write_config(tmp_path, endpoint.url)
    command = [sys.executable, "-c", SLOW, "serve", "--port", "0", "--config", str(file)]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "LARGE_KEY": SECRET},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None and process.stdout is not None
            assert process.stderr.readline() == "loading\n"
            process.stdout.readline()
            interrupted = time.monotonic()
            process.send_signal(signal.SIGTERM)
            _, err = wait_for_exit(process)
        finally:
            process.kill()
    assert time.monotonic() - interrupted < 10
    assert process.returncode == 0
    assert "draining: 0 requests" in err


@pytest.mark.parametrize("embed", ["duel", "clip", "./nowhere", "duel:text", "a/b/c"])
@pytest.mark.parametrize("more", [["--check", "--offline"], ["--port", "0"]])
def test_an_impossible_embedder_is_rejected(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embed: str, more: list[str]
) -> None:
    monkeypatch.setenv("LARGE_KEY", SECRET)
    file = write_config(tmp_path, "http://localhost:9/v1")
    file.write_text(file.read_text().replace('"words"', f'"{embed}"'))
    done = run("serve", *more)
    assert done.code == 2
    assert f"cache.embed: embedder is unknown, got {embed!r}" in " ".join(done.err.split())


def test_a_missing_torch_is_reported_at_start(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.errors.find_spec", lambda name: None)
    monkeypatch.setenv("LARGE_KEY", SECRET)
    file = write_config(tmp_path, "http://localhost:9/v1")
    assert (
        run("serve", "--check", "--offline").code == 0
    )  # the embedder "words" does not need torch
    assert "pip install 'bottega-vlm[local]'" in run("serve", "--demo", "--port", "0").err
    file.write_text(file.read_text().replace('"words"', '"dual"'))
    assert "pip install 'bottega-vlm[local]'" in run("serve", "--port", "0").err


def test_a_misspelt_model_is_reported_with_its_setting(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "bottega.toml"
    file.write_text('[tiers.small]\nmodel = "bundled:mastr"\n')
    done = run("serve", "--check", "--config", str(file))
    assert done.code == 2
    error = " ".join(done.err.split())
    assert "tiers.small.model: model is unknown, got 'bundled:mastr'" in error
    assert "did you mean bundled:master?" in error
