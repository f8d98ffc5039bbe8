"""Settings of an evaluation run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bottega._util.locations import StoreLocation
from bottega.errors import LoadError
from bottega.evaluation.examples import Relevance
from bottega.evaluation.search_config import SearchConfig
from bottega.knowledge.embedders.names import BUNDLED
from bottega.knowledge.index.vector_index import VectorMetric
from bottega.naming import source_digest
from bottega.recipes.racc import COMPRESSOR, STORE

CUSTOM = "custom"  # the method of the user's own function


@dataclass(frozen=True)
class RunConfig:
    """Settings of an evaluation run, for the command line, the runner and the run store.

    `samples` None: as many as a search among the methods may request, else 5. `rationales` None:
    as `prompts.prompt_for` decides. `relevance` None: the benchmark's. `reasoning_tokens` replaces
    `max_tokens` for methods that ask for reasons by default (`prompts.asks_for_reasons`). `hyper`
    names the model that compresses if `model` does not. `pipeline` is the import path of the
    function of `custom`. `concurrency` limits concurrent queries;
    `round_size` splits the items, in their order, into rounds, between which a method may learn.
    """

    benchmark: str = ""
    methods: Sequence[str] = ()
    shots: Sequence[int] = ()
    passages: str | None = None
    relevance: Relevance | None = None
    limit: int | None = None
    kb_per_class: int | None = None
    kb_share: float = 1.0
    rerank: str = "none"
    label_noise: float = 0.0
    allow_overlap: bool = False
    embed: str = BUNDLED
    retrieve: str = "image"
    embed_text: str | None = None
    metric: VectorMetric = "cosine"
    groups: int | None = None
    prompt: str = "auto"
    order: str = "nearest-last"
    seed: int = 0
    samples: int | None = None
    search: SearchConfig = field(default_factory=SearchConfig)
    rationales: bool | None = None
    answers_from: StoreLocation | None = None
    synonyms: Path | None = None
    compressor: Path | None = None
    hyper: str | None = None
    store: Path | None = None
    max_tokens: int | None = None
    reasoning_tokens: int | None = None
    stop: tuple[str, ...] = ()
    pipeline: str | None = None
    round_size: int | None = None
    concurrency: int = 32

    def record(self, *, model: str, hyper: str | None, skipped: int) -> dict[str, object]:
        """Return the settings on which the answers depend: a run resumes if these are equal.

        `model` and `hyper` are the names of the loaded models, `skipped` the number of unreadable
        examples. Raises `LoadError` if a compressor or a store cannot be read.
        """
        return {
            "benchmark": self.benchmark,
            "passages": self.passages,
            "skipped": skipped,
            "model": model,
            "embedder": self.embed,
            "retrieve": self.retrieve,
            "label_noise": self.label_noise,
            "limit": self.limit,
            "kb_per_class": self.kb_per_class,
            "prompt": self.prompt,
            "order": self.order,
            "seed": self.seed,
            "samples": self.samples,
            **self.search.record(),
            "rationales": self.rationales,
            "compressor": None if self.compressor is None else str(self.compressor),
            "hyper": hyper,
            "store": None if self.store is None else str(self.store),
            **compressor_identity(self.compressor, self.store),
            "max_tokens": self.max_tokens,
            # Recorded only if set: reports list the recorded settings.
            **({"stop": list(self.stop)} if self.stop else {}),
            **({"kb_share": self.kb_share} if self.kb_share < 1 else {}),
            **({"rerank": self.rerank} if self.rerank != "none" else {}),
            **({"embed_text": self.embed_text} if self.embed_text else {}),
            **({"metric": self.metric} if self.metric != "cosine" else {}),
            **({"groups": self.groups} if self.groups else {}),
            **({"answers_from": str(self.answers_from)} if self.answers_from else {}),
            **({"synonyms": self.synonyms.read_text("utf-8")} if self.synonyms else {}),
            **({"pipeline": source_digest(self.pipeline)} if self.pipeline else {}),
            "round_size": self.round_size,
        }


def compressor_identity(compressor: Path | None, store: Path | None) -> dict[str, object]:
    """Return a digest of the compressor and the store's manifest: paths may be reused.

    A compressor's settings name the weights of both models, so its digest covers them too.
    """
    identity: dict[str, object] = {}
    try:
        if compressor is not None:
            identity["compressor_digest"] = _digest(compressor.expanduser())
        if store is not None:
            manifest = store.expanduser() / STORE
            identity["store_manifest"] = manifest.read_text("utf-8", errors="replace")
    except OSError as error:
        raise LoadError(
            f"{error.filename} cannot be read: {error.strerror}", hint="check its permissions"
        ) from error
    return identity


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in COMPRESSOR:
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
