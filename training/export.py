"""Export of model folders: half-precision weights with a float32 configuration."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import FastVlmForConditionalGeneration, LlavaProcessor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from training.tokenizer import CHAT_TEMPLATE, IMAGE

SIDE = 64
ANSWER_TOKENS = 64


def resizing_image_processor() -> Any:
    """Return an image processor that resizes any image to 64 x 64 RGB without cropping."""
    return LlavaImageProcessorPil(
        do_resize=True,
        size={"height": SIDE, "width": SIDE},
        resample=2,  # bilinear
        do_center_crop=False,
        crop_size={"height": SIDE, "width": SIDE},
        do_pad=False,
        do_convert_rgb=True,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def build_processor(tokenizer: Any, images: Any, template: str = CHAT_TEMPLATE) -> Any:
    """Return the processor of a model with one token per image."""
    make: Any = LlavaProcessor  # untyped
    return make(
        images,
        tokenizer,
        patch_size=images.crop_size["height"],
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        image_token=IMAGE,
        chat_template=template,
    )


def export(
    model: FastVlmForConditionalGeneration,
    tokenizer: Any,
    folder: Path,
    card: str,
) -> None:
    """Write all files into a temporary folder, then move them one by one: readers never see partial
    files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        staging = Path(name)
        _write(model, tokenizer, staging, card)
        for path in sorted(staging.iterdir()):
            path.replace(folder / path.name)


def _write(
    model: FastVlmForConditionalGeneration,
    tokenizer: Any,
    folder: Path,
    card: str,
) -> None:
    generation = model.generation_config
    generation.max_new_tokens, generation.do_sample = ANSWER_TOKENS, False
    model.save_pretrained(folder)
    build_processor(tokenizer, resizing_image_processor()).save_pretrained(folder)
    _halve(folder / "model.safetensors")
    (folder / "README.md").write_text(card, encoding="utf-8")


def _halve(path: Path) -> None:
    """Store floats in half precision; the configuration still says float32, which loading
    applies."""
    tensors = load_file(path)
    small = {
        name: tensor.half() if tensor.dtype == torch.float32 else tensor
        for name, tensor in tensors.items()
    }
    save_file(small, path, metadata={"format": "pt"})
    path.chmod(0o644)
