"""Detection of text that may retract a label."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bottega.parsing.replies import ChoiceIndex, plain

# A character outside ASCII is a token of its own: Chinese, Japanese and Thai have no spaces.
WORD = re.compile(r"[a-z]+|[0-9]+|[^\W_]")
TOKEN = re.compile(rf"{WORD.pattern}|[^\s\w]")
ARTICLE = re.compile(r"\ba(?=[ \t]+[a-z])")
# Shorter words and letters become other words with an "s": "as", "is", "its".
LAST_WORD = re.compile(r" [a-z]{3,} \Z")
# After a label, these words may retract it. The "t" is that of "isn't".
DOUBTS = re.compile(
    " (?:actually|but|cannot|correction|false|however|incorrect|instead|mistake|mistaken|never|no"
    "|nor|not|rather|sorry|t|wait|wrong|不|错|錯) "
)


def contradicts(text: str, labels: Sequence[str], index: ChoiceIndex) -> bool:
    """Return whether the text contains a word of doubt, or a choice that is not one of the labels,
    in the singular or plural. The comparison runs with and without punctuation: the first
    distinguishes "C" from "C++", the second finds "salt-and-pepper"."""
    folded = plain(text)
    if not folded:
        return False
    for pattern in (TOKEN, WORD):
        own = [_tokens(plain(label), pattern) for label in labels]
        choices = zip(index.choices, (_tokens(one, pattern) for one in index.texts), strict=True)
        others = [(choice, other) for choice, other in choices if other and other not in own]
        named = {other for _, other in others}
        owned = [form for one in own if one for form in _forms(one) if form not in named]
        said = rest = _tokens(folded, pattern)
        for form in sorted(owned, key=len, reverse=True):
            rest = rest.replace(form, "\n")
        if DOUBTS.search(rest):
            return True
        for choice, other in others:
            if other == " a " and not choice.islower():
                if other in _tokens(plain(ARTICLE.sub("", text)), pattern):
                    return True
                continue
            # "hot dog" contains "dog", so only a "dog" outside it counts.
            for form in _forms(other):
                if form in (rest if any(form in one for one in owned) else said):
                    return True
    return False


def _tokens(text: str, pattern: re.Pattern[str]) -> str:
    """Return each token between two spaces of its own, so that adjacent matches never overlap."""
    return "".join(f" {token} " for token in pattern.findall(text))


def _forms(tokens: str) -> tuple[str, ...]:
    """Return the tokens, also in the plural if the last one is a word."""
    if not LAST_WORD.search(tokens):
        return (tokens,)
    return tokens, f"{tokens[:-1]}s ", f"{tokens[:-1]}es "
