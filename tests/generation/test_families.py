"""Models of many families by folder: each answers right with the defaults, or one line says what
is missing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bottega.errors import ModelLoadError, SettingError
from bottega.generation import TransformersGenerator
from bottega.naming import ModelSpec
from bottega.prompting import AppendixAPrompter
from bottega.types import Candidate, Example, Message, Prompt, Query, Reply, Sampling
from tests.builders import solid_image
from tests.generation.prompts import ask, user
from tests.generation.tiny_families import FAMILIES

GREEDY = Sampling(max_tokens=4)
SEEDED = Sampling(temperature=1.0, max_tokens=3, n=2, seed=1)
QUICK = ("mllama", "ovis2", "qwen2_vl")  # in `make test`; .ci/run tests all
SIZES = [(40, 40), (64, 40), (40, 64)]


def chat(*shades: int) -> Prompt:
    """Return a prompt with a labelled demonstration per image, except the last one."""
    turns: list[Message] = []
    for shade in shades:
        turns += [user(solid_image(shade, SIZES[shade % 3])), Message("assistant", (f"{shade}",))]
    return Prompt(tuple(turns[:-1]))


SINGLE = [chat(1), chat(60_001), chat(2), chat(1)]
TEXTS = [ask("what is above"), ask("what"), ask("what is above")]
SEVERAL = [*SINGLE, *TEXTS, chat(2, 3, 4), chat(2, 3, 10), chat(2, 3, 4)]
# Of the processors of GLM-4V and PaliGemma.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.usefixtures("short_prefixes_reused"),
]


def prompts_of(family: str) -> list[Prompt]:
    return {None: SEVERAL, 1: SINGLE, 0: TEXTS}[FAMILIES[family].images]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES
    ],
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs = FAMILIES[family].needs
    if needs and find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    return FAMILIES[family].build(tmp_path_factory.mktemp("family") / family)


@pytest.fixture
async def model(folder: Path) -> AsyncIterator[TransformersGenerator]:
    generator = TransformersGenerator(folder, threads=1)
    yield generator
    await generator.aclose()


async def answers(
    model: TransformersGenerator, prompts: Sequence[Prompt], sampling: Sampling
) -> list[Reply]:
    return [await model.generate(prompt, sampling) for prompt in prompts]


def assert_equal(found: Sequence[Reply], expected: Sequence[Reply]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.usage == other.usage
        for here, there in zip(one.completions, other.completions, strict=True):
            assert here.text == there.text
            assert here.logprob == pytest.approx(there.logprob, abs=1e-3)


async def test_the_processor_is_the_folders_own_and_its_tokens_are_read(
    family: str, model: TransformersGenerator
) -> None:
    await model.load()
    loaded = model.loaded
    assert type(loaded.processor).__name__ == FAMILIES[family].processor
    for prompt in prompts_of(family):
        text = loaded.render(prompt, GREEDY).text
        images = [image.decode_for_model() for image in prompt.images]
        expected = loaded.processor(
            text=[text],
            images=[images] if images else None,
            add_special_tokens=not text.startswith("<s>"),
            return_tensors="pt",
        )["input_ids"]
        assert loaded.encode([prompt])["input_ids"].tolist() == expected.tolist()


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
async def test_replies_equal_those_of_single_prompts_without_a_cache(
    family: str, folder: Path, model: TransformersGenerator, sampling: Sampling
) -> None:
    prompts = prompts_of(family)
    whole = TransformersGenerator(folder, threads=1, prefix_cache_mb=0)
    expected = await answers(whole, prompts, sampling)
    await whole.aclose()
    assert_equal(await answers(model, prompts, sampling), expected)
    together = await asyncio.gather(*(model.generate(one, sampling) for one in prompts))
    assert_equal(together, expected)


async def test_demonstrations_of_one_turn_keep_their_images(
    family: str, model: TransformersGenerator
) -> None:
    if FAMILIES[family].images is not None:
        pytest.skip("reads one image at most")
    await model.load()
    labels = ["first", "second", "third"]
    shown = [
        Candidate(Example(Query("Which?", (solid_image(shade),)), label), 1.0)
        for shade, label in enumerate(labels)
    ]
    prompt = AppendixAPrompter()(Query("Which?", (solid_image(9),), choices=("a", "b")), shown)
    text = model.loaded.render(prompt, GREEDY).text
    marker = re.escape(model.loaded.processor.image_token)
    found = re.findall(rf"{marker}|Answer Choice: \S+", text)
    expected = [piece for label in labels for piece in (marker, f"Answer Choice: {label}")]
    assert found == [*expected, marker, "Answer Choice: [Your"]


@pytest.mark.parametrize("family", [name for name, one in FAMILIES.items() if one.needs])
async def test_a_missing_package_is_named(family: str, tmp_path: Path) -> None:
    needs = FAMILIES[family].needs
    if find_spec(needs) is not None:
        pytest.skip(f"{needs} is installed")
    folder = FAMILIES[family].build(tmp_path / family)
    with pytest.raises(ModelLoadError) as caught:
        await TransformersGenerator(folder).load()
    assert str(caught.value).splitlines()[0] == (
        f"{folder} needs the package {needs}, which is not installed"
    )
    assert f"pip install {needs}" in caught.value.hint


@pytest.mark.parametrize("given", ["0", "64"])
async def test_one_variable_sets_the_prefix_cache_of_named_models(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOTTEGA_PREFIX_CACHE_MB", given)
    model: Any = ModelSpec(str(FAMILIES["qwen2_vl"].build(tmp_path / "qwen2_vl"))).open()
    await model.load()
    assert (model.loaded.reader is not None) == (given != "0")
    await model.aclose()


@pytest.mark.parametrize("given", ["", "-1", "1.5", "off"])
def test_an_invalid_size_of_the_prefix_cache_is_refused(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOTTEGA_PREFIX_CACHE_MB", given)
    with pytest.raises(SettingError, match="BOTTEGA_PREFIX_CACHE_MB must be") as caught:
        ModelSpec("a/b")
    assert "=256" in caught.value.hint
