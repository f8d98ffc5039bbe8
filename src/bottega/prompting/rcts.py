r"""Prompts of RCTS (Yang et al.): for answers (appendix C.2) and for rationales (appendix C.1).

Each benchmark has a `PromptTemplate` for zero and few shots without rationales, and one that shows
and requests rationales (`..._REASONED`). VizWiz and VSR-MC need no reasoning and have the first one
only. `RationaleParser` reads replies in these formats.

Decisions where the printed text is ambiguous: line breaks go before fields, lists and instructions;
garbled quotation marks become ``` around a format and ' around a sentence; `//boxed` becomes
`\boxed`; the stray full stop in MMMU's second question is dropped. `{Question}` is the question
with its choices as (A), (B) and so on. The paper does not define `{Answer}`: here it has the
requested format without unknown parts, so a ScienceQA demonstration has no BECAUSE after its
thought process. MMMU's open questions, which the paper turns into choices, ask for a number, a word
or a phrase in the same format. The paper prints no prompts for VizWiz and VSR-MC: VSR-MC uses that
of MMMU, and VizWiz asks for a word or a phrase, or "unanswerable".
"""

from __future__ import annotations

from dataclasses import dataclass

from bottega.prompting.turns import (
    ASK_LETTER,
    ASK_SHORT,
    OPTION,
    PromptTemplate,
    answer_letter,
    format_question,
    has_letters,
)
from bottega.protocols import Prompter
from bottega.types import Example, Message, Prompt, Query

ASSISTANT = "You are a helpful assistant."
THE_ANSWER = "The answer is {answer}."
BOXED = r"The answer is \boxed{{{answer}}}."
AND_WHY = " BECAUSE: {rationale}"

SCIENCE_QA = PromptTemplate(
    system="""\
You are a helpful assistant. When given a question and an image, please analyze the content and \
provide your answer in the specified format below:
```
The answer is X. BECAUSE: [Your detailed reasoning]
```
- X must be one of the options.
- [Your detailed reasoning] should clearly explain the rationale behind your choice.
**Important:** Adhere strictly to the above format without deviations.""",
    answer_format=THE_ANSWER,
)
SCIENCE_QA_REASONED = PromptTemplate(
    system="""\
You are a helpful assistant responding to the question according to the context. When given a \
question and an image, please analyze the content and provide your answer in the specified format \
below:
```
**THOUGHT PROCESS:** [Your thought process for arriving at the answer].
**FINAL ANSWER:** The answer is X. BECAUSE: [Your detailed reasoning].
```
- [Your thought process for arriving at the answer] should provide a step-by-step process that led \
to your chosen answer.
- X must be one of the options: A, B, C, D, E.
- [Your detailed reasoning] should clearly explain the rationale behind your choice.
**Important:** Adhere strictly to the above format without deviations.""",
    answer_format=f"**FINAL ANSWER:** {THE_ANSWER}",
    rationale_format=f"**THOUGHT PROCESS:** {{rationale}}\n**FINAL ANSWER:** {THE_ANSWER}",
)

STEP_BY_STEP = " Think step by step before answering."
OPENLY = "Answer with a number, a word or a short phrase in the following format: 'The answer is X"

MMMU = PromptTemplate(
    system=ASSISTANT,
    instruction="Answer with the option letter from the given choices in the following format:"
    " 'The answer is X.' (without quotes) where X must be one of options.",
    open_instruction=f"{OPENLY}.' (without quotes).",
    answer_format=THE_ANSWER,
)
MMMU_REASONED = PromptTemplate(
    system=ASSISTANT,
    instruction="Answer with the option letter from the given choices in the following format:"
    " 'The answer is X. BECAUSE: xxx' (without quotes) where X must be one of options."
    + STEP_BY_STEP,
    open_instruction=f"{OPENLY}. BECAUSE: xxx' (without quotes).{STEP_BY_STEP}",
    answer_format=THE_ANSWER,
    rationale_format=THE_ANSWER + AND_WHY,
)

ASK_BOXED = (
    "Answer the preceding multiple choice question. The format of your response should follow this"
    r" format: 'The answer is \boxed{X} or \boxed{YOUR_ANSWER}."
)
EITHER = (
    " (without quotes), where 'X' must be one of the options or 'YOUR_ANSWER' is your conclusion."
)

MATH_V = PromptTemplate(system=ASSISTANT, instruction=f"{ASK_BOXED}'{EITHER}", answer_format=BOXED)
MATH_V_REASONED = PromptTemplate(
    system=ASSISTANT,
    instruction=f"{ASK_BOXED} BECAUSE: xxx'{EITHER}{STEP_BY_STEP}",
    answer_format=BOXED,
    rationale_format=BOXED + AND_WHY,
)

VSR_MC = MMMU
VIZ_WIZ = PromptTemplate(
    system=ASSISTANT,
    instruction="Answer the question using a single word or phrase. When the provided information"
    " is insufficient, answer 'unanswerable'.",
)


@dataclass(frozen=True)
class ExplanationPrompter:
    """Prompter that asks for a rationale of a labelled example ("Get Reasoning Context").

    The answer appears as letter and text, `(B) left`; the rationale may refer to either.
    """

    system: str = (
        "You are a helpful assistant tasked with providing a detailed and structured thought"
        " process based on the answer. The thought process should be logically sound,"
        " step-by-step, and clearly lead to the final answer."
    )
    question: str = (
        "**User Question:** {question}\n**Answer:** {answer}\n**System Prompt:** Please describe"
        " your thought process in a step-by-step, structured manner, ensuring that each step"
        " logically leads to the final answer. Let's think step by step."
    )
    option: str = OPTION

    def __call__(self, example: Example, /) -> Prompt:
        query = example.query
        answer = example.answer
        if answer in query.choices and has_letters(query):
            answer = self.option.format(letter=answer_letter(example), choice=answer)
        question = format_question(query, self.option)
        text = self.question.format(question=question, answer=answer)
        return _prompt(self.system, query, text)


@dataclass(frozen=True)
class ConclusionPrompter:
    """Prompter that asks a query with a given rationale ("Get Predicted Answer by Reasoning
    Context").

    The paper prints no answer format. Here `letter_instruction` or `short_instruction` follows the
    rationale on a line of its own; queries with more than 26 choices use the latter.
    """

    system: str = ASSISTANT
    question: str = "**User Question:** {question}\n**THOUGHT PROCESS:** {rationale}"
    option: str = OPTION
    letter_instruction: str = ASK_LETTER
    short_instruction: str = ASK_SHORT

    def __call__(self, query: Query, rationale: str, /) -> Prompt:
        question = format_question(query, self.option)
        text = self.question.format(question=question, rationale=rationale)
        instruction = self.letter_instruction if has_letters(query) else self.short_instruction
        return _prompt(self.system, query, f"{text}\n{instruction}")


@dataclass(frozen=True)
class ContinuationPrompter:
    """Prompter like `ConclusionPrompter` for a model that reads brief turns and no instructions.

    `prompt` shows the query; the assistant turn begins with the rationale, and the model continues
    it with the answer. The backend must continue a last assistant turn, as in-process models do.
    """

    prompt: Prompter

    def __call__(self, query: Query, rationale: str, /) -> Prompt:
        started = Message("assistant", (f"{rationale}\nAnswer:",))
        return Prompt((*self.prompt(query, ()).messages, started))


def _prompt(system: str, query: Query, text: str) -> Prompt:
    return Prompt((Message("system", (system,)), Message("user", (*query.images, text))))
