"""Prompters with one user turn (Visual RAG's), with conversation turns, and from templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from string import ascii_uppercase

from bottega.errors import SettingError
from bottega.image import Image
from bottega.types import Candidate, Example, Message, Prompt, Query

OPTION = "({letter}) {choice}"


def format_lettered(query: Query, option: str = OPTION) -> str:
    """Return the question with one lettered choice per line.

    Raises `SettingError` for more than 26 choices.
    """
    if len(query.choices) > len(ascii_uppercase):
        raise SettingError(
            f"lettered choices must be at most {len(ascii_uppercase)}, got {len(query.choices)}",
            hint="use InterleavedPrompter, which lists the choices without letters",
        )
    named = zip(ascii_uppercase, query.choices, strict=False)
    lines = (option.format(letter=letter, choice=choice) for letter, choice in named)
    return "\n".join([query.text, *lines])


def has_letters(query: Query) -> bool:
    """Return whether the query has 1 to 26 choices."""
    return 0 < len(query.choices) <= len(ascii_uppercase)


def format_question(query: Query, option: str = OPTION) -> str:
    """Return the question with its choices: lettered, or as a plain list if there are over 26."""
    if has_letters(query):
        return format_lettered(query, option)
    return "\n".join([query.text, *(f"- {choice}" for choice in query.choices)])


def answer_letter(example: Example) -> str:
    """Return the letter of the answer, or the answer itself if it is not one of the choices."""
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
    """Prompt of Visual RAG, appendix A (from ManyICL), in one user turn.

    Each image precedes its text, every block lists the choices as a Python list, and a format
    template follows the query. Rationales are not shown. A passage (an example without an answer)
    is its text alone.
    """

    def __call__(self, query: Query, demonstrations: Sequence[Candidate], /) -> Prompt:
        choices = str(list(query.choices))
        parts: list[str | Image] = []
        for candidate in demonstrations:
            example = candidate.example
            text = f"{example.query.text}\n"
            if example.answer:
                text = DEMONSTRATION.format(
                    question=example.query.text, choices=choices, answer=example.answer
                )
            parts += [*example.query.images, text]
        request = REQUEST.format(question=query.text, choices=choices)
        return Prompt((Message("user", (*parts, *query.images, request)),))


class InterleavedPrompter:
    """Prompter that shows each demonstration as a user turn and an assistant turn.

    The user turn holds images and question; the assistant turn holds the rationale, if any, and the
    answer. A passage (an example without an answer) is a user turn alone. The query is the last
    user turn, with its choices if `show_choices`. A demonstration whose choices differ from the
    query's lists its own. Without `repeat_question`, a demonstration with the question of the
    previous one shows its images only; this halves the prompt of a classification.

    Retrieved text is in user and assistant turns only, never in a system turn.
    """

    def __init__(
        self,
        *,
        show_choices: bool = True,
        repeat_question: bool = True,
        show_own_choices: bool = True,
    ) -> None:
        self.show_choices = show_choices
        self.repeat_question = repeat_question
        self.show_own_choices = show_own_choices

    def __call__(self, query: Query, demonstrations: Sequence[Candidate], /) -> Prompt:
        messages: list[Message] = []
        previous: str | None = None
        for candidate in demonstrations:
            example = candidate.example
            messages.append(Message("user", self._demonstration(example, query, previous)))
            if example.answer:
                messages.append(Message("assistant", (example.reply,)))
            # A passage may have another topic: repeat the question after it.
            previous = example.query.text if example.answer else None
        return Prompt((*messages, Message("user", (*query.images, self._question(query)))))

    def _demonstration(
        self, example: Example, query: Query, previous: str | None
    ) -> tuple[str | Image, ...]:
        """Return the user turn; `previous` is the question of the demonstration before, if any."""
        shown = example.query
        repeated = shown.text == previous and shown.images and example.answer
        if repeated and not self.repeat_question:
            return shown.images
        text = shown.text
        if self.show_own_choices and shown.choices and shown.choices != query.choices:
            text = f"{text}\nChoose one of these:\n{_listed(shown.choices)}"
        return (*shown.images, text)

    def _question(self, query: Query) -> str:
        if not (self.show_choices and query.choices):
            return query.text
        choices = _listed(query.choices)
        return f"{query.text}\nAnswer with one of these and nothing else:\n{choices}"


def _listed(choices: Sequence[str]) -> str:
    return "\n".join(f"- {choice}" for choice in choices)


class LetteredPrompter:
    """Prompter like `InterleavedPrompter` for questions with their own choices.

    Each demonstration lists its choices as (A), (B) and so on; the assistant answers with the
    letter, after the rationale if there is one. An answer that is not one of the choices is shown
    unchanged. The query asks for the letter, or for a short answer if it has no choices. Raises
    `SettingError` for more than 26 choices.
    """

    def __call__(self, query: Query, demonstrations: Sequence[Candidate], /) -> Prompt:
        messages: list[Message] = []
        for candidate in demonstrations:
            example = candidate.example
            shown = example.query
            messages.append(Message("user", (*shown.images, format_lettered(shown))))
            if example.answer:
                reply = replace(example, answer=answer_letter(example)).reply
                messages.append(Message("assistant", (reply,)))
        instruction = ASK_LETTER if query.choices else ASK_SHORT
        text = f"{format_lettered(query)}\n{instruction}"
        return Prompt((*messages, Message("user", (*query.images, text))))


class ReasoningPrompter:
    """Prompter like `InterleavedPrompter` that asks for reasoning before the answer.

    The answer goes on a line of its own; a demonstration without a rationale is that line alone.
    Use the same prompt for a master and for an apprentice, which learns from the master's answers.
    """

    def __call__(self, query: Query, demonstrations: Sequence[Candidate], /) -> Prompt:
        choices = f"\nChoose one of these:\n{_listed(query.choices)}" if query.choices else ""
        text = f"{query.text}{choices}\n{ASK_REASONING}"
        shown = InterleavedPrompter(show_choices=False)
        return shown(replace(query, text=text), [_with_answer_line(one) for one in demonstrations])


def _with_answer_line(candidate: Candidate) -> Candidate:
    """Return the candidate with its answer as the line that `ReasoningPrompter` asks for."""
    example = candidate.example
    if example.rationale or not example.answer:
        return candidate
    return replace(candidate, example=replace(example, answer=f"Answer: {example.answer}"))


@dataclass(frozen=True)
class PromptTemplate:
    """Prompter from a template: system turn, demonstrations and query in one format.

    Each demonstration is a user turn (images, question, choices) and an assistant turn with the
    answer; the query is the last user turn. Without demonstrations this is the zero-shot prompt.
    `option` formats a choice (`{letter}`, `{choice}`), `question_format` a question with its
    choices (`{question}`). `instruction` follows the choices;
    `open_instruction` replaces it for a query without choices. `answer_format` formats an answer
    (`{answer}`: the letter, or the text if it is not a choice). `rationale_format` replaces it for
    an example with a rationale (`{answer}`, `{rationale}`); None shows no rationales.

    Retrieved text is in user and assistant turns only. Raises `SettingError` for more than 26
    choices.
    """

    system: str = ""
    option: str = OPTION
    question_format: str = "{question}"
    instruction: str = ""
    open_instruction: str | None = None
    answer_format: str = "{answer}"
    rationale_format: str | None = None

    def __call__(self, query: Query, demonstrations: Sequence[Candidate], /) -> Prompt:
        messages = [Message("system", (self.system,))] if self.system else []
        for example in (candidate.example for candidate in demonstrations):
            messages.append(
                Message("user", self._question(example.query, passage=not example.answer))
            )
            if example.answer:
                reasoned = self.rationale_format if example.rationale else None
                template = self.answer_format if reasoned is None else reasoned
                letter, rationale = answer_letter(example), example.rationale
                answer = template.format(answer=letter, rationale=rationale)
                messages.append(Message("assistant", (answer,)))
        return Prompt((*messages, Message("user", self._question(query))))

    def _question(self, query: Query, *, passage: bool = False) -> tuple[str | Image, ...]:
        """Return a user turn; a passage has no instruction."""
        if passage:
            return (*query.images, query.text)
        lettered = format_lettered(query, self.option)
        question = self.question_format.replace("{question}", lettered)
        is_open = not query.choices and self.open_instruction is not None
        instruction = self.open_instruction if is_open else self.instruction
        return (*query.images, f"{question}\n{instruction}" if instruction else question)


CACHE_OF_THOUGHT = PromptTemplate(
    question_format="Question: {question}",
    instruction="Include reasoning steps. Then give the letter of the right option, on a last line"
    ' that begins with "ANSWER:".\nAnswer:',
    open_instruction="Include reasoning steps. Then give a short final answer, on a last line that"
    ' begins with "ANSWER:".\nAnswer:',
    answer_format="ANSWER: {answer}",
    rationale_format="{rationale}\nANSWER: {answer}",
)


@dataclass(frozen=True)
class CachePrompter:
    """Prompt of the master and of the apprentices: `CACHE_OF_THOUGHT` for a query with its own
    choices, else `ReasoningPrompter`. `labels` are the choices that all queries share."""

    labels: tuple[str, ...] = ()

    def __call__(self, query: Query, demonstrations: Sequence[Candidate], /) -> Prompt:
        own = has_letters(query) and query.choices != self.labels
        lettered = all(len(one.example.query.choices) <= 26 for one in demonstrations)
        prompt = CACHE_OF_THOUGHT if own and lettered else ReasoningPrompter()
        return prompt(query, demonstrations)
