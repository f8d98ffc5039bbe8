"""Parsers that turn a reply into an `Answer` with a confidence, and comparison of answers."""

from bottega.parsing.choices import ChoiceParser, FinalAnswerParser, open_candidates
from bottega.parsing.comparison import agreement, same_answer, same_choice, same_number, same_words
from bottega.parsing.labels import LabelParser, plain_text
from bottega.parsing.replies import RationaleParser, most_confident, most_frequent, strip_thinking

__all__ = [
    "ChoiceParser",
    "FinalAnswerParser",
    "LabelParser",
    "RationaleParser",
    "agreement",
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
