"""Embedders from the bundled model: its vision tower and its token table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image as Pillow

from bottega._util.drawings import LEAST_SIDE, drawing_views
from bottega.bundled import (
    CLASS_FEATURES,
    TOKEN_CONCEPTS,
    TOKEN_IDENTITY,
    bundled_folder,
)
from bottega.errors import EmbeddingError
from bottega.image import Image
from bottega.knowledge.embedders.pixel_embedder import unit_images
from bottega.knowledge.embedders.sentence import loading_model
from bottega.knowledge.records import unit
from bottega.protocols import Vectors
from bottega.types import Query

# Settings that change the tower's input pixels.
PREPROCESSING = ("size", "image_mean", "image_std", "resample", "rescale_factor")
TABLE = "embed_tokens.weight"
# A shared meaning ("hue", "tint") counts more than a shared word.
WORD_WEIGHT, MEANING_WEIGHT = 0.2, 1.0


class TowerEmbedder:
    """Image embedder from the tower and connector of a FastVLM folder, in float32.

    A vector consists of the connector's `features`, scaled to length one. The fingerprint
    covers the weights of both but not of the decoder, so training the decoder further keeps a
    knowledge base valid. `threads` sets torch's thread count for the whole process; None keeps it.
    With `centred`, a vector is the mean over `drawing_views`, as in the generators of bundled
    models. `plain_torch` loads without transformers a folder that `FastVlm` supports.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        features: slice = CLASS_FEATURES,
        batch_size: int = 64,
        threads: int | None = None,
        centred: bool = False,
        plain_torch: bool = False,
    ) -> None:
        if not Path(folder).is_dir():
            raise EmbeddingError(f"the model folder {folder} does not exist", hint="check the path")
        with loading_model(str(folder)):
            import torch

            if threads is not None:
                torch.set_num_threads(threads)
            load = _plain_parts if plain_torch else _transformers_parts
            self._model, self._images = load(Path(folder))
            self._batch_size = batch_size
            self._features = features
            self._centred = centred
            self._preprocessing = self._images.to_dict()
            self._side = max(self._preprocessing["size"].values())
            self.fingerprint = f"tower-{self.dimension} {self._digest()}"

    @classmethod
    def bundled(cls, *, batch_size: int = 64, threads: int | None = None) -> Self:
        """Return the embedder of the bundled model."""
        return cls(
            bundled_folder(),
            batch_size=batch_size,
            threads=threads,
            centred=True,
            plain_torch=True,
        )

    @property
    def dimension(self) -> int:
        return int(self._features.stop - self._features.start)

    def embed(self, queries: Sequence[Query]) -> Vectors:
        return unit_images(
            queries,
            self._encode,
            dimension=self.dimension,
            at_least=max(self._side, LEAST_SIDE) if self._centred else self._side,
            batch_size=self._batch_size,
        )

    def cells(self, image: Image) -> Vectors:
        """Return (cells, channels) of the tower's last map with more than one cell."""
        import torch

        pixels = self._pixels([image.decode_for_model(self._side)])
        with torch.inference_mode():
            seen = self._model.vision_tower(pixels, output_hidden_states=True)
        maps = [states.flatten(2)[0].T for states in seen.hidden_states]
        rows: Vectors = next(cells for cells in reversed(maps) if len(cells) > 1).numpy()
        return rows

    def _encode(self, images: list[Pillow.Image]) -> Vectors:
        import torch

        views = [drawing_views(image) if self._centred else [image] for image in images]
        pixels = self._pixels(list(chain.from_iterable(views)))
        with torch.inference_mode():
            tokens = self._model.get_image_features(pixels).pooler_output
            vectors: Vectors = tokens.mean(1)[:, self._features].numpy()
        starts = np.cumsum([0, *map(len, views[:-1])])
        counts = np.array([[len(one)] for one in views], np.float32)
        return np.asarray(np.add.reduceat(vectors, starts, axis=0) / counts, np.float32)

    def _pixels(self, images: list[Pillow.Image]) -> Any:
        return self._images(images, return_tensors="pt")["pixel_values"]

    def _digest(self) -> str:
        digest = hashlib.sha256(b"drawing views 2" if self._centred else b"")
        names = PREPROCESSING + ("crop_size",) * self._preprocessing["do_center_crop"]
        settings = [self._preprocessing.get(name) for name in names]
        digest.update(json.dumps(settings).encode())
        for part in (self._model.vision_tower, self._model.multi_modal_projector):
            for name, weight in sorted(part.state_dict().items()):
                digest.update(name.encode())
                digest.update(weight.contiguous().numpy().tobytes())
        return digest.hexdigest()[:12]


def _plain_parts(folder: Path) -> tuple[Any, Any]:
    """Return the model without its head, and the image processor."""
    from bottega.bundled.fast_vlm import FastVlm
    from bottega.bundled.processor import FastVlmProcessor

    return FastVlm.load(folder).model, FastVlmProcessor(folder).image_processor


def _transformers_parts(folder: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(
        str(folder), dtype=torch.float32, local_files_only=True
    )
    processor = AutoProcessor.from_pretrained(str(folder), local_files_only=True)
    return model.model, processor.image_processor


class TowerTokenEmbedder:
    """Multi-vector embedder with one token per image and per word that the bundled model knows.

    At 64 x 64 pixels the tower ends in a single cell, its image vector. `cells` adds the map before
    it (2 x 2). Unknown words are left out unless there are no others. Images, cells and words use
    separate dimensions, so their products are 0.

    On `attributes`, with 8 of 500 labelled, it finds more right answers than the two vectors of
    `DualEmbedder`, because other words cannot outweigh the requested attribute; the cells make it
    worse (benchmarks/log). Five tokens do not test late interaction itself.
    """

    def __init__(self, images: TowerEmbedder, words: TokenEmbedder, *, cells: bool = False) -> None:
        self._images = images
        self._words = words
        self._cells = cells
        blank = Image.from_pillow(Pillow.new("RGB", (64, 64)))
        self._channels = images.cells(blank).shape[1] if cells else 0
        self.fingerprint = (
            f"tower-tokens {self._channels} ({images.fingerprint}) ({words.fingerprint})"
        )

    @classmethod
    def bundled(cls, *, cells: bool = False) -> Self:
        """Return the embedder of the bundled model."""
        return cls(TowerEmbedder.bundled(), TokenEmbedder.bundled(), cells=cells)

    @property
    def dimension(self) -> int:
        return self._images.dimension + self._channels + self._words.dimension - 1

    def embed_queries(self, queries: Sequence[Query]) -> list[Vectors]:
        images = [image for query in queries for image in query.images]
        seen = iter(self._images.embed([Query("", (image,)) for image in images]))
        return [self._tokens(query, [next(seen) for _ in query.images]) for query in queries]

    def embed_documents(self, queries: Sequence[Query]) -> list[Vectors]:
        return self.embed_queries(queries)

    def _tokens(self, query: Query, seen: list[Vectors]) -> Vectors:
        parts = [self._padded(row[None], 0) for row in seen]
        if self._cells:
            cells = [unit(self._images.cells(image)) for image in query.images]
            parts += [self._padded(rows, self._images.dimension) for rows in cells]
        words = self._words.token_rows(query.text)
        words = words[words.any(axis=1)]  # a row of zeros is an unknown token
        has_meaning = words[:, TOKEN_IDENTITY.stop - TOKEN_IDENTITY.start :].any(axis=1)
        if has_meaning.any():
            words = words[has_meaning]
        if len(words):
            parts.append(self._padded(unit(words), self._images.dimension + self._channels))
        if not parts:
            raise EmbeddingError(
                "the query has neither image nor text", hint="add an image or a text"
            )
        return np.concatenate(parts)

    def _padded(self, rows: Vectors, start: int) -> Vectors:
        placed = np.zeros((len(rows), self.dimension), np.float32)
        placed[:, start : start + rows.shape[1]] = rows
        return placed


class TokenEmbedder:
    """Text embedder from the input embeddings of a model with the layout of the bundled one.

    A vector is the sum over the text's tokens, scaled to length one: word dimensions, times 0.2,
    and meaning dimensions. The last number marks a text without known tokens. It loads only the
    table and the tokenizer of the model.
    """

    def __init__(self, folder: str | Path) -> None:
        with loading_model(str(folder)):
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
            table = _table(Path(folder))
        needed = max(part.stop for part in (TOKEN_IDENTITY, *TOKEN_CONCEPTS))
        if table.shape[1] < needed:
            raise EmbeddingError(
                f"{folder} must have at least {needed} numbers per token, got {table.shape[1]}",
                hint="use the bundled model, or SentenceEmbedder(model, mode='text')",
            )
        parts = [WORD_WEIGHT * table[:, TOKEN_IDENTITY]]
        parts += [MEANING_WEIGHT * table[:, part] for part in TOKEN_CONCEPTS]
        self._rows = np.concatenate(parts, axis=1).astype(np.float32)
        self.fingerprint = f"tokens-{self.dimension} {self._digest()}"

    @classmethod
    def bundled(cls) -> Self:
        """Return the embedder of the bundled model."""
        return cls(bundled_folder())

    @property
    def dimension(self) -> int:
        return int(self._rows.shape[1]) + 1

    def embed(self, queries: Sequence[Query]) -> Vectors:
        vectors = np.zeros((len(queries), self.dimension), np.float32)
        for vector, query in zip(vectors, queries, strict=True):
            if not query.text:
                raise EmbeddingError(
                    "the query has no text, and this embedder reads only text",
                    hint="add a question, or use an image embedder",
                )
            vector[:-1] = self.token_rows(query.text).sum(axis=0)
            vector[-1] = not vector.any()
        return unit(vectors)

    def token_rows(self, text: str) -> Vectors:
        """Return (tokens, dimension - 1), the rows that `embed` sums: word dimensions, then meaning
        dimensions."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        rows: Vectors = self._rows[ids]
        return rows

    def _digest(self) -> str:
        digest = hashlib.sha256(np.ascontiguousarray(self._rows).tobytes())
        digest.update(self._tokenizer.to_str().encode())
        return digest.hexdigest()[:12]


def _table(folder: Path) -> Vectors:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="np") as weights:
        name = next(name for name in weights.keys() if name.endswith(TABLE))  # noqa: SIM118
        table: Vectors = weights.get_tensor(name)
    return table.astype(np.float32)
