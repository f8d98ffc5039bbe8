"""What `bottega eval` was asked: what its work comes from, and what is kept beside its answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bottega.cli.measuring import Work
from bottega.cli.opening import open_rows
from bottega.cli.output import note, warn
from bottega.errors import BottegaError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.benchmarks.passages import with_passages
from bottega.evaluation.compressors import identities
from bottega.evaluation.prompts import with_rationales
from bottega.recipes import Classification


@dataclass(frozen=True)
class Material:
    """What is asked about, and what is known beside it."""

    benchmark: str
    passages: str | None
    limit: int | None
    per_class: int | None
    label_noise: float
    allow_overlap: bool

    def read(self, seed: int, rationales: Path | None) -> tuple[Benchmark, int]:
        """With the number of what could not be used, each of which is told."""
        skipped: list[BottegaError] = []

        def on_bad(error: BottegaError) -> None:
            skipped.append(error)
            warn(error)

        data = load_benchmark(
            self.benchmark,
            seed=seed,
            limit=self.limit,
            per_class=self.per_class,
            label_noise=self.label_noise,
            allow_overlap=self.allow_overlap,
            on_bad=on_bad,
        )
        if self.passages is not None:
            data = with_passages(data, self.passages, on_bad=on_bad)
        return data if rationales is None else _explained(data, rationales), len(skipped)


@dataclass(frozen=True)
class Asked:
    """All that the answers depend on."""

    material: Material
    skipped: int
    settings: Classification
    prompt: str
    order: str
    work: Work
    round_size: int | None

    def record(self) -> dict[str, object]:
        """Which other runs these answers belong with: a run goes on where this is the same."""
        material, settings, work = self.material, self.settings, self.work
        return {
            "benchmark": material.benchmark,
            "passages": material.passages,
            "skipped": self.skipped,
            "model": settings.generator.name,
            "embedder": work.embed,
            "retrieve": work.retrieve,
            "label_noise": material.label_noise,
            "limit": material.limit,
            "kb_per_class": material.per_class,
            "prompt": self.prompt,
            "order": self.order,
            "seed": settings.seed,
            "samples": work.samples,
            "rollouts": work.rollouts,
            "rationales": work.rationales,
            "compressor": None if work.compressor is None else str(work.compressor),
            "hyper": work.hyper and work.hyper.name,
            "store": None if work.store is None else str(work.store),
            **identities(work.compressor, work.store),
            "max_tokens": settings.sampling.max_tokens,
            "round_size": self.round_size,
        }


def _explained(data: Benchmark, file: Path) -> Benchmark:
    with open_rows(file) as knowledge:
        data, found = with_rationales(data, knowledge)
    note(f"{found} of {len(data.knowledge)} known examples have their rationale from {file}")
    return data
