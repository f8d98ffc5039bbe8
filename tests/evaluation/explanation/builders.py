"""Synthetic search traces and their images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bottega.image import Image
from bottega.recording import StoredTrace, stored_trace
from bottega.types import Answer, Candidate, Query, SearchTree
from tests.builders import candidates, search_tree, searched, solid_image

LABELS = ("cat", "dog", "owl", "newt", "eel", "ant")
HOSTILE = "</style></script><img src=x onerror=\"document.title='owned'\"><b>& {{ 7 * 7 }}"


def demonstrations(*labels: str) -> list[Candidate]:
    return candidates(*(labels or LABELS))


def stored_search(tree: SearchTree) -> StoredTrace:
    query = Query("Which animal is it?", (solid_image(500),), choices=LABELS)
    return stored_trace(searched(tree, query))


def untrusted_trace() -> StoredTrace:
    """Return a trace with markup in every untrusted text."""
    shown = [
        replace(one, example=replace(one.example, answer=f"{HOSTILE}{i}", rationale=HOSTILE))
        for i, one in enumerate(demonstrations())
    ]
    tree = search_tree(shown, depth=2)
    root = replace(tree.root, answer=Answer(HOSTILE, rationale=HOSTILE), rewards={HOSTILE: 0.5})
    query = Query(f"Which? {HOSTILE}", choices=(HOSTILE,))
    trace = searched(replace(tree, root=root), query, id=HOSTILE)
    return stored_trace(replace(trace, reply=replace(trace.reply, model=HOSTILE)))


def images_of(trace: StoredTrace) -> Mapping[str, Image]:
    """Return the images of the demonstrations and the question by hash."""
    shown = [one.example.query.images[0] for one in demonstrations()]
    return {image.sha256: image for image in (*shown, solid_image(500))}
