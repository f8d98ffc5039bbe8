"""Embedder from any sentence-transformers model with one vector per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np

from bottega.errors import EmbeddingError, SettingError
from bottega.knowledge.embedders.sentence import (
    check_modalities,
    embedding_errors,
    loading_model,
    weights_digest,
)
from bottega.knowledge.records import unit
from bottega.protocols import Vectors
from bottega.types import Query

AT_LEAST = 512


class MultiVectorEncoderEmbedder:
    """Multi-vector embedder from a hub id or a folder: ColBERT and PyLate checkpoints (text),
    ColPali's family (image).

    `mode` selects the input: "text", "image" (all images in order), or "both", concatenated as in
    RCTS (sec. 3.2). `document_mode` may differ, for example to search pages as images with
    questions as text.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        mode: Literal["text", "image", "both"] = "text",
        document_mode: Literal["text", "image", "both"] | None = None,
        batch_size: int = 16,
        device: str = "cpu",
    ) -> None:
        self._batch_size = batch_size
        self._modes = {"query": mode, "document": document_mode or mode}
        self._lock = Lock()
        with loading_model(str(model)):
            from sentence_transformers import MultiVectorEncoder

            self._model = MultiVectorEncoder(str(model), device=device)
        self._check_modes(str(model))
        self._dimension = int(self._model.get_embedding_dimension() or 0)
        if not self._dimension:
            [rows] = self._encode(self._model.encode_query, ["a"])
            self._dimension = rows.shape[1]
        folder = Path(model)
        weights = f"{folder.name}@{weights_digest(folder)}" if folder.is_dir() else str(model)
        self.fingerprint = f"multi-vector {weights} {mode} {self._modes['document']}"

    @property
    def dimension(self) -> int:
        return self._dimension

    def embed_queries(self, queries: Sequence[Query]) -> list[Vectors]:
        return self._embed(queries, self._modes["query"], self._model.encode_query)

    def embed_documents(self, queries: Sequence[Query]) -> list[Vectors]:
        return self._embed(queries, self._modes["document"], self._model.encode_document)

    def _embed(
        self, queries: Sequence[Query], mode: str, encode: Callable[..., Any]
    ) -> list[Vectors]:
        parts: list[list[Vectors]] = [[] for _ in queries]
        if mode in ("text", "both"):
            with_text = [row for row, query in enumerate(queries) if query.text]
            texts = [queries[row].text for row in with_text]
            for row, rows in zip(with_text, self._encode(encode, texts), strict=True):
                parts[row].append(rows)
        if mode in ("image", "both"):
            owners = [row for row, query in enumerate(queries) for _ in query.images]
            images = [image.decode(AT_LEAST) for query in queries for image in query.images]
            for row, rows in zip(owners, self._encode(encode, images), strict=True):
                parts[row].append(rows)
        if not all(parts):
            raise EmbeddingError(
                f"the query has no input for mode {mode!r}", hint="choose another mode"
            )
        return [unit(np.concatenate(rows)) for rows in parts]

    def _encode(self, encode: Callable[..., Any], items: Sequence[object]) -> list[Vectors]:
        if not items:
            return []
        with self._lock, embedding_errors():
            found = encode(
                items,
                batch_size=self._batch_size,
                show_progress_bar=False,
                convert_to_numpy=True,
            )
        return [np.asarray(rows, np.float32) for rows in found]

    def _check_modes(self, name: str) -> None:
        for mode in self._modes.values():
            if mode not in ("text", "image", "both"):
                raise SettingError(
                    f"mode is unknown, got {mode!r}", hint="use 'text', 'image' or 'both'"
                )
            required = {"text", "image"} if mode == "both" else {mode}
            check_modalities(name, self._model.modalities, required)
