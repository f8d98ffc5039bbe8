"""RCTS over a model that replies from what it is shown."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bottega.generation import ScriptedGenerator
from bottega.parsing import FinalAnswerParser
from bottega.prompting import InterleavedPrompter
from bottega.reranking import (
    BudgetedGenerator,
    MutualReward,
    RewardValue,
    SelfConsistencyReward,
    TreeSearch,
    WeightedReward,
)
from bottega.types import (
    Answer,
    Candidate,
    Example,
    Message,
    Prompt,
    Query,
    Sampling,
    SearchNode,
    SearchResult,
)

QUERY = Query("Which way?")
PROMPT = InterleavedPrompter()
PARSE = FinalAnswerParser()
SHORT = Sampling(max_tokens=16)


def candidates(count: int) -> list[Candidate]:
    """Named 0, 1, 2 and so on, with falling scores; what they ask is their name."""
    examples = [Example(Query(f"case {i}"), f"{i % 3}", id=str(i)) for i in range(count)]
    return [Candidate(one, 1 - i / 100) for i, one in enumerate(examples)]


def names(shown: Sequence[Candidate]) -> list[str]:
    return [str(one.example.id) for one in shown]


def opinion(prompt: Prompt) -> str:
    """A model whose answer and reasoning depend on all that it is shown."""
    digest = hashlib.sha256(repr(prompt).encode()).hexdigest()
    return f"It follows from {digest[:8]}.\nAnswer: {int(digest, 16) % 3}"


def reminded(query: Query, rationale: str) -> Prompt:
    return Prompt((Message("user", (f"{query.text}\n{rationale}",)),))


REWARD = WeightedReward(
    SelfConsistencyReward(reminded, PARSE, sampling=replace(SHORT, temperature=0.8)),
    MutualReward(PROMPT, PARSE, sampling=replace(SHORT, temperature=0.8)),
)


def rcts(model: ScriptedGenerator, **settings: Any) -> TreeSearch:
    fields: dict[str, Any] = {"reward": REWARD, "sampling": SHORT}
    return TreeSearch(model, prompt=PROMPT, parse=PARSE, **(fields | settings))


async def later_is_better(
    query: Query, answer: Answer, candidates: Sequence[Candidate], ask: BudgetedGenerator, /
) -> RewardValue:
    """Likes the answers that name far candidates, and asks nothing."""
    value = sum(int(name) for name in answer.text.split() if name.isdigit()) / 100
    return RewardValue(value, {"far": value})


def repeated(prompt: Prompt) -> str:
    """Answers with the names of what it is shown."""
    texts = [str(message.parts[0]) for message in prompt.messages if message.role == "user"]
    return " ".join(text.removeprefix("case ") for text in texts[:-1]) or "nothing"


def leaf_at(found: SearchResult) -> list[SearchNode]:
    """The nodes on the chosen path, the root first."""
    assert found.tree is not None
    nodes = [found.tree.root]
    for step in found.tree.path:
        nodes.append(nodes[-1].children[step])
    return nodes


def leaves(node: SearchNode) -> list[SearchNode]:
    return [leaf for child in node.children for leaf in leaves(child)] or [node]
