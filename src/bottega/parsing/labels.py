"""A reply becomes a label. Matching is by whole label, never by substring ("cat" is not in
"caterpillar")."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bottega.parsing.replies import (
    QUOTES,
    WORDS,
    before,
    confidence,
    match,
    plain,
    spoken,
    stated_answers,
)
from bottega.types import Answer, Completion, Query

SEPARATORS = re.compile(r"([,;|\n]+(?: and )?| and )")
NO_LABEL = "none"
# Markdown at the start of a line. The blank after it distinguishes a bullet from a minus sign.
BULLET = re.compile(r"\A[\s*_]*(?:[-–—•·▪◦>]|#{1,6})\s+")
DASHES = str.maketrans(dict.fromkeys("‐‑‒–—―−", "-"))
# A character outside ASCII is a token of its own: Chinese, Japanese and Thai have no spaces.
WORD = re.compile(r"[a-z]+|[0-9]+|[^\W_]")
TOKEN = re.compile(rf"{WORD.pattern}|[^\s\w]")
ARTICLE = re.compile(r"\ba(?=[ \t]+[a-z])")
# After a label, these words may retract it. The "t" is that of "isn't".
DOUBTS = re.compile(
    " (?:actually|but|cannot|correction|false|however|incorrect|instead|mistake|mistaken|never|no"
    "|nor|not|rather|sorry|t|wait|wrong|不|错|錯) "
)


def plain_text(query: Query, completion: Completion, /) -> Answer:
    """The reply as it is, without its thinking; an empty one is invalid."""
    text = spoken(completion.text)
    return Answer(text, valid=bool(text))


class LabelParser:
    """Reads `Answer Choice: ...` and `Confidence Score: ...` (the last of each, as a model that
    repeats the template answers last), or else takes the whole reply as the label.

    The label must equal one of the query's choices up to case, outer punctuation and spacing, with
    or without a bullet before it. It may be the whole first line of a longer reply that names no
    other choice and expresses no doubt ("biology" above "Which of"). With no choices, any text is
    an answer. The text before the first answer is the rationale. With `multi_label` the reply may
    list several choices separated by commas, or say "none". Everything else is
    `Answer(valid=False)`.
    """

    def __init__(self, *, multi_label: bool = False) -> None:
        self.multi_label = multi_label

    def __call__(self, query: Query, completion: Completion, /) -> Answer:
        reply = spoken(completion.text)
        stated = [] if reply in query.choices else stated_answers(reply)
        text = (stated[-1][1] if stated else reply).strip()
        rationale = before(reply, stated)
        labels = self._labels(text, query.choices)
        if labels is None:
            return Answer(text, valid=False, rationale=rationale)
        shown = ", ".join(labels) or NO_LABEL
        sure = confidence(reply, completion)
        return Answer(shown, labels=labels, confidence=sure, rationale=rationale)

    def _labels(self, text: str, choices: Sequence[str]) -> tuple[str, ...] | None:
        if not choices:
            bare = text.strip(QUOTES)
            return (bare,) if bare else None
        one = _listed(text, choices)
        if one is None and not self.multi_label:
            one = _first_line(text, choices)
        if one is not None:
            return (one,)
        if not self.multi_label:
            return None
        if plain(text) == NO_LABEL:
            return ()
        return _split(text, choices)


def _listed(text: str, choices: Sequence[str]) -> str | None:
    """Return the choice that equals the text, with or without a bullet. Return None for "- 5" if
    "-5" is a choice, with any dash in either."""
    label = match(text, choices)
    bullet = BULLET.match(text)
    if label is not None or bullet is None:
        return label
    if _signed(text) in map(_signed, choices):
        return None
    return match(text[bullet.end() :], choices)


def _signed(text: str) -> str:
    return "".join(plain(text.translate(DASHES)).split())


def _first_line(text: str, choices: Sequence[str]) -> str | None:
    """Return the choice that is the whole first line, unless later text may contradict it."""
    lines = [line for line in text.splitlines() if WORDS.search(line)]
    label = _listed(lines[0], choices) if lines else None
    if label is None or _contradicts("\n".join(lines[1:]), label, choices):
        return None
    return label


def _contradicts(text: str, label: str, choices: Sequence[str]) -> bool:
    """Return whether the text contains a word of doubt or any other choice. Compare with and
    without punctuation: the first distinguishes "C" from "C++", the second finds
    "salt-and-pepper"."""
    folded = plain(text)
    for pattern in (TOKEN, WORD):
        own, said = _tokens(plain(label), pattern), _tokens(folded, pattern)
        rest = said.replace(own, "\n") if own else said
        if DOUBTS.search(rest):
            return True
        for choice in choices:
            other = _tokens(plain(choice), pattern)
            if not other or other == own:
                continue
            # "hot dog" contains "dog", so only a "dog" outside it counts.
            where = rest if other in own else said
            if other == " a " and not choice.islower():
                where = _tokens(plain(ARTICLE.sub("", text)), pattern)
            if other in where:
                return True
    return False


def _tokens(text: str, pattern: re.Pattern[str]) -> str:
    """Return each token between two spaces of its own, so that adjacent matches never overlap."""
    return "".join(f" {token} " for token in pattern.findall(text))


def _split(text: str, choices: Sequence[str]) -> tuple[str, ...] | None:
    """The labels of a list. A label may itself hold a separator, so the longest run of parts that
    is a choice wins. None if any part belongs to no choice."""
    parts = SEPARATORS.split(text)  # captured separators stand at the odd places
    # No choice has more: each separator stands for one of its characters at least.
    most = 2 * max(len(plain(choice)) for choice in choices) + 1
    found: list[str] = []
    start = 0
    while start < len(parts):
        for end in range(min(len(parts), start + most), start, -2):
            label = _listed("".join(parts[start:end]), choices)
            if label is not None:
                found.append(label)
                start = end + 1
                break
        else:
            return None
    return tuple(dict.fromkeys(found))
