"""Parsers that turn a reply into an `Answer` with a confidence, and comparison of answers."""

from bottega._util.refusals import is_refusal
from bottega.parsing.answers import (
    find_stated_answers,
    last_answer,
    plain_text,
    rationale_before,
    strip_thinking,
)
from bottega.parsing.choices import (
    ChoiceParser,
    RationaleParser,
    most_confident,
    most_frequent,
    open_candidates,
)
from bottega.parsing.comparison import (
    COMPARISON_RULES,
    compare_replies,
    decided_agreement,
    equal_answers,
    field_agreement,
    same_answer,
    same_choice,
    same_number,
    same_words,
)
from bottega.parsing.final_answers import FinalAnswerParser
from bottega.parsing.labels import LabelParser, SynonymParser
from bottega.parsing.quantities import Sameness

__all__ = [
    "COMPARISON_RULES",
    "ChoiceParser",
    "FinalAnswerParser",
    "LabelParser",
    "RationaleParser",
    "Sameness",
    "SynonymParser",
    "compare_replies",
    "decided_agreement",
    "equal_answers",
    "field_agreement",
    "find_stated_answers",
    "is_refusal",
    "last_answer",
    "most_confident",
    "most_frequent",
    "open_candidates",
    "plain_text",
    "rationale_before",
    "same_answer",
    "same_choice",
    "same_number",
    "same_words",
    "strip_thinking",
]
