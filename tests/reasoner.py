"""Scripted endpoint that reasons in the requested format and fails on demand."""

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
    """Endpoint whose replies depend only on the request and its seed; samples at a temperature
    differ. It gives reasons if the prompt contains "BECAUSE", and in a quarter of other replies.

    `answers` maps a question to its answer, and `format` formats the reply. The fraction `failing`
    of the requests fails every time, in one of four kinds. `answered` and `failed` count requests
    by body, `samples` counts completions.
    """

    def __init__(
        self, *, failing: float = 0.0, answers: Callable[[str], str] | None = None, format: str = ""
    ) -> None:
        self.failing = failing
        self.answers = answers
        self.format = format
        self.answered: Counter[bytes] = Counter()
        self.failed: Counter[bytes] = Counter()
        self.failure_kinds: Counter[str] = Counter()
        self.samples = self.prompt_tokens = 0
        self.order: list[bytes] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        payload = await request.read()
        body: Body = orjson.loads(payload)
        if hash_fraction(payload, "fails") < self.failing:
            kind = sorted(FAILURES)[hash_number(payload, "how") % len(FAILURES)]
            self.failed[payload] += 1
            self.failure_kinds[kind] += 1
            return await FAILURES[kind](request)
        texts = [self.reply(body, i) for i in range(body.get("n", 1))]
        response = await ok(*texts)(request)
        await asyncio.sleep(0)
        self.answered[payload] += 1
        self.order.append(payload)
        self.samples += len(texts)
        self.prompt_tokens += 10
        return response

    def reply(self, body: Body, number: int) -> str:
        question = storable_text(body["messages"][-1])
        if "**Answer:**" in question:  # appendix C.1: a rationale is requested
            return f"Way {number}: look, then count."
        sample = number if body.get("temperature") else 0
        random_number = hash_number(orjson.dumps([body["messages"], body.get("seed")]), sample)
        answer = self.answers(question) if self.answers else random_answer(question, random_number)
        if self.format:
            return self.format.format(answer)
        if "letter of the right choice" in question or "short phrase" in question:
            return f"Answer: {answer}"
        boxed = rf"\boxed{{{answer}}}" if "boxed" in question else answer
        reasons = "BECAUSE" in str(body["messages"][0]) + question
        rationale = (
            f" BECAUSE: It follows, reason {random_number % 7}."
            if reasons or random_number % 4 == 0
            else ""
        )
        return f"The answer is {boxed}.{rationale}"


def random_answer(question: str, random_number: int) -> str:
    letters = OPTION.findall(question)
    return letters[random_number % len(letters)] if letters else str(random_number % 9)


def storable_text(message: Body) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def hash_number(payload: bytes, salt: object) -> int:
    return int.from_bytes(hashlib.blake2b(payload + repr(salt).encode(), digest_size=6).digest())


def hash_fraction(payload: bytes, salt: object) -> float:
    return hash_number(payload, salt) / 2**48
