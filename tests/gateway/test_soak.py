"""Checks of the soak test: wrong replies and lost entries."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from benchmarks.soak import Soak
from benchmarks.soak_clients import Client, Question, Reply, ReplyLog, StoredAnswer, TenantKey
from benchmarks.soak_mixed import SHORTEST, MemorySample, MixedReport, MixedSoak
from tests.gateway.marked_replies import MarkedReply

QUESTION, OTHER = Question(3, image=5), Question(3, image=6)
LARGE = MarkedReply(QUESTION.digest, "large", 7).text
FOREIGN = MarkedReply(OTHER.digest, "large", 7).text
SMALL = MarkedReply(QUESTION.digest, "small", 8).text
HIT = {"x-bottega-cache": "replayed"}


def client(namespace: str = "red", log: ReplyLog | None = None) -> Client:
    asker = TenantKey("sk-x", namespace)
    return Client("", asker, log or ReplyLog(), random.Random(0), 10, asyncio.Event())


def reply_problem(reply: Reply, model: str = "bottega") -> str | None:
    return client().reply_problem(QUESTION, {"model": model}, reply)


@pytest.mark.parametrize(
    "reply",
    [
        Reply({}, LARGE, "stop", whole=True),
        Reply({}, LARGE, "stop", whole=True, stored="a"),
        Reply(HIT, SMALL, "stop", whole=True),
        Reply({}, LARGE[:20], "length", whole=True),
        Reply({}, LARGE[:40], failed=True),
        Reply({}, "", "stop", whole=True),
    ],
)
def test_valid_replies_have_no_problem(reply: Reply) -> None:
    assert reply_problem(reply) is None


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (
            Reply({}, MarkedReply(OTHER.digest, "large", 7).text, "stop", whole=True),
            "this question",
        ),
        (Reply({}, LARGE + LARGE, "stop", whole=True), "this question"),
        (Reply({}, LARGE[:-1], "stop", whole=True), "a part"),
        (Reply({}, LARGE[:40]), "without an end marker"),
        (Reply({}, LARGE, whole=True), "no finish_reason"),
        (Reply({}, LARGE[:40], failed=True, stored="a"), "despite a failure"),
        (Reply(HIT, LARGE[:40], "length", whole=True), "although incomplete"),
        (Reply({}, LARGE[:40], "length", whole=True, stored="a"), "although incomplete"),
        (Reply({}, SMALL, "stop", whole=True, stored="a"), "not the master's"),
    ],
)
def test_invalid_replies_are_reported(reply: Reply, why: str) -> None:
    assert why in (reply_problem(reply) or "nothing")


def test_reply_from_another_tier_is_reported() -> None:
    reply = Reply({}, SMALL, "stop", whole=True)
    assert reply_problem(reply, "bottega/apprentice") is None
    assert reply_problem(reply, "bottega/master") == "another tier than the requested one"


def test_reply_of_another_namespace_is_reported() -> None:
    log, reply = ReplyLog(), Reply({}, LARGE, "stop", whole=True)
    assert client("red", log).reply_problem(QUESTION, {"model": "bottega"}, reply) is None
    assert client("red", log).reply_problem(QUESTION, {"model": "bottega"}, reply) is None
    why = client("blue", log).reply_problem(QUESTION, {"model": "bottega"}, reply)
    assert why == "a reply of namespace red"


@pytest.mark.parametrize(
    ("there", "lost"),
    [
        (["second"], False),
        (["unsaid"], False),  # the process died before it replied
        (["first"], True),  # sent after the reply to the first
        (["beside"], False),  # sent together with the second
        ([], True),
    ],
)
def test_lost_entries_are_detected(there: list[str], lost: bool) -> None:
    kept = {
        "first": StoredAnswer(0, 1),
        "second": StoredAnswer(2, 4),
        "beside": StoredAnswer(1.5, 3),
    }
    log = ReplyLog(kept={("red", "q"): kept})
    assert bool(log.lost("red", {"q": there})) == lost
    assert not log.lost("blue", {})


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_soak_of_twenty_seconds_has_no_faults(tmp_path: Path) -> None:
    report = await Soak(tmp_path, concurrency=32).run(20, kills=2)
    assert report.faults() == []
    assert report.kills == 2
    assert report.log.counts["right"] > 200
    assert report.entries > 50


def mixed_report(late: int, warm: tuple[int, int], full: int, seconds: float) -> MixedReport:
    """Return a report whose memory is 100 bytes at first, and whose only cache fills as given."""
    samples = [MemorySample(second, 100) for second in range(int(seconds / 2))]
    samples += [MemorySample(second, late) for second in range(int(seconds / 2), int(seconds))]
    size, bound = warm
    return MixedReport(
        seconds, samples=samples, warm={"cache": warm}, full={"cache": (size + full, bound)}
    )


@pytest.mark.parametrize(
    ("late", "warm", "added", "seconds", "fault"),
    [
        (105, (90, 100), 10, SHORTEST, None),
        (106, (90, 100), 10, SHORTEST, "memory is 1.060"),
        (95, (89, 100), 11, SHORTEST, "not filled early: cache"),
        (100, (20, 100), 1, SHORTEST, None),  # smaller than its bound, but it does not grow
        (100, (20, -1), 2, SHORTEST, "not filled early: cache"),  # without a bound
        (200, (0, 100), 50, SHORTEST - 1, None),  # too short to say
    ],
)
def test_growing_memory_is_reported(
    late: int, warm: tuple[int, int], added: int, seconds: float, fault: str | None
) -> None:
    report = mixed_report(late, warm, added, seconds)
    found = [one for one in report.faults() if "the soak says nothing" not in one]
    assert [one.startswith(fault or "none") for one in found] == ([] if fault is None else [True])


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_mixed_soak_of_twenty_seconds_loses_nothing(tmp_path: Path) -> None:
    report = await MixedSoak(tmp_path, concurrency=8).run(20, old_requests=1_000)
    faults = [one for one in report.faults() if "the soak says nothing" not in one]
    assert faults == []  # a busy machine may not reach each endpoint in this time
    assert len(report.outcomes.requests) > 50
    assert report.compared_costs > 20
