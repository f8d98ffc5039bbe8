from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote_plus

import aiohttp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from playwright.sync_api import Page, expect

from bottega.image import Image
from bottega.knowledge import KnowledgeBase, PixelEmbedder
from bottega.protocols import Vectors
from bottega.types import Example, Query
from bottega.ui.background import BackgroundComputations
from bottega.ui.base_analysis import (
    BaseAnalyses,
    Neighbourhood,
    embedding_map,
    likely_wrong_labels,
    near_duplicates,
    neighbourhood,
    principal_components,
)
from tests.builders import solid_image
from tests.knowledge.doubles import SeededEmbedder, damaged_image, text_example
from tests.ui.base_console import TOKEN, Elements, base_console
from tests.ui.conftest import drop, log_in, serious_findings

MARKUP = st.builds(
    "{}{}{}".format,
    st.text(alphabet="<>\"'&{}%ab;/= ", max_size=8),
    st.sampled_from(
        [
            "<x-injected y-injected=1>",
            '"><x-injected>',
            "' y-injected='1",
            '" y-injected="1',
            "</textarea><x-injected>",
            "</title><x-injected>",
            "javascript:alert(1)",
            "{{ 98765 * 43210 }}",
        ]
    ),
    st.text(alphabet="<>\"'&", max_size=4),
)


def noisy(seed: int, shade: int, size: int = 16) -> Image:
    """Return an image with one half in the shade and the other at random."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    pixels[: size * 3 // 4] = shade
    return Image.from_pillow(Pillow.fromarray(pixels))


def labelled(label: str, *images: Image) -> list[Example]:
    return [Example(Query("What?", (image,)), label) for image in images]


def test_dropped_files_are_added_and_broken_ones_named(page: Page, tmp_path: Path) -> None:
    with base_console(tmp_path) as served:
        log_in(page, served.url)
        page.goto(f"{served.url}/knowledge/add")
        files = {"a.png": solid_image(1).data, "<b>broken.png": b"x", "c.png": solid_image(2).data}
        drop(page, ".drop", files)
        expect(page.locator(".previews img")).to_have_count(3)
        page.get_by_label("Label", exact=True).fill("red <i>")
        page.get_by_role("button", name="Add the images").click()
        expect(page.locator("#added [data-count]")).to_have_text(["2", "0", "1"])
        expect(page.locator("#added li")).to_contain_text("<b>broken.png is not a readable image")
        page.get_by_role("link", name="Labels", exact=True).click()
        expect(page.locator(".grid li")).to_have_text("red <i> 2")
        page.locator(".grid a").click()
        expect(page.locator(".grid img")).to_have_count(2)


def test_wrong_labels_are_changed_together(page: Page, tmp_path: Path) -> None:
    with base_console(tmp_path) as served:
        served.embed = PixelEmbedder()
        base = served.base()
        for label, shade in (("dark <i>", 40), ("light", 200)):
            base.add(labelled(label, *(noisy(shade + n, shade) for n in range(8))))
        wrong = [Example(Query("What?", (noisy(n, 40),)), "light") for n in (98, 99)]
        base.add([*wrong, Example(Query("What?", (noisy(97, 40),)), "light", ("light",), "seen")])
        log_in(page, served.url)
        page.goto(f"{served.url}/knowledge/wrong-labels")
        boxes = page.get_by_label("change the label to dark <i>")
        expect(boxes).to_have_count(3, timeout=10_000)
        assert serious_findings(page) == []
        boxes.nth(0).check()
        boxes.nth(2).check()
        page.get_by_role("button", name="Change the chosen labels").click()
        expect(page.get_by_role("status")).to_contain_text("2 labels changed")
        expect(boxes).to_have_count(1, timeout=10_000)
        changed = [one for one in base if one.tags.get("provenance") == "human"]
        assert {one.answer for one in changed} == {"dark <i>"}
        assert len(base.ids_by_label()["dark <i>"]) == 10
        assert len(base) == 19
        assert served.forgotten == ["", ""]
        assert all(one.labels in (None, ("dark <i>",)) for one in changed)


def test_labels_of_examples_that_are_gone_stay(tmp_path: Path) -> None:
    with base_console(tmp_path) as served:
        served.base().add(labelled("x", noisy(1, 40)))
        form = aiohttp.FormData([("relabel", "0123 new label")])
        [(status, _)] = served.send(TOKEN, [("POST", "/knowledge/wrong-labels", form)])
        assert status in (200, 303)
        assert list(served.base().ids_by_label()) == ["x"]
        [(status, text)] = served.send(TOKEN, [("POST", "/knowledge/wrong-labels", None)])
        assert status == 400
        assert "no example was chosen" in text


def test_folders_are_labels_and_failures_lose_nothing(tmp_path: Path) -> None:
    with base_console(tmp_path) as served:
        form = aiohttp.FormData(quote_fields=False)
        large = io.BytesIO()
        Pillow.new("1", (8000, 5000)).save(large, "PNG")
        files = {
            "sky/cats/1.png": solid_image(1).data,
            "sky/cats/again.png": solid_image(1).data,
            "sky/dogs/2.png": solid_image(2).data,
            "sky/dogs/broken.png": damaged_image().data,
            "sky/dogs/empty.png": b"",
            "noise/40 megapixels.png": large.getvalue(),
            "without folder.png": solid_image(5).data,
            "sky/@eaDir/6.png": solid_image(6).data,
            "sky/cats/._7.png": b"not an image",
        }
        for name, data in files.items():
            form.add_field("images", data, filename=name)
        [(status, text)] = served.send(TOKEN, [("POST", "/knowledge/add", form)])
        assert status == 200
        for name in ("broken.png is damaged", "empty.png is empty", "without folder.png has no"):
            assert name in text
        assert "._7" not in text
        assert {k: len(v) for k, v in served.base().ids_by_label().items()} == {
            "cats": 1,
            "dogs": 1,
            "noise": 1,
        }
        assert all(one.tags["provenance"] == "human" for one in served.base())


# Paths of a choice of files or folders, with the label of each, None if it is refused.
UPLOADS: dict[str, dict[str, str | None]] = {
    "deeper folders belong to their class": {"pets/cat/a/b/1.png": "cat", "pets/dog/2.png": "dog"},
    "a class folder": {"cat/1.png": "cat", "cat/2.png": "cat"},
    "splits of classes": {"tv/Train/cat/1.png": None, "tv/val/dog/2.png": None},
    "one split of classes": {"tv/train/cat/1.png": None},
    "splits without classes": {
        "tv/train/1.png": None,
        "tv/test/2.png": None,
        "tv/cat/3.png": "cat",
    },
    "a chosen split": {"train/cat/1.png": "cat", "train/dog/2.png": "dog"},
    "a class named like a split": {"toys/train/1.png": "train", "toys/car/2.png": "car"},
}


@pytest.mark.parametrize("kind", UPLOADS)
def test_labels_of_uploads_are_those_of_class_folders(tmp_path: Path, kind: str) -> None:
    with base_console(tmp_path) as served:
        form = aiohttp.FormData(quote_fields=False)
        for shade, name in enumerate(UPLOADS[kind]):
            form.add_field("folder", solid_image(shade).data, filename=name)
        [(status, text)] = served.send(TOKEN, [("POST", "/knowledge/add", form)])
        assert status == 200
        stored = {str(one.source): one.answer for one in served.base()}
        assert stored == {name: label for name, label in UPLOADS[kind].items() if label}
        assert text.count("is a split, not a class") == list(UPLOADS[kind].values()).count(None)


class AngleEmbedder:
    """Embedder that reads an angle from the text of a query."""

    fingerprint, dimension = "angle", 2

    def embed(self, queries: Sequence[Query]) -> Vectors:
        angles = np.array([float(query.text) for query in queries], np.float32)
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def test_neighbours_show_near_duplicates_and_wrong_labels() -> None:
    with KnowledgeBase.open(":memory:", AngleEmbedder()) as base:
        angles = {"dark": np.arange(8) / 20, "light": 1.5 + np.arange(8) / 20}
        angles["dark"] = np.append(angles["dark"], 0.101)
        base.add(text_example(str(a), label) for label in angles for a in angles[label])
        base.add([text_example("0.175", "light")])
        found = neighbourhood(base)
        [(one, other, score)] = near_duplicates(found, 0.9999)
        assert {base.get(id).query.text for id in (one, other)} == {"0.1", "0.101"}
        assert score == pytest.approx(np.cos(0.001))
        [wrong] = likely_wrong_labels(found)
        assert base.get(wrong.id).query.text == "0.175"
        assert (wrong.label, wrong.suggested, wrong.votes) == ("light", "dark", 6)


def test_the_map_is_computed_once_for_each_state() -> None:
    analyses = BaseAnalyses(BackgroundComputations(wait_seconds=30))
    with KnowledgeBase.open(":memory:", PixelEmbedder()) as base:
        empty = analyses.map(base, "")
        assert empty is not None and empty.points == ()
        base.add(labelled("same", *(solid_image(9, (n, n)) for n in (8, 16, 24))))
        assert len({(p.x, p.y) for p in embedding_map(base).points}) == 1  # equal vectors
        base.add(one for n in range(9) for one in labelled(f"label {n}", noisy(n, 25 * n)))
        first = analyses.map(base, "")
        assert first is not None and analyses.map(base, "") is first
        assert len(first.points) == first.total == 12
        assert first.legend[0][2] == 3
        assert sum(number for _, _, number in first.legend) == 12
        assert all(0 <= p.x <= first.width and 0 <= p.y <= first.height for p in first.points)
        base.delete(base.ids()[:1])
        second = analyses.map(base, "")
        assert second is not None and len(second.points) == 11


@pytest.mark.parametrize(("classes", "named", "others"), [(3, 3, 0), (10, 10, 0), (12, 9, 3)])
def test_ten_classes_have_colours_of_their_own(classes: int, named: int, others: int) -> None:
    with KnowledgeBase.open(":memory:", SeededEmbedder()) as base:
        base.add(text_example(f"{label} {n}", f"{label}") for label in range(classes) for n in "ab")
        legend = embedding_map(base).legend
    assert len({style for style, *_ in legend}) == len(legend)
    counts = {label: count for _, label, count in legend}
    assert counts.pop("other labels", 0) == 2 * others and len(counts) == named


def test_the_map_has_the_directions_of_greatest_variance() -> None:
    rng = np.random.default_rng(1)
    directions, _ = np.linalg.qr(rng.normal(size=(40, 40)))
    spread = np.array([9.0, 5.0, *np.linspace(1, 0.1, 38)])
    vectors = (rng.normal(size=(300, 40)) * spread @ directions.T + 3).astype(np.float32)
    centred = vectors - vectors.mean(axis=0)
    left, lengths, _ = np.linalg.svd(centred.astype(np.float64), full_matrices=False)
    found, share = principal_components(vectors)
    for number in range(2):
        expected = left[:, number] * lengths[number]
        sign = np.sign(found[:, number] @ expected)
        np.testing.assert_allclose(sign * found[:, number], expected, atol=1e-2)
    assert share == pytest.approx((lengths[:2] ** 2).sum() / (lengths**2).sum(), rel=1e-4)


def test_a_page_reloads_until_its_analysis_is_computed(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proceed = threading.Event()

    def slow(base: KnowledgeBase) -> Neighbourhood:
        assert proceed.wait(30)
        return neighbourhood(base)

    monkeypatch.setattr("bottega.ui.base_analysis.neighbourhood", slow)
    with base_console(tmp_path) as served:
        served.base().add(labelled("x", *(noisy(n, 40) for n in range(4))))
        log_in(page, served.url)
        page.goto(f"{served.url}/knowledge/duplicates")
        expect(page.locator("main .notice")).to_contain_text("4 examples are being compared")
        page.route("**/*", lambda route: route.fulfill(status=204))  # no reload during the check
        assert serious_findings(page) == []
        page.unroute_all()
        page.reload()
        proceed.set()
        expect(page.get_by_text("4 of 4 examples were compared")).to_be_visible(timeout=10_000)


@pytest.mark.parametrize("left", [0, 2, 8])
@pytest.mark.parametrize("page", ["map", "duplicates?threshold=0", "wrong-labels"])
def test_entries_evicted_during_an_analysis_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, left: int
) -> None:
    sample_ids = KnowledgeBase.sample_ids

    def sample_and_evict(self: KnowledgeBase, size: int) -> list[str]:
        found = sample_ids(self, size)
        self.delete(found[left:])
        return found

    monkeypatch.setattr(KnowledgeBase, "sample_ids", sample_and_evict)
    with base_console(tmp_path) as served:
        served.base().add(labelled("x", *(noisy(n, 40) for n in range(9))))
        [(status, text)] = served.send(TOKEN, [("GET", f"/knowledge/{page}", None)])
        assert (status, len(served.base())) == (200, left)
    if page == "map":
        assert text.count("<circle class") == (9 if left == 8 else 0)  # one is of the legend
    else:
        assert f"{left} of {left} examples" in text


def test_texts_never_become_elements(tmp_path: Path) -> None:
    with base_console(tmp_path) as served:

        @settings(max_examples=6)
        @given(st.lists(MARKUP, min_size=6, max_size=6))
        def check(texts: list[str]) -> None:
            label, question, answer, name, tag, rationale = texts
            base = served.base()
            base.delete(base.ids())
            images = [replace(noisy(n, 40), source=name) for n in range(4)]
            tags = {tag: tag, "request": tag}
            base.add(
                Example(
                    *(Query(question, (image,), (label, answer)), answer, (label,), rationale),
                    tags=tags,
                    source=name,
                )
                for image in images
            )
            base.add([Example(Query(f"{question} without an image"), answer)])
            id = base.ids()[0]
            text = quote_plus(label)
            paths = ["/cache", f"/cache?text={text}&source={text}", f"/cache/{id}", "/knowledge"]
            paths += [f"/knowledge?label={text}", f"/knowledge?text={text}", "/knowledge/map"]
            paths += ["/knowledge/duplicates?threshold=0", "/knowledge/wrong-labels"]
            paths += [f"/cache?message={text}"]
            form = aiohttp.FormData(quote_fields=False)
            lines = aiohttp.FormData(quote_fields=False)
            for upload in (b"x", b""):
                form.add_field("images", upload, filename=f"{name}/{answer}.png")
            lines.add_field("file", tag.encode(), filename=name)
            requests = [
                *(("GET", path, None) for path in paths),
                ("POST", "/knowledge/add", form),
                ("POST", "/cache/import", lines),
            ]
            for (method, path, _), (status, page) in zip(
                requests, served.send(TOKEN, requests), strict=True
            ):
                found = Elements(page)
                assert status == 200, (method, path, page)
                assert "x-injected" not in found.names, path
                assert "y-injected" not in found.attributes, path
                assert all(one.startswith(("/ui", "#", "?", "data:,")) for one in found.targets)
                assert "4267635650" not in found.text, path

        check()
