"""Folders with files of another model, damaged files, and files that need a package."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bottega.errors import ModelLoadError
from bottega.generation import TransformersGenerator
from tests.generation.tiny_families import FAMILIES, tokenizer

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
        words = tokenizer(FAMILIES[folder.name].names, special)
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
