"""Any sentence-transformers model that reads images, text, or both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Literal

import numpy as np
from PIL import Image as Pillow

from bottega.errors import EmbeddingError, SettingError
from bottega.knowledge.embedders.images import embed_images, unit_images
from bottega.knowledge.embedders.loading import loading_model, weights_digest
from bottega.knowledge.vectors import unit
from bottega.protocols import Vectors
from bottega.types import Query

Mode = Literal["image", "text", "average"]
# Most vision encoders read 224 to 384 pixels; a JPEG is decoded to no less than this.
AT_LEAST = 512


class SentenceEmbedder:
    """A hub id or a folder: CLIP, SigLIP, Qwen3-VL-Embedding, text models.

    `mode` says what of a query is embedded; "average" is the mean of image and text vector.
    `average="unit"` scales both to length one before, `"raw"` takes them as the model gives them,
    as Cache-of-Thought does. `normalize` scales the result, which the cosine metric does anyway.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        mode: Mode = "image",
        normalize: bool = True,
        average: Literal["unit", "raw"] = "unit",
        batch_size: int = 32,
        device: str = "cpu",
    ) -> None:
        self._batch_size = batch_size
        # Fast tokenizers refuse to be shared by two threads at once.
        self._lock = Lock()
        with loading_model(str(model)):
            from sentence_transformers import SentenceTransformer

            self._model = SentenceTransformer(str(model), device=device)
            # Not every architecture says it in advance: a short text tells.
            self._dimension = self._model.get_embedding_dimension() or self._encode(["a"]).shape[1]
        self._check_mode(str(model), mode)
        self._mode = mode
        self._normalize = normalize
        self._average = average
        settings = f"{mode}-{average}" if mode == "average" else mode
        length = "unit" if normalize else "raw"
        self.fingerprint = f"{_identity(model, self._model)} {settings} {length}"

    @property
    def dimension(self) -> int:
        return self._dimension

    def embed(self, queries: Sequence[Query]) -> Vectors:
        vectors = self._vectors(queries)
        return unit(vectors) if self._normalize else vectors

    def _vectors(self, queries: Sequence[Query]) -> Vectors:
        match self._mode:
            case "image":
                return self._image_vectors(queries, raw=not self._normalize)
            case "text":
                return self._text_vectors(queries)
            case "average":
                raw = self._average == "raw"
                images = self._image_vectors(queries, raw=raw)
                texts = self._text_vectors(queries)
                return (images + (texts if raw else unit(texts))) * np.float32(0.5)

    def _image_vectors(self, queries: Sequence[Query], *, raw: bool) -> Vectors:
        embed = embed_images if raw else unit_images
        return embed(
            queries,
            self._encode,
            dimension=self.dimension,
            at_least=AT_LEAST,
            batch_size=self._batch_size,
        )

    def _text_vectors(self, queries: Sequence[Query]) -> Vectors:
        if not queries:
            return np.empty((0, self.dimension), np.float32)
        return self._encode([query.text for query in queries])

    def _encode(self, items: list[str] | list[Pillow.Image]) -> Vectors:
        with self._lock:
            try:
                vectors = self._model.encode(
                    items, batch_size=self._batch_size, show_progress_bar=False
                )
            except (RuntimeError, ValueError) as error:  # out of memory, unfit inputs
                raise EmbeddingError(
                    f"the embedder failed: {error}", hint="try a smaller batch_size"
                ) from error
        return np.asarray(vectors, np.float32)

    def _check_mode(self, name: str, mode: Mode) -> None:
        modes: dict[str, set[str]] = {
            "image": {"image"},
            "text": {"text"},
            "average": {"image", "text"},
        }
        if mode not in modes:
            raise SettingError(f"no mode {mode!r}", hint="use 'image', 'text' or 'average'")
        known = {str(modality) for modality in self._model.modalities}
        missing = modes[mode] - known
        if missing:
            raise SettingError(
                f"{name} embeds {' and '.join(sorted(known))}, not {missing.pop()}",
                hint="choose another mode or another model",
            )


def _identity(model: str | Path, loaded: object) -> str:
    """A folder by its weights: it may be moved. A hub id by its revision, where that is known."""
    if Path(model).is_dir():
        return f"{Path(model).name}@{weights_digest(Path(model))}"
    config = getattr(getattr(loaded, "transformers_model", None), "config", None)
    revision = getattr(config, "_commit_hash", None)
    return f"{model}@{revision[:12]}" if revision else str(model)
