"""Texts in which order and signs count: those that hold digits or a formula."""

from __future__ import annotations

import re
import unicodedata

from bottega.parsing.agreement import DIGITS, SIGNS
from bottega.parsing.arithmetic import THOUSANDS, spelled

# A hyphen inside of a word, or before one, is no sign; that of "x-y", "-x" and "B-" is one.
FORMULA = re.compile(r"[\d\\^=<>+±\u2190-\u22ff]|(?<=\w)[-−](?!\w\w)|(?<!\w)[-−](?=\w\b)")
RAISED = {"²": "^2", "³": "^3", "⁄": "/"}
WRAPPED = re.compile(r"\\(?:text(?:bf)?|math(?:rm|bf)|mbox)\s*\{([^{}]*)\}")
ARTICLE = re.compile(r"(?<!\S)(?:a|an|the)\s+(?=\w)")  # but not the a of "a-2"
HYPHEN = re.compile(r"(?<=\w)-(?=[^\W\d_]{2})")
BRACKETED = re.compile(r"\(([^()]*)\)")
TOKENS = re.compile(
    rf"(?P<number>\d*\.?\d+)|[{SIGNS}]|[^\W\d_{SIGNS}]+|[-+*/^=<>|\\(){{}}\[\]±\u2190-\u22ff]"
)
MARKS = " \t\n\"'`*_.,;:!?"


def is_formula(text: str) -> bool:
    return FORMULA.search(unicodedata.normalize("NFKC", text)) is not None


def tokens(text: str) -> list[str]:
    """Its words, numbers and signs in order; punctuation and articles are none, nor is what TeX
    puts around them."""
    for written, meant in RAISED.items():
        text = text.replace(written, meant)
    text = unicodedata.normalize("NFKC", text).casefold().replace("⁄", "/")
    text = _bare(HYPHEN.sub(" ", spelled(WRAPPED.sub(r"\1", text))))
    found = TOKENS.finditer(ARTICLE.sub("", text))
    return [_number(one[0]) if one["number"] else DIGITS.get(one[0], one[0]) for one in found]


def _bare(text: str) -> str:
    """Less the marks and the brackets around it, and the commas of thousands, which in brackets
    stand between numbers."""
    bracketed = BRACKETED.fullmatch(text.strip(MARKS))
    if bracketed:
        return bracketed[1]
    return text.strip("`* \t\n") if "(" in text or "[" in text else THOUSANDS.sub("", text)


def _number(written: str) -> str:
    whole, _, part = written.partition(".")
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    return f"{whole}.{part}" if part else whole
