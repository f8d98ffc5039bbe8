"""Folders with files of another model, damaged files, and files that need a package."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from bottega.errors import ModelLoadError, PromptRejectedError
from bottega.generation import TransformersGenerator
from bottega.generation.model_files import _load_error
from bottega.types import Message, Prompt, Sampling
from tests.builders import solid_image
from tests.generation.prompts import ask, shown
from tests.generation.tiny_families import CHAT, FAMILIES, llama, tokenizer

SHORT = Sampling(max_tokens=4)
Change = Callable[[Path], object]
PROCESSOR = "processor_config.json"
DIFFERENT = "Image features and image tokens do not match"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("sources")
    return {name: FAMILIES[name].build(base / name) for name in ("qwen2_vl", "llava_next")}


def with_settings(file: str, **settings: Any) -> Change:
    def change(folder: Path) -> None:
        found = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(found | settings))

    return change


def with_tokens(*tokens: str, **renamed: str) -> Change:
    """Write another tokenizer of the same kind."""

    def change(folder: Path) -> None:
        special = {f"<{old}>": new for old, new in renamed.items()}
        words = tokenizer({"image_token": "<image>"}, special)
        words.add_special_tokens({"additional_special_tokens": list(tokens)})
        if tokens:
            words.image_token = tokens[-1]
        words.save_pretrained(folder)

    return change


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("qwen2_vl", with_settings("config.json", image_token_id=9), "config.json is 9"),
        ("qwen2_vl", with_tokens(image="<4>", start="<image>"), "config.json is 3"),
        (
            "qwen2_vl",
            with_tokens("<new image>"),
            "reads 272 tokens, the tokenizer writes",
        ),
        ("qwen2_vl", without_tokenizer, "the tokenizer has no token <|image_pad|>"),
        ("llava_next", with_settings(PROCESSOR, patch_size=8), DIFFERENT),
        ("llava_next", with_settings(PROCESSOR, num_additional_image_tokens=3), DIFFERENT),
    ],
)
async def test_image_tokens_that_the_model_does_not_read_are_an_error_at_load(
    name: str, change: Change, reason: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sources[name], tmp_path / name))
    change(folder)
    with pytest.raises(ModelLoadError, match=re.escape(reason)) as caught:
        await TransformersGenerator(folder).load()
    assert str(folder) in str(caught.value) and "Processor does not fit" in str(caught.value)
    assert "config.json" in caught.value.hint


async def test_weights_of_other_sizes_are_named(sources: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sources["llava_next"], tmp_path / "llava_next"))
    text = json.loads((folder / "config.json").read_text())["text_config"]
    with_settings("config.json", text_config=text | {"vocab_size": 300})(folder)
    with pytest.raises(ModelLoadError, match=r"must have the shape \[300, 64\] of config.json"):
        await TransformersGenerator(folder).load()


def cut(name: str) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-60])


def in_shards(folder: Path) -> list[Path]:
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    return sorted(folder.glob("model-*.safetensors"))


def cut_shard(folder: Path) -> None:
    shard = in_shards(folder)[1]
    shard.write_bytes(shard.read_bytes()[:-60])


@pytest.mark.parametrize(
    ("change", "file"),
    [
        (cut("model.safetensors"), "model.safetensors"),
        (cut_shard, "model-00002-of-"),
        (lambda folder: in_shards(folder)[1].unlink(), "model-00002-of-"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_text("oid 1"), "model.safetensors"),
        (cut("tokenizer.json"), "tokenizer.json"),
        (cut("config.json"), "config.json"),
        (cut("preprocessor_config.json"), "preprocessor_config.json"),
        (cut(PROCESSOR), PROCESSOR),
    ],
)
async def test_damaged_and_absent_files_are_named(
    change: Change, file: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sources["llava_next"], tmp_path / "llava_next"))
    change(folder)
    with pytest.raises(ModelLoadError, match=re.escape(file)) as caught:
        await TransformersGenerator(folder).load()
    assert caught.value.hint


async def test_code_of_a_model_is_not_run(sources: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sources["llava_next"], tmp_path / "llava_next"))
    code = {"AutoConfig": "own.Config", "AutoModelForImageTextToText": "own.Model"}
    with_settings("config.json", model_type="own", auto_map=code)(folder)
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')")
    with pytest.raises(ModelLoadError, match="needs code of its own") as caught:
        await TransformersGenerator(folder).load()
    assert "--trust-remote-code" in caught.value.hint and not ran.exists()


@pytest.mark.parametrize(
    ("message", "package"),
    [
        ("Package `num2words` is required. Install it with `pip install num2words`.", "num2words"),
        ("AProcessor requires the Torchvision library but it was not found", "torchvision"),
        ("/a/b requires `torchvision` to be installed.", "torchvision"),
        ("Missing optional dependencies: torchvision. Please install", "torchvision"),
        ("packages that were not found: timm. Run `pip install timm`", "timm"),
        ("No module named 'einops.layers'", "einops"),
    ],
)
def test_a_missing_package_is_read_from_the_librarys_message(message: str, package: str) -> None:
    error = _load_error("own/model", ImportError(message))
    assert str(error).startswith(f"own/model needs the package {package}, which")
    assert error.hint.startswith(f"pip install {package}")


@pytest.mark.parametrize("chat_template", [CHAT, None])
async def test_a_text_model_answers_text_and_refuses_images(
    chat_template: str | None, tmp_path: Path
) -> None:
    folder = llama(tmp_path / "llama", chat_template=chat_template)
    model = TransformersGenerator(folder)
    turns = [Message("system", ("brief",)), *ask("what").messages, Message("assistant", ("it",))]
    await model.load()
    asked = model.loaded.render(Prompt((*turns, *ask("why").messages)), SHORT)
    begun = model.loaded.render(Prompt(tuple(turns)), SHORT)
    if chat_template:
        assert asked.text == "system: brief\nuser: what\nassistant: it\nuser: why\nassistant: "
        assert (begun.text, begun.sampling.stop) == (
            "system: brief\nuser: what\nassistant: it",
            (),
        )
    else:
        told = "brief\n\nQuestion: what\nAnswer: it"
        assert asked.text == f"{told}\n\nQuestion: why\nAnswer:"
        assert (begun.text, begun.sampling.stop) == (told, ("\nQuestion:",))
    reply = await model.generate(Prompt((*turns, *ask("why").messages)), SHORT)
    assert reply.usage.completion_tokens > 0
    with pytest.raises(PromptRejectedError, match="at most 0 images per prompt, got 1") as caught:
        await model.generate(shown(1), SHORT)
    assert "vision-language model" in caught.value.hint
    await model.aclose()


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("What is it?", "answer en What is it?"),
        ("caption en", "caption en"),
        ("detect cat", "detect cat"),
        ("answer de Was ist das?", "answer de Was ist das?"),
    ],
)
async def test_pali_gemma_reads_its_published_prompt(
    text: str, written: str, tmp_path: Path
) -> None:
    model = TransformersGenerator(FAMILIES["pali_gemma"].build(tmp_path / "pali_gemma"))
    await model.load()
    inputs = model.loaded.encode([Prompt((Message("user", (solid_image(1), text)),))])
    found = model.loaded.processor.tokenizer.decode(inputs["input_ids"][0])
    assert found == f"{'<image>' * 4}<s>{written}\n"
    with pytest.raises(PromptRejectedError, match="at most 1 image per prompt"):
        await model.generate(shown(1, 2), SHORT)
    await model.aclose()
