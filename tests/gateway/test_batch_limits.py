"""Limits and checks of files and batches."""

from __future__ import annotations

import io
import logging
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger_schema import FILE
from bottega.gateway.apis.batches.execution import DAY, HOUR
from bottega.gateway.apis.batches.store import BatchStore
from bottega.gateway.running.build import build
from bottega.gateway.running.server import GatewayServer
from bottega.openai_api.errors import ApiError
from tests.gateway.batches import (
    CHAT,
    LIMITS,
    chat_lines,
    ended,
    gateway,
    jsonl,
    start,
    texts,
    upload,
    with_key,
)
from tests.gateway.gateways import ENVIRONMENT, gateway_config, run_gateway
from tests.gateway.harness import client
from tests.server import Server, running


def test_lower_limits_do_not_fail_a_batch_with_results(endpoint: Server, tmp_path: Path) -> None:
    servers: list[GatewayServer] = []
    lines = chat_lines(*(str(number) for number in range(4)), model="bottega:no-replay")
    with gateway(tmp_path, endpoint, servers.append, concurrency=1) as url, client(url) as real:
        batch = start(real, lines)
        while not texts(endpoint):
            time.sleep(0.005)
        servers[0].app.closing = True
    with gateway(tmp_path, endpoint, max_requests=1) as url, client(url) as real:
        done = ended(real, batch)
        assert done.status == "completed" and done.request_counts
        assert done.request_counts.completed == 4


def test_batch_above_the_limit_of_unfinished_ones_is_not_stored(tmp_path: Path) -> None:
    fields: Any = {"expires": 0.0, "limit": 1, "max_batches": 10}
    with closing(BatchStore(tmp_path)) as store:
        file = store.add_file("a", "x", io.BytesIO(b"{}"), **LIMITS)
        first = store.add_batch("a", CHAT, file.id, None, **fields)
        with pytest.raises(ApiError, match="limit of 1 unfinished batch\n"):
            store.add_batch("a", CHAT, file.id, None, **fields)
        assert [batch.id for batch in store.unfinished()] == [first.id]


def test_sizes_are_limited(endpoint: Server, tmp_path: Path) -> None:
    with (
        gateway(tmp_path, endpoint, file_mb=1, storage_mb=1, max_requests=2) as url,
        client(url) as real,
    ):
        with pytest.raises(openai.APIStatusError, match="bytes") as raised:
            upload(real, b"x" * (1 << 21))
        assert raised.value.status_code == 413
        with pytest.raises(openai.APIStatusError, match="body is larger than 65,536 bytes"):
            real.batches.create(
                input_file_id="file-1",
                endpoint="/v1/chat/completions",
                completion_window="24h",
                metadata={"note": "x" * 70_000},
            )
        file = upload(real, b"x" * 900_000)
        with pytest.raises(openai.APIStatusError, match="exceed"):
            upload(real, b"x" * 200_000)
        real.files.delete(file.id)
        assert upload(real, b"x" * 200_000).bytes == 200_000
        many = ended(real, start(real, chat_lines("a", "b", "c")))
        assert many.errors and many.errors.data
        assert many.errors.data[0].code == "too_many_requests"
        files = list((tmp_path / "files").iterdir())
    assert len(files) == 2  # rejected uploads leave nothing


def test_files_and_batches_of_a_key_are_counted(endpoint: Server, tmp_path: Path) -> None:
    with closing(Accounts(tmp_path / FILE)) as accounts:
        first, second = (accounts.add(name)[1] for name in ("a", "b"))
    with gateway(tmp_path, endpoint, max_files=3) as url, client(url) as real:
        one, other = real.with_options(api_key=first), real.with_options(api_key=second)
        done = ended(one, start(one, chat_lines("x")))  # its output counts, too
        assert done.metadata == {"a": "b"}
        upload(one, b"{}")
        with pytest.raises(openai.RateLimitError, match="limit of 3 files") as raised:
            upload(one, b"{}")
        assert raised.value.code == "too_many_files"
        assert raised.value.response.headers["x-should-retry"] == "false"
        assert len(list((tmp_path / "files").iterdir())) == 3
        upload(other, b"{}")
        for _ in range(2):
            ended(one, one.batches.create(**fields_of(done)))
        with pytest.raises(openai.RateLimitError, match="limit of 3 batches") as raised:
            one.batches.create(**fields_of(done))
        assert raised.value.code == "too_many_batches"
        for file in one.files.list().data:
            one.files.delete(file.id)
        assert upload(one, b"{}").bytes == 2


def fields_of(batch: Batch) -> Any:
    names = ("input_file_id", "endpoint", "completion_window")
    return {name: getattr(batch, name) for name in names}


def test_long_names_of_files_are_rejected(shared: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="255 characters") as refused:
        shared.files.create(file=("x" * 256, b"{}"), purpose="batch")
    assert refused.value.param == "file"
    longest = "é" * 255
    assert shared.files.create(file=(longest, b"{}"), purpose="batch").filename == longest


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {"x" * 65: "a"}}, "metadata." + "x" * 64),
        ({"metadata": {str(n): "a" for n in range(17)}}, "metadata"),
        ({"extra_body": {"priority": 1}}, "priority"),
    ],
)
def test_invalid_batches_are_rejected_by_field(
    shared: openai.OpenAI, given: dict[str, Any], param: str
) -> None:
    fields = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h", **given}
    with pytest.raises(openai.BadRequestError) as refused:
        shared.batches.create(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("seconds", "lifetime"),
    [(60, HOUR), (2 * HOUR, 2 * HOUR), (400 * DAY, 30 * DAY)],
)
def test_lifetime_of_a_file_is_limited(
    shared: openai.OpenAI, seconds: int, lifetime: float
) -> None:
    file = shared.files.create(
        file=b"{}",
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": int(seconds)},
    )
    assert (file.expires_at or 0) - file.created_at == lifetime
    assert shared.files.retrieve(file.id).expires_at == file.expires_at


def test_output_is_kept_as_long_as_the_input(shared: openai.OpenAI) -> None:
    file = shared.files.create(
        file=jsonl(chat_lines("a")),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": int(2 * HOUR)},
    )
    batch = shared.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    output = shared.files.retrieve(ended(shared, batch).output_file_id or "")
    assert (output.expires_at or 0) - output.created_at == pytest.approx(2 * HOUR, abs=1)


def test_other_purposes_are_rejected(shared: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        shared.files.create(file=b"{}", purpose="user_data")
    assert refused.value.param == "purpose"
    with pytest.raises(openai.BadRequestError, match="multipart"):
        shared.post("/files", body={"purpose": "batch"}, cast_to=object)
    kind = {"content-type": "multipart/form-data", "host": "localhost"}
    request = urllib.request.Request(f"{shared.base_url}files", b"x", kind)
    with pytest.raises(urllib.error.HTTPError, match="400") as failed:
        urllib.request.urlopen(request)
    with failed.value as reply:
        assert b"Missing boundary" in reply.read()


def test_client_that_leaves_during_an_upload_is_no_error(
    shared: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    url = shared.base_url
    head = f"POST {url.path}files HTTP/1.1\r\nhost: {url.netloc.decode()}\r\ncontent-length: 99"
    kind = "content-type: multipart/form-data; boundary=x"
    with socket.create_connection((url.host, url.port or 80)) as leaving:
        leaving.sendall(f"{head}\r\n{kind}\r\n\r\n--x\r\n".encode())
        time.sleep(0.05)
    shared.models.list()  # after the gateway has noticed
    time.sleep(0.05)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("batches")
    with running() as endpoint, gateway(folder, endpoint) as url, client(url) as real:
        yield real


def test_batches_are_refused_with_shared_state(
    endpoint: Server, tmp_path: Path, gateway_database: str
) -> None:
    with closing(Accounts(gateway_database)) as accounts:
        key = accounts.add("team")[1]
    more = f'\n[state]\ndatabase_env = "DATABASE"\n# {gateway_database}'
    config = gateway_config(tmp_path, endpoint.url, more)
    server = build(config, {**ENVIRONMENT, "DATABASE": gateway_database})
    with (
        run_gateway(server) as url,
        with_key(url, key) as real,
        pytest.raises(openai.APIStatusError, match="the state is shared"),
    ):
        upload(real, b"{}")


def test_batches_can_be_off(endpoint: Server, tmp_path: Path) -> None:
    with gateway(tmp_path, endpoint, concurrency=0) as url, client(url) as real:
        with pytest.raises(
            openai.APIStatusError, match="files and batches are not available"
        ) as refused:
            upload(real, b"{}")
        assert refused.value.status_code == 501
    assert not (tmp_path / "files").exists()
