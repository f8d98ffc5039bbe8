"""What every parser reads off a reply: what was said after thinking, the stated answers and the
stated confidence."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence

from bottega.types import Completion

# Some templates write the opening tag themselves, so that a reply only closes it.
THINKING = re.compile(r"\A.*</think>", re.DOTALL)
UNFINISHED = "<think>"
# Before these words only marks of their own line may stand: a reply of marks alone would be read to
# its end from each of its lines.
STATED_ANSWER = re.compile(r"^[^\w\n]*answer(?: choice)?\W*:\s*(.*)$", re.IGNORECASE | re.MULTILINE)
STATED_CONFIDENCE = re.compile(
    r"^[^\w\n]*confidence(?: score)?[^\w:]*:[^\d\n-]*?(\d*\.?\d+)\s*(%?)",
    re.IGNORECASE | re.MULTILINE,
)
TEMPLATE_OPENS = re.compile(r"^[^\w\n]*BEGIN FORMAT TEMPLATE[^\w\n]*$", re.MULTILINE)
CONFIDENCE_LINE = re.compile(
    r"^[^\w\n]*confidence(?: score)?[^\w\n]*:.*$", re.IGNORECASE | re.MULTILINE
)
WORDS = re.compile(r"\w")
POINT = re.compile(r"(?<![\w.])\.(?=\d)")  # that of ".5", which is no punctuation
QUOTES = "\"'`*_[]().,;:!?“”‘’«» \t\n"


def spoken(reply: str) -> str:
    """The reply without its thinking; nothing if it was cut off while still thinking."""
    said = THINKING.sub("", reply)
    return "" if UNFINISHED in said else said.strip()


def stated_answers(reply: str) -> list[re.Match[str]]:
    """The lines `Answer: ...`. A model that repeats the template answers last."""
    return list(STATED_ANSWER.finditer(reply))


def before(reply: str, stated: Sequence[re.Match[str]]) -> str | None:
    """What was said before the first answer, if there is one: the rationale."""
    if not stated:
        return None
    lines = TEMPLATE_OPENS.sub("", reply[: stated[0].start()]).split("\n")
    while lines and not WORDS.search(lines[-1]):  # a rule above the answer
        lines.pop()
    return "\n".join(lines).strip() or None


def without_confidence(reply: str) -> str:
    """The reply less the line of the template that is no part of the answer."""
    return CONFIDENCE_LINE.sub("", reply).strip()


def confidence(reply: str, completion: Completion) -> float | None:
    """As stated in the reply, or else the probability of the completion's tokens."""
    stated = STATED_CONFIDENCE.findall(reply)
    if stated:
        number, percent = stated[-1]
        value = float(number) / (100 if percent else 1)
        if 0 <= value <= 1:
            return value
    if completion.logprob is None or math.isnan(completion.logprob):
        return None
    return math.exp(min(0.0, completion.logprob))


def match(text: str, choices: Sequence[str]) -> str | None:
    """The choice that the text is, up to case, outer punctuation and spacing; None if it is not
    exactly one of them."""
    if text in choices:
        return text
    wanted = plain(text)
    if not wanted:
        return None
    equal = [choice for choice in choices if plain(choice) == wanted]
    return equal[0] if len(equal) == 1 else None


def plain(text: str) -> str:
    folded = unicodedata.normalize("NFKC", text).casefold().replace("_", " ")
    if "." in folded:
        folded = POINT.sub("0.", folded)
    return " ".join(folded.strip(QUOTES).split())
