"""A scripted endpoint that reasons: it answers in the format asked for, and fails on demand."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

from tests.server import Answer, ok, raw, refuse, slowly

OPTION = re.compile(r"^\(([A-Z])\) ", re.MULTILINE)
FAILURES: dict[str, Answer] = {
    "500": refuse(500, "overloaded"),
    "timeout": slowly(ok("late"), 30.0),
    "garbage": raw(b"<html>Bad gateway</html>", 200),
    "cut": raw(b'{"choices": [{"message"', 200, "application/json"),
}
Body = dict[str, Any]


class Reasoner:
    """What it says follows from what is asked, its seed included, and from nothing else; samples
    at a temperature differ. Where "BECAUSE" is asked for it gives reasons, and in every fourth of
    the other replies.

    `answers` says what it answers to a question, and `format` how.

    A share of the requests, `failing`, fails whenever it is sent, in every one of four ways.
    `answered` and `failed` count the requests by their bodies, `samples` all completions.
    """

    def __init__(
        self, *, failing: float = 0.0, answers: Callable[[str], str] | None = None, format: str = ""
    ) -> None:
        self.failing = failing
        self.answers = answers
        self.format = format
        self.answered: Counter[bytes] = Counter()
        self.failed: Counter[bytes] = Counter()
        self.ways: Counter[str] = Counter()
        self.samples = self.prompt_tokens = 0
        self.order: list[bytes] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        payload = await request.read()
        body: Body = orjson.loads(payload)
        if chance(payload, "fails") < self.failing:
            way = sorted(FAILURES)[draw(payload, "how") % len(FAILURES)]
            self.failed[payload] += 1
            self.ways[way] += 1
            return await FAILURES[way](request)
        texts = [self.said(body, i) for i in range(body.get("n", 1))]
        response = await ok(*texts)(request)
        await asyncio.sleep(0)
        self.answered[payload] += 1
        self.order.append(payload)
        self.samples += len(texts)
        self.prompt_tokens += 10
        return response

    def said(self, body: Body, number: int) -> str:
        asked = text_of(body["messages"][-1])
        if "**Answer:**" in asked:  # appendix C.1: how does one get there?
            return f"Way {number}: look, then count."
        sample = number if body.get("temperature") else 0
        drawn = draw(orjson.dumps([body["messages"], body.get("seed")]), sample)
        answer = self.answers(asked) if self.answers else guess(asked, drawn)
        if self.format:
            return self.format.format(answer)
        if "letter of the right choice" in asked or "short phrase" in asked:
            return f"Answer: {answer}"
        boxed = rf"\boxed{{{answer}}}" if "boxed" in asked else answer
        wanted = "BECAUSE" in str(body["messages"][0]) + asked
        why = f" BECAUSE: It follows, reason {drawn % 7}." if wanted or drawn % 4 == 0 else ""
        return f"The answer is {boxed}.{why}"


def guess(asked: str, drawn: int) -> str:
    letters = OPTION.findall(asked)
    return letters[drawn % len(letters)] if letters else str(drawn % 9)


def text_of(message: Body) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def draw(payload: bytes, salt: object) -> int:
    return int.from_bytes(hashlib.blake2b(payload + repr(salt).encode(), digest_size=6).digest())


def chance(payload: bytes, salt: object) -> float:
    return draw(payload, salt) / 2**48
