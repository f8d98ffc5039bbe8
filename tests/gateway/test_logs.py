from __future__ import annotations

import asyncio
import gc
import io
import logging
import threading
import time
import warnings
from dataclasses import replace
from typing import Any

import orjson
import pytest

from bottega.errors import PromptTooLongError, RejectedError, SettingError, StoreError
from bottega.gateway.telemetry.logs import Style, log_request, log_to
from bottega.generation import OpenAIGenerator
from bottega.types import Message, Prompt, Sampling
from tests.gateway.entries import request_entry
from tests.server import Server, refuse

KEY = "sk-bottega-0123456789ab-secretsecretsecret"
PLAIN = "plainplainplainplainplainplainplain1"  # matches no pattern, but is in the list of secrets
PASSWORD = "hunter2hunter2"
PROMPT = "my diagnosis is confidential"
PIXELS = "iVBORw0KGgoAAAANSUhEUgAA" * 40
EVERYTHING = (
    f"https://user:{PASSWORD}@example.com/v1/models?key={PLAIN}x&a=b Authorization: Bearer {KEY}"
    f" data:image/png;base64,{PIXELS} {{'api_key': '{PASSWORD}'}} x-api-key: {PASSWORD} {PLAIN}"
    f" {PIXELS}"
)
log = logging.getLogger("bottega.somewhere")


def parsed(out: io.StringIO) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in out.getvalue().splitlines()]


def safe(out: io.StringIO) -> str:
    text = out.getvalue()
    assert text
    for secret in (KEY, "secretsecret", PLAIN, PASSWORD, PROMPT, "iVBORw0K", "diagnosis"):
        assert secret not in text
    return text


def test_warnings_are_logged_as_lines() -> None:
    out = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        before = warnings.showwarning
        with log_to(out):
            warnings.warn("something is slow", UserWarning, stacklevel=1)
        assert warnings.showwarning is before
    [line] = parsed(out)
    assert (line["level"], line["event"]) == ("warning", "something is slow")


def test_a_prompt_that_is_too_long_is_described() -> None:
    out = io.StringIO()
    with log_to(out):
        log.warning("master failed: %s", PromptTooLongError("m: the prompt must be short, got 9"))
    [line] = parsed(out)
    assert line["event"] == "master failed: PromptTooLongError: m: the prompt must be short, got 9"


def test_each_request_has_one_line() -> None:
    out = io.StringIO()
    with log_to(out):
        log_request(request_entry())
        log_request(
            request_entry(state="failed", status=502, similarity=None, cost_usd=None),
            "upstream_failed",
            "apprentice",
        )
    first, second = parsed(out)
    time_of = first.pop("time")
    assert time_of.endswith("+00:00")
    assert first == {
        "level": "info",
        "event": "request",
        "request": "4f1e2d",
        "account": "0123456789ab",
        "namespace": "a",
        "status": 200,
        "state": "answered",
        "route": "apprentice",
        "model": "qwen",
        "shots": 2,
        "similarity": 0.83,
        "prompt_tokens": 1000,
        "completion_tokens": 30,
        "cost_usd": 0.001,
        "seconds": 0.4,
    }
    assert (second["status"], second["reason"]) == (502, "upstream_failed")
    assert second["fallback"] == "apprentice"
    assert "similarity" not in second


@pytest.mark.parametrize("style", ["json", "text"])
def test_secrets_are_removed_everywhere(
    style: Style, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, own = io.StringIO(), logging.getLogger("uvicorn")
    # Like uvicorn's own handlers, which write directly to stderr.
    monkeypatch.setattr(own, "handlers", [logging.StreamHandler()])
    monkeypatch.setattr(own, "propagate", False)
    with log_to(out, style, secrets=[PLAIN, ""]):
        log.warning(EVERYTHING)
        log.warning("%s", EVERYTHING)
        log.warning("failed: %s", ValueError(PROMPT))
        log.warning("failed: %s", RejectedError(f"{PROMPT} {EVERYTHING}"))
        log.error(RejectedError(PROMPT))
        log.error("stored: %s", StoreError(f"cannot write to {EVERYTHING}"))
        logging.getLogger("uvicorn.error").error("odd request: %s", EVERYTHING)
        log_request(request_entry(request_id=KEY, model=EVERYTHING, namespace=PLAIN))
        log_request(request_entry(), EVERYTHING)
        try:
            try:
                raise KeyError(PROMPT)
            except KeyError as error:
                raise SettingError(EVERYTHING, hint=EVERYTHING) from error
        except SettingError:
            log.exception("while answering")
    text = safe(out)
    assert "StoreError: cannot write to" in text
    assert "SettingError" in text
    assert "KeyError" in text
    assert "test_logs.py" in text
    assert len(text.splitlines()) >= 10
    assert not capsys.readouterr().err


def test_truncated_line_does_not_show_half_a_secret() -> None:
    for length in range(1960, 2001):
        out = io.StringIO()
        with log_to(out):
            log.warning("a " * (length // 2) + KEY)
        assert "secret" not in out.getvalue()
        assert "sk-b" not in out.getvalue()


async def test_secrets_are_removed_from_task_and_thread_errors() -> None:
    out = io.StringIO()
    with log_to(out, "text", secrets=[PLAIN]):

        async def fail() -> None:
            raise ValueError(f"{PROMPT} {EVERYTHING}")

        def fail_in_thread() -> None:
            raise ValueError(f"{PROMPT} {EVERYTHING}")

        task = asyncio.create_task(fail())
        await asyncio.sleep(0.01)
        del task
        gc.collect()
        thread = threading.Thread(target=fail_in_thread)
        thread.start()
        thread.join()
    text = safe(out)
    assert "Task exception was never retrieved" in text
    assert "a thread ended" in text


async def test_upstream_error_texts_are_not_logged(endpoint: Server) -> None:
    out = io.StringIO()
    endpoint.answers = [refuse(400, f"bad {PROMPT!r} for the key {PASSWORD}, {EVERYTHING}")]
    model = OpenAIGenerator("m", base_url=endpoint.url, api_key=PASSWORD, retries=0)
    with log_to(out, secrets=[PASSWORD]):
        try:
            await model.generate(Prompt((Message("user", (PROMPT,)),)), Sampling())
        except RejectedError as error:
            log.exception("the upstream failed: %s", error)
        finally:
            await model.aclose()
    assert "RejectedError 400" in safe(out)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("export MASTER_API_KEY=... with a key", "export MASTER_API_KEY=... with a key"),
        ("export MY_TOKEN=... before", "export MY_TOKEN=... before"),
        ('set api_key_env = "NAME" and', 'set api_key_env = "NAME" and'),
        ("set OPENAI_API_KEY (or api_key=) to a key", "set OPENAI_API_KEY (or api_key=) to a key"),
        ("export MASTER_API_KEY=...hunter2", "export MASTER_API_KEY=[redacted]"),
        ("(api_key='hunter2')", "(api_key=[redacted]"),
        ("password: )hunter2(", "password: [redacted]"),
    ],
)
def test_hints_are_no_secrets(text: str, shown: str) -> None:
    out = io.StringIO()
    with log_to(out):
        log.warning(text)
    assert parsed(out)[0]["event"] == shown


def test_text_format_has_one_line_per_event() -> None:
    out = io.StringIO()
    with log_to(out, "text"):
        log_request(request_entry(model="a\nb\x1b[31m\u2028c"))
        log.warning("two\nlines\r\x1b]0;title\x07")
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert "status=200 state=answered route=apprentice" in lines[0]
    assert "\x1b" not in out.getvalue()


def test_blocked_terminal_does_not_block_logging() -> None:
    class BlockedStream(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.free = threading.Event()

        def write(self, text: str, /) -> int:
            self.free.wait(60)
            return super().write(text)

    out, entry = BlockedStream(), request_entry()
    with log_to(out) as writer:
        log_request(entry)
        time.sleep(0.05)
        clock = time.perf_counter()
        for _ in range(12_000):
            log_request(entry)
        assert time.perf_counter() - clock < 60
        assert writer.lost > 1_000
        out.free.set()
        # Closing waits for a second only.
        while out.getvalue().count("\n") + writer.lost < 12_001:
            assert time.perf_counter() - clock < 60
            time.sleep(0.05)
    lines = parsed(out)
    assert len(lines) + writer.lost >= 12_001
    assert any(line["event"] == "lines lost" for line in lines)


def test_a_full_queue_of_lines_is_not_logged_by_itself(capfd: pytest.CaptureFixture[str]) -> None:
    free = threading.Event()

    class BlockedStream(io.StringIO):
        def write(self, text: str, /) -> int:
            free.wait(60)
            return len(text)

    try:
        with log_to(BlockedStream()) as writer:
            for number in range(12_000):
                log.warning("line %d", number)
            assert writer.lost > 1_000
    finally:
        free.set()
    assert "lost" not in capfd.readouterr().err  # which may be the stream that is blocked


def test_closed_stream_is_not_a_failure() -> None:
    out = io.StringIO()
    out.close()
    with log_to(out) as writer:
        log_request(request_entry())
    assert writer.lost == 1


def test_failed_log_line_is_reported() -> None:
    out = io.StringIO()
    with log_to(out):
        log.warning("%d", "no number")
        log_request(replace(request_entry(), similarity="high"))  # type: ignore[arg-type]
    assert [line["event"] for line in parsed(out)] == ["log line failed"] * 2


def test_loggers_are_restored() -> None:
    before = logging.getLogger().handlers[:], logging.getLogger("bottega").level
    hook = threading.excepthook
    with log_to(io.StringIO()):
        assert logging.getLogger().handlers != before[0]
    assert (logging.getLogger().handlers, logging.getLogger("bottega").level) == before
    assert threading.excepthook is hook


def test_library_loaded_later_logs_once(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    with log_to(out):
        library = logging.getLogger("library_that_is_loaded_later")
        library.addHandler(logging.StreamHandler())
        library.propagate = False
        library.warning("slow")
        logging.getLogger("library_that_is_loaded_later.part").warning("slower")
    assert [orjson.loads(line)["event"] for line in out.getvalue().splitlines()] == [
        "slow",
        "slower",
    ]
    assert capsys.readouterr().err == ""
