"""Reading a knowledge base without searching."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bottega.errors import (
    NotFoundError,
    SettingError,
)
from bottega.knowledge import KnowledgeBase
from tests.builders import solid_image
from tests.knowledge.doubles import SeededEmbedder, image_example, text_example


@pytest.fixture
def kb() -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as opened:
        yield opened


def test_id_may_be_shortened_while_it_is_unambiguous(kb: KnowledgeBase) -> None:
    kb.add([text_example(f"q{i}") for i in range(3)])
    id = kb.ids()[1]
    assert kb.get(id[:8]) == kb.get(id)
    assert kb.delete([id[:8]]) == 1
    assert id not in kb.ids()
    with pytest.raises(NotFoundError, match=id[:8]):
        kb.get(id[:8])
    with pytest.raises(SettingError, match="at least 4 characters"):
        kb.get(kb.ids()[0][:3])


def test_ambiguous_id_is_an_error(kb: KnowledgeBase) -> None:
    kb.add([text_example(f"q{i}") for i in range(600)])  # two of them share four characters
    prefixes = [id[:4] for id in kb.ids()]
    twice = next(prefix for prefix in prefixes if prefixes.count(prefix) > 1)
    with pytest.raises(SettingError, match=f"prefix '{twice}' is ambiguous"):
        kb.get(twice)


def test_deleting_is_all_or_nothing(kb: KnowledgeBase) -> None:
    kb.add([text_example("a"), text_example("b")])
    with pytest.raises(NotFoundError):
        kb.delete([*kb.ids(), "0123456789abcdef"])
    assert len(kb) == 2
    assert kb.delete(kb.ids()) == 2


def test_images_are_those_of_the_namespace(tmp_path: Path) -> None:
    path, embedder = tmp_path / "k.db", SeededEmbedder()
    with (
        KnowledgeBase.open(path, embedder) as ours,
        KnowledgeBase.open(path, embedder, namespace="b") as theirs,
    ):
        ours.add([image_example(1), image_example(2), image_example(2, "dog")])
        theirs.add([image_example(2), image_example(3)])
        hashes = [solid_image(shade).sha256 for shade in (1, 2, 3, 4)]
        found = ours.images(hashes)
        assert list(found) == [one.sha256 for one in found.values()]
        assert {image.data for image in found.values()} == {
            solid_image(1).data,
            solid_image(2).data,
        }
        assert set(theirs.images(hashes)) == set(hashes[1:3])
        ours.delete(ours.ids())
        assert ours.images(hashes) == {}


def test_labels_are_in_order_of_appearance(kb: KnowledgeBase) -> None:
    kb.add(
        [
            image_example(1, "zebra"),
            text_example("x", "b, a", labels=("b", "a")),
            image_example(2, "zebra"),
        ]
    )
    kb.add([text_example("y", "none", labels=()), text_example("z", "a")])
    ids = kb.ids()
    assert kb.labels() == ["zebra", "b", "a"]
    assert kb.ids_by_label() == {"zebra": [ids[0], ids[2]], "b": [ids[1]], "a": [ids[1], ids[4]]}
    assert kb.is_multi_label()


def test_ids_are_filtered_by_label_source_and_tags(kb: KnowledgeBase) -> None:
    kb.add(
        [
            text_example("a", "x", tags={"hue": "red", "size": "big"}, source="s1"),
            text_example("b", "x, y", labels=("x", "y"), tags={"hue": "red"}, source="s2"),
            text_example("c", "y", source="s1"),
        ]
    )
    a, b, c = kb.ids()
    assert kb.ids(label="y") == [b, c]
    assert kb.ids(source="s1") == [a, c]
    assert kb.ids(tags={"hue": "red"}) == [a, b]
    assert kb.ids(label="x", tags={"hue": "red", "size": "big"}) == [a]


def test_iteration_gives_every_example_in_order(kb: KnowledgeBase) -> None:
    kb.add([text_example(f"q{i}") for i in range(150)])
    assert [example.query.text for example in kb] == [f"q{i}" for i in range(150)]


def test_notes_are_kept(tmp_path: Path) -> None:
    with KnowledgeBase.open(tmp_path / "kb.db", None) as kb:
        assert kb.note("embed") is None
        kb.set_note("embed", "bundled")
        kb.set_note("embed", "pixels")
    with KnowledgeBase.open(tmp_path / "kb.db", None) as kb:
        assert kb.note("embed") == "pixels"
