"""Traces of made-up searches, with the pictures that they name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bottega.image import Image
from bottega.recording import StoredTrace, stored_trace
from bottega.types import Answer, Candidate, Query, SearchTree
from tests.builders import candidates, search_tree, searched, solid_image

LABELS = ("cat", "dog", "owl", "newt", "eel", "ant")
HOSTILE = "</style></script><img src=x onerror=\"document.title='owned'\"><b>& {{ 7 * 7 }}"


def known(*labels: str) -> list[Candidate]:
    return candidates(*(labels or LABELS))


def a_trace(tree: SearchTree) -> StoredTrace:
    query = Query("Which animal is it?", (solid_image(500),), choices=LABELS)
    return stored_trace(searched(tree, query))


def hostile_trace() -> StoredTrace:
    """In every text that anybody else has written."""
    shown = [
        replace(one, example=replace(one.example, answer=f"{HOSTILE}{i}", rationale=HOSTILE))
        for i, one in enumerate(known())
    ]
    tree = search_tree(shown, depth=2)
    root = replace(tree.root, answer=Answer(HOSTILE, rationale=HOSTILE), rewards={HOSTILE: 0.5})
    query = Query(f"Which? {HOSTILE}", choices=(HOSTILE,))
    trace = searched(replace(tree, root=root), query, id=HOSTILE)
    return stored_trace(replace(trace, reply=replace(trace.reply, model=HOSTILE)))


def pictures(trace: StoredTrace) -> Mapping[str, Image]:
    """Of all that `known` shows; of the question."""
    shown = [one.example.query.images[0] for one in known()]
    return {image.sha256: image for image in (*shown, solid_image(500))}
