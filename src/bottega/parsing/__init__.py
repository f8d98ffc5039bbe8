"""What was answered: a reply becomes an `Answer`, with the model's stated confidence or its own
probability."""

from bottega.parsing.choices import ChoiceParser, open_candidates
from bottega.parsing.final import FinalAnswerParser
from bottega.parsing.labels import LabelParser, plain_text

__all__ = ["ChoiceParser", "FinalAnswerParser", "LabelParser", "open_candidates", "plain_text"]
