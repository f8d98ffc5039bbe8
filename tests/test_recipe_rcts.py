from __future__ import annotations

from collections.abc import Iterator

import pytest

from bottega.errors import SettingError
from bottega.generation import ScriptedGenerator
from bottega.knowledge import KnowledgeBase
from bottega.protocols import Generator
from bottega.recipes import rcts
from bottega.reranking import FlatSearch
from bottega.types import Prompt, Query, SearchNode, SearchTree
from tests.builders import solid_image
from tests.knowledge.doubles import SeededEmbedder, image_example

QUERY = Query("What?", (solid_image(7),))


@pytest.fixture
def knowledge() -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as opened:
        opened.add(image_example(40 * i, "cat" if i % 2 else "dog") for i in range(24))
        yield opened


def follows(prompt: Prompt) -> str:
    """Return the answer of the last demonstration with a reason, or a guess without any."""
    shown = [str(m.parts[-1]) for m in prompt.messages if m.role == "assistant"]
    if not shown:
        return "Answer: dog"
    return "It looks like the last.\nAnswer: " + shown[-1].rpartition(" ")[2]


class TurnsOnlyGenerator(ScriptedGenerator):
    turns_only = True


def leaves(tree: SearchTree | None) -> list[SearchNode]:
    def below(node: SearchNode) -> list[SearchNode]:
        return [leaf for child in node.children for leaf in below(child)] or [node]

    return [] if tree is None else below(tree.root)


async def test_a_tree_search_selects_three_demonstrations_and_the_answer(
    knowledge: KnowledgeBase,
) -> None:
    model = ScriptedGenerator(follows, name="small")
    trace = await rcts(knowledge, model, labels=("cat", "dog"), seed=1).trace(QUERY)
    assert trace.tree is not None
    assert len(trace.candidates) == 3
    assert len({candidate.example.id for candidate in trace.candidates}) == 3
    assert trace.answer.text == trace.candidates[-1].example.answer
    assert trace.tree.calls == sum(call.sampling.n for call in model.calls)
    rewarded = [call for call in model.calls if call.sampling.temperature == 0.8]
    own = [call for call in rewarded if call.sampling.n == 5]
    assert own and len(own) < len(rewarded)  # the query again, and labelled questions
    again = await rcts(
        knowledge, ScriptedGenerator(follows, name="small"), labels=("cat", "dog"), seed=1
    ).trace(QUERY)
    assert again.tree == trace.tree


async def test_a_turns_only_model_continues_its_own_rationale(knowledge: KnowledgeBase) -> None:
    model = TurnsOnlyGenerator(follows)
    trace = await rcts(knowledge, model, labels=("cat", "dog"), rollouts=4).trace(QUERY)
    continuations = [
        call.prompt for call in model.calls if call.prompt.messages[-1].role == "assistant"
    ]
    assert {one.messages[-1].parts for one in continuations} == {
        ("It looks like the last.\nAnswer:",)
    }
    assert {one.messages[0].parts[-1] for one in continuations} == {QUERY.text}
    assert all("Answer with" not in str(call.prompt) for call in model.calls)
    rewards = [reward for leaf in leaves(trace.tree) for reward in leaf.rewards]
    assert {"self", "mutual"} == set(rewards)


async def test_the_call_budget_holds(knowledge: KnowledgeBase) -> None:
    model = ScriptedGenerator(follows)
    trace = await rcts(knowledge, model, labels=("cat", "dog"), max_calls=30).trace(QUERY)
    assert trace.tree is not None and trace.tree.calls <= 30


async def test_a_given_search_replaces_the_default(knowledge: KnowledgeBase) -> None:
    model: Generator = ScriptedGenerator(follows)
    pipeline = rcts(knowledge, model, labels=("cat", "dog"))
    search = pipeline.search
    assert search is not None
    flat = FlatSearch(
        model,
        prompt=pipeline.prompt,
        parse=pipeline.parse,
        reward=search.reward,  # type: ignore[attr-defined]
        sequences="random",
        branches=3,
    )
    trace = await rcts(knowledge, model, labels=("cat", "dog"), search=flat).trace(QUERY)
    assert trace.tree is not None and len(trace.tree.root.children) == 3


async def test_invalid_shot_counts_are_rejected_at_construction(
    knowledge: KnowledgeBase,
) -> None:
    with pytest.raises(SettingError, match="got fetch=4"):
        rcts(knowledge, ScriptedGenerator([]), shots=5, fetch=4)
    with pytest.raises(SettingError, match="101"):
        rcts(knowledge, ScriptedGenerator([]), shots=101, fetch=200)


async def test_a_reasoning_model_accepts_more_labels_than_letters(
    knowledge: KnowledgeBase,
) -> None:
    labels = ("cat", "dog", *(f"kind {i}" for i in range(28)))
    trace = await rcts(knowledge, ScriptedGenerator(follows), labels=labels, seed=1).trace(QUERY)
    assert any("self" in leaf.rewards for leaf in leaves(trace.tree))


def reasons(prompt: Prompt) -> str:
    """Follow the instructions of the prompt: reasons, or the choice that the reasons name."""
    request = str(prompt.messages[-1].parts[-1])
    if "THOUGHT PROCESS" in request:
        return request.partition("is a ")[2].partition(".")[0]
    assert request.rstrip().endswith('begins with "Answer:".')
    shown = [str(m.parts[0]) for m in prompt.messages if m.role == "assistant"]
    assert all("Answer: " in one for one in shown)
    last = shown[-1].rpartition("Answer: ")[2] if shown else ""
    # The reasons for a "dog" lead to another answer.
    return f"It is a {'cow' if last == 'dog' else last}.\nAnswer: {last or 'cow'}"


async def test_the_default_prompt_asks_for_rationales_that_the_self_reward_reads() -> None:
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as opened:
        opened.add(image_example(40 * i, "cat" if i % 2 else "dog") for i in range(24))
        model = ScriptedGenerator(reasons, name="m")
        trace = await rcts(opened, model, labels=("cat", "dog", "cow"), seed=1).trace(QUERY)
    own = {leaf.answer and leaf.answer.text: leaf.rewards["self"] for leaf in leaves(trace.tree)}
    assert own == {"cat": 1.0, "dog": 0.0}
    assert all(leaf.answer and leaf.answer.rationale for leaf in leaves(trace.tree))
