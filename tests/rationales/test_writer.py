from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from bottega.errors import BottegaError, RejectedError, SettingError
from bottega.evaluation.outcomes import is_item_error
from bottega.generation import ScriptedGenerator
from bottega.knowledge import KnowledgeBase
from bottega.prompting import ExplanationPrompter
from bottega.rationales import (
    ACCURACY,
    RationaleGenerator,
    RationaleResult,
    RationaleWriter,
    find_pending,
)
from bottega.types import Example, Prompt, Query
from tests.knowledge.doubles import SeededEmbedder, text_example


class CostBudget:
    def __init__(self, examples: int = 99) -> None:
        self.left = examples
        self.costs: list[float | None] = []

    def reserve(self) -> bool:
        self.left -= 1
        return self.left >= 0

    def settle(self, cost_usd: float | None, at_most_usd: float) -> None:
        self.costs.append(cost_usd)


def thinks(prompt: Prompt) -> str:
    """Answer all queries correctly except q1; refuse q2."""
    text = str(prompt.messages[-1].parts[-1])
    if "q2" in text:
        raise RejectedError("filtered", status=400)
    if "**Answer:**" in text:
        return "Think."
    return "no" if "q1" in text else "yes"


class Run:
    def __init__(self, kb: KnowledgeBase) -> None:
        self.model = ScriptedGenerator(thinks)
        self.kb = kb
        self.done: dict[str, RationaleResult] = {}

    async def __call__(self, budget: CostBudget | None = None, *, fatal: bool = False) -> None:
        def passes(error: BottegaError) -> bool:
            return not fatal

        work = RationaleWriter(
            self.kb,
            RationaleGenerator(self.model, candidates=2, predictions=2),
            is_item_error=passes,
            done=self.done.__setitem__,
        )
        await work.run(find_pending(self.kb).ids, budget or CostBudget(), 2)

    def rationales(self) -> dict[str, tuple[str | None, str | None]]:
        return {e.query.text: (e.rationale, e.tags.get(ACCURACY)) for e in self.kb}


@pytest.fixture
def kb() -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as opened:
        opened.add([text_example(f"q{i}", tags={"hue": "red"}, source="s") for i in range(4)])
        opened.add([text_example("given", rationale="By heart."), text_example("passage", "")])
        yield opened


async def test_rationales_are_stored_rejected_or_unchanged(kb: KnowledgeBase) -> None:
    before = {e.query.text: e for e in kb}
    run = Run(kb)
    await run()
    assert run.rationales() == {
        "q0": ("Think.", "1"),
        "q1": (None, "0"),
        "q2": (None, None),
        "q3": ("Think.", "1"),
        "given": ("By heart.", None),
        "passage": (None, None),
    }
    after = {e.query.text: e for e in kb}
    assert after["q2"] == before["q2"]
    tags = {"hue": "red", ACCURACY: "1"}
    assert after["q0"] == replace(before["q0"], rationale="Think.", tags=tags)
    assert {str(made.error) for made in run.done.values() if made.error} == {"filtered"}
    found = find_pending(kb)
    assert found.ids == (after["q2"].id,)
    assert (found.given, found.passages, found.rejected, found.scores) == (1, 1, 1, (1.0, 1.0))


async def test_a_stopped_run_continues(kb: KnowledgeBase) -> None:
    run = Run(kb)
    budget = CostBudget(examples=1)
    await run(budget)
    assert [pair for pair in run.rationales().values() if pair[1]] == [("Think.", "1")]
    first_calls = len(run.model.calls)
    assert len(budget.costs) == 1
    await run()
    again = [call.prompt for call in run.model.calls[first_calls:]]
    assert not any("q0" in str(prompt.messages[-1].parts) for prompt in again)
    assert len(find_pending(kb).ids) == 1  # the refused example


async def test_again_includes_all_but_passages_and_rejections_keep_rationales(
    kb: KnowledgeBase,
) -> None:
    assert len(find_pending(kb, again=True).ids) == 5
    (id,) = (str(e.id) for e in kb if e.query.text == "q1")
    kb.annotate(id, rationale="Mine.")
    run = Run(kb)
    work = RationaleWriter(
        kb,
        RationaleGenerator(run.model, candidates=2, predictions=2),
        is_item_error=lambda error: True,
        done=run.done.__setitem__,
    )
    await work.run([id], CostBudget())
    assert run.rationales()["q1"] == ("Mine.", "0")


async def test_a_rejection_keeps_the_rationale_of_another_process(kb: KnowledgeBase) -> None:
    (id,) = (str(e.id) for e in kb if e.query.text == "q1")

    def meanwhile(prompt: Prompt) -> str:
        if "q1" in str(prompt.messages[-1].parts):
            kb.annotate(id, rationale="Theirs.", tags={"theirs": "1"})
        return thinks(prompt)

    run = Run(kb)
    run.model = ScriptedGenerator(meanwhile)
    await run()
    assert run.rationales()["q1"] == ("Theirs.", "0")
    assert kb.get(id).tags["theirs"] == "1"


async def test_a_prompt_error_fails_its_example_only(kb: KnowledgeBase) -> None:
    def explain(example: Example) -> Prompt:
        if example.query.text == "unspeakable":
            raise SettingError("no prompt for this one")
        return ExplanationPrompter()(example)

    kb.add([Example(Query("unspeakable"), "so it is")])
    run = Run(kb)
    work = RationaleWriter(
        kb,
        RationaleGenerator(run.model, candidates=2, predictions=2, explain=explain),
        is_item_error=is_item_error,
        done=run.done.__setitem__,
    )
    await work.run(find_pending(kb).ids, CostBudget())
    failed = {kb.get(id).query.text: str(made.error) for id, made in run.done.items() if made.error}
    assert failed.keys() == {"q2", "unspeakable"}
    assert "no prompt" in failed["unspeakable"]
    assert run.rationales()["q3"] == ("Think.", "1")


async def test_an_error_that_affects_all_examples_ends_the_run(kb: KnowledgeBase) -> None:
    run = Run(kb)
    with pytest.raises(RejectedError, match="filtered"):
        await run(fatal=True)
    assert any(made.error for made in run.done.values())  # it was counted


async def test_a_deleted_example_costs_nothing(kb: KnowledgeBase) -> None:
    run = Run(kb)
    ids = find_pending(kb).ids[:1]
    kb.delete(ids)
    work = RationaleWriter(
        kb,
        RationaleGenerator(run.model),
        is_item_error=lambda error: False,
        done=run.done.__setitem__,
    )
    budget = CostBudget()
    await work.run(ids, budget)
    assert (budget.costs, run.done, run.model.calls) == ([0.0], {}, [])


def test_a_tag_that_is_not_a_number_is_ignored(kb: KnowledgeBase) -> None:
    (id, *_) = kb.ids()
    kb.annotate(id, rationale="Mine.", tags={ACCURACY: "high"})
    assert find_pending(kb).given == 2
