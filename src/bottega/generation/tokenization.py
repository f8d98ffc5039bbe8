"""Prompts as token ids: templates, control tokens, images. Needs torch and transformers."""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from PIL import Image as Pillow

from bottega.generation.kv_caches import IntArray
from bottega.image import Image
from bottega.types import Prefix, Sampling

# Zero-width non-joiner: invisible to readers, and part of no control token.
ZERO_WIDTH_NON_JOINER = "\u200c"
Parts: TypeAlias = Sequence[str | Image]
FIRST, SECOND = "first text", "second text"  # of a probe
CONVERSATIONS = {
    "user": ("user",),
    "assistant": ("user", "assistant", "user"),
    "system": ("system", "user"),
}

log = logging.getLogger(__name__)


class ControlTokens:
    """Escaping of a tokenizer's control tokens in user text, which makes them plain characters.

    `escape` inserts a zero-width non-joiner after the first character (`<image>` becomes `<`, the
    joiner, `image>`). `unescape` removes it from such strings only: a label that the model repeats
    then equals the label in its prompt.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        # Some vocabularies add runs of spaces and single characters; these have no control
        # function.
        self._tokens = tuple({token for token in tokens if len(token.strip()) > 1})
        firsts = "".join(sorted({token[0] for token in self._tokens}))
        self._first = re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)")

    @classmethod
    def for_processor(cls, processor: Any) -> ControlTokens:
        tokenizer = processor.tokenizer
        marker = getattr(processor, "image_token", None)
        return cls(
            [*tokenizer.all_special_tokens, *tokenizer.get_added_vocab(), *filter(None, [marker])]
        )

    def escape(self, text: str) -> str:
        # With thousands of tokens, one `startswith` per position is much faster than a pattern.
        return self._first.sub(
            lambda found: (
                found[0] + ZERO_WIDTH_NON_JOINER * text.startswith(self._tokens, found.start())
            ),
            text,
        )

    def unescape(self, text: str) -> str:
        if ZERO_WIDTH_NON_JOINER in text:
            for token in self._tokens:
                text = text.replace(token[0] + ZERO_WIDTH_NON_JOINER + token[1:], token)
        return text


@dataclass(frozen=True)
class ChatTemplate:
    """Renderer of turns by a processor's chat template.

    Some templates put all images of a turn before its texts, which would separate the images of
    demonstrations from their labels: here each image after a text begins a turn of its own.
    `control` escapes the texts.
    """

    processor: Any
    control: ControlTokens

    def render(self, turns: Iterable[tuple[str, Parts]], *, prefilled: bool) -> str:
        """Return the text of the turns (role, parts). If `prefilled`, the last one is continued."""
        split = [(role, group) for role, parts in turns for group in self._groups(parts)]
        return self._apply(((role, self._content(role, parts)) for role, parts in split), prefilled)

    def _apply(self, turns: Iterable[tuple[str, Any]], prefilled: bool) -> str:
        text = self.processor.apply_chat_template(
            [{"role": role, "content": content} for role, content in turns],
            add_generation_prompt=not prefilled,
            continue_final_message=prefilled,
        )
        return str(text)

    def _probe(self, turns: Iterable[tuple[str, Any]]) -> str:
        """Return the text of the turns, empty if the template rejects them."""
        try:
            return self._apply(turns, prefilled=False)
        except Exception:  # templates raise errors of any type, which appear again
            return ""

    def _content(self, role: str, parts: Parts) -> Any:
        texts = [self.control.escape(part) for part in parts if isinstance(part, str)]
        if len(texts) == len(parts) and role in self._string_roles:
            return "".join(texts)
        rest = iter(texts)
        return [_text(next(rest)) if isinstance(part, str) else {"type": "image"} for part in parts]

    def _groups(self, parts: Parts) -> list[Parts]:
        """Split a turn before each image that follows another image and its text, if the template
        changes their order."""
        is_image = [isinstance(part, Image) for part in parts]
        cuts = [
            index
            for index in range(1, len(parts))
            if is_image[index] and not is_image[index - 1] and any(is_image[:index])
        ]
        if not cuts or self._keeps_order:
            return [parts]
        return [parts[begin:end] for begin, end in pairwise([0, *cuts, len(parts)])]

    @cached_property
    def _keeps_order(self) -> bool:
        marker = str(getattr(self.processor, "image_token", None))
        content = [{"type": "image"}, _text(FIRST), {"type": "image"}, _text(SECOND)]
        pattern = f"{re.escape(marker)}|{FIRST}|{SECOND}"
        found = re.findall(pattern, self._probe([("user", content)]))
        if marker not in found or found == [marker, FIRST, marker, SECOND]:
            return True
        log.warning(
            "the chat template of %s puts images before texts: one turn per demonstration is used",
            type(self.processor).__name__,
        )
        return False

    @cached_property
    def _string_roles(self) -> Collection[str]:
        """The roles whose content the template reads as a string only, not as a list of parts."""
        found: list[str] = []
        for role in CONVERSATIONS:
            if not self._reads(role, found) and self._reads(role, [*found, role]):
                found.append(role)
        return found

    def _reads(self, role: str, strings: Collection[str]) -> bool:
        """Return whether the template shows the texts of a conversation with this role."""
        roles = CONVERSATIONS[role]
        text = self._probe((one, FIRST if one in strings else [_text(FIRST)]) for one in roles)
        return text.count(FIRST) == len(roles) and not re.search("['\"]type['\"]", text)


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@dataclass(frozen=True)
class RenderedPrompt:
    """Prompt as text of the model's chat template. `decoded` holds the decoded images by sha256,
    except those in the vision cache."""

    text: str
    images: tuple[Image, ...]
    sampling: Sampling
    decoded: Mapping[str, Pillow.Image] = field(default_factory=dict)
    prefix: Prefix | None = None

    @property
    def image_keys(self) -> tuple[str, ...]:
        """The sha256 of each image, in prompt order."""
        return tuple(image.sha256 for image in self.images)

    @property
    def samples(self) -> int:
        """Number of samples to generate: greedy samples are equal, so one is generated and
        copied."""
        return self.sampling.n if self.sampling.temperature > 0 else 1

    @property
    def shape(self) -> tuple[bool, int, int, int, int, int]:
        """Sort key for batches: prompts with similar shapes need little padding. Prompts of one
        batch must have equal values in the first three fields."""
        limit = self.sampling.max_tokens
        kind = bool(self.images), self.samples, self.prefix.length if self.prefix else 0
        return (*kind, limit, len(self.images), len(self.text))


def decoded_images(batch: Sequence[RenderedPrompt]) -> dict[str, Pillow.Image]:
    """Return the decoded images of all prompts by sha256."""
    return {sha: image for one in batch for sha, image in one.decoded.items()}


def adds_special_tokens(processor: Any, text: str) -> bool:
    """Return whether the tokenizer must add special tokens: many templates add BOS themselves."""
    bos = processor.tokenizer.bos_token
    return not (bos and text.startswith(bos))


@dataclass(frozen=True)
class TokenizedPrompt:
    """Token ids of a prompt, with the tokens of its images. `keys` identify a token, or a token of
    one image: prompts with equal leading keys have equal leading states. `positions` are the
    indices of image tokens. `ends` holds the number of image tokens up to the end of each image."""

    ids: IntArray
    keys: IntArray
    positions: IntArray
    images: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, length: int) -> int:
        """Return the largest prefix length, up to `length`, that splits no image. At least one
        token remains after the prefix."""
        length = min(length, len(self) - 1)
        seen = int(np.searchsorted(self.positions, length))
        # Number of image tokens before the cut that belong to complete images.
        whole = max((end for end in self.ends if end <= seen), default=0)
        return length if seen == whole else int(self.positions[whole])

    def images_from(self, start: int) -> tuple[str, ...]:
        """Return the images that end after token `start`."""
        seen = int(np.searchsorted(self.positions, start))
        return tuple(sha for sha, end in zip(self.images, self.ends, strict=True) if end > seen)

    def until(self, length: int) -> TokenizedPrompt:
        """Return the first `length` tokens with their complete images."""
        positions = self.positions[: int(np.searchsorted(self.positions, length))]
        kept = sum(end <= len(positions) for end in self.ends)
        return TokenizedPrompt(
            self.ids[:length], self.keys[:length], positions, self.images[:kept], self.ends[:kept]
        )


class PromptTokenizer:
    """Tokenizer that gives the same ids as the processor, without processing cached images. The
    number of tokens of an image depends on its size only."""

    def __init__(self, processor: Any, placeholder: str | None = None) -> None:
        self._processor = processor
        self._marker = str(processor.image_token)
        self.token = int(processor.tokenizer.convert_tokens_to_ids(self._marker))
        self._placeholder = placeholder
        self._by_size: dict[tuple[int, int], str] = {}
        # Keyed hash: a client cannot craft an image whose key collides with another image.
        self._secret = secrets.token_bytes(16)

    def tokenize(
        self, text: str, images: Sequence[str], decoded: Mapping[str, Pillow.Image]
    ) -> TokenizedPrompt:
        """Tokenize a rendered prompt; `images` are the sha256s in text order."""
        fixed = self._placeholder
        expanded = [self._expand(decoded[sha]) if fixed is None else fixed for sha in images]
        before, *after = text.split(self._marker)
        full_text = "".join(
            [before, *(part for pair in zip(expanded, after, strict=True) for part in pair if part)]
        )
        found = self._processor.tokenizer(
            full_text, add_special_tokens=adds_special_tokens(self._processor, text)
        )
        ids = np.asarray(found["input_ids"], np.int64)
        positions = np.flatnonzero(ids == self.token)
        counts = [one.count(self._marker) for one in expanded]
        keys = ids.copy()
        keys[positions] = np.repeat([self._key(sha) for sha in images] or [0], counts or [0])
        return TokenizedPrompt(
            ids, keys, positions, tuple(images), tuple(np.cumsum(counts).tolist())
        )

    def _expand(self, image: Pillow.Image) -> str:
        """Return the text that replaces the image marker, cached by image size."""
        if image.size not in self._by_size:
            if len(self._by_size) >= 4096:
                self._by_size.clear()
            processed = self._processor(
                text=[self._marker], images=[[image]], return_text_replacement_offsets=True
            )
            [[replacement]] = processed["text_replacement_offsets"]
            self._by_size[image.size] = str(replacement["replacement"])
        return self._by_size[image.size]

    def _key(self, sha256: str) -> int:
        digest = hashlib.blake2b(sha256.encode(), key=self._secret, digest_size=8).digest()
        return -1 - (int.from_bytes(digest) >> 1)
