"""Files and batches with the real openai client against a real gateway: results and states."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger_schema import FILE
from bottega.gateway.apis.batches.batch_records import StoredFile
from bottega.gateway.apis.batches.lines import MAX_ERRORS, BatchLine, read_lines
from bottega.gateway.apis.batches.store import FILE as BATCHES_FILE
from bottega.gateway.apis.batches.store import ORPHAN_SECONDS, BatchStore
from bottega.gateway.running.server import GatewayServer
from bottega.openai_api.errors import ApiError
from tests.gateway.batches import (
    CHAT,
    LIMITS,
    MASTER,
    chat_lines,
    ended,
    entries,
    gateway,
    jsonl,
    rows,
    start,
    texts,
    upload,
    with_key,
)
from tests.gateway.harness import client
from tests.server import Server, ok, raw


def test_batch_fills_the_cache(endpoint: Server, tmp_path: Path) -> None:
    endpoint.answers = [ok("seven")]
    with gateway(tmp_path, endpoint) as url, client(url) as real:
        batch = start(real, chat_lines("What is 3 + 4?", "What is 4 + 4?", "What is 5 + 4?"))
        assert (batch.status, batch.endpoint, batch.metadata) == ("validating", CHAT, {"a": "b"})
        done = ended(real, batch)
        assert done.status == "completed" and done.error_file_id is None
        counts = done.request_counts
        assert counts is not None and (counts.total, counts.completed, counts.failed) == (3, 3, 0)
        assert done.created_at <= (done.in_progress_at or 0) <= (done.completed_at or 0)
        found = rows(real, done.output_file_id)
        assert sorted(found) == ["What is 3 + 4?", "What is 4 + 4?", "What is 5 + 4?"]
        reply = found["What is 3 + 4?"]["response"]
        assert reply["status_code"] == 200 and reply["request_id"].startswith("req_")
        assert reply["body"]["choices"][0]["message"]["content"] == "seven"
        assert found["What is 3 + 4?"]["error"] is None
        output = real.files.retrieve(done.output_file_id or "")
        assert (output.purpose, output.bytes) == (
            "batch_output",
            len(real.files.content(output.id).read()),
        )
        shown = real.chat.completions.with_raw_response.create(
            model="bottega:route=small",
            messages=[{"role": "user", "content": "What is 3 + 5?"}],
        )
        assert int(shown.headers["x-bottega-demonstrations"]) > 0
        assert [one.id for one in real.batches.list()] == [batch.id]
    assert [state for _, state, _ in entries(tmp_path)] == ["answered"] * 4
    # Outputs are in the file alone: a deleted file leaves none behind.
    with closing(sqlite3.connect(tmp_path / BATCHES_FILE)) as connection:
        assert connection.execute("SELECT count(*) FROM results").fetchone() == (0,)


def test_files_are_private_to_their_key(endpoint: Server, tmp_path: Path) -> None:
    with closing(Accounts(tmp_path / FILE)) as accounts:
        one, other = (accounts.add(name)[1] for name in ("one", "other"))
    content = jsonl(chat_lines("a"))
    with (
        gateway(tmp_path, endpoint) as url,
        with_key(url, one) as ours,
        with_key(url, other) as theirs,
    ):
        files = [upload(ours, content) for _ in range(3)]
        assert ours.files.content(files[0].id).read() == content
        assert (tmp_path / "files").stat().st_mode & 0o777 == 0o700
        shown = ours.files.retrieve(files[0].id)
        assert (shown.filename, shown.bytes, shown.purpose) == (
            "batch.jsonl",
            len(content),
            "batch",
        )
        listed = [file.id for file in ours.files.list(limit=2)]  # the client reads all pages
        assert listed == [file.id for file in reversed(files)]
        assert [file.id for file in ours.files.list(order="asc")] == [file.id for file in files]
        assert list(ours.files.list(purpose="batch_output")) == list(theirs.files.list()) == []
        batch = ours.batches.create(
            input_file_id=files[0].id, endpoint=CHAT, completion_window="24h"
        )
        for way in (theirs.files.retrieve, theirs.files.content, theirs.files.delete):
            with pytest.raises(openai.NotFoundError, match="no such file"):
                way(files[0].id)
        for attempt in (theirs.batches.retrieve, theirs.batches.cancel):
            with pytest.raises(openai.NotFoundError, match="no such batch"):
                attempt(batch.id)
        with pytest.raises(openai.NotFoundError):
            theirs.batches.create(input_file_id=files[1].id, endpoint=CHAT, completion_window="24h")
        with client(url) as stranger, pytest.raises(openai.AuthenticationError):
            upload(stranger, content)
        ended(ours, batch)
        assert ours.files.delete(files[0].id).deleted
        with pytest.raises(openai.NotFoundError):
            ours.files.retrieve(files[0].id)


def test_failed_requests_are_in_the_error_file(endpoint: Server, tmp_path: Path) -> None:
    endpoint.answers = [ok("fine")]
    lines = [
        *chat_lines("good"),
        *chat_lines("wrong model", model="gpt-9"),
        *chat_lines("wrong field", temperature="hot"),
    ]
    deep = b'{"custom_id": "deep", "method": "POST", "url": "%b", "body": {"x": %b}}\n' % (
        CHAT.encode(),
        b"[" * 900 + b"]" * 900,
    )
    with gateway(tmp_path, endpoint) as url, client(url) as real:
        file = upload(real, jsonl(lines) + b"\n" + deep)
        batch = real.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        done = ended(real, batch)
        assert done.status == "completed"
        assert list(rows(real, done.output_file_id)) == ["good"]
        failed = rows(real, done.error_file_id)
        codes = {
            id: (row["response"]["status_code"], row["response"]["body"]["error"]["code"])
            for id, row in failed.items()
        }
    assert codes == {
        "wrong model": (404, "model_not_found"),
        "wrong field": (400, "invalid_type"),
        "deep": (400, "limit_exceeded"),
    }


def test_indented_replies_are_one_line_each(endpoint: Server, tmp_path: Path) -> None:
    choice = {"message": {"role": "assistant", "content": "a\nb"}, "finish_reason": "stop"}
    completion = {"id": "x", "choices": [choice], "usage": {"prompt_tokens": 1}}
    indented = json.dumps(completion, indent=2).encode()
    endpoint.answers = [raw(indented, kind="application/json")]
    with gateway(tmp_path, endpoint) as url, client(url) as real:
        done = ended(real, start(real, chat_lines("one", "two")))
        found = rows(real, done.output_file_id)
    assert sorted(found) == ["one", "two"]
    assert found["one"]["response"]["body"]["choices"] == [choice]


def test_invalid_input_fails_as_a_whole(endpoint: Server, tmp_path: Path) -> None:
    (good,) = chat_lines("a")
    lines = [
        good,
        good,
        {**good, "custom_id": "b", "method": "GET"},
        {**good, "custom_id": "c", "url": "/v1/embeddings"},
        {**good, "custom_id": ""},
        {**good, "custom_id": "d", "body": {"stream": True}},
        {**good, "custom_id": "e", "body": []},
        {name: value for name, value in good.items() if name != "method"},
    ]
    with gateway(tmp_path, endpoint) as url, client(url) as real:
        file = upload(real, b"no json\n" + jsonl(lines))
        batch = real.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        done = ended(real, batch)
        empty = ended(real, start(real, []))
    assert done.status == "failed" and done.failed_at and done.errors and done.errors.data
    assert [(error.line, error.code, error.param) for error in done.errors.data] == [
        (1, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "invalid_method", "method"),
        (5, "mismatched_endpoint", "url"),
        (6, "invalid_value", "custom_id"),
        (7, "unsupported_parameter", "body.stream"),
        (8, "invalid_value", "body"),
        (9, "missing_required_parameter", "method"),
    ]
    assert empty.errors and empty.errors.data and empty.errors.data[0].code == "empty_file"
    assert texts(endpoint) == []


def test_lines_are_found_by_position(tmp_path: Path) -> None:
    path, lines = tmp_path / "input", chat_lines("a", "b", "é")
    path.write_bytes(b"\r\n".join(jsonl([line]).strip() for line in lines) + b"\n\n")
    found, errors = read_lines(path, CHAT, max_requests=3, max_bytes=1000)
    assert [(line.number, line.custom_id) for line in found] == [(1, "a"), (2, "b"), (3, "é")]
    raw = path.read_bytes()
    assert [json.loads(raw[one.start : one.start + one.length]) for one in found] == lines
    assert errors == []
    _, [error] = read_lines(path, CHAT, max_requests=2, max_bytes=1000)
    assert (error.code, error.line) == ("too_many_requests", 3)
    path.write_bytes(b"x" * 5000 + b"\n" + jsonl(chat_lines("a")))
    [line], [error] = read_lines(path, CHAT, max_requests=2, max_bytes=1000)
    assert (error.code, error.line, line) == (
        "line_too_long",
        1,
        BatchLine(2, 5001, line.length, "a"),
    )
    path.write_bytes(b"x\n" * 1000)
    assert len(read_lines(path, CHAT, max_requests=2, max_bytes=10)[1]) == MAX_ERRORS


def test_cancelled_batch_keeps_its_output(endpoint: Server, tmp_path: Path) -> None:
    names = [f"question {number}" for number in range(200)]
    with gateway(tmp_path, endpoint, concurrency=1) as url, client(url) as real:
        batch = start(real, chat_lines(*names, model="bottega:no-replay"))
        ended(real, batch, "in_progress")
        while not texts(endpoint):
            time.sleep(0.01)
        assert real.batches.cancel(batch.id).status == "cancelling"
        done = ended(real, batch)
        assert done.status == "cancelled" and done.cancelling_at and done.cancelled_at
        assert done.request_counts and 0 < done.request_counts.completed < 200
        assert len(rows(real, done.output_file_id)) == done.request_counts.completed
        assert real.batches.cancel(batch.id).status == "cancelled"
        finished = ended(real, start(real, chat_lines("a")))
        with pytest.raises(openai.ConflictError, match="completed"):
            real.batches.cancel(finished.id)


def test_expired_batch_lists_what_was_not_sent(endpoint: Server, tmp_path: Path) -> None:
    with gateway(tmp_path, endpoint, concurrency=1, expire_hours=1e-7) as url, client(url) as real:
        done = ended(real, start(real, chat_lines("a", "b")))
        assert done.status == "expired" and done.expired_at
        found = rows(real, done.error_file_id)
    assert {id: row["error"]["code"] for id, row in found.items()} == {
        "a": "batch_expired",
        "b": "batch_expired",
    }
    assert found["a"]["response"] is None


def test_viewers_key_ends_its_batch(endpoint: Server, tmp_path: Path) -> None:
    with closing(Accounts(tmp_path / FILE)) as accounts:
        account, key = accounts.add("team")

    def block(server: GatewayServer) -> None:
        assert server.batches is not None
        server.batches.account = lambda id: dataclasses.replace(account, viewer=True)

    with gateway(tmp_path, endpoint, block) as url, with_key(url, key) as real:
        done = ended(real, start(real, chat_lines("a")))
    assert done.status == "failed" and done.errors and done.errors.data
    assert done.errors.data[0].code == "invalid_api_key"


def test_revoked_key_ends_its_batch(endpoint: Server, tmp_path: Path) -> None:
    with closing(Accounts(tmp_path / FILE)) as accounts:
        _, key = accounts.add("team")

    def block(server: GatewayServer) -> None:
        server.accounts.find = lambda id: None  # type: ignore[method-assign]
        assert server.batches is not None
        server.batches.account = server.accounts.find

    with gateway(tmp_path, endpoint, block) as url, with_key(url, key) as real:
        done = ended(real, start(real, chat_lines("a")))
    assert done.status == "failed" and done.errors and done.errors.data
    assert done.errors.data[0].code == "invalid_api_key"
    assert texts(endpoint) == []


def test_missing_input_file_ends_its_batch(endpoint: Server, tmp_path: Path) -> None:
    with gateway(tmp_path, endpoint) as url, client(url) as real:
        file = upload(real, jsonl(chat_lines("a")))
        (tmp_path / "files" / file.id).unlink()
        batch = real.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        done = ended(real, batch)
    assert done.status == "failed" and done.errors and done.errors.data
    assert done.errors.data[0].code == "missing_file"


def test_batch_of_a_file_that_is_deleted_meanwhile_is_refused(tmp_path: Path) -> None:
    class DeletingStore(BatchStore):
        """Store in which another request deletes each file right after it was found."""

        def file(self, account: str, id: str) -> StoredFile:
            found = super().file(account, id)
            with self._transaction() as connection:
                connection.execute("DELETE FROM files")
            return found

    with closing(DeletingStore(tmp_path)) as store:
        file = store.add_file("a", "x", io.BytesIO(b"{}"), **LIMITS)
        with pytest.raises(ApiError, match="no such file"):
            store.add_batch("a", CHAT, file.id, None, expires=0.0, limit=10, max_batches=10)
        assert store.unfinished() == []


def test_old_contents_without_a_row_are_deleted(tmp_path: Path) -> None:
    with closing(BatchStore(tmp_path)) as store:
        file = store.add_file("a", "x", io.BytesIO(b"{}"), **LIMITS)
        store.path("uploading").write_bytes(b"{}")
        store.path("left-over").write_bytes(b"{}")
        old = time.time() - 2 * ORPHAN_SECONDS
        for name in (file.id, "left-over"):
            os.utime(store.path(name), (old, old))
        store.remove_expired(0.0)
        left = {path.name for path in store.path(file.id).parent.iterdir()}
    assert left == {file.id, "uploading"}


def test_other_endpoints(endpoint: Server, tmp_path: Path) -> None:
    def line(url: str, body: Any) -> list[Any]:
        return [{"custom_id": "a", "method": "POST", "url": url, "body": body}]

    with gateway(tmp_path, endpoint) as url, client(url) as real:
        bodies: dict[str, Any] = {
            "/v1/responses": {"model": MASTER, "input": "hi"},
            "/v1/embeddings": {"model": "bottega/embedder", "input": "hi"},
            "/v1/completions": {"model": MASTER, "prompt": "hi"},
        }
        started = {path: start(real, line(path, body), path) for path, body in bodies.items()}
        kinds = {}
        for path, batch in started.items():
            found = rows(real, ended(real, batch).output_file_id)["a"]["response"]["body"]
            kinds[path] = found["object"]
    assert kinds == {
        "/v1/responses": "response",
        "/v1/embeddings": "list",
        "/v1/completions": "text_completion",
    }
