"""Generation from a tree of tokens, compared with transformers' own generation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bottega.errors import GenerationError
from bottega.generation import TransformersGenerator, bundled, tree_generation
from bottega.generation.loaded import LoadedModel
from bottega.generation.token_tree import TokenTree
from bottega.generation.tokenization import RenderedPrompt
from bottega.generation.tree_generation import parts_by_length
from bottega.types import Completion, Prompt, Sampling, Usage
from tests.generation.prompts import ask, shown

Answers = list[tuple[tuple[Completion, ...], Usage]]

SAMPLINGS = (
    Sampling(max_tokens=12),
    Sampling(1.0, max_tokens=9, n=3, seed=5),
    Sampling(0.5, max_tokens=1, seed=2),
    Sampling(max_tokens=12, n=2, stop=("a", "e")),
)
PROMPTS = (shown(1), shown(2, 3, 4), ask("no image at all"), shown(2, 3, 1), shown(2, 3, 4, 2))


@pytest.fixture(scope="module")
def model(folders: dict[str, Path]) -> LoadedModel:
    """Random model: it seldom chooses the tokens of a draft."""
    return _loaded(TransformersGenerator(folders["fast_vlm"], prefix_cache_mb=0))


@pytest.fixture(scope="module")
def apprentice() -> LoadedModel:
    """Trained model: it repeats labels of its demonstrations."""
    return _loaded(bundled())


def _loaded(generator: TransformersGenerator) -> LoadedModel:
    asyncio.run(generator.load())
    assert generator.loaded.tree is not None
    return generator.loaded


def rendered(model: LoadedModel, prompt: Prompt, sampling: Sampling) -> RenderedPrompt:
    return model.decode(model.render(prompt, sampling))


def assert_equal(found: Answers, expected: Answers) -> None:
    for (completions, usage), (wanted, wanted_usage) in zip(found, expected, strict=True):
        assert usage == wanted_usage
        assert [one.text for one in completions] == [one.text for one in wanted]
        assert [one.finish_reason for one in completions] == [one.finish_reason for one in wanted]
        for one, other in zip(completions, wanted, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


@pytest.mark.parametrize("name", ["model", "apprentice"])
def test_replies_equal_those_of_transformers(name: str, request: pytest.FixtureRequest) -> None:
    model: LoadedModel = request.getfixturevalue(name)
    batch = [rendered(model, prompt, how) for prompt in PROMPTS for how in SAMPLINGS]
    plain = replace(model, tree=None)
    expected = [answer for one in batch for answer in plain.answer([one])]
    for _ in range(2):  # the second time, drafts are the replies themselves
        assert_equal(model.answer(batch), expected)
    assert_equal([answer for one in batch for answer in model.answer([one])], expected)


def test_labels_of_the_demonstrations_are_read_in_one_pass(
    apprentice: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, logits = [], TokenTree.logits

    def counted(tree: TokenTree, rows: Sequence[Any]) -> torch.Tensor:
        passes.append(len(rows))
        return logits(tree, rows)

    monkeypatch.setattr(TokenTree, "logits", counted)
    for shades in ((7, 8, 7), (8, 7, 7), (9, 7, 9)):
        one = rendered(apprentice, shown(*shades), Sampling(max_tokens=12))
        [[(completion,), usage]] = apprentice.answer([one])
        assert completion.text in {f"label {shade}" for shade in shades}
        assert usage.completion_tokens > 2
    assert passes == [1, 1, 1]


def test_drafts_do_not_see_each_other(model: LoadedModel) -> None:
    def logits(*drafts: list[int]) -> torch.Tensor:
        tree = TokenTree(model.model)
        path: list[int] = []
        tree.extend(path, [5, 6, 7])
        nodes = []
        for draft in drafts:
            branch = path[-1:]
            tree.extend(branch, draft)
            nodes.append(branch[1:])
        return tree.logits([(path, nodes)])

    with torch.inference_mode():
        both = logits([8, 9], [8, 4, 3])
        one, other = logits([8, 9]), logits([8, 4, 3])
    assert torch.allclose(both, torch.cat([one, other[1:]]), atol=1e-5)


def test_a_small_tree_forgets_between_batches(model: LoadedModel) -> None:
    assert model.tree is not None
    tree = TokenTree(model.model, max_bytes=1)
    ends, decode = frozenset([2]), model.tree._decode
    small = replace(model, tree=type(model.tree)(tree, ends, decode))
    sampling = Sampling(max_tokens=6)
    for prompt in PROMPTS:
        one = rendered(model, prompt, sampling)
        assert_equal(small.answer([one]), model.answer([one]))
        assert tree.size < 200


def test_a_failed_pass_fails_its_batch_only(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rendered(model, shown(5, 6), Sampling(max_tokens=6))
    with monkeypatch.context() as patch:
        patch.setattr(TokenTree, "_read_new", _out_of_memory)
        with pytest.raises(GenerationError):
            model.answer([one])
    assert_equal(model.answer([one]), replace(model, tree=None).answer([one]))


def _out_of_memory(*_: object) -> None:
    raise MemoryError("out of memory")


def test_long_prompts_are_read_apart_from_short_ones() -> None:
    assert parts_by_length([50, 60, 40]) == [[1, 0, 2]]
    assert parts_by_length([100, 4000, 90]) == [[1], [0, 2]]
    assert parts_by_length([4096, 4096]) == [[0], [1]]


@pytest.mark.parametrize("name", ["model", "apprentice"])
def test_parts_of_a_batch_have_the_same_replies(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: LoadedModel = request.getfixturevalue(name)
    batch = [rendered(model, prompt, how) for prompt in PROMPTS for how in SAMPLINGS]
    expected = model.answer(batch)
    monkeypatch.setattr(tree_generation, "MAX_SCORES", 1)
    assert_equal(model.answer(batch), expected)


def test_tiny_temperatures_are_greedy(apprentice: LoadedModel) -> None:
    prompt = shown(2, 3, 4)
    greedy, *tiny = (
        rendered(apprentice, prompt, Sampling(heat, max_tokens=9, seed=3))
        for heat in (0, 1e-40, 1e-300)
    )
    (expected,) = apprentice.answer([greedy])
    for plain in (apprentice, replace(apprentice, tree=None)):
        for one in tiny:
            assert_equal(plain.answer([one]), [expected])
