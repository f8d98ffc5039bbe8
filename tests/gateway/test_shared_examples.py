"""Two gateways whose examples are in one PostgreSQL database."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bottega.errors import SettingError
from bottega.gateway.running.build import build
from bottega.knowledge import KnowledgeBase
from tests.gateway.gateways import ENVIRONMENT, ask, gateway_config, run_gateway
from tests.postgres import running_postgres
from tests.server import Server, ok


def eventually(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


def test_gateways_show_and_forget_the_same_examples(
    endpoint: Server, tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHE", database)
    endpoint.answers = [ok("42")]
    shown = "x-bottega-demonstrations"
    configs = [
        gateway_config(tmp_path / name, endpoint.url, 'database_env = "CACHE"\n') for name in "ab"
    ]
    first, second = (build(config, ENVIRONMENT) for config in configs)
    with run_gateway(first) as a, KnowledgeBase.open(database, None) as base:
        _, headers = ask(a, "How many apples are in the bowl?")
        assert headers["x-bottega-route"] == "large"
        assert eventually(lambda: len(base) == 1)
        with run_gateway(second) as b:  # its cold start has ended: the cache holds an example
            _, headers = ask(b, "How many pears are in the bowl?")
            assert (headers["x-bottega-route"], headers[shown]) == ("small", "1")
            base.delete(base.ids())
            _, headers = ask(b, "How many plums are in the bowl?")
            assert (headers["x-bottega-route"], headers[shown]) == ("small", "0")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('database = "mysql://h/d"', "cache.database is not the URL of a supported server"),
        ('database = "postgresql://u:secret@h/d"', "cache.database looks like a secret"),
        (
            'database = "postgresql://h/d"\ndatabase_env = "D"',
            "cache.database must not be set",
        ),
        (
            'database_env = "D"\nfile = "k.db"',
            "cache.file must not be set together with a database",
        ),
        ('database_env = "not a name"', "must be the name of an environment variable"),
        ('vectors = "milvus://h"', "cache.vectors needs a database"),
        ('database_env = "D"\nvectors = "redis://h"', "cache.vectors is not the URL"),
        (
            'database_env = "D"\nvectors = "milvus://u:secret@h"',
            "cache.vectors looks like a secret",
        ),
    ],
)
def test_invalid_databases_are_named(tmp_path: Path, line: str, problem: str) -> None:
    with pytest.raises(SettingError, match=problem) as error:
        gateway_config(tmp_path, "http://localhost:9/v1", line + "\n")
    assert "secret@" not in str(error.value) + error.value.hint


def test_variable_without_url_is_named(tmp_path: Path) -> None:
    config = gateway_config(tmp_path, "http://localhost:9/v1", 'database_env = "ABSENT"\n')
    with pytest.raises(SettingError, match=r"ABSENT must be a URL for cache\.database"):
        build(config, ENVIRONMENT)


def test_vectors_come_from_a_variable(tmp_path: Path) -> None:
    lines = 'database_env = "D"\nvectors_env = "V"\n'
    cache = gateway_config(tmp_path, "http://localhost:9/v1", lines).cache
    url = "milvus://root:secret@h"
    assert cache.vectors_url({"V": url}) == url
    with pytest.raises(SettingError, match=r"V must be a URL for cache\.vectors"):
        cache.vectors_url({"V": "redis://h"})


@pytest.mark.slow
def test_requests_go_on_without_the_database(
    endpoint: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.answers = [ok("42")]
    with running_postgres() as server:
        monkeypatch.setenv("CACHE", server.create_database())
        config = gateway_config(tmp_path / "a", endpoint.url, 'database_env = "CACHE"\n')
        with run_gateway(build(config, ENVIRONMENT)) as url:
            ask(url, "How many apples are in the bowl?")
            with KnowledgeBase.open(os.environ["CACHE"], None) as base:
                assert eventually(lambda: len(base) == 1)
            server.stop()
            for text in ("How many pears are in the bowl?", "How many plums are in the bowl?"):
                document, headers = ask(url, text)
                assert headers["x-bottega-demonstrations"] == "0"
                assert document["choices"][0]["message"]["content"] == "42"
            server.start()
            # An answer without examples is not repeated.
            _, headers = ask(url, "How many pears are in the bowl?")
            assert headers["x-bottega-cache"] == "augmented"
            _, headers = ask(url, "How many nuts are in the bowl?")
            assert headers["x-bottega-demonstrations"] == "1"
