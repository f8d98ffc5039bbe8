"""The prompts that make rationales and test them (RCTS, appendix C.1)."""

from __future__ import annotations

from dataclasses import dataclass

from bottega.prompting.rcts import ASSISTANT
from bottega.prompting.turns import ASK_LETTER, ASK_SHORT, OPTION, has_letters, letter_of, listed
from bottega.protocols import Prompter
from bottega.types import Example, Message, Prompt, Query


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
