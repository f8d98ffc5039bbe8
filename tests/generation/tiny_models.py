"""Randomly initialised vision-language models of three families, small enough to build in tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

hf: Any = transformers  # half annotated
VOCABULARY = 384
SPECIAL = ["<pad>", "<s>", "<end>", "<image>", "<start>", "<stop>", "<global-img>", "<video>"]
TEMPLATE = """\
{%- for m in messages %}{% if m['role'] == 'system' and loop.index > 1 %}\
{{ raise_exception('the system turn must come first') }}{% endif %}\
{% for c in m['content'] %}{% if c['type'] == 'image' %}IMAGE{% else %}{{ c['text'] }}{% endif %}\
{% endfor %}{% if m['role'] == 'assistant' %}<end>{% else %}:{% endif %}{% endfor %}"""
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tokenizer() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["what is in the image above zero one two three"] * 3, trainer)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<end>",
        padding_side="right",
        model_max_length=1024,
        extra_special_tokens={
            "image_token": "<image>",
            "fake_image_token": "<start>",
            "video_token": "<video>",
        },
    )


def fast_vlm(folder: Path) -> Path:
    """One visual token an image, from a 64-pixel ResNet."""
    vision = {
        "model_type": "resnet",
        "num_channels": 3,
        "embedding_size": 16,
        "hidden_sizes": [16, 32, 32, 32, 32],
        "depths": [1, 1, 1, 1, 1],
        "layer_type": "basic",
        "hidden_size": 32,
    }
    config = hf.FastVlmConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config=vision,
        image_token_index=3,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    pixels = LlavaImageProcessorPil(
        size={"height": 64, "width": 64},
        do_center_crop=False,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    processor = hf.LlavaProcessor(
        pixels,
        tokenizer(),
        patch_size=64,
        vision_feature_select_strategy="full",
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
    )
    return save(folder, hf.FastVlmForConditionalGeneration, config, processor)


def idefics3(folder: Path) -> Path:
    config = hf.Idefics3Config(
        text_config={"model_type": "llama", **TEXT},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        },
        image_token_id=3,
        scale_factor=4,
        pad_token_id=0,
    )
    pixels = Idefics3ImageProcessorPil(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 32}, do_image_splitting=False
    )
    processor = hf.Idefics3Processor(
        pixels,
        tokenizer(),
        image_seq_len=1,
        chat_template="<s>" + TEMPLATE.replace("IMAGE", "<image>"),
    )
    return save(folder, hf.Idefics3ForConditionalGeneration, config, processor)


def qwen2_vl(folder: Path) -> Path:
    """Several visual tokens an image, as many as its size asks for."""
    vision = {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64}
    return save_qwen(folder, "Qwen2VL", vision)


def save_qwen(folder: Path, family: str, vision: dict[str, Any]) -> Path:
    """Its processor class needs torchvision for videos: the folder is written part by part."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = getattr(hf, f"{family}Config")(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=3,
        video_token_id=7,
        vision_start_token_id=4,
        vision_end_token_id=5,
    )
    pixels = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56})
    words = tokenizer()
    words.chat_template = TEMPLATE.replace("IMAGE", "<start><image><stop>")
    words.save_pretrained(folder)
    return save(folder, getattr(hf, f"{family}ForConditionalGeneration"), config, pixels)


def save(folder: Path, architecture: Any, config: Any, processor: Any) -> Path:
    torch.manual_seed(0)
    model = architecture(config).eval()
    for weights in model.parameters():
        # The usual initial weights are so small that all prompts would get the same answer.
        weights.data.mul_(3.0 if weights.ndim > 1 else 1.0)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


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
    """Model with bidirectional attention: no part of a prompt can be read separately."""
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
