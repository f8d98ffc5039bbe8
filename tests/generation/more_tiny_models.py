"""Families whose prompts are read in ways of their own: several tokens an image, other positions,
eyes that look ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests.generation.tiny_models import TEMPLATE, TEXT, save, save_qwen, tokenizer

hf: Any = transformers  # half annotated
EYE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}


def llava(folder: Path) -> Path:
    """Four visual tokens an image."""
    config = hf.LlavaConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", **EYE},
        image_token_index=3,
        vision_feature_layer=-1,
    )
    pixels = LlavaImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    processor = hf.LlavaProcessor(
        pixels,
        tokenizer(),
        patch_size=16,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
    )
    return save(folder, hf.LlavaForConditionalGeneration, config, processor)


def qwen2_5_vl(folder: Path) -> Path:
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
        "window_size": 56,
    }
    return save_qwen(folder, "Qwen2_5_VL", vision)


def pali_gemma(folder: Path) -> Path:
    """Every token of a prompt sees all of it, so that nothing of it can be read alone."""
    config = hf.PaliGemmaConfig(
        text_config={"model_type": "gemma", **TEXT, "head_dim": 16},
        vision_config={"model_type": "siglip_vision_model", **EYE, "projection_dim": 64},
        image_token_index=3,
        projection_dim=64,
        hidden_size=64,
    )
    pixels: Any = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    pixels.image_seq_length = 4
    processor = hf.PaliGemmaProcessor(
        pixels, tokenizer(), chat_template=TEMPLATE.replace("IMAGE", "<image>")
    )
    return save(folder, hf.PaliGemmaForConditionalGeneration, config, processor)
