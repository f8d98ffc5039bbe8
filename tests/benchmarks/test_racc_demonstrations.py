"""The experiment with compressed demonstrations, on a task of a few scenes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks import racc_demonstrations
from benchmarks.racc_demonstrations import (
    PROMPTS,
    Variant,
    base_of,
    compressing_methods,
    evaluate_methods,
    train_variant,
    training_data,
)
from bottega.compression import PassageStore
from bottega.compression.passage_store import StoreManifest
from bottega.compression.persistence import load
from bottega.evaluation.benchmarks.loading import load_benchmark

TASK = "attributes:examples=40,queries=6"


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the knowledge bases after the test; the experiment never closes them."""
    with ExitStack() as bases:
        monkeypatch.setattr(
            racc_demonstrations, "base_of", lambda data: bases.enter_context(base_of(data))
        )
        yield


def test_bases_have_own_words_and_relevance_follows_the_answer() -> None:
    examples = training_data(TASK, bases=2, shots=3)
    words = [
        {one.answer for example in examples(step) for one in example.passages} for step in (0, 1)
    ]

    assert words[0].isdisjoint(words[1])
    for example in examples(0):
        assert example.relevant == tuple(one.answer == example.answer for one in example.passages)
    assert any(any(example.relevant) for example in examples(0))


@pytest.mark.slow
def test_controls_share_compressed_demonstrations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(racc_demonstrations, "INITIALIZATION", 60)
    data = load_benchmark(TASK, seed=0)
    train_variant(
        Variant(closed_form=False), training_data(TASK, bases=1, shots=3), tmp_path / "small"
    )

    methods = compressing_methods(data, racc_demonstrations.base_of(data), tmp_path / "small", 3)
    rows = evaluate_methods(data, methods)

    names = ["racc", "racc-oracle", "racc-flat", "racc-swapped"]
    assert [row["method"] for row in rows] == names
    # No demonstration is in the prompt.
    assert all(row["n"] == 6 and row["prompt_tokens"] < 30 for row in rows)  # type: ignore[operator]
    saved = load(tmp_path / "small")
    manifest = StoreManifest(saved.digest, PROMPTS, saved.racc.config.width)
    assert len(PassageStore(tmp_path / "small" / "store", manifest)) == len(data.knowledge)
