from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bottega.bundled import bundled_compressor
from bottega.compression import InputBuilder, PassageCompressor, PassageStore, StoreManifest, load
from bottega.errors import LoadError, SettingError, StoreError
from bottega.generation import OpenAIGenerator, bundled
from bottega.generation.loaded import LoadedModel
from bottega.knowledge import DualEmbedder, KnowledgeBase, TokenEmbedder, TowerEmbedder
from bottega.recipes import racc
from bottega.tasks.glyphs import FactTask
from bottega.types import Candidate, Example, Query
from tests.compression.tiny_models import passage

TASK = FactTask(queries=10, episodes=1).generate(5)


@pytest.fixture(scope="module")
def passages() -> KnowledgeBase:
    words = DualEmbedder(TowerEmbedder.bundled(threads=1), TokenEmbedder.bundled())
    knowledge = KnowledgeBase.open(":memory:", embed=words)
    knowledge.add(TASK.knowledge)
    return knowledge


async def test_the_bundled_model_reads_the_whole_passage() -> None:
    """`<end>` surrounds the passage; only the trailing one belongs to it."""

    def decoded_inputs(loaded: LoadedModel) -> list[str]:
        inputs = InputBuilder(loaded.encode, loaded.ends).passages(
            [passage("The home of babra is lavim")]
        )
        return [loaded.processor.tokenizer.decode(row) for row in inputs["input_ids"]]

    assert await bundled().run(decoded_inputs) == ["<passage>The home of babra is lavim<end>"]


class OracleRetriever:
    """Retriever that returns the passage with the answer among others."""

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        item = next(one for one in TASK.items if one.query.id == query.id)
        right = [one for one in TASK.knowledge if one.id == item.tags["passage"]]
        others = [one for one in TASK.knowledge if one.id != item.tags["passage"]]
        return [Candidate(one, 0.0) for one in (*others[: k - 1], *right)]


async def count_right(pipeline, items: tuple[Example, ...]) -> int:  # type: ignore[no-untyped-def]
    answers = [await pipeline.answer(item.query) for item in items]
    return sum(one.text == item.answer for one, item in zip(answers, items, strict=True))


async def test_the_model_answers_with_compressed_passages(
    passages: KnowledgeBase,
) -> None:
    pipeline = racc(passages, None, bundled(), retrieve=OracleRetriever())  # the bundled compressor

    trace = await pipeline.trace(TASK.items[0].query)

    assert len(trace.candidates) == 5
    assert len(trace.prompt.messages) == 1  # no passage is shown
    assert await count_right(pipeline, TASK.items) >= 8


async def test_stored_passages_give_equal_answers(passages: KnowledgeBase, tmp_path: Path) -> None:
    saved, model = load(bundled_compressor()), bundled()
    shape = saved.racc.config
    store = PassageStore(tmp_path, StoreManifest(saved.digest, shape.document_prompts, shape.width))

    def build(loaded: LoadedModel) -> int:
        hyper = saved.open(loaded.model, loaded.model)
        condenser = PassageCompressor(saved.racc, hyper, InputBuilder(loaded.encode, loaded.ends))
        return store.add([(str(one.id), one) for one in TASK.knowledge], condenser.compress)

    assert await model.run(build) == len(TASK.knowledge)
    pipeline = racc(
        passages, bundled_compressor(), model, store=tmp_path, retrieve=OracleRetriever()
    )
    assert await count_right(pipeline, TASK.items) >= 8


async def test_a_passage_missing_in_the_store_is_an_error(
    passages: KnowledgeBase, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match="no compressed passages"):
        racc(passages, bundled_compressor(), bundled(), store=tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()

    saved = load(bundled_compressor())
    shape = saved.racc.config
    empty = PassageStore(tmp_path, StoreManifest(saved.digest, shape.document_prompts, shape.width))
    empty.add([], lambda none: torch.zeros(0))
    pipeline = racc(
        passages, bundled_compressor(), bundled(), store=tmp_path, retrieve=OracleRetriever()
    )

    with pytest.raises(StoreError, match="is not compressed"):
        await pipeline.answer(TASK.items[0].query)


def test_a_base_over_http_is_rejected(passages: KnowledgeBase) -> None:
    http = OpenAIGenerator("some-model", base_url="http://127.0.0.1:9/v1")

    with pytest.raises(SettingError, match="cannot be sent over HTTP") as refused:
        racc(passages, bundled_compressor(), http)
    assert "TransformersGenerator" in refused.value.hint


async def test_another_base_model_is_rejected(passages: KnowledgeBase) -> None:
    pipeline = racc(passages, bundled_compressor(), bundled("master"), retrieve=OracleRetriever())

    with pytest.raises(LoadError, match="another model"):
        await pipeline.answer(TASK.items[0].query)
