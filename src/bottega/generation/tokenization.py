"""Prompts as token ids: templates, control tokens, images. Needs torch and transformers."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image as Pillow

from bottega.generation.prefix_cache import Numbers
from bottega.image import Image
from bottega.types import Prefix, Sampling

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


@dataclass(frozen=True)
class Rendered:
    """A prompt as the model's template writes it. `pictures` are its images decoded, by sha256,
    but for those that the model remembers."""

    text: str
    images: tuple[Image, ...]
    sampling: Sampling
    pictures: Mapping[str, Pillow.Image] = field(default_factory=dict)
    prefix: Prefix | None = None

    @property
    def behind(self) -> int:
        """How many tokens stand before it."""
        return self.prefix.length if self.prefix else 0

    @property
    def shown(self) -> tuple[str, ...]:
        return tuple(image.sha256 for image in self.images)

    @property
    def samples(self) -> int:
        """Greedy samples are all alike: one is drawn and copied."""
        return self.sampling.n if self.sampling.temperature > 0 else 1

    @property
    def shape(self) -> tuple[bool, int, int, int, int, int]:
        """Prompts with equal or near shapes fit in one batch with little padding. Only those that
        are equal in the first three may share one."""
        limit = self.sampling.max_tokens
        kind = bool(self.images), self.samples, self.behind
        return (*kind, limit, len(self.images), len(self.text))


def pictures_of(batch: Sequence[Rendered]) -> dict[str, Pillow.Image]:
    return {sha: picture for one in batch for sha, picture in one.pictures.items()}


@dataclass(frozen=True)
class Spelled:
    """A prompt's token ids. `keys` are equal where the same token, or a token of the same image,
    stands: prompts whose keys begin alike are read alike. `places` are the indices of the images'
    tokens, `ends` how many of these there are up to the end of each image."""

    ids: Numbers
    keys: Numbers
    places: Numbers
    images: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, length: int) -> int:
        """The most tokens, up to `length`, that leave at least one to read and split no image."""
        length = min(length, len(self) - 1)
        seen = int(np.searchsorted(self.places, length))
        whole = self._whole(seen)
        return length if seen == whole else int(self.places[whole])

    def images_from(self, start: int) -> tuple[str, ...]:
        seen = int(np.searchsorted(self.places, start))
        return tuple(sha for sha, end in zip(self.images, self.ends, strict=True) if end > seen)

    def until(self, length: int) -> Spelled:
        places = self.places[: int(np.searchsorted(self.places, length))]
        kept = sum(end <= len(places) for end in self.ends)
        return Spelled(
            self.ids[:length], self.keys[:length], places, self.images[:kept], self.ends[:kept]
        )

    def _whole(self, seen: int) -> int:
        """Of so many tokens of images, those of whole images."""
        return max((end for end in self.ends if end <= seen), default=0)


class Speller:
    """Writes prompts as their processor would, without looking at images that it has seen: how many
    tokens an image gets depends on its size alone."""

    def __init__(self, processor: Any, placeholder: str | None = None) -> None:
        self._processor = processor
        self._marker = str(processor.image_token)
        self.token = int(processor.tokenizer.convert_tokens_to_ids(self._marker))
        self._placeholder = placeholder
        self._by_size: dict[tuple[int, int], str] = {}
        # What a stranger's image hashes to cannot be made equal on purpose.
        self._secret = secrets.token_bytes(16)

    def spell(
        self, text: str, images: Sequence[str], pictures: Mapping[str, Pillow.Image]
    ) -> Spelled:
        """`images` are the sha256s in the order of the text."""
        shown = [self._shown(pictures[sha]) if self._sized else self._placeholder for sha in images]
        before, *after = text.split(self._marker)
        written = "".join(
            [before, *(part for pair in zip(shown, after, strict=True) for part in pair if part)]
        )
        found = self._processor.tokenizer(written, add_special_tokens=self.adds_special(text))
        ids = np.asarray(found["input_ids"], np.int64)
        places = np.flatnonzero(ids == self.token)
        counts = [(one or "").count(self._marker) for one in shown]
        keys = ids.copy()
        keys[places] = np.repeat([self._key(sha) for sha in images] or [0], counts or [0])
        return Spelled(ids, keys, places, tuple(images), tuple(np.cumsum(counts).tolist()))

    def adds_special(self, text: str) -> bool:
        """Many templates write the first token themselves."""
        bos = self._processor.tokenizer.bos_token
        return not (bos and text.startswith(bos))

    @property
    def _sized(self) -> bool:
        return self._placeholder is None

    def _shown(self, picture: Pillow.Image) -> str:
        if picture.size not in self._by_size:
            if len(self._by_size) >= 4096:
                self._by_size.clear()
            processed = self._processor(
                text=[self._marker], images=[[picture]], return_text_replacement_offsets=True
            )
            [[place]] = processed["text_replacement_offsets"]
            self._by_size[picture.size] = str(place["replacement"])
        return self._by_size[picture.size]

    def _key(self, sha256: str) -> int:
        digest = hashlib.blake2b(sha256.encode(), key=self._secret, digest_size=8).digest()
        return -1 - (int.from_bytes(digest) >> 1)
