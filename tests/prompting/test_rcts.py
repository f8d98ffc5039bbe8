"""Exact prompts of RCTS's appendix C, and replies in their formats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bottega.parsing import ChoiceParser, FinalAnswerParser, RationaleParser
from bottega.prompting import (
    MATH_V,
    MATH_V_REASONED,
    MMMU,
    MMMU_REASONED,
    SCIENCE_QA,
    SCIENCE_QA_REASONED,
    VIZ_WIZ,
    VSR_MC,
    ConclusionPrompter,
    ContinuationPrompter,
    ExplanationPrompter,
    InterleavedPrompter,
    PromptTemplate,
)
from bottega.protocols import Parser
from bottega.types import Candidate, Completion, Example, Message, Query
from tests.builders import solid_image

QUERY = Query("Which bank?", (solid_image(77),), choices=("left", "right"))
LABELLED = Query("Which side?", (solid_image(1),), choices=("north", "south"))
WORKED = Example(LABELLED, "south", rationale="It faces the sun.")
HELPFUL = "You are a helpful assistant."
OPTIONS = "(A) left\n(B) right"
LABELLED_OPTIONS = "(A) north\n(B) south"

SCIENCE = (
    "You are a helpful assistant. When given a question and an image, please analyze the content"
    " and provide your answer in the specified format below:\n"
    "```\n"
    "The answer is X. BECAUSE: [Your detailed reasoning]\n"
    "```\n"
    "- X must be one of the options.\n"
    "- [Your detailed reasoning] should clearly explain the rationale behind your choice.\n"
    "**Important:** Adhere strictly to the above format without deviations."
)
SCIENCE_REASONED = (
    "You are a helpful assistant responding to the question according to the context. When given a"
    " question and an image, please analyze the content and provide your answer in the specified"
    " format below:\n"
    "```\n"
    "**THOUGHT PROCESS:** [Your thought process for arriving at the answer].\n"
    "**FINAL ANSWER:** The answer is X. BECAUSE: [Your detailed reasoning].\n"
    "```\n"
    "- [Your thought process for arriving at the answer] should provide a step-by-step process that"
    " led to your chosen answer.\n"
    "- X must be one of the options: A, B, C, D, E.\n"
    "- [Your detailed reasoning] should clearly explain the rationale behind your choice.\n"
    "**Important:** Adhere strictly to the above format without deviations."
)
BY_LETTER = (
    "\nAnswer with the option letter from the given choices in the following format: 'The answer is"
    " X.' (without quotes) where X must be one of options."
)
BY_LETTER_REASONED = (
    "\nAnswer with the option letter from the given choices in the following format: 'The answer is"
    " X. BECAUSE: xxx' (without quotes) where X must be one of options. Think step by step before"
    " answering."
)
BOXED = (
    "\nAnswer the preceding multiple choice question. The format of your response should follow"
    r" this format: 'The answer is \boxed{X} or \boxed{YOUR_ANSWER}.' (without quotes), where 'X'"
    " must be one of the options or 'YOUR_ANSWER' is your conclusion."
)
BOXED_REASONED = (
    "\nAnswer the preceding multiple choice question. The format of your response should follow"
    r" this format: 'The answer is \boxed{X} or \boxed{YOUR_ANSWER}. BECAUSE: xxx' (without"
    " quotes), where 'X' must be one of the options or 'YOUR_ANSWER' is your conclusion. Think"
    " step by step before answering."
)
SHORTLY = (
    "\nAnswer the question using a single word or phrase. When the provided information is"
    " insufficient, answer 'unanswerable'."
)
FORMS = [
    (SCIENCE_QA, SCIENCE, "", "The answer is B."),
    (
        SCIENCE_QA_REASONED,
        SCIENCE_REASONED,
        "",
        "**THOUGHT PROCESS:** It faces the sun.\n**FINAL ANSWER:** The answer is B.",
    ),
    (MMMU, HELPFUL, BY_LETTER, "The answer is B."),
    (MMMU_REASONED, HELPFUL, BY_LETTER_REASONED, "The answer is B. BECAUSE: It faces the sun."),
    (MATH_V, HELPFUL, BOXED, r"The answer is \boxed{B}."),
    (
        MATH_V_REASONED,
        HELPFUL,
        BOXED_REASONED,
        r"The answer is \boxed{B}. BECAUSE: It faces the sun.",
    ),
    (VSR_MC, HELPFUL, BY_LETTER, "The answer is B."),
]


@pytest.mark.parametrize(("form", "system", "ask", "answer"), FORMS)
def test_prompts_match_the_paper(form: PromptTemplate, system: str, ask: str, answer: str) -> None:
    first = Message("system", (system,))
    last = Message("user", (solid_image(77), f"Which bank?\n{OPTIONS}{ask}"))
    assert form(QUERY, []).messages == (first, last)
    assert form(QUERY, [Candidate(WORKED, 1.0)]).messages == (
        first,
        Message("user", (solid_image(1), f"Which side?\n{LABELLED_OPTIONS}{ask}")),
        Message("assistant", (answer,)),
        last,
    )


def test_vizwiz_asks_for_a_phrase_or_unanswerable() -> None:
    cup = Example(Query("Which object?", (solid_image(1),)), "cup", rationale="It has a handle.")
    query = Query("What colour?", (solid_image(77),))
    assert VIZ_WIZ(query, [Candidate(cup, 1.0)]).messages == (
        Message("system", (HELPFUL,)),
        Message("user", (solid_image(1), f"Which object?{SHORTLY}")),
        Message("assistant", ("cup",)),
        Message("user", (solid_image(77), f"What colour?{SHORTLY}")),
    )


def test_open_questions_of_mmmu_ask_for_a_phrase() -> None:
    how = " in the following format: 'The answer is X"
    for form, ask in (
        (MMMU, f"{how}.' (without quotes)."),
        (
            MMMU_REASONED,
            f"{how}. BECAUSE: xxx' (without quotes). Think step by step before answering.",
        ),
    ):
        turn = form(Query("How many?"), []).messages[-1].parts
        assert turn == (f"How many?\nAnswer with a number, a word or a short phrase{ask}",)


def test_a_demonstration_without_a_rationale_keeps_the_format() -> None:
    bare = [Candidate(replace(WORKED, rationale=None), 1.0)]
    said = [str(form(QUERY, bare).messages[2].parts[0]) for form, *_ in FORMS]
    assert said[1] == "**FINAL ANSWER:** The answer is B."
    assert (said[3], said[5]) == ("The answer is B.", r"The answer is \boxed{B}.")


FINAL, BY_CHOICE = FinalAnswerParser(), ChoiceParser(whole_words=True)
READ = [(form, FINAL) for form, *_ in FORMS] + [
    (form, BY_CHOICE) for form, *_ in FORMS if form not in (MATH_V, MATH_V_REASONED)
]


@pytest.mark.parametrize(("form", "parse"), READ)
def test_formats_are_parsed_back(form: PromptTemplate, parse: Parser) -> None:
    """The parser reads the answer of a demonstration, and its rationale if shown."""
    shown = form(QUERY, [Candidate(WORKED, 1.0)]).messages[2].parts[0]
    answer = RationaleParser(parse)(LABELLED, Completion(str(shown)))
    assert (answer.text, answer.labels) == ("south", ("south",))
    assert answer.rationale == (WORKED.rationale if form.rationale_format else None)


def test_explanation_prompts_contain_the_answer() -> None:
    assert ExplanationPrompter()(WORKED).messages == (
        Message(
            "system",
            (
                "You are a helpful assistant tasked with providing a detailed and structured"
                " thought process based on the answer. The thought process should be logically"
                " sound, step-by-step, and clearly lead to the final answer.",
            ),
        ),
        Message(
            "user",
            (
                solid_image(1),
                f"**User Question:** Which side?\n{LABELLED_OPTIONS}\n**Answer:** (B) south\n"
                "**System Prompt:** Please describe your thought process in a step-by-step,"
                " structured manner, ensuring that each step logically leads to the final answer."
                " Let's think step by step.",
            ),
        ),
    )
    free = ExplanationPrompter()(Example(Query("How many?"), "{4}")).messages[1].parts
    assert "\n**Answer:** {4}\n" in str(free[0])


def test_conclusion_prompts_hide_the_answer() -> None:
    assert ConclusionPrompter()(LABELLED, "{Look} up.").messages == (
        Message("system", (HELPFUL,)),
        Message(
            "user",
            (
                solid_image(1),
                f"**User Question:** Which side?\n{LABELLED_OPTIONS}\n"
                "**THOUGHT PROCESS:** {Look} up.\nAnswer with the letter of the right choice.",
            ),
        ),
    )
    free = ConclusionPrompter()(Query("How many?"), "Count.").messages[1].parts
    assert free == (
        "**User Question:** How many?\n**THOUGHT PROCESS:** Count.\n"
        "Answer with a number, a word or a short phrase.",
    )


def test_continuation_prompts_begin_the_assistant_turn() -> None:
    brief = InterleavedPrompter(show_choices=False)
    assert ContinuationPrompter(brief)(LABELLED, "{Look} up.").messages == (
        Message("user", (solid_image(1), "Which side?")),
        Message("assistant", ("{Look} up.\nAnswer:",)),
    )


def test_queries_without_letters_ask_for_words() -> None:
    many = tuple(f"kind {i}" for i in range(27))
    (_, turn) = ConclusionPrompter()(Query("Which?", choices=many), "Look.").messages
    assert "- kind 26\n" in str(turn.parts[0]) and "(A)" not in str(turn.parts[0])
    assert str(turn.parts[0]).endswith("a short phrase.")
    (_, explained) = ExplanationPrompter()(
        Example(Query("Which?", choices=many), "kind 26")
    ).messages
    assert "**Answer:** kind 26\n" in str(explained.parts[0])
