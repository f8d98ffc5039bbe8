"""Shared prefixes are read once, and replies equal those of whole prompts."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bottega.bundled import bundled_folder
from bottega.errors import GenerationError, ImageError, SettingError
from bottega.generation import TransformersGenerator
from bottega.generation.model_files import load_parts
from bottega.generation.prefix_reuse import BatchReader, PrefixInputBuilder
from bottega.generation.token_tree import TokenTree
from bottega.image import Image
from bottega.prompting import InterleavedPrompter
from bottega.tasks.attributes import AttributeTask
from bottega.types import Candidate, Message, Prompt, Reply, Sampling
from tests.builders import solid_image
from tests.generation import tiny_models
from tests.generation.prompts import ask

FAMILIES = {
    "fast_vlm": tiny_models.fast_vlm,
    "idefics3": tiny_models.idefics3,
    "llava": tiny_models.llava,
    "qwen2_vl": tiny_models.qwen2_vl,
    "qwen2_5_vl": tiny_models.qwen2_5_vl,
}
SLOW = ("idefics3", "llava", "qwen2_5_vl")  # the others cover both kinds of positions
SHORT = Sampling(max_tokens=4)
# Shades far apart, of sizes that get one, two and four tokens of Qwen.
SCENES = [
    solid_image(shade, size) for shade in (0, 60_000) for size in ((28, 28), (28, 56), (56, 56))
]


pytestmark = pytest.mark.usefixtures("short_prefixes_reused")
PARTS = cache(load_parts)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in FAMILIES
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[request.param](tmp_path_factory.mktemp("model") / request.param)


@pytest.fixture(scope="module")
def whole(folder: Path) -> TransformersGenerator:
    """Reads every prompt from its first token."""
    model = TransformersGenerator(folder, prefix_cache_mb=0)
    asyncio.run(model.load())
    model._loaded = replace(model.loaded, tree=None)
    return model


@pytest.fixture
async def shared(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TransformersGenerator]:
    """Its weights are loaded once a family; what it has read is kept beside them."""
    monkeypatch.setattr("bottega.generation.loaded.load_parts", PARTS)
    model = TransformersGenerator(folder)
    await model.load()
    yield model
    await model.aclose()


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.fast_vlm(tmp_path_factory.mktemp("model") / "fast_vlm")


def scene(index: int, question: str = "what is above") -> Message:
    return Message("user", (SCENES[index], question))


def chat(*indices: int, question: str = "what is above") -> Prompt:
    """Every scene but the last with an answer."""
    turns = [turn for one in indices[:-1] for turn in (scene(one), assistant(f"zero {one}"))]
    return Prompt((*turns, scene(indices[-1], question)))


def assistant(text: str) -> Message:
    return Message("assistant", (text,))


def reader_of(model: TransformersGenerator) -> BatchReader:
    assert model.loaded.reader is not None
    return model.loaded.reader


@contextmanager
def counted(model: TransformersGenerator) -> Iterator[list[int]]:
    """The tokens that each call reads before anything is answered."""
    assert model._loaded is not None
    inner, seen = model._loaded.model.base_model, list[int]()

    def note(_: object, __: object, inputs: dict[str, Any]) -> None:
        if inputs["input_ids"].shape[1] > 1:
            seen.append(inputs["input_ids"].numel())

    hook = inner.register_forward_pre_hook(note, with_kwargs=True)
    yield seen
    hook.remove()


async def generate_all(
    model: TransformersGenerator, prompts: Sequence[Prompt], sampling: Sampling = SHORT
) -> list[Reply]:
    return await asyncio.gather(*(model.generate(prompt, sampling) for prompt in prompts))


async def check_equal_replies(
    whole: TransformersGenerator,
    shared: TransformersGenerator,
    prompts: Sequence[Prompt],
    sampling: Sampling = SHORT,
) -> None:
    found = await generate_all(shared, prompts, sampling)
    assert_equal_replies(found, [await whole.generate(prompt, sampling) for prompt in prompts])
    assert reader_of(shared).enabled


def assert_equal_replies(found: Sequence[Reply], expected: Sequence[Reply]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.usage == other.usage
        for here, there in zip(one.completions, other.completions, strict=True):
            assert (here.text, here.finish_reason) == (there.text, there.finish_reason)
            assert here.logprob == pytest.approx(there.logprob, abs=1e-4)


async def test_a_search_in_waves_reuses_prefixes(
    whole: TransformersGenerator, shared: TransformersGenerator
) -> None:
    waves = [
        [chat(0)],
        [
            chat(0, 5),
            chat(0, 1, 5),
            chat(0, 4, 5),
            chat(3, 5),
        ],  # of mixed lengths
        [
            chat(0, 1, 2, 5),
            chat(0, 1, 3, 5),
            chat(0, 4, 2, 5),
            chat(2),
        ],
        [ask("what is above"), ask("what is in the image"), ask("zero")],
    ]
    for wave in waves:
        await check_equal_replies(whole, shared, wave)
    reader_of(shared).prefixes.clear()
    tokens = []
    for model in (whole, shared):
        with counted(model) as read:
            for wave in waves:
                await generate_all(model, wave)
        tokens.append(sum(read))
    assert tokens[1] < 0.75 * tokens[0]


async def test_cached_tokens_are_not_read_again(shared: TransformersGenerator) -> None:
    await generate_all(shared, [chat(0, 1, 2)])
    await generate_all(shared, [chat(0, 1, 3)])  # the first of its kind is compared
    with counted(shared) as read:
        reply = await shared.generate(chat(0, 1, 5), SHORT)
    rest = await shared.generate(chat(5), SHORT)
    assert 1 < sum(read) <= rest.usage.prompt_tokens < reply.usage.prompt_tokens


async def test_a_batch_reads_a_shared_prefix_once(
    whole: TransformersGenerator, shared: TransformersGenerator
) -> None:
    await check_equal_replies(whole, shared, [chat(3, 1, 2), chat(3, 1, 4)])
    prompts = [chat(0, 1, 2, 3, last) for last in (3, 4, 5)]
    with counted(shared) as read:
        found = await generate_all(shared, prompts)
    assert sum(read) < 2 * found[0].usage.prompt_tokens
    assert_equal_replies(found, [await whole.generate(prompt, SHORT) for prompt in prompts])


async def test_samples_follow_their_seed(
    whole: TransformersGenerator, shared: TransformersGenerator
) -> None:
    warm = Sampling(temperature=1.0, max_tokens=4, n=3, seed=7)
    for wave in (
        [chat(0, 1)],
        [chat(0, 2), chat(0, 1), chat(1, 5)],
        [chat(0, 1, 2)],
    ):
        await check_equal_replies(whole, shared, wave, warm)
    [one] = await generate_all(shared, [chat(0, 1, 3)], warm)
    assert len({completion.text for completion in one.completions}) > 1


async def test_shared_prefixes_may_end_within_a_turn(
    whole: TransformersGenerator, shared: TransformersGenerator
) -> None:
    prompts = [
        chat(0, 1, question=f"what is in the image above one two {end}")
        for end in ("zero", "three", "three two one", "")
    ]
    await check_equal_replies(whole, shared, prompts[:2])
    await check_equal_replies(whole, shared, prompts)


async def test_a_prompt_may_be_a_prefix_of_another(
    whole: TransformersGenerator, shared: TransformersGenerator
) -> None:
    started = chat(0, 1)
    longer = [
        Prompt((*started.messages, assistant(text))) for text in ("one", "one two", "one two three")
    ]
    for wave in ([longer[2]], [longer[0], started], [longer[1], longer[2], started], [started]):
        await check_equal_replies(whole, shared, wave)


async def test_different_images_between_equal_words_share_no_states(
    whole: TransformersGenerator, shared: TransformersGenerator
) -> None:
    for wave in (
        [chat(0, 2)],
        [chat(3, 2), chat(0, 2)],
        [chat(0, 5), chat(3, 5)],
    ):
        await check_equal_replies(whole, shared, wave)
    one, other = await generate_all(shared, [chat(0, 2), chat(3, 2)])
    assert one.completions[0].logprob != pytest.approx(other.completions[0].logprob, abs=1e-3)


async def test_a_failure_affects_its_request_only(
    whole: TransformersGenerator, shared: TransformersGenerator
) -> None:
    await check_equal_replies(whole, shared, [chat(0, 1), chat(0, 2)])
    damaged = Image.from_bytes(solid_image(1, (64, 64)).data[:-40])
    broken = [Message("user", (damaged,)), Message("user", (SCENES[3], "\ud800"))]
    prompts = [Prompt((*chat(0, 1).messages, assistant("one"), turn)) for turn in broken]
    good, bad, worse, other = await asyncio.gather(
        *(shared.generate(one, SHORT) for one in (chat(0, 3), *prompts, chat(0, 4))),
        return_exceptions=True,
    )
    assert isinstance(bad, ImageError) and isinstance(worse, GenerationError)
    assert isinstance(good, Reply) and isinstance(other, Reply)
    await check_equal_replies(whole, shared, [chat(0, 3), chat(0, 4)])


async def test_wrong_states_are_detected_and_never_used(
    whole: TransformersGenerator, shared: TransformersGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = PrefixInputBuilder._cache

    def wrong(self: PrefixInputBuilder, *arguments: Any) -> Any:
        cache: Any = right(self, *arguments)
        for layer in cache.layers:
            if layer.values is not None:
                layer.values = layer.values.flip(-2)
        return cache

    monkeypatch.setattr(PrefixInputBuilder, "_cache", wrong)
    prompts = [chat(0, 1, 2), chat(0, 1, 5), chat(3, 2)]
    found = [await shared.generate(prompt, SHORT) for prompt in prompts]
    assert_equal_replies(found, [await whole.generate(prompt, SHORT) for prompt in prompts])
    assert not reader_of(shared).enabled
    assert reader_of(shared).prefixes.nbytes == 0


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
async def test_a_bidirectional_model_reads_whole_prompts(tmp_path: Path) -> None:
    folder = tiny_models.pali_gemma(tmp_path / "pali_gemma")
    whole, ahead = TransformersGenerator(folder, prefix_cache_mb=0), TransformersGenerator(folder)
    prompts = [chat(0, 1, 2), chat(0, 1, 5), chat(0, 1, 3)]
    found = [await ahead.generate(prompt, SHORT) for prompt in prompts]
    assert_equal_replies(found, [await whole.generate(prompt, SHORT) for prompt in prompts])
    assert not reader_of(ahead).enabled
    await whole.aclose()
    await ahead.aclose()


async def test_models_with_sliding_or_recurrent_caches_are_excluded(fast: Path) -> None:
    model = TransformersGenerator(fast)
    await model.load()
    loaded = model.loaded
    assert loaded.reader is not None
    loaded.model.config.text_config.layer_types = ["full_attention", "sliding_attention"]
    loaded.model.config.text_config.sliding_window = 8
    assert BatchReader.for_model(loaded.model, loaded.processor, loaded.vision_cache, 1024) is None
    await model.aclose()


async def test_memory_is_bounded_and_released(fast: Path) -> None:
    model = TransformersGenerator(fast, prefix_cache_mb=1)
    words = random.Random(0)
    for _ in range(12):
        text = "".join(words.choices("zero one two three", k=200))
        await model.generate(ask(text), Sampling(max_tokens=1))
    kept = reader_of(model).prefixes
    assert 800_000 < kept.nbytes <= 1024 * 1024
    before = len(kept)
    await model.generate(ask(text), SHORT)
    assert len(kept) == before
    kept.clear()
    kept._max_bytes = 40_000
    await model.generate(ask(text), SHORT)
    assert 30_000 < kept.nbytes <= 40_000  # the beginning of what is too long
    watched = weakref.ref(kept)
    del kept
    await model.aclose()
    gc.collect()
    assert watched() is None


def test_a_size_of_zero_caches_nothing(fast: Path) -> None:
    model = TransformersGenerator(fast, prefix_cache_mb=0)
    asyncio.run(model.load())
    assert model.loaded.reader is None
    asyncio.run(model.aclose())
    with pytest.raises(SettingError, match="prefix_cache_mb"):
        TransformersGenerator(fast, prefix_cache_mb=-1)


TURNS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["one", "one two", ""])), max_size=3)
FAMILY = st.lists(
    st.tuples(TURNS, st.sampled_from(["what", "what is", ""])), min_size=1, max_size=5
)


@pytest.fixture(scope="module")
def pair(fast: Path) -> Iterator[tuple[TransformersGenerator, TransformersGenerator]]:
    models = TransformersGenerator(fast, prefix_cache_mb=0), TransformersGenerator(fast)
    for model in models:
        asyncio.run(model.load())
    yield models
    for model in models:
        asyncio.run(model.aclose())


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(family=FAMILY, n=st.integers(1, 2), keep=st.sampled_from([0, 40_000, 2**26]))
def test_random_prompt_families_give_equal_replies(
    pair: tuple[TransformersGenerator, TransformersGenerator], family: Any, n: int, keep: int
) -> None:
    whole, shared = pair
    reader_of(shared).prefixes._max_bytes = keep
    sampling = Sampling(temperature=float(n > 1), max_tokens=3, n=n, seed=1)
    prompts = [
        Prompt(
            (
                *(turn for index, text in turns for turn in (scene(index, text), assistant(text))),
                Message("user", (question,)),
            )
        )
        for turns, question in family
    ]
    asyncio.run(check_equal_replies(whole, shared, prompts, sampling))
    assert reader_of(shared).prefixes.nbytes <= keep


async def test_the_apprentice_gives_equal_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenTree, "for_model", lambda model: None)
    task = AttributeTask(examples=12, queries=20).generate(3)
    rng, prompt = random.Random(0), InterleavedPrompter(show_choices=False)
    prompts = [
        prompt(item.query, [Candidate(one, 1.0) for one in rng.sample(task.knowledge[:4], 3)])
        for item in task.items
    ]
    replies = []
    for keep in (0, 16):
        model = TransformersGenerator(bundled_folder("apprentice"), threads=1, prefix_cache_mb=keep)
        waves = [await generate_all(model, prompts[i : i + 5]) for i in range(0, 20, 5)]
        replies.append([reply for wave in waves for reply in wave])
        assert keep == 0 or reader_of(model).enabled
        await model.aclose()
    assert_equal_replies(*replies)
