from __future__ import annotations

from bottega.evaluation.outcomes import Method, Outcome, ScoredAnswer
from bottega.evaluation.runs.runner import DemonstrationRecorder
from bottega.types import Answer, Completion, Example, Prompt, Query, Reply, Trace
from tests.builders import candidates
from tests.evaluation.test_runner import always_a

ITEM = Example(Query("?"), "a")


def outcome(*labels: str) -> Outcome:
    reply, answer = Reply("m", (Completion("a"),)), Answer("a")
    retrieved = tuple(candidates(*labels))
    return Outcome(
        answer, Trace("t", 0.0, ITEM.query, "m", retrieved, Prompt(()), reply, answer, 0.0)
    )


async def test_recorder_keeps_demonstrations_of_one_method_and_shot_count() -> None:
    ledger = DemonstrationRecorder("visual-rag", 2)
    ours, fewer, other = (
        Method(name, shots, always_a)
        for name, shots in (("visual-rag", 2), ("visual-rag", 1), ("random", 2))
    )
    for method, label in ((fewer, "x"), (ours, "a"), (other, "y")):
        scored = ScoredAnswer(7, ITEM, Answer("a"), (1.0,))
        await ledger.keep(method, scored, outcome(label, "b"))
    await ledger.keep(ours, ScoredAnswer(8, ITEM, Answer("a"), (1.0,)), Outcome(Answer("a")))
    assert ledger.by_index == {7: tuple(candidates("a", "b"))}
