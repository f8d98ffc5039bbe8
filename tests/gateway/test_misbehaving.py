"""The bad upstream is itself as bad as it says, and right wherever it says something."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import aiohttp
import orjson
import pytest
from aiohttp.test_utils import TestServer

from tests.gateway.misbehaving import PLAIN, RARE, STREAMED, Misbehaving, Trick
from tests.gateway.right import Spoken, asked, digest, heard, is_beginning

QUESTION = "What is painted on the left panel?"
RIGHT = {"slow", "wrong type", "not a stream", "never done", "odd chunks"}


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as one:
        yield one


async def said(session: aiohttp.ClientSession, name: str, trick: Trick, streamed: bool) -> str:
    """All text that one trick gives away."""
    upstream = Misbehaving(well=0)
    upstream.trick = lambda number, *, streamed: (name, trick)  # type: ignore[method-assign]
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
    said = choice.get("delta") or choice.get("message") or {}
    return said.get("content") or ""


@pytest.mark.parametrize("name", sorted(PLAIN.keys() - RARE))
async def test_a_plain_reply_is_right_or_a_beginning(
    session: aiohttp.ClientSession, name: str
) -> None:
    text = await said(session, name, PLAIN[name], streamed=False)
    assert (heard(text) is not None) == (name in RIGHT)
    assert is_beginning(text, digest(QUESTION))


@pytest.mark.parametrize("name", sorted(STREAMED.keys() - RARE))
async def test_a_stream_is_right_or_a_beginning(session: aiohttp.ClientSession, name: str) -> None:
    text = await said(session, name, STREAMED[name], streamed=True)
    assert (heard(text) is not None) == (name in RIGHT)
    assert is_beginning(text, digest(QUESTION))


def test_the_schedule_follows_from_the_seed() -> None:
    def names(seed: int) -> list[str]:
        upstream = Misbehaving(seed)
        return [upstream.trick(number, streamed=number % 2 == 0)[0] for number in range(1000)]

    assert names(1) == names(1) != names(2)
    assert {*names(1)} == {"well", *PLAIN, *STREAMED}
    assert 0.5 < names(1).count("well") / 1000 < 0.7


def test_another_image_another_answer() -> None:
    def turn(image: str) -> Mapping[str, object]:
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
        return {"role": "user", "content": [picture, {"type": "text", "text": QUESTION}]}

    first, second = turn("AAAA"), turn("AAAB")
    assert asked([first]) == digest(QUESTION, [b"\0\0\0"]) != asked([second])
    shown: list[Mapping[str, object]] = [second, {"role": "assistant", "content": "before"}, first]
    assert asked(shown) == asked([first])


def test_who_heard_less_or_something_else_knows_it() -> None:
    spoken = Spoken(digest(QUESTION), "master", 7)
    assert heard(spoken.text) == spoken
    assert heard(spoken.text[:-1]) is None
    assert heard(spoken.text + spoken.text) is None
    assert heard(spoken.text.replace("reply 7", "reply 8")) is None
    for end in range(len(spoken.text)):
        assert is_beginning(spoken.text[:end], spoken.question)
    assert not is_beginning(spoken.text[:40], digest("Another question"))
    assert not is_beginning(spoken.text[:60] + "!", spoken.question)
