"""Replies of a model on a GPU, compared with those on the CPU: pytest -m gpu."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from bottega.bundled import bundled_folder
from bottega.generation import TransformersGenerator
from bottega.types import Prompt, Reply, Sampling
from tests.generation.prompts import ask, shown

pytestmark = pytest.mark.gpu

PROMPTS = (shown(1), shown(2, 3, 4), ask("no image at all"), shown(2, 3, 1), shown(2, 3, 4, 2))
GREEDY = Sampling(max_tokens=12)


async def replies(
    folder: Path, device: str, prompts: Sequence[Prompt], prefix_cache_mb: int
) -> list[Reply]:
    model = TransformersGenerator(
        folder, device=device, dtype="float32", prefix_cache_mb=prefix_cache_mb
    )
    first = await asyncio.gather(*(model.generate(one, GREEDY) for one in prompts))
    second = await asyncio.gather(*(model.generate(one, GREEDY) for one in prompts))
    await model.aclose()
    assert [one.completions[0].text for one in first] == [one.completions[0].text for one in second]
    return second


async def assert_equal_on_gpu(folder: Path, prompts: Sequence[Prompt], keep: int) -> None:
    expected = await replies(folder, "cpu", prompts, 0)
    found = await replies(folder, "cuda", prompts, keep)
    for one, other in zip(found, expected, strict=True):
        [here], [there] = one.completions, other.completions
        assert (here.text, here.finish_reason) == (there.text, there.finish_reason)
        assert here.logprob == pytest.approx(there.logprob, abs=1e-2)


@pytest.mark.parametrize("keep", [0, 16], ids=["whole prompts", "prefix cache"])
@pytest.mark.parametrize("family", ["fast_vlm", "idefics3", "qwen2_vl"])
async def test_greedy_replies_equal_those_of_the_cpu(
    folders: dict[str, Path], family: str, keep: int
) -> None:
    await assert_equal_on_gpu(folders[family], PROMPTS, keep)


async def test_the_bundled_model_repeats_labels_on_a_gpu() -> None:
    await assert_equal_on_gpu(bundled_folder("apprentice"), [shown(1, 2, 1), shown(2, 3, 3)], 0)


async def test_half_precision_and_samples_run_on_a_gpu() -> None:
    model = TransformersGenerator(bundled_folder("apprentice"), device="cuda", dtype="bfloat16")
    one = await model.generate(shown(1, 2, 1), Sampling(0.5, n=3, seed=4, max_tokens=8))
    again = await model.generate(shown(1, 2, 1), Sampling(0.5, n=3, seed=4, max_tokens=8))
    await model.aclose()
    assert [it.text for it in one.completions] == [it.text for it in again.completions]
    assert len(one.completions) == 3
