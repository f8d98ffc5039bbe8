"""Replay of stored master answers for exact repeats, also after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import FILE
from bottega.gateway.running.build import build
from bottega.gateway.running.server import GatewayServer
from tests.gateway.gateways import ENVIRONMENT, ask, gateway_config, run_gateway
from tests.server import Server, ok

QUESTION = "What is 3 + 4?"


@contextmanager
def gateway(endpoint: Server, folder: Path, more: str = "") -> Iterator[tuple[GatewayServer, str]]:
    gateway_server = build(gateway_config(folder, endpoint.url, more), ENVIRONMENT)
    with run_gateway(gateway_server) as url:
        endpoint.bodies.clear()
        yield gateway_server, url


def paid_calls(endpoint: Server) -> int:
    return len([body for body in endpoint.bodies if body])


@pytest.fixture
def filled_cache(endpoint: Server, tmp_path: Path) -> Path:
    """Return the folder of a stopped gateway that has stored one master answer."""
    endpoint.answers = [ok("seven", id="first", model="huge-2")]
    with gateway(endpoint, tmp_path) as (_, url):
        _, headers = ask(url, QUESTION)
    assert headers["x-bottega-route"] == "large" and headers["x-bottega-stored"]
    endpoint.answers = [ok("bought again")]
    return tmp_path


def test_exact_repeat_costs_nothing(endpoint: Server, filled_cache: Path) -> None:
    with gateway(endpoint, filled_cache) as (gateway_server, url):
        reply, headers = ask(url, QUESTION)
        again, more = ask(url, QUESTION, user="another", metadata={"a": "b"})
        with openai.OpenAI(base_url=url, api_key="x") as client:
            stream = client.chat.completions.create(
                model="bottega",
                messages=[{"role": "user", "content": QUESTION}],
                stream=True,
            )
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        gateway_server.ledger.flush()
        rows = gateway_server.ledger.read(
            "SELECT state, tier, cost_usd FROM gateway_entries ORDER BY time"
        )
    assert paid_calls(endpoint) == 0
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "seven"}
    assert (reply["model"], reply["choices"][0]["finish_reason"]) == ("huge-2", "stop")
    assert reply["choices"][0]["index"] == 0
    assert reply["usage"]["total_tokens"] == 0
    assert headers["x-bottega-cache"] == more["x-bottega-cache"] == "replayed"
    assert (headers["x-bottega-route"], headers["x-bottega-cost-usd"]) == ("large", "0.00000000")
    assert again["id"] == reply["id"]
    assert streamed == "seven"
    assert rows[-1] == ("replayed", "large", 0.0)


@pytest.mark.parametrize(
    "other",
    [
        {"text": "What is 3 + 4 ?"},
        {"model": "bottega/large"},
        {"model": "bottega:shots=0"},
        {"model": "bottega:namespace=team"},
        {"model": "bottega:no-replay"},
        {"temperature": 0.7},
        {"max_tokens": 5},
        {"stop": ["x"]},
        {"response_format": {"type": "json_object"}},
    ],
    ids=str,
)
def test_different_request_is_sent_upstream(
    endpoint: Server, filled_cache: Path, other: dict[str, Any]
) -> None:
    with gateway(endpoint, filled_cache) as (_, url):
        reply, headers = ask(url, **{"text": QUESTION, **other})
    assert paid_calls(endpoint) == 1
    assert reply["choices"][0]["message"]["content"] == "bought again"
    assert headers["x-bottega-cache"] != "replayed"


def test_instructions_and_earlier_turns_are_part_of_the_key(
    endpoint: Server, filled_cache: Path
) -> None:
    last = {"role": "user", "content": QUESTION}
    before = [
        [{"role": "system", "content": "Answer in French."}],
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
    ]
    with gateway(endpoint, filled_cache) as (_, url):
        for turns in before:
            _, headers = ask(url, QUESTION, messages=[*turns, last])
            assert headers["x-bottega-cache"] != "replayed"
    assert paid_calls(endpoint) == 2


def test_deleted_answer_is_not_replayed(endpoint: Server, filled_cache: Path) -> None:
    with gateway(endpoint, filled_cache) as (gateway_server, url):
        base = gateway_server.tenants.base("")  # type: ignore[attr-defined]
        base.delete([example.id for example in base])
        reply, _ = ask(url, QUESTION)
    assert reply["choices"][0]["message"]["content"] == "bought again"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "bought again"), (400, "bought again"), (600, "seven")]
)
def test_answers_older_than_replay_seconds_are_not_replayed(
    endpoint: Server, filled_cache: Path, seconds: int, text: str
) -> None:
    with_old_notes(filled_cache, 500.0)
    with gateway(endpoint, filled_cache, f"[replay]\nseconds = {seconds}\n") as (_, url):
        reply, _ = ask(url, QUESTION)
    assert reply["choices"][0]["message"]["content"] == text


def with_old_notes(folder: Path, age: float) -> None:
    ledger = Ledger(folder / FILE)
    for name, value in ledger.read(
        "SELECT name, value FROM gateway_notes WHERE name LIKE 'replay:%'"
    ):
        then, _, id = str(value).partition(" ")
        ledger._set_note(str(name), f"{float(then) - age} {id}")
    ledger.close()


def test_apprentice_answer_is_not_replayed(endpoint: Server, filled_cache: Path) -> None:
    endpoint.answers = [ok("by the apprentice")]
    with gateway(endpoint, filled_cache) as (_, url):
        _, headers = ask(url, "What is 5 + 5?")
    assert headers["x-bottega-route"] == "small"
    with gateway(endpoint, filled_cache) as (_, url):
        _, headers = ask(url, "What is 5 + 5?")
    assert headers["x-bottega-cache"] != "replayed"


def test_no_store_and_reasoning_leave_nothing_to_replay(endpoint: Server, tmp_path: Path) -> None:
    """A stored answer lacks the reasoning, so it differs from the original reply."""
    for model, text in (("bottega:no-store", "seven"), ("bottega", "<think>3, 4</think>seven")):
        endpoint.answers = [ok(text)]
        with gateway(endpoint, tmp_path) as (_, url):
            _, headers = ask(url, QUESTION, model=model)
            assert headers["x-bottega-route"] == "large"
        with gateway(endpoint, tmp_path) as (_, url):
            _, headers = ask(url, QUESTION, model=model)
            assert headers["x-bottega-cache"] != "replayed"


def test_abstention_is_not_stored(endpoint: Server, tmp_path: Path) -> None:
    endpoint.answers = [ok("Unknown.")]
    with gateway(endpoint, tmp_path) as (_, url):
        _, headers = ask(url, QUESTION)
    assert headers["x-bottega-route"] == "large"
    assert "x-bottega-stored" not in headers


def test_old_repeats_are_deleted(tmp_path: Path) -> None:
    now = [1000.0]
    ledger = Ledger(tmp_path / FILE, repeat_seconds=60.0, clock=lambda: now[0])
    ledger.set_repeat("key", "example")
    assert ledger.repeat("key") == (1000.0, "example")
    ledger.flush()
    assert ledger.repeat("key") == (1000.0, "example")
    ledger.set_gate("a", "nearest", "{}")
    now[0] += 61
    assert ledger.repeat("key") is None
    ledger.set_repeat("other", "example")
    ledger.flush()
    assert ledger.delete_old_repeats() == 1
    assert ledger.repeat("other") == (1061.0, "example")
    assert ledger.gate("a", "nearest") == "{}"
    ledger.close()
