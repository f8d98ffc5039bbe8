"""PreFLMR embedder: question and image as token vectors, for late interaction."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bottega._util.native import load_from_hub
from bottega.errors import SettingError
from bottega.knowledge.embedders.sentence import embedding_errors, loading_model, weights_digest
from bottega.knowledge.records import unit
from bottega.protocols import Vectors
from bottega.types import Query

if TYPE_CHECKING:
    from torch import Tensor

    from bottega.knowledge.embedders.flmr_model import FlmrModel, FlmrShape

INSTRUCTION = "Using the provided image, obtain documents that address the subsequent question:"
QUERY_MARK, DOCUMENT_MARK = "[unused0]", "[unused1]"
# The mark replaces this token.
PLACEHOLDER = ". "
MIN_TOKENS, MAX_TOKENS = 4, 512
Mask = NDArray[np.bool_]


class FlmrEmbedder:
    """Multi-vector embedder from a PreFLMR checkpoint: a folder with its original names and
    tokenizers, or a hub id.

    A question has `query_tokens` text tokens (default: those of the checkpoint, 32), filled up with
    [MASK]. Each image adds 32 vectors of the whole image and one per patch (256), which attend to
    the question. Tokens of `instruction`, up to its colon, are dropped; the original keeps zero
    vectors, which add nothing. With `choices`, the text of questions and documents includes their
    choices.

    A document is its text without punctuation. `document_images` prepends 32 vectors of each of its
    images, as RCTS does (sec. 3.2); the released checkpoints were trained on text alone. The code
    of RCTS compares questions with questions: 512 tokens, the instruction "Question:", and choices.
    `threads` sets torch's thread count for the whole process; None keeps it. Raises `SettingError`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        document_images: bool = False,
        instruction: str = INSTRUCTION,
        query_tokens: int | None = None,
        choices: bool = False,
        batch_size: int = 8,
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        with loading_model(str(model)):
            import torch
            from transformers import BertTokenizer, CLIPImageProcessorPil

            from bottega.knowledge.embedders.flmr_model import load_flmr

            if threads is not None:
                torch.set_num_threads(threads)
            folder = Path(model)
            if not folder.is_dir():
                from huggingface_hub import snapshot_download

                folder = load_from_hub(
                    str(model),
                    lambda local: Path(snapshot_download(str(model), local_files_only=local)),
                )
            self._model: FlmrModel = load_flmr(folder).to(device)
            shape = self._model.shape
            self._query_tokens = BertTokenizer.from_pretrained(str(folder / "query_tokenizer"))
            self._document_tokens = BertTokenizer.from_pretrained(str(folder / "context_tokenizer"))
            side = shape.vision["image_size"]
            self._images = CLIPImageProcessorPil(
                size={"shortest_edge": side}, crop_size={"height": side, "width": side}
            )
        self._query_length = _checked_count(query_tokens, shape)
        _check_instruction(instruction, shape)
        self._side = side
        self._device = device
        self._instruction = instruction
        self._choices = choices
        self._document_images = document_images
        self._batch_size = batch_size
        # Fast tokenizers are not thread-safe.
        self._lock = Lock()
        images = "images" if document_images else "text"
        self.fingerprint = f"flmr@{weights_digest(folder)} {images} {instruction!r}"
        if self._query_length != shape.query_tokens:
            self.fingerprint += f" {self._query_length} tokens"
        if choices:
            self.fingerprint += " choices"

    @property
    def dimension(self) -> int:
        return self._model.shape.dimension

    def embed_queries(self, queries: Sequence[Query]) -> list[Vectors]:
        return self._batched(queries, self._queries)

    def embed_documents(self, queries: Sequence[Query]) -> list[Vectors]:
        return self._batched(queries, self._documents)

    def _batched(self, queries: Sequence[Query], encode: Any) -> list[Vectors]:
        import torch

        found: list[Vectors] = []
        for start in range(0, len(queries), self._batch_size):
            with torch.inference_mode(), embedding_errors():
                found += encode(queries[start : start + self._batch_size])
        return found

    def _queries(self, queries: Sequence[Query]) -> list[Vectors]:
        texts = [
            f"{PLACEHOLDER}{self._instruction} {self._text(query)}".rstrip() for query in queries
        ]
        with self._lock:
            ids, attention = _tokens(
                self._query_tokens, texts, QUERY_MARK, self._query_length, "max_length"
            )
            ids[ids == self._query_tokens.pad_token_id] = self._query_tokens.mask_token_id
            kept = self._after_instruction(ids)
        word_rows, states = self._model.query_words(*self._on_device(ids, attention))
        owners = [row for row, query in enumerate(queries) for _ in query.images]
        image_rows = None
        if owners:
            image_rows = self._model.query_images(self._pixels(queries), states[owners])
        return _joined(word_rows, kept, image_rows, owners, images_first=False)

    def _documents(self, queries: Sequence[Query]) -> list[Vectors]:
        texts = [PLACEHOLDER + self._text(query) for query in queries]
        shape = self._model.shape
        with self._lock:
            ids, attention = _tokens(
                self._document_tokens, texts, DOCUMENT_MARK, shape.document_tokens, "longest"
            )
            kept = self._not_punctuation(ids) & (attention == 1)
        word_rows = self._model.document_words(*self._on_device(ids, attention))
        owners = [row for row, query in enumerate(queries) for _ in query.images]
        image_rows = None
        if owners and self._document_images:
            image_rows = self._model.document_images(self._pixels(queries))
        return _joined(
            word_rows, kept, image_rows, owners if image_rows is not None else [], images_first=True
        )

    def _text(self, query: Query) -> str:
        if not (self._choices and query.choices):
            return query.text
        letters = (chr(ord("A") + i) if i < 26 else str(i + 1) for i in range(len(query.choices)))
        listed = (f"({letter}) {one}" for letter, one in zip(letters, query.choices, strict=True))
        return f"{query.text}\nChoices: {' '.join(listed)}"

    def _after_instruction(self, ids: NDArray[np.int64]) -> Mask:
        """Return a mask of the start, the mark, and the tokens after the end of the instruction."""
        end = self._model.shape.instruction_end
        if end is None:
            return np.ones_like(ids, bool)
        found = ids == self._query_tokens.convert_tokens_to_ids(end)
        ends = np.maximum(found.argmax(axis=1), 1)
        positions = np.arange(ids.shape[1])
        kept: Mask = (positions > ends[:, None]) | (positions < 2)
        return kept

    def _not_punctuation(self, ids: NDArray[np.int64]) -> Mask:
        if not self._model.shape.mask_punctuation:
            return np.ones_like(ids, bool)
        signs = self._document_tokens.convert_tokens_to_ids(list(string.punctuation))
        # Signs missing from the vocabulary have the id of unknown words, which stay.
        unknown = self._document_tokens.unk_token_id
        kept: Mask = np.isin(ids, [sign for sign in signs if sign != unknown], invert=True)
        return kept

    def _pixels(self, queries: Sequence[Query]) -> Tensor:
        images = [image.decode_for_model(self._side) for query in queries for image in query.images]
        pixels: Tensor = self._images(images, return_tensors="pt")["pixel_values"]
        return pixels.to(self._device)

    def _on_device(self, *arrays: NDArray[np.int64]) -> list[Tensor]:
        import torch

        return [torch.from_numpy(array).to(self._device) for array in arrays]


def _checked_count(count: int | None, shape: FlmrShape) -> int:
    if count is None:
        return shape.query_tokens
    most = shape.text.get("max_position_embeddings", MAX_TOKENS)
    if not MIN_TOKENS <= count <= most:
        raise SettingError(
            f"query_tokens must be from {MIN_TOKENS} to {most}, got {count}",
            hint=f"set query_tokens to {most} or less",
        )
    return count


def _check_instruction(instruction: str, shape: FlmrShape) -> None:
    """Raise `SettingError` if the instruction would end at a colon of the question."""
    end = shape.instruction_end
    if instruction and end and instruction.rstrip().find(end) != len(instruction.rstrip()) - 1:
        raise SettingError(
            f"instruction must end with its only {end!r}, got {instruction!r}",
            hint=f"write e.g. Question{end}",
        )


def _tokens(
    tokenizer: Any, texts: list[str], mark: str, longest: int, padding: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (n, tokens) ids with the mark after the start, and the attention mask."""
    found = tokenizer(
        texts, padding=padding, truncation=True, max_length=longest, return_tensors="np"
    )
    ids = np.array(found["input_ids"], np.int64)
    ids[:, 1] = tokenizer.convert_tokens_to_ids(mark)
    return ids, np.array(found["attention_mask"], np.int64)


def _joined(
    word_rows: Tensor,
    kept: Mask,
    image_rows: Tensor | None,
    owners: list[int],
    *,
    images_first: bool,
) -> list[Vectors]:
    """Return one matrix of unit rows per query; `owners` has the query of each image."""
    parts = [[rows[mask]] for rows, mask in zip(word_rows.cpu().numpy(), kept, strict=True)]
    for owner, rows in zip(
        owners, () if image_rows is None else image_rows.cpu().numpy(), strict=True
    ):
        parts[owner].insert(len(parts[owner]) - 1 if images_first else len(parts[owner]), rows)
    return [unit(np.concatenate(rows)) for rows in parts]
