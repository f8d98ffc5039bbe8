"""Prompts of Cache-of-Thought: for questions with their own choices, and for all others.

The paper prints the form of a prompt (section 4.1): each image, "Question:" with its text and
"Answer:" with the master's response. Its code ends a response with a line "ANSWER:". The exact
wording of the instruction is not printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bottega.prompting.turns import PromptTemplate, ReasoningPrompter, has_letters
from bottega.types import Candidate, Prompt, Query

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
