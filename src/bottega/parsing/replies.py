"""What every parser reads off a reply: what was said after thinking, the stated answers and the
stated confidence."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
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
ANSWER_PHRASE = re.compile(r"\bthe (?:final |correct )?answer is\b:?\s*", re.IGNORECASE)
WORDS = re.compile(r"\w")
DASHES = str.maketrans(dict.fromkeys("‐‑‒–—―−", "-"))
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


class ChoiceIndex:
    """The choices by their plain text, built once for many look-ups."""

    def __init__(self, choices: Sequence[str]) -> None:
        self.choices = choices
        self.texts = [plain(choice) for choice in choices]
        counts = Counter(self.texts)
        pairs = zip(self.texts, choices, strict=True)
        self._by_text = {text: choice for text, choice in pairs if text and counts[text] == 1}
        self._exact = frozenset(choices)
        self._signed = frozenset(map(_signed, self.texts))

    def find(self, text: str) -> str | None:
        """Return the choice that equals the text up to case, outer punctuation and spacing. Return
        None if there is no such choice, or more than one."""
        return text if text in self._exact else self._by_text.get(plain(text))

    def has_signed(self, text: str) -> bool:
        """Return whether a choice equals the text with any dash as minus sign, without spaces."""
        return _signed(plain(text)) in self._signed


def _signed(text: str) -> str:
    return "".join(text.translate(DASHES).split())


def match(text: str, choices: Sequence[str]) -> str | None:
    """Return the choice that equals the text, as `ChoiceIndex.find` does."""
    return text if text in choices else ChoiceIndex(choices).find(text)


def plain(text: str) -> str:
    folded = unicodedata.normalize("NFKC", text).casefold().replace("_", " ")
    if "." in folded:
        folded = POINT.sub("0.", folded)
    return " ".join(folded.strip(QUOTES).split())
