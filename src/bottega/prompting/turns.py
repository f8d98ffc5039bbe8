"""Demonstrations of any task: the paper's single turn, and turns of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from string import ascii_uppercase

from bottega.errors import SettingError
from bottega.image import Image
from bottega.types import Candidate, Example, Message, Prompt, Query

OPTION = "({letter}) {choice}"


def lettered(query: Query, option: str = OPTION) -> str:
    """The question, and below it each choice on a line. Raises `SettingError` for more than 26."""
    if len(query.choices) > len(ascii_uppercase):
        raise SettingError(
            f"there are {len(query.choices)} choices and only {len(ascii_uppercase)} letters",
            hint="use Interleaved, which shows the choices without letters",
        )
    named = zip(ascii_uppercase, query.choices, strict=False)
    listed = (option.format(letter=letter, choice=choice) for letter, choice in named)
    return "\n".join([query.text, *listed])


def has_letters(query: Query) -> bool:
    return 0 < len(query.choices) <= len(ascii_uppercase)


def listed(query: Query, option: str = OPTION) -> str:
    """As `lettered`, but in words where there are more choices than letters."""
    if has_letters(query):
        return lettered(query, option)
    return "\n".join([query.text, *(f"- {choice}" for choice in query.choices)])


def letter_of(example: Example) -> str:
    """Of its answer; an answer that is none of its choices stays what it is."""
    choices = example.query.choices
    if example.answer not in choices:
        return example.answer
    return ascii_uppercase[choices.index(example.answer)]


DEMONSTRATION = """\
Given the image above, answer the following question using the specified format.
Question: {question}
Choices: {choices}
Answer Choice: {answer}
"""

REQUEST = """\
Given the image above, answer the following question using the specified format.
Question: {question}
Choices: {choices}
Please respond with the following format:
---BEGIN FORMAT TEMPLATE---
Answer Choice: [Your Answer Choice Here]
Confidence Score: [Your Numerical Prediction Confidence Score Here From 0 To 1]
---END FORMAT TEMPLATE---
Do not deviate from the above format. Repeat the format template for the answer."""


ASK_REASONING = (
    "Explain your reasoning step by step. Then state the final answer alone, on a last line that"
    ' begins with "Answer:".'
)
ASK_LETTER = "Answer with the letter of the right choice."
ASK_SHORT = "Answer with a number, a word or a short phrase."


class AppendixAPrompter:
    """The prompt of Visual RAG's appendix A (from ManyICL): one user turn, each image before its
    text, the choices as a Python list in every block, and a format template after the query. It
    shows no rationales; a passage (an example without an answer) is its text alone."""

    def __call__(self, query: Query, demonstrations: Sequence[Candidate], /) -> Prompt:
        choices = str(list(query.choices))
        parts: list[str | Image] = []
        for candidate in demonstrations:
            example = candidate.example
            parts += [*example.query.images, self._shown(example, choices)]
        request = REQUEST.format(question=query.text, choices=choices)
        return Prompt((Message("user", (*parts, *query.images, request)),))

    def _shown(self, example: Example, choices: str) -> str:
        if not example.answer:
            return f"{example.query.text}\n"
        return DEMONSTRATION.format(
            question=example.query.text, choices=choices, answer=example.answer
        )


class InterleavedPrompter:
    """A conversation: each demonstration is a user turn (images, question) and the assistant's
    answer, below its rationale if it has one; a passage (an example without an answer) is a user
    turn alone. The query is the last user turn. With `show_choices` that turn lists the choices.
    Without `repeat_question` a demonstration that asks the same as the demonstration just before
    it shows its image alone: a question holds until another is asked. That shortens the prompt of
    a classification to less than half.

    Retrieved text stands in user and assistant turns only, never in a system turn.
    """

    def __init__(self, *, show_choices: bool = True, repeat_question: bool = True) -> None:
        self.show_choices = show_choices
        self.repeat_question = repeat_question

    def __call__(self, query: Query, demonstrations: Sequence[Candidate], /) -> Prompt:
        messages: list[Message] = []
        asked: str | None = None
        for candidate in demonstrations:
            example = candidate.example
            messages.append(Message("user", self._demonstrated(example, asked)))
            if example.answer:
                messages.append(Message("assistant", (example.reply,)))
            # A passage may speak of something else: after it the question stands anew.
            asked = example.query.text if example.answer else None
        messages.append(Message("user", (*query.images, self._question(query))))
        return Prompt(tuple(messages))

    def _demonstrated(self, example: Example, asked: str | None) -> tuple[str | Image, ...]:
        """`asked` is the question of the demonstration just before, None if there is none."""
        shown = example.query
        holds = shown.text == asked and shown.images and example.answer
        if holds and not self.repeat_question:
            return shown.images
        return (*shown.images, shown.text)

    def _question(self, query: Query) -> str:
        if not (self.show_choices and query.choices):
            return query.text
        choices = "\n".join(f"- {choice}" for choice in query.choices)
        return f"{query.text}\nAnswer with one of these and nothing else:\n{choices}"


class LetteredPrompter:
    """Turns as in `InterleavedPrompter`, for questions that bring their own choices: each
    demonstration lists its own as (A), (B) and so on, and is answered by the letter, below its
    rationale if it has one. An answer that is none of its choices is shown as it is. The query is
    asked for the letter alone, or for a short answer if it has no choices.

    Raises `SettingError` for more than 26 choices.
    """

    def __call__(self, query: Query, demonstrations: Sequence[Candidate], /) -> Prompt:
        messages: list[Message] = []
        for candidate in demonstrations:
            example = candidate.example
            shown = example.query
            messages.append(Message("user", (*shown.images, lettered(shown))))
            if example.answer:
                reply = replace(example, answer=letter_of(example)).reply
                messages.append(Message("assistant", (reply,)))
        asked = ASK_LETTER if query.choices else ASK_SHORT
        messages.append(Message("user", (*query.images, f"{lettered(query)}\n{asked}")))
        return Prompt(tuple(messages))


class ReasoningPrompter:
    """Turns as in `InterleavedPrompter`, whose last one asks for the reasoning and then for the
    answer on a line of its own: what a master is told, because its answers are to be learnt
    from."""

    def __call__(self, query: Query, demonstrations: Sequence[Candidate], /) -> Prompt:
        listed = "\n".join(["\nChoose one of these:", *(f"- {one}" for one in query.choices)])
        asked = f"{query.text}{listed if query.choices else ''}\n{ASK_REASONING}"
        shown = InterleavedPrompter(show_choices=False)
        return shown(replace(query, text=asked), demonstrations)


@dataclass(frozen=True)
class PromptTemplate:
    """Turns of one form: an instruction to the `system`, then each demonstration as a user turn
    (images, question, choices) and the assistant's answer, and the query as the last user turn.

    Below each question stand its choices, each as `option` (`{letter}`, `{choice}`) writes it, and
    then what is asked for, `ask`, or `ask_open` where there are no choices and that is something
    else. `answered` has the field `{answer}`: the letter, or the text of
    an answer that is no choice. `reasoned`, which has `{rationale}` as well, takes its place for an
    example that has one; without it no rationale is shown. Without demonstrations it is the
    zero-shot prompt.

    What was retrieved stands in user and assistant turns only. Raises `SettingError` for more than
    26 choices.
    """

    system: str = ""
    option: str = OPTION
    ask: str = ""
    ask_open: str | None = None
    answered: str = "{answer}"
    reasoned: str | None = None

    def __call__(self, query: Query, demonstrations: Sequence[Candidate], /) -> Prompt:
        messages = [Message("system", (self.system,))] if self.system else []
        for example in (candidate.example for candidate in demonstrations):
            messages.append(Message("user", self._asked(example.query, passage=not example.answer)))
            if example.answer:
                messages.append(Message("assistant", (self._answer(example),)))
        messages.append(Message("user", self._asked(query)))
        return Prompt(tuple(messages))

    def _asked(self, query: Query, *, passage: bool = False) -> tuple[str | Image, ...]:
        """A passage is read: it asks for nothing."""
        if passage:
            return (*query.images, query.text)
        asked = lettered(query, self.option)
        ask = self.ask if query.choices or self.ask_open is None else self.ask_open
        return (*query.images, f"{asked}\n{ask}" if ask else asked)

    def _answer(self, example: Example) -> str:
        if example.rationale and self.reasoned is not None:
            return self.reasoned.format(answer=letter_of(example), rationale=example.rationale)
        return self.answered.format(answer=letter_of(example))
