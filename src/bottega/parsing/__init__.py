"""What was answered: a reply becomes an `Answer`, with the model's stated confidence or its own
probability."""

from bottega.parsing.agreement import agreement
from bottega.parsing.answer_equality import same_answer, same_choice, same_number, same_words
from bottega.parsing.choices import ChoiceParser, FinalAnswerParser, open_candidates
from bottega.parsing.labels import LabelParser, plain_text
from bottega.parsing.replies import RationaleParser, most_confident, most_frequent, spoken

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
    "spoken",
]
