"""The words of the bundled model as a text embedder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np

from bottega.bundled import MEANINGS, WORDS, bundled_folder
from bottega.errors import EmbeddingError
from bottega.knowledge.embedders.loading import loading_model
from bottega.knowledge.vectors import unit
from bottega.protocols import Vectors
from bottega.types import Query

TABLE = "embed_tokens.weight"
# A shared meaning ("hue", "tint") counts more than a shared word.
WORD_WEIGHT, MEANING_WEIGHT = 0.2, 1.0


class TokenEmbedder:
    """Embeds texts by the input embeddings of a model that is laid out as the bundled one.

    A vector is the unit norm of the sum over the text's tokens: which tokens they are, times 0.2,
    beside what they mean. The last number marks a text of which nothing is known. The model itself
    is not loaded, only its table and its tokenizer.
    """

    def __init__(self, folder: str | Path) -> None:
        with loading_model(str(folder)):
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
            table = _table(Path(folder))
        self._rows = _weighed(table, str(folder))
        self.fingerprint = f"tokens-{self.dimension} {self._digest()}"

    @classmethod
    def bundled(cls) -> Self:
        """The model that comes with the package."""
        return cls(bundled_folder())

    @property
    def dimension(self) -> int:
        return int(self._rows.shape[1]) + 1

    def embed(self, queries: Sequence[Query]) -> Vectors:
        vectors = np.zeros((len(queries), self.dimension), np.float32)
        for vector, query in zip(vectors, queries, strict=True):
            if not query.text:
                raise EmbeddingError(
                    "a query has no text, and this embedder reads only text",
                    hint="ask a question, or use an image embedder",
                )
            vector[:-1] = self.token_rows(query.text).sum(axis=0)
            vector[-1] = not vector.any()
        return unit(vectors)

    def token_rows(self, text: str) -> Vectors:
        """(tokens, dimension - 1) what `embed` sums: which token it is, then what it means."""
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


def _weighed(table: Vectors, name: str) -> Vectors:
    """(tokens, dimension) the parts of the table that are compared, each with its weight."""
    needed = max(part.stop for part in (WORDS, *MEANINGS))
    if table.shape[1] < needed:
        raise EmbeddingError(
            f"{name} has {table.shape[1]} numbers a token, and its meanings would end at {needed}",
            hint="use the bundled model, or SentenceEmbedder(model, mode='text')",
        )
    parts = [WORD_WEIGHT * table[:, WORDS]]
    parts += [MEANING_WEIGHT * table[:, part] for part in MEANINGS]
    return np.concatenate(parts, axis=1).astype(np.float32)
