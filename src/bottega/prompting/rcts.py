r"""The prompts of RCTS (Yang et al., appendix C.2), each as one `PromptTemplate`.

A benchmark has one for zero and few shots, which shows no rationale and asks for none beyond the
format, and one that shows each demonstration's rationale and asks for one (`..._REASONED`). VizWiz
and VSR-MC are sets without reasoning: they have the first one only.

What the printed text leaves open was decided here. Its lost line ends are set where a field, a list
or an instruction begins; its garbled quotation marks are ``` around a format and ' around a
sentence; `//boxed` is `\boxed`, which it stands for, and the stray full stop of MMMU's second
question is gone. `{Question}` is the question with its choices as (A), (B) and so on below. How
`{Answer}` is written the paper does not say: here in the very format that is asked for, less the
part whose text nobody knows, so a demonstration of ScienceQA has no BECAUSE behind its thought
process. MMMU's open questions, which the paper turns into choices, are asked for a number, a word
or a phrase in the same format. For VizWiz and VSR-MC no prompt is printed: VSR-MC is asked as MMMU
is, and VizWiz for a word or a phrase, or "unanswerable".

Replies in these formats are read by `RationaleParser`.
"""

from __future__ import annotations

from dataclasses import dataclass

from bottega.prompting.turns import (
    ASK_LETTER,
    ASK_SHORT,
    OPTION,
    PromptTemplate,
    has_letters,
    letter_of,
    listed,
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
    answered=THE_ANSWER,
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
    answered=f"**FINAL ANSWER:** {THE_ANSWER}",
    reasoned=f"**THOUGHT PROCESS:** {{rationale}}\n**FINAL ANSWER:** {THE_ANSWER}",
)

STEP_BY_STEP = " Think step by step before answering."
OPENLY = "Answer with a number, a word or a short phrase in the following format: 'The answer is X"

MMMU = PromptTemplate(
    system=ASSISTANT,
    ask="Answer with the option letter from the given choices in the following format:"
    " 'The answer is X.' (without quotes) where X must be one of options.",
    ask_open=f"{OPENLY}.' (without quotes).",
    answered=THE_ANSWER,
)
MMMU_REASONED = PromptTemplate(
    system=ASSISTANT,
    ask="Answer with the option letter from the given choices in the following format:"
    " 'The answer is X. BECAUSE: xxx' (without quotes) where X must be one of options."
    + STEP_BY_STEP,
    ask_open=f"{OPENLY}. BECAUSE: xxx' (without quotes).{STEP_BY_STEP}",
    answered=THE_ANSWER,
    reasoned=THE_ANSWER + AND_WHY,
)

ASK_BOXED = (
    "Answer the preceding multiple choice question. The format of your response should follow this"
    r" format: 'The answer is \boxed{X} or \boxed{YOUR_ANSWER}."
)
EITHER = (
    " (without quotes), where 'X' must be one of the options or 'YOUR_ANSWER' is your conclusion."
)

MATH_V = PromptTemplate(system=ASSISTANT, ask=f"{ASK_BOXED}'{EITHER}", answered=BOXED)
MATH_V_REASONED = PromptTemplate(
    system=ASSISTANT,
    ask=f"{ASK_BOXED} BECAUSE: xxx'{EITHER}{STEP_BY_STEP}",
    answered=BOXED,
    reasoned=BOXED + AND_WHY,
)

VSR_MC = MMMU
VIZ_WIZ = PromptTemplate(
    system=ASSISTANT,
    ask="Answer the question using a single word or phrase. When the provided information is"
    " insufficient, answer 'unanswerable'.",
)


@dataclass(frozen=True)
class ExplanationPrompter:
    """Asks how one gets to the answer of an example that is known ("Get Reasoning Context").

    The answer is written as its letter and its text, `(B) left`, so that the reasoning may speak of
    either.
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
            answer = self.option.format(letter=letter_of(example), choice=answer)
        asked = self.question.format(question=listed(query, self.option), answer=answer)
        return _asked(self.system, query, asked)


@dataclass(frozen=True)
class ConclusionPrompter:
    """Asks a query whose thought process is given ("Get Predicted Answer by Reasoning Context").

    The paper prints no format for the answer: `by_letter` or `in_words` asks for one that can be
    read, on a line of its own behind the thoughts. More than 26 choices are asked for in words.
    """

    system: str = ASSISTANT
    question: str = "**User Question:** {question}\n**THOUGHT PROCESS:** {rationale}"
    option: str = OPTION
    by_letter: str = ASK_LETTER
    in_words: str = ASK_SHORT

    def __call__(self, query: Query, rationale: str, /) -> Prompt:
        asked = self.question.format(question=listed(query, self.option), rationale=rationale)
        wanted = self.by_letter if has_letters(query) else self.in_words
        return _asked(self.system, query, f"{asked}\n{wanted}")


@dataclass(frozen=True)
class ContinuationPrompter:
    """The same for a model that reads brief turns and no instructions: `prompt` shows the query,
    the rationale begins the model's own turn, and what is left to say is the answer.

    Needs a backend that goes on with an assistant's last turn, as models in this process do.
    """

    prompt: Prompter

    def __call__(self, query: Query, rationale: str, /) -> Prompt:
        begun = Message("assistant", (f"{rationale}\nAnswer:",))
        return Prompt((*self.prompt(query, ()).messages, begun))


def _asked(system: str, query: Query, text: str) -> Prompt:
    return Prompt((Message("system", (system,)), Message("user", (*query.images, text))))
