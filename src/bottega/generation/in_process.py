"""A model in this process with its processor: rendered prompts, and replies from a token tree.

Needs torch, but not transformers. Methods block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bottega._util.native import LOADING
from bottega.bundled.fast_vlm import FastVlm
from bottega.bundled.photo_model import REINSTALL
from bottega.bundled.processor import FastVlmProcessor
from bottega.errors import (
    BottegaError,
    GenerationError,
    MissingDependencyError,
    ModelLoadError,
    PromptRejectedError,
    PromptTooLongError,
    first_line,
    needs_extra,
)
from bottega.generation.kv_caches import MAX_BYTES, VisionCache
from bottega.generation.sampling import SampleRow
from bottega.generation.token_tree import TokenTree
from bottega.generation.tokenization import (
    ChatTemplate,
    ControlTokens,
    RenderedPrompt,
    adds_special_tokens,
    decoded_images,
)
from bottega.generation.tree_generation import TreeGenerator, parts_by_length
from bottega.types import Completion, Prefix, Prompt, Samples, Sampling, Usage

if TYPE_CHECKING:
    from bottega.generation.loaded import LoadedModel

ONE_IMAGE = (
    "show no demonstrations or passages with images (--methods racc gives them to the compressor"
    " one by one), or use a model that takes several images"
)


@dataclass(frozen=True)
class InProcessModel(ABC):
    """Loaded vision-language model with its processor and caches. `ends` are the tokens that end a
    reply."""

    model: Any
    processor: Any
    ends: frozenset[int]
    control: ControlTokens
    vision_cache: VisionCache | None
    tree: TreeGenerator | None = None

    @abstractmethod
    def transformers_model(self) -> LoadedModel:
        """Return this model as loaded by transformers; load it if necessary."""

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.processor, self.control)

    @property
    def max_images(self) -> int | None:
        """Maximum images of a prompt, None without a limit."""
        return getattr(self.processor, "max_images", None)

    @property
    def image_limit(self) -> str:
        """`max_images` as text, such as "1 image"."""
        return f"{self.max_images} image{'' if self.max_images == 1 else 's'}"

    def render(
        self, prompt: Prompt, sampling: Sampling, prefix: Prefix | None = None
    ) -> RenderedPrompt:
        """Render a prompt with the chat template. A last turn of the assistant is continued. Raises
        `PromptRejectedError`."""
        images = prompt.images
        prefilled = bool(prompt.messages) and prompt.messages[-1].role == "assistant"
        if self.max_images is not None and len(images) > self.max_images:
            raise PromptRejectedError(
                f"the model reads at most {self.image_limit} per prompt, got {len(images)}",
                hint=ONE_IMAGE if self.max_images else "use a vision-language model",
            )
        try:
            turns = ((message.role, message.parts) for message in prompt.messages)
            text = self.template.render(turns, prefilled=prefilled)
        except Exception as error:  # templates raise errors of any type
            raise PromptRejectedError(
                f"the chat template rejects the prompt: {first_line(error)}",
                hint="check that the model accepts this order of roles, several images and a system"
                " turn; --prompt interleaved alternates user and assistant",
            ) from error
        marker = getattr(self.processor, "image_token", None)
        if marker and text.count(marker) != len(images):
            raise PromptRejectedError(
                f"the rendered prompt needs {len(images)} image tokens, got {text.count(marker)}",
                hint="check that the chat template accepts this many images in these turns",
            )
        stop = (*sampling.stop, *getattr(self.processor, "stop", ()))
        return RenderedPrompt(text, images, replace(sampling, stop=stop), prefix=prefix)

    def batch_kind(self, rendered: RenderedPrompt) -> tuple[bool, int, int]:
        """Return the key that all prompts of a batch must share: whether they have images, their
        samples and the length of their KV prefix. A token tree reads any prompts without a prefix
        in one batch."""
        images, samples, prefix = rendered.shape[:3]
        return (images, samples, prefix) if prefix or self.tree is None else (False, 1, 0)

    def decode(self, rendered: RenderedPrompt) -> RenderedPrompt:
        """Add the decoded images that `answer` needs. Raises `ImageError`."""
        needed = {
            image.sha256: image
            for image in rendered.images
            if self.vision_cache is None or not self.vision_cache.contains(image.sha256)
        }
        return replace(
            rendered, decoded={sha: one.decode_for_model() for sha, one in needed.items()}
        )

    def answer(self, batch: Sequence[RenderedPrompt]) -> list[Samples]:
        """Generate the completions and usage of each prompt. Raises `GenerationError`, and
        `PromptTooLongError` if a prompt is too long for a token tree. All prompts have the same
        number of samples, and either all have images or none has."""
        try:
            with torch.inference_mode():
                return self._answer(batch)
        except BottegaError:
            raise
        except Exception as error:
            is_memory = isinstance(error, torch.OutOfMemoryError) or "memory" in str(error).lower()
            raise GenerationError(
                f"the model failed: {first_line(error)}",
                hint="lower `max_batch` or `prefix_cache_mb` (BOTTEGA_PREFIX_CACHE_MB), use fewer"
                " shots, or reduce the images"
                if is_memory
                else "check that the model accepts several images per prompt, and prompts of this"
                " length",
            ) from error

    @abstractmethod
    def _answer(self, batch: Sequence[RenderedPrompt]) -> list[Samples]:
        """Answer prompts of one kind."""

    def _from_tree(
        self, generator: TreeGenerator, batch: Sequence[RenderedPrompt]
    ) -> list[Samples]:
        generator.tree.trim()
        prompts = self._tree_keys(generator.tree, batch)
        check_length(max(map(len, prompts)), generator.tree.max_tokens)
        answers: dict[int, Samples] = {}
        for part in parts_by_length(list(map(len, prompts))):
            indices = [number for number in part for _ in range(batch[number].samples)]
            rows = [
                SampleRow(batch[number].sampling, index)
                for number in part
                for index in range(batch[number].samples)
            ]
            found = iter(generator.generate([prompts[number] for number in indices], rows))
            for number in part:
                completions = [next(found) for _ in range(batch[number].samples)]
                answers[number] = to_reply(batch[number], completions, len(prompts[number]))
        return [answers[number] for number in range(len(batch))]

    def _tree_keys(self, tree: TokenTree, batch: Sequence[RenderedPrompt]) -> list[list[int]]:
        """Return the keys of each prompt in the tree, one per token. Image tokens have the keys of
        their features."""
        assert self.vision_cache is not None
        shas = [sha for one in batch for sha in one.image_keys]
        features = self.vision_cache.features(shas, decoded_images(batch))
        texts = [self.vision_cache.expand_placeholders(one.text) for one in batch]
        special = adds_special_tokens(self.processor, texts[0])
        found = self.processor.tokenizer(texts, add_special_tokens=special)["input_ids"]
        marker = self.model.config.image_token_id
        keys = []
        for one, ids in zip(batch, found, strict=True):
            images = chain.from_iterable(
                tree.image_keys(sha, features[sha]) for sha in one.image_keys
            )
            keys.append([next(images) if token == marker else token for token in ids])
        return keys

    def _decode(self, tokens: list[int]) -> str:
        text = str(self.processor.tokenizer.decode(tokens, skip_special_tokens=True))
        return self.control.unescape(text)


def check_length(tokens: int, most: int) -> None:
    """Raise `PromptTooLongError` if a prompt has more than `most` tokens. Time and memory of its
    attention grow with the square of its length."""
    if tokens > most:
        raise PromptTooLongError(
            f"the prompt must have at most {most:,} tokens, got {tokens:,}",
            hint="shorten the text, or use fewer or shorter demonstrations",
        )


def to_reply(
    one: RenderedPrompt, found: Sequence[tuple[Completion, int]], prompt_tokens: int
) -> Samples:
    """Return the completions of a prompt and its usage. `found` holds completions with their token
    counts; greedy ones are copied up to `n`."""
    copies = one.sampling.n // one.samples
    completions = tuple(replace(completion) for completion, _ in found) * copies
    return completions, Usage(prompt_tokens, sum(count for _, count in found) * copies)


@dataclass(frozen=True)
class TreeModel(InProcessModel):
    """Bundled model without transformers. Work that needs transformers, such as a prompt with a KV
    prefix, loads the folder `source` once more, as a `LoadedModel`. Both share the vision cache and
    the token tree."""

    source: str = ""

    @classmethod
    def load(cls, source: str) -> TreeModel:
        """Load a folder that `FastVlm` supports. Raises `ModelLoadError`."""
        try:
            with needs_extra("local"):
                model, processor = FastVlm.load(Path(source)), FastVlmProcessor(Path(source))
        except MissingDependencyError:
            raise
        except Exception as error:  # damaged files raise errors of any type
            raise ModelLoadError(
                f"{source} cannot be loaded as a bundled model: {first_line(error)}",
                hint=REINSTALL,
            ) from error
        placeholder = processor.image_token * model.config.image_seq_length
        loaded = cls(
            model,
            processor,
            frozenset({processor.tokenizer.eos_token_id}),
            ControlTokens.for_processor(processor),
            VisionCache(model, processor, placeholder, MAX_BYTES),
            source=source,
        )
        tree = TreeGenerator(TokenTree(model), loaded.ends, loaded._decode)
        return replace(loaded, tree=tree)

    def transformers_model(self) -> LoadedModel:
        with LOADING:  # other threads wait and get the same model
            return self._transformers_model

    @cached_property
    def _transformers_model(self) -> LoadedModel:
        with needs_extra("local"):
            from bottega.generation.loaded import LoadedModel
        loaded = LoadedModel.load(self.source, "cpu", "float32")
        return replace(loaded, vision_cache=self.vision_cache, tree=self.tree)

    def answer(self, batch: Sequence[RenderedPrompt]) -> list[Samples]:
        # Load outside `super().answer`: parameters created in inference mode cannot be trained.
        return self.transformers_model().answer(batch) if batch[0].prefix else super().answer(batch)

    def _answer(self, batch: Sequence[RenderedPrompt]) -> list[Samples]:
        assert self.tree is not None
        return self._from_tree(self.tree, batch)
