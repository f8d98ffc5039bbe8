"""Faults of the faulty upstream, and the correctness of its texts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import aiohttp
import orjson
import pytest
from aiohttp.test_utils import TestServer

from tests.gateway.faulty_upstream import PLAIN, RARE, STREAMED, Fault, FaultyUpstream
from tests.gateway.marked_replies import MarkedReply, digest, is_start, parse_reply, question_digest

QUESTION = "What is painted on the left panel?"
CORRECT = {"slow", "wrong type", "not a stream", "never done", "odd chunks"}


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as one:
        yield one


async def sent_text(session: aiohttp.ClientSession, name: str, fault: Fault, streamed: bool) -> str:
    """Return all text that one fault sends."""
    upstream = FaultyUpstream(correct=0)
    upstream.fault = lambda number, *, streamed: (name, fault)  # type: ignore[method-assign]
    turns = [{"role": "user", "content": QUESTION}]
    async with TestServer(upstream.app()) as server:
        url = server.make_url("/v1/chat/completions")
        body = {"model": "master", "messages": turns, "stream": streamed}
        raw = b""
        try:
            async with session.post(url, json=body) as reply:
                async for piece in reply.content.iter_any():
                    raw += piece
        except aiohttp.ClientError:
            pass
    return "".join(map(content, raw.replace(b"data: ", b"").splitlines()))


def content(line: bytes) -> str:
    try:
        [choice] = orjson.loads(line)["choices"]
    except (ValueError, TypeError, KeyError):
        return ""
    sent_text = choice.get("delta") or choice.get("message") or {}
    return sent_text.get("content") or ""


@pytest.mark.parametrize("name", sorted(PLAIN.keys() - RARE))
async def test_complete_replies_are_correct_or_a_start(
    session: aiohttp.ClientSession, name: str
) -> None:
    text = await sent_text(session, name, PLAIN[name], streamed=False)
    assert (parse_reply(text) is not None) == (name in CORRECT)
    assert is_start(text, digest(QUESTION))


@pytest.mark.parametrize("name", sorted(STREAMED.keys() - RARE))
async def test_streams_are_correct_or_a_start(session: aiohttp.ClientSession, name: str) -> None:
    text = await sent_text(session, name, STREAMED[name], streamed=True)
    assert (parse_reply(text) is not None) == (name in CORRECT)
    assert is_start(text, digest(QUESTION))


def test_seed_decides_the_schedule() -> None:
    def names(seed: int) -> list[str]:
        upstream = FaultyUpstream(seed)
        return [upstream.fault(number, streamed=number % 2 == 0)[0] for number in range(1000)]

    assert names(1) == names(1) != names(2)
    assert {*names(1)} == {"correct", *PLAIN, *STREAMED}
    assert 0.5 < names(1).count("correct") / 1000 < 0.7


def test_other_image_gives_another_digest() -> None:
    def turn(image: str) -> Mapping[str, object]:
        image_part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
        return {"role": "user", "content": [image_part, {"type": "text", "text": QUESTION}]}

    first, second = turn("AAAA"), turn("AAAB")
    assert question_digest([first]) == digest(QUESTION, [b"\0\0\0"]) != question_digest([second])
    shown: list[Mapping[str, object]] = [second, {"role": "assistant", "content": "before"}, first]
    assert question_digest(shown) == question_digest([first])


def test_incomplete_and_other_replies_are_detected() -> None:
    marked = MarkedReply(digest(QUESTION), "master", 7)
    assert parse_reply(marked.text) == marked
    assert parse_reply(marked.text[:-1]) is None
    assert parse_reply(marked.text + marked.text) is None
    assert parse_reply(marked.text.replace("reply 7", "reply 8")) is None
    for end in range(len(marked.text)):
        assert is_start(marked.text[:end], marked.question)
    assert not is_start(marked.text[:40], digest("Another question"))
    assert not is_start(marked.text[:60] + "!", marked.question)
