"""Parsers that turn a reply into an `Answer` with a confidence, and comparison of answers."""

from bottega.parsing.answers import (
    FinalAnswerParser,
    LabelParser,
    last_answer,
    plain_text,
    strip_thinking,
)
from bottega.parsing.choices import (
    ChoiceParser,
    RationaleParser,
    most_confident,
    most_frequent,
    open_candidates,
)
from bottega.parsing.comparison import agreement, same_answer, same_choice, same_number, same_words

__all__ = [
    "ChoiceParser",
    "FinalAnswerParser",
    "LabelParser",
    "RationaleParser",
    "agreement",
    "last_answer",
    "most_confident",
    "most_frequent",
    "open_candidates",
    "plain_text",
    "same_answer",
    "same_choice",
    "same_number",
    "same_words",
    "strip_thinking",
]
