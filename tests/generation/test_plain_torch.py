"""Bundled models in plain torch, compared with those that transformers loads from the files."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from bottega import Query
from bottega.bundled import CLASS_FEATURES, bundled_folder
from bottega.bundled.fast_vlm import FastVlm
from bottega.errors import (
    MissingDependencyError,
    ModelLoadError,
    PromptRejectedError,
    PromptTooLongError,
)
from bottega.generation import bundled
from bottega.generation.in_process import TreeModel
from bottega.generation.loaded import LoadedModel
from bottega.generation.token_tree import PathWithDrafts, TokenTree
from bottega.image import Image
from bottega.knowledge.embedders.bundled_tower import TowerEmbedder
from bottega.kv_prefix import Geometry
from bottega.types import Completion, Message, Prefix, Prompt, Reply, Sampling
from tests.builders import solid_image
from tests.generation.prompts import ask, shown

TEXTS = (
    "What is it?",
    "  spaces \n and lines\t",
    "<image> <user> <answer> </s> <im\u200cage>",
    "ünïcode ✓ 画像 \U0001f600",
    "",
)
PROMPTS = [
    *(Prompt((Message("user", (text,)),)) for text in TEXTS),
    shown(1, 2, 3),
    Prompt((Message("system", (TEXTS[1],)), *shown(1, 2).messages)),
    Prompt((*shown(1).messages, Message("assistant", (" par tial ",)))),
    Prompt((*shown(1).messages, Message("assistant", ("",)))),
]
IMPORTS = """
import json, sys
from bottega.cli import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["bottega", *arguments]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, (arguments, stop.code)
    else:
        raise AssertionError(arguments)
assert "torch" in sys.modules
assert "transformers" not in sys.modules
"""
SAMPLINGS = (
    Sampling(max_tokens=12),
    Sampling(1.0, max_tokens=9, n=3, seed=5),
    Sampling(2.0, max_tokens=9, n=3, seed=5, stop=("a", "e")),
)


@pytest.fixture(scope="module", params=("apprentice", "master"))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@cache
def plain(name: str) -> TreeModel:
    return TreeModel.load(str(bundled_folder(name)))


@cache
def expected(name: str) -> LoadedModel:
    return LoadedModel.load(str(bundled_folder(name)), "cpu", "float32")


def images() -> list[Pillow.Image]:
    rng = np.random.default_rng(0)
    sizes = ((64, 64, 3), (30, 200, 4), (500, 333, 3), (1, 1, 3), (28, 28), (65, 64))
    arrays = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    found = [Pillow.fromarray(array) for array in arrays]
    return [*found, found[2].convert("P"), found[4].convert("1")]


def test_weights_have_the_names_and_values_of_transformers(name: str) -> None:
    found, wanted = plain(name).model, expected(name).model
    states = wanted.state_dict()
    assert found.state_dict().keys() == states.keys()
    assert all(torch.equal(part, states[key]) for key, part in found.state_dict().items())
    frequencies = found.model.language_model.rotary_emb.inv_freq
    assert torch.equal(frequencies, wanted.model.language_model.rotary_emb.inv_freq)


@torch.inference_mode()
def test_images_have_the_features_of_transformers(name: str) -> None:
    found, wanted = plain(name), expected(name)
    decoded = [Image.from_pillow(image).decode_for_model() for image in images()]
    pixels = found.processor.image_processor(decoded)["pixel_values"]
    same = wanted.processor.image_processor(decoded, return_tensors="pt")["pixel_values"]
    assert torch.equal(pixels, same)
    assert torch.allclose(_features(found, pixels), _features(wanted, pixels), atol=1e-6)
    maps = found.model.model.vision_tower(pixels).hidden_states
    others = wanted.model.model.vision_tower(pixels, output_hidden_states=True).hidden_states
    for one, other in zip(maps, others, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def _features(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model.model.base_model.get_image_features(pixels).pooler_output
    return found


def test_prompts_have_the_tokens_of_transformers(name: str) -> None:
    found, wanted = plain(name), expected(name)
    assert found.ends == wanted.ends
    for prompt in PROMPTS:
        text = found.render(prompt, Sampling()).text
        assert text == wanted.render(prompt, Sampling()).text
        for special in (True, False):
            [ids] = found.processor.tokenizer([text], add_special_tokens=special)["input_ids"]
            same = wanted.processor.tokenizer([text], add_special_tokens=special)
            assert ids == same["input_ids"][0]
        assert found._decode(ids) == wanted._decode(ids)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_replies_equal_those_of_transformers(name: str, sampling: Sampling) -> None:
    found, wanted = plain(name), replace(expected(name), tree=None)
    for prompt in (shown(1), shown(2, 3, 4), ask("no image at all")):
        [(completions, usage)] = found.answer([found.decode(found.render(prompt, sampling))])
        [(others, same)] = wanted.answer([wanted.decode(wanted.render(prompt, sampling))])
        assert usage == same
        assert [one.text for one in completions] == [one.text for one in others]
        logprobs = [one.logprob for one in completions]
        assert logprobs == pytest.approx([one.logprob for one in others], abs=1e-3)


def test_a_continued_message_needs_text() -> None:
    image = Image.from_pillow(images()[0])
    prompt = Prompt((*shown(1).messages, Message("assistant", (image,))))
    for model in (plain("apprentice"), expected("apprentice")):
        with pytest.raises(PromptRejectedError, match="template rejects the prompt"):
            model.render(prompt, Sampling())


def test_an_empty_prompt_is_an_error() -> None:
    for model in (plain("apprentice"), expected("apprentice")):
        with pytest.raises(PromptRejectedError, match="template rejects the prompt"):
            model.render(Prompt(()), Sampling())


async def test_a_long_prompt_fails_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = bundled()
    await generator.load()
    read = list[int]()
    logits = TokenTree.logits

    def recorded(tree: TokenTree, rows: Sequence[PathWithDrafts]) -> torch.Tensor:
        read.append(max(len(path) for path, _ in rows))
        return logits(tree, rows)

    monkeypatch.setattr(TokenTree, "logits", recorded)
    good, long, other = await asyncio.gather(
        generator.generate(shown(1), Sampling()),
        generator.generate(ask("a " * 50_000), Sampling()),
        generator.generate(shown(2), Sampling()),
        return_exceptions=True,
    )
    await generator.aclose()
    assert isinstance(good, Reply) and isinstance(other, Reply)
    assert isinstance(long, PromptTooLongError)
    limit = "the prompt must have at most 8,192 tokens, got "
    assert str(long).startswith(f"{generator.name}: {limit}")
    assert long.hint == "shorten the text, or use fewer or shorter demonstrations"
    assert max(read) < 1000  # the error precedes the attention


def test_the_longest_prompt_has_as_many_tokens_as_the_model_positions() -> None:
    model = TreeModel.load(str(bundled_folder()))
    assert model.tree is not None
    tree = model.tree.tree
    assert tree.max_tokens == 8192
    rendered = model.render(ask("a question"), Sampling())
    [(_, usage)] = model.answer([rendered])
    tree.max_tokens = usage.prompt_tokens
    assert model.answer([rendered])
    tree.max_tokens -= 1
    with pytest.raises(PromptTooLongError):
        model.answer([rendered])


def test_a_prefix_counts_towards_the_length(name: str) -> None:
    model = expected(name)
    geometry = Geometry.of(model.model)
    rows = np.zeros((geometry.kv_heads, 8_192, geometry.head_dim), np.float32)
    prefix = Prefix(((rows, rows),) * geometry.layers)
    for one in (model, plain(name)):
        rendered = one.decode(one.render(ask("a question"), Sampling(), prefix))
        with pytest.raises(PromptTooLongError, match="got 8,2"):
            one.answer([rendered])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_replies_do_not_depend_on_the_default_dtype(dtype: torch.dtype) -> None:
    prompt = ask("no image at all")
    [wanted] = _answered(TreeModel.load(str(bundled_folder())), prompt)
    torch.set_default_dtype(dtype)
    try:
        [found] = _answered(TreeModel.load(str(bundled_folder())), prompt)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == wanted


def _answered(model: TreeModel, prompt: Prompt) -> tuple[Completion, ...]:
    [(completions, _)] = model.answer([model.decode(model.render(prompt, Sampling()))])
    return completions


def test_embedder_equals_that_of_transformers() -> None:
    found = TowerEmbedder.bundled()
    wanted = TowerEmbedder(bundled_folder(), centred=True)
    queries = [Query("", (Image.from_pillow(image),)) for image in images()]
    assert found.fingerprint == wanted.fingerprint
    assert np.allclose(found.embed(queries), wanted.embed(queries), atol=1e-6)
    image = queries[0].images[0]
    assert np.allclose(found.cells(image), wanted.cells(image), atol=1e-6)
    assert found.dimension == CLASS_FEATURES.stop


def test_run_and_loaded_use_the_model_of_transformers() -> None:
    async def run() -> tuple[LoadedModel, LoadedModel]:
        generator = bundled()
        model = await generator.run(lambda model: model)
        found = model, generator.loaded
        await generator.aclose()
        return found

    model, loaded = asyncio.run(run())
    assert model is loaded
    assert type(model.model).__module__.startswith("transformers.")
    assert all(part.requires_grad and not part.is_inference() for part in model.model.parameters())


def test_loading_keeps_the_random_state() -> None:
    state = torch.get_rng_state()
    FastVlm.load(bundled_folder())
    assert torch.equal(torch.get_rng_state(), state)


def test_missing_files_raise_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot be loaded as a bundled model"):
        TreeModel.load(str(tmp_path))


def test_a_missing_tokenizers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingDependencyError, match="tokenizers is required"):
        TreeModel.load(str(bundled_folder()))


def test_a_missing_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TreeModel.load(str(bundled_folder()))
    monkeypatch.delitem(sys.modules, "bottega.generation.loaded")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match="transformers is required"):
        model.transformers_model()


def test_classify_does_not_import_transformers(tmp_path: Path) -> None:
    for label, shade in (("dark", 20), ("light", 230)):
        (tmp_path / "images" / label).mkdir(parents=True)
        file = tmp_path / "images" / label / "1.png"
        file.write_bytes(solid_image(shade).data)
    base, environment = str(tmp_path / "k.db"), os.environ | {"BOTTEGA_TRACES": "none"}
    commands = [["add", base, str(tmp_path / "images")], ["classify", base, str(file)]]
    subprocess.run(
        [sys.executable, "-c", IMPORTS, json.dumps(commands)], check=True, env=environment
    )
