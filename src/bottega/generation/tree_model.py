"""A bundled model in plain torch that generates from a token tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from bottega._util.native import LOADING
from bottega.bundled.fast_vlm import FastVlm
from bottega.bundled.photo_model import REINSTALL
from bottega.bundled.processor import FastVlmProcessor
from bottega.errors import MissingDependencyError, ModelLoadError, needs_extra
from bottega.generation.in_process import InProcessModel, first_line
from bottega.generation.kv_caches import MAX_BYTES, VisionCache
from bottega.generation.token_tree import TokenTree
from bottega.generation.tokenization import ControlTokens, RenderedPrompt
from bottega.generation.tree_generation import TreeGenerator
from bottega.types import Samples

if TYPE_CHECKING:
    from bottega.generation.loaded import LoadedModel


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
