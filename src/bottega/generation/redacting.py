"""Keeping credentials out of errors: servers like to repeat what they were sent."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from urllib.parse import quote, quote_plus, unquote, unquote_plus

Redact = Callable[[str], str]
# Shorter ones are no secrets, and would hide ordinary words.
SHORTEST = 4
LOOKS_SECRET = r"\b(?:sk|key|pk)-[\w*-]{6,}|\bbearer\s+\S+|(?<=://)[^/@\s]+(?=@)"


def redactor(secrets: Iterable[str]) -> Redact:
    """Hides these secrets, however they are quoted, and whatever looks like a credential."""
    ways = {way for secret in secrets for way in _ways(secret) if len(way) >= SHORTEST}
    longest_first = sorted(ways, key=len, reverse=True)
    pattern = re.compile("|".join([*map(re.escape, longest_first), LOOKS_SECRET]), re.IGNORECASE)
    return lambda text: pattern.sub("[redacted]", text)


def _ways(secret: str) -> Iterator[str]:
    for plain in (secret, unquote(secret), unquote_plus(secret)):
        yield from (plain, quote(plain), quote(plain, safe=""), quote_plus(plain))
