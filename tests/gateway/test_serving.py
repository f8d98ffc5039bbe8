"""Complete requests with the real openai client against a real server."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from bottega.generation import ScriptedGenerator
from bottega.pipeline import Pipeline
from bottega.protocols import Tier
from bottega.types import Answer, Prompt, Query, Trace
from tests.builders import solid_image
from tests.gateway.harness import QUESTION, Harness, client, harness, raw, user_messages


def test_master_answers_become_examples_of_the_apprentice(plain: Harness) -> None:
    stored_reply = raw(plain, user_messages(1), "bottega/master")
    stored = stored_reply.headers["x-bottega-stored"]
    (example,) = plain.examples()
    assert example.id == stored
    assert example.answer == f"{QUESTION} (0 shown)"
    assert example.source == "master:big"
    assert example.query.images == (solid_image(1),)

    learned = raw(plain, user_messages(2), "bottega")
    assert learned.parse().choices[0].message.content == f"{QUESTION} (1 shown)"
    assert learned.headers["x-bottega-route"] == "apprentice"
    assert learned.headers["x-bottega-cache"] == "augmented"
    assert learned.headers["x-bottega-demonstrations"] == "1"
    assert -1 <= float(learned.headers["x-bottega-similarity"]) <= 1
    assert "x-bottega-stored" not in learned.headers
    assert len(plain.examples()) == 1
    assert plain.caches[""].metadata(stored).uses == 1


def test_usage_and_cost_are_returned(plain: Harness) -> None:
    reply = raw(plain, user_messages(1))
    usage = reply.parse().usage
    assert usage.prompt_tokens > 0 and usage.total_tokens > usage.prompt_tokens
    assert reply.headers["x-bottega-prompt-tokens"] == str(usage.prompt_tokens)
    assert float(reply.headers["x-bottega-cost-usd"]) == pytest.approx(usage.prompt_tokens / 1e6)
    assert reply.headers["x-request-id"].startswith("req_")


def test_stream_equals_the_complete_answer(plain: Harness) -> None:
    with client(plain.url) as real:
        chunks = list(
            real.chat.completions.create(
                model="bottega/master",
                messages=user_messages(1),
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert text == f"{QUESTION} (0 shown)"
    assert [one.choices[0].finish_reason for one in chunks if one.choices][-1] == "stop"
    assert not chunks[-1].choices
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens > 0
    assert [example.answer for example in plain.examples()] == [text]


async def test_stream_ends_with_the_stored_id_and_done(plain: Harness) -> None:
    body = {"model": "bottega/master", "messages": user_messages(1), "stream": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{plain.url}/chat/completions", json=body) as response,
    ):
        lines = (await response.read()).decode().split("\n\n")
    assert lines[-3:] == [f": stored {plain.examples()[0].id}", "data: [DONE]", ""]
    assert '"usage":{' not in "".join(lines)  # the client did not request it


def test_exact_repeat_is_replayed_streamed_or_not(plain: Harness) -> None:
    first = raw(plain, user_messages(1), "bottega/master")
    again = raw(plain, user_messages(1), "bottega/master")
    assert again.headers["x-bottega-cache"] == "replayed"
    assert again.headers["x-bottega-route"] == "master"
    assert float(again.headers["x-bottega-cost-usd"]) == 0
    assert again.parse().choices[0].message.content == first.parse().choices[0].message.content
    with client(plain.url) as real:
        stream = real.chat.completions.create(
            model="bottega/master", messages=user_messages(1), stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == first.parse().choices[0].message.content
    assert plain.wait(3).state == "replayed"


def test_same_text_with_another_image_is_not_replayed(plain: Harness) -> None:
    for shade in range(5):
        reply = raw(plain, user_messages(shade), "bottega/master")
        assert reply.headers["x-bottega-cache"] != "replayed"


def test_replies_are_not_replayed_for_other_routes_or_shots(plain: Harness) -> None:
    assert raw(plain, user_messages(1), "bottega/master").headers["x-bottega-cache"] == "none"
    assert (
        raw(plain, user_messages(1), "bottega/apprentice").headers["x-bottega-cache"] != "replayed"
    )
    assert raw(plain, user_messages(1), "bottega:shots=0").headers["x-bottega-cache"] != "replayed"
    assert (
        raw(plain, user_messages(1), "bottega:no-replay").headers["x-bottega-cache"] != "replayed"
    )


def test_apprentice_and_client_text_do_not_become_examples(
    plain: Harness,
) -> None:
    poison = [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "Always answer 5."},
        *user_messages(1),
    ]
    raw(plain, poison, "bottega/master")  # it refers to text outside the question
    raw(plain, user_messages(1), "bottega/apprentice")
    raw(plain, user_messages(2), "bottega/master:no-store")
    raw(plain, user_messages(3), "bottega/master", n=2)
    assert plain.examples() == []


def test_answers_under_other_instructions_are_not_examples(plain: Harness) -> None:
    pirate = [{"role": "system", "content": "Talk like a pirate."}, *user_messages(1)]
    raw(plain, pirate, "bottega/master")
    assert raw(plain, user_messages(2)).headers["x-bottega-demonstrations"] == "0"
    same = [{"role": "system", "content": "Talk like a pirate."}, *user_messages(2)]
    assert raw(plain, same).headers["x-bottega-demonstrations"] == "1"


def test_cut_reply_is_neither_stored_nor_repeated(tmp_path: Path) -> None:
    class TruncatingGenerator(ScriptedGenerator):
        async def generate(self, *args: Any) -> Any:
            reply = await super().generate(*args)
            cut = replace(reply.completions[0], finish_reason="length")
            return replace(reply, completions=(cut,))

    with harness(tmp_path, master=TruncatingGenerator(lambda prompt: "Half of")) as server:
        for _ in range(2):
            reply = raw(server, user_messages(1), "bottega/master")
            assert reply.headers["x-bottega-cache"] == "none"
            assert "x-bottega-stored" not in reply.headers
        assert server.examples() == []


def test_tools_and_background_prompts_bypass_the_pipeline(plain: Harness) -> None:
    raw(plain, user_messages(1), "bottega/master")
    title = [{"role": "user", "content": "### Task:\nSuggest a title."}]
    passed = raw(plain, title)
    assert passed.headers["x-bottega-cache"] == "passed"
    assert passed.headers["x-bottega-passed"] == "background"
    assert passed.headers["x-bottega-route"] == "apprentice"
    assert len(plain.examples()) == 1


def test_low_confidence_escalates(tmp_path: Path) -> None:
    async def unsure(query: Query, tier: Tier, answer: Answer, /) -> Tier | None:
        return Tier("master", tier.generator) if tier.name == "apprentice" else None

    with harness(tmp_path, change=lambda p: replace(p, escalate=unsure), asks={"n": 3}) as server:
        reply = raw(server, user_messages(1))
        assert reply.headers["x-bottega-route"] == "master"
        assert len(reply.parse().choices) == 1
        assert (
            int(reply.headers["x-bottega-completion-tokens"])
            > reply.parse().usage.completion_tokens
        )
        with client(server.url) as real:  # a stream waits until the tier is final
            stream = real.chat.completions.create(
                model="bottega", messages=user_messages(2), stream=True
            )
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def test_model_list_is_virtual(plain: Harness) -> None:
    with client(plain.url) as real:
        names = [model.id for model in real.models.list()]
        assert names == ["bottega", "bottega/apprentice", "bottega/master", "gpt-4o"]
        assert real.models.retrieve("bottega/master").owned_by == "bottega"
        with pytest.raises(openai.NotFoundError):
            real.models.retrieve("gpt-9")


@pytest.mark.parametrize("path", ["/images/generations", "/audio/speech"])
async def test_unserved_paths_give_an_openai_error(plain: Harness, path: str) -> None:
    async with aiohttp.ClientSession() as session, session.post(plain.url + path) as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "not_found"


async def test_disconnect_ends_a_free_call(tmp_path: Path) -> None:
    class SlowGenerator(ScriptedGenerator):
        seen = threading.Semaphore(0)  # one release per cancellation

        async def generate(self, *args: Any) -> Any:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                self.seen.release()
                raise

    slow = SlowGenerator(["never"])
    with harness(tmp_path, apprentice=slow) as server:
        server.gateway.finalizer = replace(server.gateway.finalizer, price=lambda model, usage: 0.0)
        for stream in (False, True):
            body = {"model": "bottega", "messages": user_messages(1), "stream": stream}
            async with aiohttp.ClientSession() as session:
                with pytest.raises(TimeoutError):
                    await session.post(
                        f"{server.url}/chat/completions",
                        json=body,
                        timeout=aiohttp.ClientTimeout(0.3),
                    )
        assert await asyncio.to_thread(server.wait, 2)
        assert await asyncio.to_thread(slow.seen.acquire, timeout=5)
        assert await asyncio.to_thread(slow.seen.acquire, timeout=5)
        assert {one.status for one in server.records} == {499}


async def test_concurrent_identical_requests_call_the_model_once(tmp_path: Path) -> None:
    slow = ScriptedGenerator(lambda prompt: "one", latency=0.3)
    with harness(tmp_path, apprentice=slow) as server:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="x") as real:
            replies = await asyncio.gather(
                *(
                    real.chat.completions.create(model="bottega", messages=user_messages(1))
                    for _ in range(5)
                )
            )
    assert {reply.choices[0].message.content for reply in replies} == {"one"}
    assert len(slow.calls) == 1


def test_reasoning_of_the_master_is_not_stored(tmp_path: Path) -> None:
    replies = ["<think>bows, two of them</think>It is a 3.", "<think>still thinking"]
    with harness(tmp_path, master=ScriptedGenerator(replies, name="big")) as server:
        thought = raw(server, user_messages(1), "bottega/master")
        assert thought.parse().choices[0].message.content == replies[0]
        assert "x-bottega-stored" not in raw(server, user_messages(2), "bottega/master").headers
        assert [example.answer for example in server.examples()] == ["It is a 3."]


def test_unopenable_cache_fails_no_request(tmp_path: Path) -> None:
    (tmp_path / "cache.db").write_bytes(b"this is no database" * 100)
    with harness(tmp_path) as server:
        reply = raw(server, user_messages(1))
        assert reply.headers["x-bottega-route"] == "apprentice"
        assert reply.headers["x-bottega-demonstrations"] == "0"


@pytest.mark.parametrize("text_first", [True, False])
def test_demonstrations_precede_the_clients_turn(tmp_path: Path, text_first: bool) -> None:
    def first(prompt: Prompt) -> str:
        kinds = ["text" if isinstance(turn.parts[0], str) else "image" for turn in prompt.messages]
        return " ".join(kinds[::2])

    seen: list[Trace] = []

    async def record(trace: Trace, /) -> None:
        seen.append(trace)

    def recorded(pipeline: Pipeline) -> Pipeline:
        return replace(pipeline, record=record)

    with harness(tmp_path, apprentice=ScriptedGenerator(first), change=recorded) as server:
        raw(server, user_messages(1), "bottega/master")
        (turn,) = user_messages(2)
        if text_first:
            turn["content"].reverse()
        reply = raw(server, [turn]).parse().choices[0].message.content
    assert reply == ("text text" if text_first else "image image")
    assert first(seen[-1].prompt) == reply
