"""What no log line may hold, taken out of whatever is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from bottega.generation.redacting import redactor

Scrub = Callable[[str], str]

# Before the rest is looked at: megabytes of base64 are quick to find and slow to search.
BYTES = re.compile(r"data:[\w.+-]+/[\w.+-]+[^\s,\"']*,[^\s\"'<>]*|[A-Za-z0-9+/=_-]{100,}")
QUERY = re.compile(r"\?[^\s\"'<>=]*=[^\s\"'<>]*")
HEADER = re.compile(
    r"((?:authorization|cookie|api[-_]?key|token|secret|password)[\"']?\s*[:=]\s*)"
    r"(?:(?:basic|bearer)\s+)?[^\s,;]+",
    re.IGNORECASE,
)
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
LONGEST_SEARCHED = 64 * 1024
LONGEST = 2_000
REMEMBERED = 1_024  # the same models and namespaces come again and again
SHORT = 200
ONE_WORD = 40
REQUEST = "req_"  # of our own ids, of which no two are alike


def scrubber(secrets: Iterable[str] = ()) -> Scrub:
    """Takes out these secrets and whatever looks like one, query strings and bytes in base64."""
    known = frozenset(secret for secret in secrets if secret)
    redact = redactor(known)

    def scrub(text: str) -> str:
        text = BYTES.sub("[bytes]", text)
        if len(text) > LONGEST_SEARCHED:
            return "[too long to be searched for secrets]"
        # Cut only now: half a secret is not recognised.
        return HEADER.sub(r"\1[redacted]", redact(QUERY.sub("?[redacted]", text)))[:LONGEST]

    again = lru_cache(REMEMBERED)(scrub)

    def quickly(text: str) -> str:
        if len(text) <= ONE_WORD and text not in known and text.removeprefix(REQUEST).isalnum():
            return text  # what looks like a secret has a sign in it
        return again(text) if len(text) < SHORT else scrub(text)

    return quickly


def printable(text: str) -> str:
    """One line, and nothing that a terminal would obey."""
    return CONTROLS.sub(" ", text)
