"""HTML of objects in notebooks: escaped, without scripts, bounded, complete."""

from __future__ import annotations

import sys
from collections.abc import Callable
from html.parser import HTMLParser
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from bottega import (
    Answer,
    Candidate,
    Completion,
    Example,
    Image,
    KnowledgeBase,
    Message,
    PixelEmbedder,
    Prompt,
    Query,
    Reply,
    Trace,
    Usage,
    notebook,
)
from bottega.evaluation.outcomes import ScoredAnswer
from bottega.evaluation.runs.paired import PairedDifference
from bottega.evaluation.runs.runner import MethodResult

ALLOWED = {
    *("div", "span", "b", "img", "details", "summary", "progress"),
    *("table", "thead", "tbody", "tr", "th", "td"),
}
MARKUP = st.sampled_from(
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "' onmouseover='alert(1)",
        "</div></table><iframe src=//evil.example>",
        "{{ 7 * 7 }}{% raw %}",
        "&lt;b&gt;",
        "]]><!-- -->",
    ]
)
HOSTILE = st.one_of(MARKUP, st.text(min_size=1, max_size=40))


class Elements(HTMLParser):
    """Tags with their attributes, and the texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def noise_image(source: str | None = None, side: int = 60) -> Image:
    pixels = np.random.default_rng(0).integers(0, 255, (side, side, 3), np.uint8)
    return Image.from_pillow(Pillow.fromarray(pixels), source=source)


def traced(text: str, shots: int = 2, side: int = 60) -> Trace:
    query = Query(text, (noise_image(text, side),))
    candidate = Candidate(Example(query, text), 0.5)
    return Trace(
        id="1",
        time=0.0,
        query=query,
        tier=text,
        candidates=(candidate,) * shots,
        prompt=Prompt((Message("user", (text, query.images[0])), Message("assistant", (text,)))),
        reply=Reply(text, (Completion(text),), Usage(12, 3)),
        answer=Answer(text, labels=("a", text), confidence=0.25, rationale=text),
        seconds=1.5,
        cost_usd=0.002,
    )


def result(text: str) -> MethodResult:
    return MethodResult(text, 5, 10, text, 0.9, 0.6, 0.98, 0, 0, 10, 100, 10, None, 1.0)


OBJECTS: dict[str, Callable[[str], Any]] = {
    "image": noise_image,
    "answer": lambda text: Answer(text, valid=False, labels=(text, text), rationale=text),
    "trace": traced,
    "result": result,
    "difference": lambda text: PairedDifference(text, text, 5, 10, 0.1, 0.0, 0.2, 0.04),
    "scored": lambda text: ScoredAnswer(0, Example(Query(text), text), Answer(text), (0.5,)),
}


@pytest.mark.parametrize("kind", OBJECTS)
@given(text=HOSTILE)
def test_texts_add_no_elements_and_no_attributes(kind: str, text: str) -> None:
    shown = Elements(OBJECTS[kind](text)._repr_html_())
    harmless = Elements(OBJECTS[kind]("word")._repr_html_())
    assert shown.tags == harmless.tags and set(shown.tags) <= ALLOWED
    names = [name for name, _ in shown.attributes]
    assert names == [name for name, _ in harmless.attributes]
    assert not any(name.startswith("on") or name == "href" for name in names)
    sources = [value for name, value in shown.attributes if name == "src"]
    assert all(value.startswith("data:image/") for value in sources)


@given(label=HOSTILE, question=HOSTILE)
def test_a_knowledge_base_shows_labels_as_text(label: str, question: str) -> None:
    if any(0xD800 <= ord(c) <= 0xDFFF or c == "\0" for c in label + question):
        return  # the store accepts only text
    with KnowledgeBase.open(":memory:", embed=PixelEmbedder()) as base:
        base.add([Example(Query(question, (noise_image("a.png", 8),)), label)])
        shown = Elements(base._repr_html_())
    assert set(shown.tags) <= ALLOWED
    assert "1 examples, 1 images, 1 labels" in shown.text and shown.tags.count("img") == 1


def test_a_trace_shows_answer_demonstrations_and_cost() -> None:
    shown = Elements(traced("pug")._repr_html_())
    for words in ("pug", "confidence 0.250", "2 shots", "12 + 3 tokens", "0.002000 USD", "0.500"):
        assert words in shown.text
    assert shown.tags.count("img") == 3


def test_html_is_bounded() -> None:
    long = traced("x" * 100_000, shots=64, side=600)
    html = long._repr_html_()
    assert len(html) < 150_000
    assert Elements(html).tags.count("img") == 1 + notebook.MAX_IMAGES
    assert "and 56 more" in html


def test_damaged_images_and_closed_stores_are_named() -> None:
    whole = noise_image(side=100).data
    damaged = Image.from_bytes(whole[: len(whole) // 2])
    assert "damaged image" in damaged._repr_html_()
    base = KnowledgeBase.open(":memory:", embed=PixelEmbedder())
    base.close()
    assert "closed" in base._repr_html_()


def test_colours_are_those_of_the_notebook() -> None:
    html = traced("pug")._repr_html_() + result("m")._repr_html_()
    assert "background" not in html and "#" not in "".join(
        value for name, value in Elements(html).attributes if name == "style"
    )


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is displayed by the part of IPython that a notebook's kernel provides; tests/docs
    runs a real kernel."""
    pages: list[str] = []

    def display(html: str, *, display_id: bool) -> SimpleNamespace:
        pages.append(html)
        return SimpleNamespace(update=pages.append)

    module = ModuleType("IPython.display")
    module.HTML, module.display = str, display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(notebook, "REFRESH_SECONDS", 0.0)
    return pages


def test_progress_is_displayed_and_updated(pages: list[str]) -> None:
    with notebook.progress_bar("Answering", 3) as advance:
        advance(1)
        advance(1)
    assert [Elements(page).text.split()[1] for page in pages] == ["0/3", "1/3,", "2/3,", "2/3,"]
    assert not notebook.is_notebook()


def test_a_bar_without_a_total_counts_steps(pages: list[str]) -> None:
    with notebook.progress_bar("Adding", None) as advance:
        advance(64)
    assert [Elements(page).text.split() for page in pages] == [
        ["Adding", "0"],
        *[["Adding", "64"]] * 2,
    ]
    assert all(name != "value" for name, _ in Elements(pages[-1]).attributes)


def test_adding_shows_a_bar_in_a_notebook(
    pages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebook, "is_notebook", lambda: True)
    with KnowledgeBase.open(":memory:", embed=PixelEmbedder()) as base:
        examples = [Example(Query("?", (noise_image(side=8 + i),)), "a") for i in range(3)]
        base.add(examples, batch_size=2, progress=True)
    texts = [Elements(page).text.split() for page in pages]
    assert texts[0] == ["Adding", "0/3"]
    assert texts[1][:2] == ["Adding", "2/3,"] and texts[-1] == ["Adding", "3/3"]
