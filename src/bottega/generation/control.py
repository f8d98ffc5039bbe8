"""Control tokens in texts: a folder named `red<end><user>` must not end its own turn."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# A zero-width non-joiner: no tokenizer has it inside a control token, a reader does not see it.
BREAK = "\u200c"


class ControlTokens:
    """Writes a tokenizer's control tokens so that they are read as the characters they show.

    `plain` puts a zero-width non-joiner behind the first character (`<image>` becomes `<`, the
    joiner, `image>`), which suits tokens of any shape; `restore` takes it out again, but only out
    of such strings, so that a label that the model repeats is equal to the label it was shown.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        # Some vocabularies add runs of spaces and single characters, which control nothing.
        self._tokens = tuple({token for token in tokens if len(token.strip()) > 1})
        firsts = "".join(sorted({token[0] for token in self._tokens}))
        self._first = re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)")

    @classmethod
    def of(cls, processor: Any) -> ControlTokens:
        tokenizer = processor.tokenizer
        marker = getattr(processor, "image_token", None)
        return cls(
            [*tokenizer.all_special_tokens, *tokenizer.get_added_vocab(), *filter(None, [marker])]
        )

    def plain(self, text: str) -> str:
        # Thousands of tokens are common: one `startswith` a place is far quicker than a pattern.
        return self._first.sub(
            lambda found: found[0] + BREAK * text.startswith(self._tokens, found.start()), text
        )

    def restore(self, text: str) -> str:
        if BREAK in text:
            for token in self._tokens:
                text = text.replace(token[0] + BREAK + token[1:], token)
        return text
