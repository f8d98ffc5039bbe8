"""`bottega serve --check`: what it finds at the endpoints of the tiers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from tests.cli.conftest import Ran, Run
from tests.redis import RedisServer
from tests.server import ok, raw, refuse, reply, running, slowly

SECRET = "sk-0123456789abcdefghij"


@dataclass
class Provider:
    """Server of models with a list. `status` replaces the status of a path, and `reads` names the
    kinds of questions that its models read."""

    models: tuple[str, ...] = ("gpt-4.1", "gpt-4.1-mini", "whisper-1")
    aliases: tuple[str, ...] = ()
    reads: tuple[str, ...] = ("text", "image")
    key: str = ""
    list_answer: Any = None
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return await refuse(401, f"Incorrect API key provided: {SECRET}")(request)
        if request.path == "/v1/models":
            rows = [{"id": name, "object": "model"} for name in self.models]
            answer = self.list_answer or reply({"object": "list", "data": rows})
            return await answer(request)
        if request.path.startswith("/v1/models/"):
            name = request.path.removeprefix("/v1/models/")
            known = reply({"id": name, "object": "model"})
            return await (known if name in self.aliases else refuse(404))(request)
        body = orjson.loads(await request.read())
        self.asked.append(body)
        kind = "image" if "image_url" in orjson.dumps(body["messages"]).decode() else "text"
        if body["model"] not in (*self.models, *self.aliases):
            return await refuse(404, f"The model {body['model']} does not exist")(request)
        if kind not in self.reads:
            return await refuse(400, f"this model does not read {kind}s", "invalid")(request)
        return await ok("OK")(request)


@contextmanager
def provided(**how: Any) -> Iterator[tuple[str, Provider]]:
    with running() as server:
        provider = Provider(**how)
        server.answers = [provider]
        yield server.url, provider


def checked(
    run: Run, url: str, *options: object, model: str = "gpt-4.1", settings: str = "", more: str = ""
) -> Ran:
    Path("bottega.toml").write_text(
        f'[tiers.only]\nmodel = "openai:{model}"\nbase_url = "{url}"\nretries = 0\n{settings}\n'
        f'[cache]\nembed = "words"\n{more}'
    )
    return run("serve", "--check", *options)


def row(done: Ran, tier: str = "only") -> str:
    lines = done.out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("tier "))
    return " ".join(next(line for line in lines[start:] if line.startswith(tier)).split())


# For each server and model: what the table says; for a fault, words of the error and its hint.
FOUND: list[tuple[dict[str, Any], str, str, tuple[str, ...]]] = [
    ({}, "gpt-4.1", "up, lists gpt-4.1", ()),
    ({"models": ("llama3:latest",)}, "llama3", "up, lists llama3", ()),
    ({"models": ("models/gemini-flash",)}, "gemini-flash", "up, lists gemini-flash", ()),
    ({"models": ("openai/*",)}, "openai/gpt-4.1", "up, lists openai/gpt-4.1", ()),
    ({"aliases": ("gpt-latest",)}, "gpt-latest", "up, lists gpt-latest", ()),
    ({"list_answer": refuse(404)}, "any", "up, without a list of models", ()),
    ({"list_answer": refuse(405)}, "any", "up, without a list of models", ()),
    *(
        (
            {"list_answer": raw(body)},
            "any",
            "does not answer",
            ("tiers.only.base_url: ", "sent no list of models", "usually ends in /v1"),
        )
        for body in (b"<html>", b"null", b"[1, 2]", b'{"data": "abc"}', b"")
    ),
    (
        {"list_answer": reply({"error": {"message": "no", "code": "invalid_api_key"}})},
        "any",
        "answers with status 502",
        ("tiers.only: ", "no"),
    ),
    ({"models": ()}, "any", "up, does not list any", ("tiers.only.model: ", "0 models")),
    (
        {},
        "gpt-4.2-typo",
        "up, does not list gpt-4.2-typo",
        ("tiers.only.model: 'gpt-4.2-typo'", "similar: gpt-4.1", 'write model = "openai:gpt-4.1'),
    ),
    (
        {"key": "sk-other"},
        "gpt-4.1",
        "answers with status 401",
        (
            "tiers.only.api_key_env: ",
            "answered 401",
            'set api_key_env = "NAME" and export NAME=... with a key of this server',
        ),
    ),
    (
        {"list_answer": refuse(302)},
        "gpt-4.1",
        "answers with status 302",
        ("tiers.only.base_url: ", "set base_url to the address that it redirects to"),
    ),
    (
        {"list_answer": refuse(500, "on fire")},
        "gpt-4.1",
        "answers with status 500",
        ("tiers.only: ", "on fire", "the server's log"),
    ),
]


def test_https_at_a_plain_port_is_named(run: Run) -> None:
    with provided() as (url, _):
        done = checked(run, url.replace("http:", "https:"))
    assert done.code == 1
    assert "tiers.only.base_url: " in done.err and "write http://" in done.err
    assert "certificate" not in done.err and "start the server" not in done.err


@pytest.mark.parametrize(("how", "model", "found", "fault"), FOUND)
def test_the_model_is_looked_up_at_its_endpoint(
    run: Run, how: dict[str, Any], model: str, found: str, fault: tuple[str, ...]
) -> None:
    with provided(**how) as (url, provider):
        done = checked(run, url, model=model)
    assert row(done) == f"only {url} {found}"
    assert done.code == (1 if fault else 0), done.err
    assert all(words in done.err for words in fault) and SECRET not in done.err
    assert ("error:" in done.err) == bool(fault)
    assert not provider.asked  # free of charge


def test_a_dead_port_is_a_fault_unless_offline(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    done = checked(run, url, model="gpt-4.2-typo")
    assert (done.code, row(done)) == (1, f"only {url} does not answer")
    assert "tiers.only.base_url: " in done.err and "start the server" in done.err
    offline = checked(run, url, "--offline")
    assert offline.code == 0 and "does not answer" not in offline.out


PROBED: list[tuple[dict[str, Any], str, str, str, tuple[str, ...]]] = [
    ({}, "gpt-4.1", "", "up, lists gpt-4.1; answers the text; answers the image", ()),
    (
        {"list_answer": refuse(404)},
        "gpt-4.1",
        "",
        "up, without a list of models; answers the text; answers the image",
        (),
    ),
    (
        {"reads": ("text",)},
        "gpt-4.1",
        "",
        "up, lists gpt-4.1; answers the text; rejects the image",
        ("tiers.only.images: ", "does not read images", "images = 0"),
    ),
    (
        {"reads": ("text",)},
        "gpt-4.1",
        "images = 0",
        "up, lists gpt-4.1; answers the text; takes no images",
        (),
    ),
    (
        {"list_answer": refuse(404)},
        "gpt-4.2-typo",
        "",
        "up, without a list of models; answers with status 404",
        ("tiers.only.model: ", "The model gpt-4.2-typo does not exist"),
    ),
]


@pytest.mark.parametrize(("how", "model", "settings", "found", "fault"), PROBED)
def test_a_probe_sends_a_text_and_an_image(
    run: Run, how: dict[str, Any], model: str, settings: str, found: str, fault: tuple[str, ...]
) -> None:
    with provided(**how) as (url, provider):
        done = checked(run, url, "--probe", model=model, settings=settings)
    assert row(done) == f"only {url} {found}"
    assert done.code == (1 if fault else 0), done.err
    assert all(words in done.err for words in fault)
    assert all(body["max_tokens"] <= 16 for body in provider.asked)
    assert len(provider.asked) == (2 if "image (" in found or "the image" in found else 1)


def test_a_model_that_answers_may_be_missing_from_the_list(run: Run) -> None:
    with provided(models=("a",), aliases=()) as (url, provider):
        provider.models = ("a", "b")
        provider.list_answer = reply({"data": [{"id": "a"}]})
        assert checked(run, url, model="b").code == 1
        done = checked(run, url, "--probe", model="b")
    assert done.code == 0 and "does not list b; answers the text" in row(done)


def test_all_tiers_are_checked_and_every_fault_is_named(run: Run) -> None:
    with provided() as (url, _), provided(key="sk-other") as (locked, _):
        Path("bottega.toml").write_text(
            f'[tiers.small]\nmodel = "openai:typo"\nbase_url = "{url}"\n'
            f'drop_fields = ["seed", "user"]\nusd_per_hour = 1.5\n'
            f'[tiers.large]\nmodel = "openai:gpt-4.1"\nbase_url = "{locked}"\n'
            '[tiers.local]\nmodel = "bundled"\n'
            '[cache]\nembed = "words"\n[shadow]\nrate = 0.1\njudge = "large"\n'
        )
        done = run("serve", "--check")
    assert done.code == 1
    assert row(done, "large") == f"large (judge) {locked} answers with status 401"
    assert row(done, "local") == "local this process loads at the start"
    assert "tiers.small.model: " in done.err and "tiers.large.api_key_env: " in done.err
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert {"drop_fields seed, user", "usd_per_hour 1.5 USD per hour for its servers"} <= {*lines}


def test_a_silent_server_is_a_fault(run: Run) -> None:
    with provided(list_answer=slowly(ok("late"), 30)) as (url, _):
        done = checked(run, url, settings="timeout = 0.2")
    assert (done.code, row(done)) == (1, f"only {url} does not answer")
    assert "tiers.only.base_url: " in done.err


@pytest.mark.parametrize("more", [["--probe"], ["--offline"], ["--check", "--probe", "--offline"]])
def test_options_of_a_check_need_one(run: Run, more: list[str]) -> None:
    done = run("serve", "--demo", *more)
    assert (done.code, "exclude each other" in done.err) == (2, True)


def test_servers_of_the_state_are_in_the_table(
    run: Run, database: str, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DB", database)
    state = f"[state]\ndatabase_env = 'DB'\nredis = '{redis.url}'"
    with provided() as (url, _):
        done = checked(run, url, settings=state)
        assert (done.code, "bottega keys add NAME" in done.err) == (2, True)
        assert row(done, "(redis)") == f"(redis) {redis.url} up"
        assert row(done, "(database)").endswith(" up")
        assert "required, but none exist: bottega keys add NAME" in done.out
        monkeypatch.setenv("DB", "postgresql://any@127.0.0.1:9/none")
        cache = "database_env = 'DB'\n"  # the last section of the file
        offline = checked(run, url, "--offline", settings=state, more=cache)
    assert offline.code == 0 and "were not read" in offline.out
