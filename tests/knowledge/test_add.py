"""Adding examples: new ones, duplicates and failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image as Pillow

from bottega.errors import (
    EmbeddingError,
    ImageError,
    LoadError,
    StoreError,
)
from bottega.image import Image
from bottega.knowledge import AddResult, KnowledgeBase, PixelEmbedder
from bottega.knowledge.records import EmbeddedBatch, with_id
from bottega.protocols import Vectors
from bottega.types import Example, Query
from tests.builders import solid_image
from tests.knowledge.doubles import (
    ErrorList,
    ImageOnlyEmbedder,
    SeededEmbedder,
    damaged_image,
    image_example,
    text_example,
)


@pytest.fixture
def kb() -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as opened:
        yield opened


def test_adding_counts_what_is_new(kb: KnowledgeBase) -> None:
    seen: list[int] = []
    examples = [image_example(i) for i in range(5)] + [image_example(2), image_example(7)]
    assert kb.add(examples, batch_size=3, progress=seen.append) == AddResult(new=6, duplicates=1)
    assert kb.add(examples) == AddResult(duplicates=7)
    assert seen == [3, 3, 1]
    assert len(kb) == 6


def test_true_shows_a_bar(kb: KnowledgeBase, capsys: pytest.CaptureFixture[str]) -> None:
    examples = [image_example(i) for i in range(5)]
    kb.add(examples, progress=True)
    kb.add(iter(examples), progress=True)
    kb.add(examples)
    written = capsys.readouterr()
    assert (written.out, written.err.count("Adding")) == ("", 2)
    assert "5/5" in written.err and "5/?" in written.err


def test_image_question_and_answer_make_an_example(kb: KnowledgeBase) -> None:
    base = image_example(1, "cat", "What?")
    variants = [
        image_example(2, "cat", "What?"),
        image_example(1, "dog", "What?"),
        image_example(1, "cat", "Which?"),
    ]
    assert kb.add([base, *variants, replace(base, rationale="fur")]).new == 4
    assert kb.get(kb.ids()[0]).rationale is None


def test_duplicates_are_found_before_they_are_embedded() -> None:
    embedder = SeededEmbedder()
    with KnowledgeBase.open(":memory:", embedder) as kb:
        kb.add([image_example(1), image_example(1)])
        kb.add([image_example(1), image_example(2)])
    assert embedder.embedded == 2


def test_copies_of_a_failed_example_failed_too(kb: KnowledgeBase) -> None:
    bad = Example(Query("What?", (damaged_image(),)), "cat", source="bad.png")
    errors = ErrorList()
    examples = [bad, image_example(1), bad, replace(bad, source="copy.png"), image_example(1)]
    assert kb.add(examples, on_error=errors) == AddResult(new=1, duplicates=1, failed=3)
    assert len(errors) == 3
    assert "copy.png equals an example that failed" in str(errors[2])


def test_damaged_image_is_named_and_the_others_are_stored(kb: KnowledgeBase) -> None:
    bad = ErrorList()
    broken = Example(Query("What?", (damaged_image("pets/cat/9.png"),)), "cat")
    assert kb.add([image_example(1), broken, image_example(2)], on_error=bad) == AddResult(
        new=2, failed=1
    )
    assert isinstance(bad[0], ImageError)
    assert "pets/cat/9.png" in str(bad[0])
    with pytest.raises(ImageError):
        kb.add([broken])


def test_damaged_images_leave_the_batch_with_an_embedder_that_decodes() -> None:
    bad = ErrorList()
    broken = [Example(Query(f"{i}?", (damaged_image(f"{i}.png"),)), "cat") for i in range(2)]
    examples = [image_example(1), broken[0], image_example(2), broken[1]]
    with KnowledgeBase.open(":memory:", PixelEmbedder()) as kb:
        assert kb.add(examples, on_error=bad) == AddResult(new=2, failed=2)
        assert [str(error).split()[0] for error in bad] == ["0.png", "1.png"]
        assert kb.add([broken[0]], on_error=bad) == AddResult(failed=1)
        stored = [one.query for one in kb]
        np.testing.assert_array_equal(kb.vectors(kb.ids()), PixelEmbedder().embed(stored))


def test_image_error_of_an_embedder_for_intact_images_is_raised() -> None:
    class Choosy(SeededEmbedder):
        def embed(self, queries: Sequence[Query]) -> Vectors:
            raise ImageError("too small", hint="use larger images")

    with (
        KnowledgeBase.open(":memory:", Choosy()) as kb,
        pytest.raises(ImageError, match="too small"),
    ):
        kb.add([image_example(1)], on_error=ErrorList())


def test_an_image_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = 0
    load = Image._loaded

    def counting(image: Image, at_least: int | None) -> Pillow.Image:
        nonlocal decoded
        decoded += 1
        return load(image, at_least)

    large = Example(Query("What?", (solid_image(1, (200, 100)),)), "cat")
    monkeypatch.setattr(Image, "_loaded", counting)
    for embedder in (PixelEmbedder(), SeededEmbedder()):  # one decodes, the other does not
        decoded = 0
        with KnowledgeBase.open(":memory:", embedder) as kb:
            assert kb.add([large]).new == 1
        assert decoded == 1


def test_one_failing_example_does_not_fail_its_batch() -> None:
    bad = ErrorList()
    with KnowledgeBase.open(":memory:", ImageOnlyEmbedder()) as kb:
        failing = text_example("no image", source="line 7")
        assert kb.add([image_example(1), failing, image_example(2)], on_error=bad) == AddResult(
            new=2, failed=1
        )
        assert isinstance(bad[0], EmbeddingError)
        assert "line 7" in str(bad[0])
        with pytest.raises(EmbeddingError):
            kb.add([failing])


def test_invalid_vectors_are_not_stored(kb: KnowledgeBase) -> None:
    class Nonsense(SeededEmbedder):
        def embed(self, queries: object) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
            return np.full((1, self.dimension), np.nan, np.float32)

    with KnowledgeBase.open(":memory:", Nonsense()) as nonsense:
        with pytest.raises(EmbeddingError, match="NaN"):
            nonsense.add([image_example(1)])
        assert len(nonsense) == 0


def test_adding_does_not_cache_pixels_in_the_callers_images(kb: KnowledgeBase) -> None:
    example = image_example(1)
    kb.add([example])
    assert "_decoded" not in vars(example.query.images[0])


def test_decoded_pixels_are_reused(kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch) -> None:
    example = image_example(1)
    example.query.images[0].decode()
    monkeypatch.setattr(Image, "_decode", None)
    assert kb.add([example]).new == 1


@pytest.mark.parametrize(
    "wrong",
    [
        text_example("q", None),  # type: ignore[arg-type]
        Example(Query(5), "a"),  # type: ignore[arg-type]
        text_example("half \ud83d"),
        text_example("q", source=b"bytes"),
        text_example("q", tags={"\ud83d": "x"}),
        text_example("q", tags={"year": 1999}),
        text_example("q", tags=["a tag"]),
        text_example("q", labels=5),
        text_example("q", labels=("a\0b",)),
        Example(Query("q", (replace(solid_image(1), source="\ud83d"),)), "a"),
        Example(Query("q", choices=("a", "b\0")), "a"),
    ],
)
def test_field_that_is_not_text_fails(kb: KnowledgeBase, wrong: Example) -> None:
    bad = ErrorList()
    assert kb.add([text_example("fine"), wrong], on_error=bad) == AddResult(new=1, failed=1)
    assert len(bad) == 1
    with pytest.raises(LoadError, match="cannot be stored"):
        kb.add([wrong])


def test_constraint_violation_is_not_a_duplicate(kb: KnowledgeBase) -> None:
    broken = with_id(text_example("q", None), "0" * 16)  # type: ignore[arg-type]
    with pytest.raises(StoreError):
        kb._rows.put([broken], {"default": EmbeddedBatch("seeded-8", np.ones((1, 8), np.float32))})
