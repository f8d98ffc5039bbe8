"""Reasoning before answers: instructed, stored as rationale, and hidden from the client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from bottega import KnowledgeBase, Query, Tier, cache_of_thought
from bottega.gateway.running.build import build, build_for_pipeline
from bottega.gateway.running.server import GatewayServer
from bottega.gateway.running.tiers import config_of
from bottega.generation import ScriptedGenerator
from bottega.pipeline import FixedRouter
from bottega.prompting.turns import ASK_REASONING
from bottega.protocols import Router
from tests.builders import solid_image
from tests.gateway.gateways import ENVIRONMENT, ask, gateway_config, run_gateway
from tests.gateway.upstreams import chunk, events, lines
from tests.knowledge.doubles import SeededEmbedder
from tests.server import Server, ok

REASONED = "Three and four\nmake seven.\nAnswer: seven"
USAGE = {"prompt_tokens": 30, "completion_tokens": 9, "total_tokens": 39}


@contextmanager
def gateway(endpoint: Server, folder: Path, more: str = "") -> Iterator[tuple[GatewayServer, str]]:
    config = gateway_config(folder, endpoint.url, f"reasoning = true\n{more}")
    gateway_server = build(config, ENVIRONMENT)
    with run_gateway(gateway_server) as url:
        endpoint.bodies.clear()
        yield gateway_server, url


def stored(gateway_server: GatewayServer) -> list[tuple[str, str | None]]:
    base = gateway_server.tenants.base("")  # type: ignore[attr-defined]
    return [(one.answer, one.rationale) for one in base]


def content(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["message"]["content"])


def test_client_gets_the_answer_and_the_cache_its_reasoning(
    endpoint: Server, tmp_path: Path
) -> None:
    endpoint.answers = [ok(REASONED)]
    with gateway(endpoint, tmp_path) as (gateway_server, url):
        reply, headers = ask(url, "What is 3 + 4?")
        repeated, more = ask(url, "What is 3 + 4?")
        endpoint.answers = [ok("Two and two.\nAnswer: four")]
        other, routed = ask(url, "What is 2 + 2?")
        kept = stored(gateway_server)
    assert content(reply) == content(repeated) == "seven"
    assert (headers["x-bottega-route"], more["x-bottega-cache"]) == ("large", "replayed")
    assert kept == [("seven", "Three and four\nmake seven.")]
    assert reply["usage"]["completion_tokens"] == 2  # of the whole reply
    first, second = endpoint.bodies
    assert first["messages"][-1]["content"] == f"What is 3 + 4?\n{ASK_REASONING}"
    # The apprentice gets the same instruction, and the reasoning in its demonstration.
    assert routed["x-bottega-route"] == "small" and content(other) == "four"
    assert second["messages"][0] == {"role": "user", "content": "What is 3 + 4?"}
    assert second["messages"][1] == {"role": "assistant", "content": REASONED}
    assert second["messages"][2]["content"].endswith(ASK_REASONING)


def test_stream_contains_the_answer_alone(endpoint: Server, tmp_path: Path) -> None:
    pieces = ["Three and", " four\nmake seven.", "\nAns", "wer: sev", "en"]
    usage = {**chunk(), "choices": [], "usage": USAGE}
    endpoint.answers = [events(lines(*map(chunk, pieces), chunk(finish="stop"), usage))]
    with gateway(endpoint, tmp_path) as (gateway_server, url):
        with openai.OpenAI(base_url=url, api_key="x") as client:
            stream = client.chat.completions.create(
                model="bottega",
                messages=[{"role": "user", "content": "What is 3 + 4?"}],
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = list(stream)
        reply, headers = ask(url, "What is 3 + 4?")
        kept = stored(gateway_server)
        gateway_server.ledger.flush()
        [row, _] = gateway_server.ledger.read(
            "SELECT completion_tokens, cost_usd FROM gateway_entries ORDER BY time"
        )
    texts = [one.choices[0].delta.content or "" for one in chunks if one.choices]
    assert "".join(texts) == "seven"
    assert [one.choices[0].finish_reason for one in chunks if one.choices][-1] == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 9
    assert row == (9, pytest.approx(39 * 10e-6))
    assert kept == [("seven", "Three and four\nmake seven.")]
    assert (content(reply), headers["x-bottega-cache"]) == ("seven", "replayed")


def test_cut_stream_is_an_error_and_not_stored(endpoint: Server, tmp_path: Path) -> None:
    endpoint.answers = [events(lines(chunk("Three"), done=False))]
    with gateway(endpoint, tmp_path) as (gateway_server, url):
        with (
            openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client,
            pytest.raises(openai.APIError),
        ):
            list(
                client.chat.completions.create(
                    model="bottega",
                    messages=[{"role": "user", "content": "What is 3 + 4?"}],
                    stream=True,
                )
            )
        assert stored(gateway_server) == []


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_object"}},
        {"max_tokens": 16},
        {"n": 2},
        {"logprobs": True},
        {"stop": ["\n"]},
    ],
    ids=str,
)
def test_requests_for_other_forms_get_no_instruction(
    endpoint: Server, tmp_path: Path, more: dict[str, Any]
) -> None:
    texts = [REASONED] * more.get("n", 1)
    endpoint.answers = [ok(*texts)]
    with gateway(endpoint, tmp_path) as (_, url):
        reply, _ = ask(url, "What is 3 + 4?", **more)
    assert content(reply) == REASONED
    assert endpoint.bodies[0]["messages"][-1]["content"] == "What is 3 + 4?"


QUIZ = "Two questions.\nAnswer:\nWhat is 1?\nAnswer: A\nWhat is 2?\nAnswer: B"


@pytest.mark.parametrize("text", ["seven", "I think\nthat it is seven", QUIZ])
def test_reply_without_reasoning_is_unchanged(endpoint: Server, tmp_path: Path, text: str) -> None:
    endpoint.answers = [ok(text)]
    with gateway(endpoint, tmp_path) as (gateway_server, url):
        reply, _ = ask(url, "What is 3 + 4?")
        assert stored(gateway_server) == [(text, None)]
    assert content(reply) == text


@pytest.mark.parametrize(
    ("text", "answer", "rationale"),
    [
        ("I reason.\n**Answer:** red", "red", "I reason."),
        ("I reason.\n**Answer: red**", "red", "I reason."),
        ("Answer: red", "red", None),
        ("<think>Secret: Answer: blue</think>\nShort.\nAnswer: red", "red", "Short."),
        ("I reason.\nAnswer: red\nAnswer: red", "red", "I reason."),
    ],
)
def test_answer_is_separated_from_its_reasoning(
    endpoint: Server, tmp_path: Path, text: str, answer: str, rationale: str | None
) -> None:
    endpoint.answers = [ok(text)]
    with gateway(endpoint, tmp_path) as (gateway_server, url):
        reply, _ = ask(url, "What colour is it?")
        assert stored(gateway_server) == [(answer, rationale)]
    assert content(reply) == answer


def test_client_that_leaves_pays_for_the_hidden_text(endpoint: Server, tmp_path: Path) -> None:
    """A second without an answer is 50 tokens at the usual speed, but three words came."""
    pieces = [lines(chunk(word), done=False) for word in ("Three", " and", " four")]
    with gateway(endpoint, tmp_path) as (gateway_server, url):
        endpoint.answers = [events(*pieces, 30.0)]
        with (
            openai.OpenAI(base_url=url, api_key="x", max_retries=0, timeout=1.0) as client,
            pytest.raises(openai.APITimeoutError),
        ):
            client.chat.completions.create(
                model="bottega",
                messages=[{"role": "user", "content": "What is 3 + 4?"}],
                stream=True,
            )
        end = time.monotonic() + 20
        rows: list[Any] = []
        while not rows:
            assert time.monotonic() < end
            gateway_server.ledger.flush()
            rows = gateway_server.ledger.read("SELECT completion_tokens FROM gateway_entries")
    assert 1 <= rows[0][0] <= 20


def test_no_instruction_by_default(endpoint: Server, tmp_path: Path) -> None:
    endpoint.answers = [ok(REASONED)]
    gateway_server = build(gateway_config(tmp_path, endpoint.url), ENVIRONMENT)
    with run_gateway(gateway_server) as url:
        reply, _ = ask(url, "What is 3 + 4?")
    assert content(reply) == REASONED
    assert not any(ASK_REASONING in str(body) for body in endpoint.bodies)


def test_served_pipeline_answers_like_the_python_pipeline(tmp_path: Path) -> None:
    """Both store the reasoning of the master and return its answer alone."""
    cache = KnowledgeBase.open(":memory:", SeededEmbedder())
    reasoned = ScriptedGenerator(lambda prompt: "It has fur.\nAnswer: cat", name="huge")

    def to_master(tiers: Sequence[Tier]) -> Router:
        return FixedRouter(tiers[-1])

    pipeline = cache_of_thought(
        cache, master=reasoned, apprentice=reasoned, route=to_master, labels=("cat", "dog")
    )
    own = asyncio.run(pipeline.answer(Query("What is it?", (solid_image(1),))))
    config = config_of(pipeline, "m:p").override(host=None, port=None, data=tmp_path / "d")
    images = {"type": "image_url", "image_url": {"url": solid_image(2).data_url}}
    turn = {"role": "user", "content": [images, {"type": "text", "text": "What is it?"}]}
    with run_gateway(build_for_pipeline(pipeline, config)) as url:
        reply, _ = ask(url, "", messages=[turn])
        with openai.OpenAI(base_url=url, api_key="x") as client:
            stream = client.chat.completions.create(
                model="bottega:no-replay",
                messages=[turn],  # type: ignore[list-item]
                stream=True,
            )
            parts = [one.model_dump()["choices"][0]["delta"]["content"] or "" for one in stream]  # type: ignore[union-attr]
    assert own.text == content(reply) == "".join(parts) == "cat"
    first, second = cache
    assert (first.answer, first.rationale) == (second.answer, second.rationale)
    assert second.rationale == "It has fur."
    cache.close()
