"""Tests of the prompts of Cache-of-Thought."""

from __future__ import annotations

from collections.abc import Sequence

from bottega import KnowledgeBase, Tier, cache_of_thought
from bottega.generation import ScriptedGenerator
from bottega.pipeline import FixedRouter
from bottega.prompting import CachePrompter, InterleavedPrompter, ReasoningPrompter
from bottega.protocols import Prompter, Router
from bottega.types import Candidate, Example, Prompt, Query
from tests.builders import solid_image
from tests.knowledge.doubles import SeededEmbedder

QUERY = Query("Which planet is red?", (solid_image(1),), choices=("Venus", "Mars"))
SHOWN = Example(
    Query("Which metal is liquid?", (solid_image(2),), choices=("iron", "mercury", "zinc")),
    "mercury",
    rationale="It melts at -39 degrees.",
)


def texts(prompt: Prompt) -> list[tuple[str, str]]:
    return [
        (message.role, "".join(part for part in message.parts if isinstance(part, str)))
        for message in prompt.messages
    ]


def test_demonstrations_of_multiple_choice_questions_show_their_options() -> None:
    prompters: list[Prompter] = [InterleavedPrompter(), ReasoningPrompter(), CachePrompter()]
    for prompter in prompters:
        (_, question), (_, answer), (_, query) = texts(prompter(QUERY, [Candidate(SHOWN, 1.0)]))
        assert all(choice in question for choice in ("iron", "mercury", "zinc"))
        assert "Mars" not in question
        assert "It melts at -39 degrees." in answer
        assert "Venus" in query and "Mars" in query and "iron" not in query


def test_common_choices_are_not_repeated() -> None:
    labels = ("cat", "dog")
    shown = Example(Query("What is it?", (solid_image(2),), choices=labels), "dog")
    prompt = InterleavedPrompter()(Query("What is it?", choices=labels), [Candidate(shown, 1.0)])
    assert texts(prompt)[0] == ("user", "What is it?")


def test_core_prompt_has_the_papers_form() -> None:
    turns = texts(CachePrompter()(QUERY, [Candidate(SHOWN, 1.0)]))
    assert turns[0][1].startswith(
        "Question: Which metal is liquid?\n(A) iron\n(B) mercury\n(C) zinc\n"
    )
    assert turns[1] == ("assistant", "It melts at -39 degrees.\nANSWER: B")
    assert turns[2][1].startswith("Question: Which planet is red?\n(A) Venus\n(B) Mars\n")
    assert turns[2][1].endswith("Answer:")


def test_common_labels_ask_for_reasoning_in_words() -> None:
    labels = ("cat", "dog")
    query = Query("What is it?", choices=labels)
    assert CachePrompter(labels)(query, []) == ReasoningPrompter()(query, [])


async def test_master_and_apprentice_get_the_same_prompt() -> None:
    reply = "Rust covers its surface.\nANSWER: B"
    large, small = ScriptedGenerator(lambda _: reply), ScriptedGenerator(lambda _: reply)
    tiers = [Tier("small", small, shots=1), Tier("large", large)]

    def first(tiers: Sequence[Tier]) -> Router:
        return FixedRouter(tiers[0])

    def last(tiers: Sequence[Tier]) -> Router:
        return FixedRouter(tiers[-1])

    with KnowledgeBase.open(":memory:", SeededEmbedder()) as cache:
        for route in (first, last):
            answer = await cache_of_thought(cache, tiers=tiers, route=route).answer(QUERY)
            assert (answer.text, answer.rationale) == ("Mars", "Rust covers its surface.")
    assert small.calls[0].prompt == large.calls[0].prompt
    assert "reasoning steps" in texts(small.calls[0].prompt)[-1][1]
