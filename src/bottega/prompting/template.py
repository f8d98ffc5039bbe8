"""A prompt as data: what a benchmark's authors wrote, in fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bottega.image import Image
from bottega.prompting.turns import OPTION, letter_of, lettered
from bottega.types import Candidate, Example, Message, Prompt, Query


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
