"""Tests that demonstrations never share an image with the evaluated item."""

from __future__ import annotations

from pathlib import Path

import pytest

from bottega.evaluation.benchmark import labelled_benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods.planning import plan
from bottega.evaluation.methods.retrieval import EXCLUSION_RULE, CachingEmbedder, retriever_factory
from bottega.evaluation.report.render import write_report
from bottega.evaluation.runs.runner import evaluate
from bottega.generation import ScriptedGenerator
from bottega.knowledge import KnowledgeBase, PixelEmbedder, TokenEmbedder
from bottega.prompting import InterleavedPrompter
from bottega.protocols import Embedder
from bottega.recipes import Classifier
from bottega.recipes.cache_retrieval import CacheRetrieval, RetrievalName
from bottega.types import Example, Prompt, Query
from tests.builders import QUESTION, solid_image
from tests.evaluation.report.builders import benchmark, store_run, three_methods

SECRET = "it is the secret"
SHADES = range(0, 400, 100)
ITEMS = [
    Example(Query(QUESTION, (solid_image(s),), id=f"i{s}"), f"{SECRET} {s % 2}") for s in SHADES
]
# Near copies of the item's question about the same image, with its answer.
LEAKS = [
    Example(Query(text, item.query.images), item.answer)
    for item in ITEMS
    for text in (f"{QUESTION} ", QUESTION.lower(), "Which one is it?")
]
HARMLESS = [Example(Query(QUESTION, (solid_image(s + 7),)), f"harmless {s % 2}") for s in SHADES]
DATA = labelled_benchmark("leaking", (*LEAKS, *HARMLESS), ITEMS)


@pytest.fixture(scope="module")
def embed() -> tuple[Embedder, Embedder]:
    return CachingEmbedder(PixelEmbedder()), CachingEmbedder(TokenEmbedder.bundled())


@pytest.mark.parametrize("retrieve", ["image", "bm25", "hashtag"])
async def test_examples_with_the_items_image_are_never_shown(
    retrieve: RetrievalName, embed: tuple[Embedder, Embedder]
) -> None:
    prompts: list[Prompt] = []

    def record(prompt: Prompt) -> str:
        prompts.append(prompt)
        return "harmless 0"

    pixels, words = embed
    retrieval = CacheRetrieval(retrieve, image=pixels, text=words, exclude="same-image")
    with KnowledgeBase.open(":memory:", embed=retrieval.views()) as knowledge:
        knowledge.add(DATA.knowledge)
        methods = ("random", "balanced", "visual-rag", "top-k", "majority")
        settings = Classifier(
            ScriptedGenerator(record), labels=DATA.labels, prompt=InterleavedPrompter()
        )
        search = retriever_factory(retrieval)
        for method in plan(
            RunConfig(methods=methods, shots=(12,)), DATA, knowledge, settings, search=search
        ):
            await evaluate(DATA, method)
    own = {item.query.images[0]: item.answer for item in ITEMS}
    assert len(prompts) >= len(methods) * len(ITEMS)
    for prompt in prompts:
        *shown, last = prompt.messages
        (image,) = (part for part in last.parts if part in own)
        assert any(message.role == "assistant" for message in shown)
        assert not any(image in message.parts for message in shown)


async def test_report_header_states_the_exclusion_rule(tmp_path: Path) -> None:
    assert (
        EXCLUSION_RULE
        == "Demonstrations exclude every example that shares an image with the query."
    )
    data = benchmark(6, examples=6, side=8)
    run = await store_run(tmp_path / "run", data, three_methods(data)[:1])
    page, _, markdown, *_ = write_report([run], tmp_path / "out").files
    assert EXCLUSION_RULE in page.read_text("utf-8").partition("<section")[0]
    assert EXCLUSION_RULE in markdown.read_text("utf-8").partition("## ")[0]
