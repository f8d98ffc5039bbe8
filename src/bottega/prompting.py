"""How demonstrations are shown to the model."""

from __future__ import annotations

from collections.abc import Sequence

from bottega.image import Image
from bottega.types import Candidate, Message, Prompt, Query

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


class AppendixA:
    """The prompt of Visual RAG's appendix A (from ManyICL): one user turn, each image before its
    text, the choices as a Python list in every block, and a format template after the query."""

    def __call__(self, query: Query, demonstrations: Sequence[Candidate], /) -> Prompt:
        choices = str(list(query.choices))
        parts: list[str | Image] = []
        for candidate in demonstrations:
            example = candidate.example
            shown = DEMONSTRATION.format(
                question=example.query.text, choices=choices, answer=example.answer
            )
            parts += [*example.query.images, shown]
        request = REQUEST.format(question=query.text, choices=choices)
        return Prompt((Message("user", (*parts, *query.images, request)),))


class Interleaved:
    """A conversation: each demonstration is a user turn (images, question) and the assistant's
    answer, the query is the last user turn. With `show_choices` that turn lists the choices;
    without `repeat_question` a demonstration that asks the query's own question shows its image
    alone, which shortens the prompt of a classification to less than half.

    Retrieved text stands in user and assistant turns only, never in a system turn.
    """

    def __init__(self, *, show_choices: bool = True, repeat_question: bool = True) -> None:
        self.show_choices = show_choices
        self.repeat_question = repeat_question

    def __call__(self, query: Query, demonstrations: Sequence[Candidate], /) -> Prompt:
        messages: list[Message] = []
        for candidate in demonstrations:
            example = candidate.example
            messages.append(Message("user", self._demonstrated(example.query, query)))
            messages.append(Message("assistant", (example.answer,)))
        messages.append(Message("user", (*query.images, self._question(query))))
        return Prompt(tuple(messages))

    def _demonstrated(self, shown: Query, asked: Query) -> tuple[str | Image, ...]:
        if self.repeat_question or shown.text != asked.text or not shown.images:
            return (*shown.images, shown.text)
        return shown.images

    def _question(self, query: Query) -> str:
        if not (self.show_choices and query.choices):
            return query.text
        choices = "\n".join(f"- {choice}" for choice in query.choices)
        return f"{query.text}\nAnswer with one of these and nothing else:\n{choices}"
