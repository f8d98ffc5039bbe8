"""What was answered: a reply becomes a label, with the model's stated confidence or its own
probability. Matching is by whole label, never by substring ("cat" is not in "caterpillar")."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence

from bottega.types import Answer, Completion, Query

# Some templates write the opening tag themselves, so that a reply only closes it.
THINKING = re.compile(r"\A.*</think>", re.DOTALL)
UNFINISHED = "<think>"
STATED_ANSWER = re.compile(r"^\W*answer(?: choice)?\W*:\s*(.*)$", re.IGNORECASE | re.MULTILINE)
STATED_CONFIDENCE = re.compile(
    r"^\W*confidence(?: score)?\W*:[^\d\n-]*?(\d*\.?\d+)\s*(%?)", re.IGNORECASE | re.MULTILINE
)
TEMPLATE_OPENS = re.compile(r"^\W*BEGIN FORMAT TEMPLATE\W*$", re.MULTILINE)
SEPARATORS = re.compile(r"([,;|\n]+(?: and )?| and )")
QUOTES = "\"'`*_[]().,;:!?“”‘’«» \t\n"
NO_LABEL = "none"


def plain_text(query: Query, completion: Completion, /) -> Answer:
    """The reply as it is, without its thinking; an empty one is invalid."""
    text = _spoken(completion.text)
    return Answer(text, valid=bool(text))


class LabelParser:
    """Reads `Answer Choice: ...` and `Confidence Score: ...` (the last of each, as a model that
    repeats the template answers last), or else takes the whole reply as the label.

    The label must equal one of the query's choices up to case, outer punctuation and spacing; with
    no choices, any text is an answer. What stands before the first answer is the rationale. With
    `multi_label` the reply may list several choices separated by commas, or say "none". Everything
    else is `Answer(valid=False)`.
    """

    def __init__(self, *, multi_label: bool = False) -> None:
        self.multi_label = multi_label

    def __call__(self, query: Query, completion: Completion, /) -> Answer:
        reply = _spoken(completion.text)
        stated = [] if reply in query.choices else list(STATED_ANSWER.finditer(reply))
        text = (stated[-1][1] if stated else reply).strip()
        rationale = _before(reply, stated[0]) if stated else None
        confidence = _stated_confidence(reply)
        if confidence is None and completion.logprob is not None:
            confidence = math.exp(min(0.0, completion.logprob))
        labels = self._labels(text, query.choices)
        if labels is None:
            return Answer(text, valid=False, rationale=rationale)
        shown = ", ".join(labels) or NO_LABEL
        return Answer(shown, labels=labels, confidence=confidence, rationale=rationale)

    def _labels(self, text: str, choices: Sequence[str]) -> tuple[str, ...] | None:
        if not choices:
            bare = text.strip(QUOTES)
            return (bare,) if bare else None
        one = _match(text, choices)
        if one is not None:
            return (one,)
        if not self.multi_label:
            return None
        if _plain(text) == NO_LABEL:
            return ()
        return _split(text, choices)


def _split(text: str, choices: Sequence[str]) -> tuple[str, ...] | None:
    """The labels of a list. A label may itself hold a separator, so the longest run of parts that
    is a choice wins. None if any part belongs to no choice."""
    parts = SEPARATORS.split(text)  # captured separators stand at the odd places
    found: list[str] = []
    start = 0
    while start < len(parts):
        for end in range(len(parts), start, -2):
            label = _match("".join(parts[start:end]), choices)
            if label is not None:
                found.append(label)
                start = end + 1
                break
        else:
            return None
    return tuple(dict.fromkeys(found))


def _before(reply: str, stated: re.Match[str]) -> str | None:
    return TEMPLATE_OPENS.sub("", reply[: stated.start()]).strip() or None


def _spoken(reply: str) -> str:
    """The reply without its thinking; nothing if it was cut off while still thinking."""
    spoken = THINKING.sub("", reply)
    return "" if UNFINISHED in spoken else spoken.strip()


def _match(text: str, choices: Sequence[str]) -> str | None:
    if text in choices:
        return text
    wanted = _plain(text)
    if not wanted:
        return None
    equal = [choice for choice in choices if _plain(choice) == wanted]
    return equal[0] if len(equal) == 1 else None


def _plain(text: str) -> str:
    folded = unicodedata.normalize("NFKC", text).casefold().replace("_", " ")
    return " ".join(folded.strip(QUOTES).split())


def _stated_confidence(reply: str) -> float | None:
    stated = STATED_CONFIDENCE.findall(reply)
    if not stated:
        return None
    number, percent = stated[-1]
    value = float(number) / (100 if percent else 1)
    return value if 0 <= value <= 1 else None
