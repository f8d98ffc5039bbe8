"""Embedders from any sentence-transformers model: one vector per query, or one per token."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np
from PIL import Image as Pillow

from bottega._util.native import LOADING, load_from_hub
from bottega.errors import BottegaError, EmbeddingError, SettingError, needs_extra
from bottega.knowledge.embedders.pixel_embedder import embed_images, unit_images
from bottega.knowledge.records import unit
from bottega.protocols import Vectors
from bottega.types import Query

WEIGHTS = ("*.safetensors", "*.bin")
Mode = Literal["image", "text", "average"]
# Minimum side for JPEG decoding; most vision encoders read 224 to 384 pixels.
AT_LEAST = 512


@contextmanager
def loading_model(name: str) -> Iterator[None]:
    """Serialize model loading and convert its errors, including those of the imports inside."""
    try:
        with LOADING, needs_extra("local"):
            yield
    except BottegaError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and others
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EmbeddingError(
            f"{name} cannot be loaded as an embedder: {reason}",
            hint="check the model's name or folder; a hub name needs a network once",
        ) from error


@contextmanager
def embedding_errors() -> Iterator[None]:
    """Convert a model's errors: lack of memory and unsupported inputs."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise EmbeddingError(
            f"the embedder failed: {error}", hint="try a smaller batch_size"
        ) from error


def check_modalities(name: str, supported: Iterable[object], required: Set[str]) -> None:
    """Raise `SettingError` if the model lacks a required modality."""
    names = {str(modality) for modality in supported}
    if missing := required - names:
        raise SettingError(
            f"{name} embeds {' and '.join(sorted(names))}, not {min(missing)}",
            hint="choose another mode or another model",
        )


def weights_digest(folder: Path) -> str:
    """Return a digest of every weight file in a model folder."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in WEIGHTS for path in folder.rglob(pattern)):
        digest.update(str(path.relative_to(folder)).encode())
        with path.open("rb") as weights:
            hashlib.file_digest(weights, lambda: digest)
    return digest.hexdigest()[:12]


class SentenceEmbedder:
    """Embedder from a hub id or a folder: CLIP, SigLIP, Qwen3-VL-Embedding, text models.

    `mode` selects the input; "average" is the mean of the image and the text vector.
    `average="unit"` scales both to length one first; `"raw"` keeps the model's lengths, as
    Cache-of-Thought does. `normalize` scales the result to length one, which the cosine metric does
    anyway.
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
        # Fast tokenizers are not thread-safe.
        self._lock = Lock()
        with loading_model(str(model)):
            from sentence_transformers import SentenceTransformer

            self._model = load_from_hub(
                str(model),
                lambda local: SentenceTransformer(
                    str(model), device=device, local_files_only=local
                ),
            )
            # Not every architecture declares it; embed a short text to find out.
            known: int | None = self._model.get_embedding_dimension()
            self._dimension = known or self._encode(["a"]).shape[1]
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
        if self._mode == "image":
            vectors = self._image_vectors(queries, raw=not self._normalize)
        elif self._mode == "text":
            vectors = self._text_vectors(queries)
        else:
            raw = self._average == "raw"
            images, texts = self._image_vectors(queries, raw=raw), self._text_vectors(queries)
            vectors = (images + (texts if raw else unit(texts))) * np.float32(0.5)
        return unit(vectors) if self._normalize else vectors

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
        with self._lock, embedding_errors():
            vectors = self._model.encode(
                items, batch_size=self._batch_size, show_progress_bar=False
            )
        return np.asarray(vectors, np.float32)

    def _check_mode(self, name: str, mode: Mode) -> None:
        modes: dict[str, set[str]] = {
            "image": {"image"},
            "text": {"text"},
            "average": {"image", "text"},
        }
        if mode not in modes:
            raise SettingError(
                f"mode is unknown, got {mode!r}", hint="use 'image', 'text' or 'average'"
            )
        check_modalities(name, self._model.modalities, modes[mode])


def _identity(model: str | Path, loaded: object) -> str:
    """Return the part of a fingerprint that names the model: the weights of a folder, which may be
    moved, or the revision of a hub id if known."""
    if Path(model).is_dir():
        return f"{Path(model).name}@{weights_digest(Path(model))}"
    config = getattr(getattr(loaded, "transformers_model", None), "config", None)
    revision = getattr(config, "_commit_hash", None)
    return f"{model}@{revision[:12]}" if revision else str(model)


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

            self._model = load_from_hub(
                str(model),
                lambda local: MultiVectorEncoder(str(model), device=device, local_files_only=local),
            )
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
            images = [
                image.decode_for_model(AT_LEAST) for query in queries for image in query.images
            ]
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
                items, batch_size=self._batch_size, show_progress_bar=False, convert_to_numpy=True
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
