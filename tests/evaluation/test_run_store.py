from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from bottega.errors import EndpointTimeoutError, RejectedError, SettingError, StoreError
from bottega.evaluation.benchmark import Benchmark, fingerprint
from bottega.evaluation.config import RunConfig
from bottega.evaluation.metrics.open_answers import vqa_accuracy
from bottega.evaluation.outcomes import Method, Outcome, ScoredAnswer
from bottega.evaluation.report.runs import read_run
from bottega.evaluation.runs.run_store import FILE, RunStore
from bottega.evaluation.runs.runner import RunState, evaluate
from bottega.types import Answer, Completion, Example, Prompt, Query, Reply, Trace
from tests.evaluation.test_runner import BENCHMARK, ITEMS, always_a

SETTINGS = {"model": "m", "seed": 0}


def open_store(folder: Path, **settings: object) -> closing[RunStore]:
    return closing(RunStore.open(folder, SETTINGS | settings, ITEMS))


def indices(scored: list[ScoredAnswer]) -> list[int]:
    return [one.index for one in scored]


async def test_answered_items_are_not_requested_again(tmp_path: Path) -> None:
    requested: list[Query] = []

    async def limited(query: Query) -> Outcome:
        requested.append(query)
        if len(requested) > 4:
            raise RejectedError("bad key", status=401)
        return await always_a(query)

    with open_store(tmp_path) as ledger, pytest.raises(RejectedError):
        await evaluate(
            BENCHMARK, Method("m", 1, limited), RunConfig(concurrency=1), RunState(ledger)
        )
    with open_store(tmp_path) as ledger:
        again = Method("m", 1, always_a)
        result, scored = await evaluate(BENCHMARK, again, state=RunState(ledger))
        assert indices(scored) == list(range(10))
        assert ledger.failures() == []
    reference_run, expected = await evaluate(BENCHMARK, again)
    assert replace(result, seconds=0) == replace(reference_run, seconds=0)
    assert scored == expected


async def test_failed_items_are_requested_again(tmp_path: Path) -> None:
    async def failing(query: Query) -> Outcome:
        if query == ITEMS[3].query:
            raise EndpointTimeoutError("too slow")
        return await always_a(query)

    with open_store(tmp_path) as ledger:
        result, _ = await evaluate(BENCHMARK, Method("m", 1, failing), state=RunState(ledger))
        assert (result.n, result.failed) == (9, 1)
        [failure] = ledger.failures()
        assert (failure.index, failure.error) == (3, "too slow")
    requested: list[Query] = []

    async def recording(query: Query) -> Outcome:
        requested.append(query)
        return await always_a(query)

    with open_store(tmp_path) as ledger:
        result, _ = await evaluate(BENCHMARK, Method("m", 1, recording), state=RunState(ledger))
        assert (result.n, result.failed, ledger.failures()) == (10, 0, [])
    assert requested == [ITEMS[3].query]


async def test_answers_are_stored_by_method_and_shots(tmp_path: Path) -> None:
    with open_store(tmp_path) as ledger:
        await evaluate(BENCHMARK, Method("m", 1, always_a), state=RunState(ledger))
        for other in (Method("m", 2, always_a), Method("n", 1, always_a)):
            assert ledger.answered(other.key, ITEMS) == {}


async def test_lone_surrogate_in_a_reply_is_stored(tmp_path: Path) -> None:
    async def surrogate_answer(query: Query) -> Outcome:
        return Outcome(Answer("\ud800a", labels=("\ud800a",)))

    with open_store(tmp_path) as ledger:
        result, _ = await evaluate(
            BENCHMARK, Method("m", 1, surrogate_answer), state=RunState(ledger)
        )
        assert result.n == len(ledger.answered(("m", 1), ITEMS)) == 10


async def test_lone_surrogate_in_a_path_is_stored(tmp_path: Path) -> None:
    """The tier's name contains the benchmark's name, which contains a folder path."""
    method, scored = Method("m", 1, always_a), ScoredAnswer(0, ITEMS[0], Answer("a"), (1.0,))
    reply = Reply("m", (Completion("a"),))
    trace = Trace("t", 0.0, ITEMS[0].query, "\udcff", (), Prompt(()), reply, Answer("a"), 0.0)
    with open_store(tmp_path) as ledger:
        await ledger.fail(method, 1, RejectedError("\udcff", status=400))
        await ledger.keep(method, scored, Outcome(Answer("a"), trace))
        assert (list(ledger.answered(method.key, ITEMS)), len(ledger.failures())) == ([0], 1)


async def test_methods_learn_from_stored_answers(tmp_path: Path) -> None:
    learnt: list[Answer] = []

    async def reasoning(query: Query) -> Outcome:
        return Outcome(Answer("a", labels=("a",), rationale="because"))

    async def learn(query: Query, answer: Answer, tier: str) -> None:
        learnt.append(answer)

    for _ in range(2):
        with open_store(tmp_path) as ledger:
            method = Method("m", 1, reasoning, learn)
            await evaluate(BENCHMARK, method, state=RunState(ledger))
    assert learnt[:10] == learnt[10:]


async def test_run_cost_is_the_sum_over_answers(tmp_path: Path) -> None:
    method = Method("m", 1, always_a)
    with open_store(tmp_path) as ledger:
        for index, cost in enumerate((0.25, 0.5, 0.125)):
            scored = ScoredAnswer(index, ITEMS[index], Answer("a"), (1.0,), cost_usd=cost)
            await ledger.keep(method, scored, Outcome(Answer("a")))
    with open_store(tmp_path) as ledger:
        assert ledger.spent() == (0.875, 0.5)


def test_damaged_journal_releases_its_lock(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database at all" * 99)
    for _ in range(2):
        with pytest.raises(StoreError, match="not a"):
            open_store(tmp_path)


def test_failed_folder_creation_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match="cannot be created"):
        open_store(tmp_path / "file" / "run")


def test_folder_of_another_run_is_rejected(tmp_path: Path) -> None:
    with open_store(tmp_path):
        pass
    with pytest.raises(SettingError, match="--seed 0, got 1"):
        open_store(tmp_path, seed=1)
    with open_store(tmp_path):
        pass


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("stop", ["."], "with --stop ., got unset"),
        ("search", {"alpha": 0.5}, "with --alpha 0.5, got unset"),
    ],
)
def test_recorded_setting_may_not_be_left_out(
    tmp_path: Path, name: str, value: object, problem: str
) -> None:
    with open_store(tmp_path, **{name: value}) as store:
        store.plan([("m", 1)])
    with pytest.raises(SettingError, match=problem):
        open_store(tmp_path)
    with open_store(tmp_path, **{name: value}):
        pass


async def test_stored_answers_are_rescored_with_current_annotations(tmp_path: Path) -> None:
    items = tuple(
        Example(replace(item.query, id=str(index)), item.answer) for index, item in enumerate(ITEMS)
    )
    method = Method("m", 1, always_a)

    async def measured(*annotators: str) -> float | None:
        metric = vqa_accuracy({str(index): annotators for index in range(len(items))})
        data = Benchmark("vqa", items[:1], items, metrics=(metric,))
        settings = {**SETTINGS, "data": fingerprint(data)}
        with closing(RunStore.open(tmp_path, settings, items)) as ledger:
            changed = ledger.score_again(data.metrics, items)
            result, _ = await evaluate(data, method, state=RunState(ledger))
        assert changed in (0, len(items))
        assert read_run(tmp_path).answers["m", 1][0].scored.score == result.value
        return result.value

    assert await measured("b", "b", "b", "a") == pytest.approx(0.25)
    assert await measured("b", "b", "b", "a") == pytest.approx(0.25)
    assert await measured("a", "a", "a", "a") == 1


def test_fingerprint_covers_labels_and_tags() -> None:
    def of(**changed: object) -> str:
        item = replace(Example(Query("?"), "a, b", labels=("a", "b")), **changed)  # type: ignore[arg-type]
        return fingerprint(Benchmark("b", ITEMS[:1], (item,)))

    assert len({of(), of(labels=("a, b",)), of(tags={"episode": "2"})}) == 3
    assert of() == of()


def test_two_processes_cannot_share_a_run(tmp_path: Path) -> None:
    with open_store(tmp_path), pytest.raises(StoreError, match="another process"):
        open_store(tmp_path)


@pytest.mark.parametrize("changed", ["answer = '{}'", "answer = '{'", "place = 99"])
async def test_damaged_answers_are_reported(tmp_path: Path, changed: str) -> None:
    method = Method("m", 1, always_a)
    with open_store(tmp_path) as ledger:
        await evaluate(BENCHMARK, method, state=RunState(ledger))
    with closing(sqlite3.connect(tmp_path / FILE)) as other, other:
        other.execute(f"UPDATE answers SET {changed} WHERE place = 3")
    with open_store(tmp_path) as ledger:
        with pytest.raises(StoreError, match="damaged"):
            ledger.answered(method.key, ITEMS)
        with pytest.raises(StoreError, match="damaged"):
            ledger.score_again(BENCHMARK.metrics, ITEMS)
    with pytest.raises(StoreError, match="damaged"):
        read_run(tmp_path)


async def test_storage_error_stops_the_run(tmp_path: Path) -> None:
    with open_store(tmp_path) as ledger:
        other = sqlite3.connect(tmp_path / FILE)
        other.execute("DROP TABLE answers")
        other.close()
        with pytest.raises(StoreError):
            await evaluate(BENCHMARK, Method("m", 1, always_a), state=RunState(ledger))


async def test_method_learns_in_order_after_each_round(tmp_path: Path) -> None:
    events: list[str] = []

    async def answer(query: Query) -> Outcome:
        await asyncio.sleep(random.random() / 1000)
        events.append("requested")
        return await always_a(query)

    async def learn(query: Query, answer: object, tier: str) -> None:
        events.append(next(str(i) for i, item in enumerate(ITEMS) if item.query is query))

    method = Method("m", 1, answer, learn)
    for expected in (
        [*["requested"] * 4, *"0123", *["requested"] * 4, *"4567", *["requested"] * 2, *"89"],
    ):
        with open_store(tmp_path) as ledger:
            await evaluate(
                BENCHMARK, method, RunConfig(concurrency=8, round_size=4), RunState(ledger)
            )
        assert events == expected
    events.clear()
    with open_store(tmp_path) as ledger:
        await evaluate(BENCHMARK, method, RunConfig(concurrency=8, round_size=4), RunState(ledger))
    assert events == [*"0123456789"]


WORKER = """
import asyncio, sys
from contextlib import closing
from pathlib import Path
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmark import Benchmark, fingerprint
from bottega.evaluation.runs.run_store import RunStore
from bottega.evaluation.metrics.open_answers import vqa_accuracy
from bottega.evaluation.outcomes import Method, Outcome
from bottega.evaluation.config import RunConfig
from bottega.evaluation.runs.runner import RunState, evaluate
from bottega.types import Answer, Example, Query

folder, count = Path(sys.argv[1]), int(sys.argv[2])
items = tuple(Example(Query(f"question {i}"), "ab"[i % 2]) for i in range(count))
data = Benchmark("letters", items[:1], items)
requested = (folder / "requested").open("a", buffering=1)

async def answer(query):
    requested.write(query.text + "\\n")
    await asyncio.sleep(0.004)
    label = "ab"[len(query.text) * 7 % 2]
    return Outcome(Answer(label, labels=(label,)))

async def main():
    with closing(RunStore.open(folder, {"seed": 0}, items)) as ledger:
        print("ready", flush=True)
        config = RunConfig(concurrency=8)
        result, _ = await evaluate(data, Method("m", 0, answer), config, RunState(ledger))
        print(result.n, result.value, flush=True)

asyncio.run(main())
"""


def stored_queries(folder: Path) -> set[str]:
    if not (folder / FILE).exists():
        return set()
    with closing(sqlite3.connect(folder / FILE)) as connection:
        found = connection.execute("SELECT question FROM answers JOIN items USING (place)")
        return {question for (question,) in found}


@pytest.mark.parametrize(
    ("count", "kills"), [(100, 1), pytest.param(500, 20, marks=pytest.mark.slow)]
)
def test_killed_run_resumes_without_repeated_requests(
    tmp_path: Path, count: int, kills: int
) -> None:
    rng = random.Random(0)
    killed, reference_run = tmp_path / "killed", tmp_path / "reference"
    killed.mkdir()
    reference_run.mkdir()
    answered: set[str] = set()
    line = 0
    with start_worker(reference_run, count) as undisturbed:
        for _ in range(kills):
            with start_worker(killed, count) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                time.sleep(rng.uniform(0, 0.03))
                os.kill(process.pid, signal.SIGKILL)
            requested = (killed / "requested").read_text().splitlines()
            assert answered.isdisjoint(requested[line:])
            answered, line = stored_queries(killed), len(requested)
        with start_worker(killed, count) as process:
            outputs = [one.communicate(timeout=60)[0] for one in (process, undisturbed)]
    requested = (killed / "requested").read_text().splitlines()
    assert answered.isdisjoint(requested[line:])
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith(f"ready\n{count} ")
    assert max(Counter((reference_run / "requested").read_text().splitlines()).values()) == 1


def start_worker(folder: Path, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, str(folder), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
