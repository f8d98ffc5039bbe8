"""Randomly initialised models of many families, in folders of the published format.

Each folder holds config, weights, tokenizer, image processor and `processor_config.json`, written
part by part: several processor classes need torchvision. Templates treat the order of images, the
roles and system turns as the published ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from tests.generation import tiny_blip, tiny_models

hf: Any = transformers  # half annotated
# Token ids are indices: padding, beginning, end, image, and tokens that a family names.
SPECIAL = ["<pad>", "<s>", "</s>", "<image>", "<start>", "<stop>", "<video>"]
SPECIAL += [f"<{number}>" for number in range(9)]
IMAGE = 3
ORDERED = """\
{% for c in m['content'] %}{% if c['type'] == 'image' %}IMAGE{% else %}{{ c['text'] }}{% endif %}\
{% endfor %}"""
IMAGES_FIRST = """\
{% for c in m['content'] if c['type'] == 'image' %}IMAGE{% endfor %}\
{% for c in m['content'] if c['type'] == 'text' %}{{ c['text'] + ' ' }}{% endfor %}"""
# Gemma's and Mistral's: roles alternate after the system turn.
ALTERNATE = """\
{% for m in messages if m['role'] != 'system' %}\
{% if (m['role'] == 'user') != loop.index0 is even %}\
{{ raise_exception('roles must alternate user and assistant') }}{% endif %}{% endfor %}"""
CHAT = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SYSTEM_STRING = "{% if m['role'] == 'system' %}{{ '[SYSTEM]' + m['content'] }}{% else %}"


def template(
    content: str, image: str, *, system_string: bool = False, alternate: bool = False
) -> str:
    turn = content.replace("IMAGE", image)
    if system_string:
        turn = f"{SYSTEM_STRING}{turn}{{% endif %}}"
    return (
        f"<s>{ALTERNATE if alternate else ''}{{% for m in messages %}}{{{{ m['role'] }}}}: {turn}"
        "{% if m['role'] == 'assistant' %}</s>{% else %}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )


TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 272,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EYE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
SQUARE = {"height": 32, "width": 32}
LLAMA = {"model_type": "llama", **TEXT}
MISTRAL = {"model_type": "mistral", **TEXT, "sliding_window": None}
QWEN2 = {"model_type": "qwen2", **TEXT}
CLIP = {"model_type": "clip_vision_model", **EYE}
SIGLIP = {"model_type": "siglip_vision_model", **EYE}


@dataclass(frozen=True)
class ImageSettings:
    """Settings of an image processor that cannot be imported without torchvision."""

    name: str

    def save_pretrained(self, folder: Path) -> None:
        settings = {"image_processor_type": self.name}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))


@dataclass(frozen=True)
class Built:
    """Family with its own function."""

    build: Callable[[Path], Path]
    processor: str
    images: int | None = None
    needs: str = ""


@dataclass(frozen=True)
class Family:
    """`config` holds the arguments of the configuration, `names` the tokenizer's named tokens, and
    `settings` the arguments of the processor."""

    prefix: str
    processor: str
    pixels: Callable[[], Any]
    config: Mapping[str, Any]
    image: str = "<image>"
    content: str = ORDERED
    turns: Mapping[str, bool] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=lambda: {"image_token": "<image>"})
    renamed: Mapping[str, str] = field(default_factory=dict)  # of `SPECIAL`
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""  # package without which the processor cannot be loaded
    images: int | None = None  # at most

    def build(self, folder: Path) -> Path:
        config = getattr(hf, f"{self.prefix}Config")(**self.config)
        torch.manual_seed(0)
        model = getattr(hf, f"{self.prefix}ForConditionalGeneration")(config).eval()
        for weights in model.parameters():
            if weights.ndim > 1:  # small initial weights would give all prompts the same answer
                weights.data.normal_(0.0, 0.1)
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
        model.save_pretrained(folder)
        words = tokenizer(self.names, self.renamed)
        if self.content:
            words.chat_template = template(self.content, self.image, **self.turns)
        words.save_pretrained(folder)
        self.pixels().save_pretrained(folder)
        settings = {"processor_class": self.processor, **self.settings}
        (folder / "processor_config.json").write_text(json.dumps(settings))
        return folder


def tokenizer(names: Mapping[str, str], renamed: Mapping[str, str]) -> Any:
    """Return a tokenizer of bytes. `names` are the tokens by their attributes."""
    special = [renamed.get(token, token) for token in SPECIAL]
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens(special)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=bytewise,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=4096,
        extra_special_tokens=dict(names),
    )


def qwen(prefix: str, **vision: Any) -> Family:
    text = {**TEXT, "rope_parameters": MROPE}
    return Family(
        prefix,
        "Qwen3VLProcessor" if prefix == "Qwen3VL" else f"{prefix}Processor",
        partial(
            Qwen2VLImageProcessorPil,
            size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56},
            patch_size=vision.get("patch_size", 14),
        ),
        {
            "text_config": text,
            "vision_config": vision,
            "image_token_id": IMAGE,
            "video_token_id": 6,
            "vision_start_token_id": 4,
            "vision_end_token_id": 5,
        },
        image="<start><image><stop>",
        names={
            "image_token": "<image>",
            "video_token": "<video>",
            "vision_start_token": "<start>",
            "vision_end_token": "<stop>",
        },
    )


def llava(prefix: str, pixels: Callable[[], Any], text: Mapping[str, Any], **more: Any) -> Family:
    return Family(
        prefix,
        f"{prefix}Processor",
        pixels,
        {
            "text_config": text,
            "vision_config": CLIP,
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
            **more,
        },
        image="<image>\n",
        content=IMAGES_FIRST,
        settings={
            "patch_size": 16,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    )


def pixtral(prefix: str, names: Mapping[str, str], **more: Any) -> Family:
    return Family(
        prefix,
        "PixtralProcessor",
        partial(
            PixtralImageProcessorPil,
            size={"longest_edge": 64},
            patch_size={"height": 16, "width": 16},
        ),
        {
            "text_config": MISTRAL,
            "vision_config": {"model_type": "pixtral", **EYE, "image_size": 64, "head_dim": 16},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
            **more,
        },
        turns={"system_string": True, "alternate": True},
        names=names,
        needs="torchvision",
        settings={
            "patch_size": 16,
            "spatial_merge_size": more.get("spatial_merge_size", 1),
            "image_token": "<image>",
            "image_break_token": "<start>",
            "image_end_token": "<stop>",
        },
    )


def llama(folder: Path, *, chat_template: str | None = CHAT) -> Path:
    """A model that reads text only."""
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT)).eval()
    for weights in model.parameters():
        if weights.ndim > 1:
            weights.data.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    words = tokenizer({}, {})
    words.chat_template = chat_template
    words.save_pretrained(folder)
    return folder


GRID = [[32, 64], [64, 32], [64, 64]]
FAMILIES: dict[str, Family | Built] = {
    "qwen2_vl": qwen("Qwen2VL", depth=1, embed_dim=32, num_heads=2, hidden_size=64),
    "qwen2_5_vl": qwen(
        "Qwen2_5_VL",
        depth=2,
        hidden_size=32,
        intermediate_size=48,
        num_heads=2,
        out_hidden_size=64,
        fullatt_block_indexes=[1],
        window_size=56,
    ),
    "qwen3_vl": qwen(
        "Qwen3VL",
        depth=2,
        hidden_size=32,
        intermediate_size=48,
        num_heads=2,
        out_hidden_size=64,
        patch_size=14,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    ),
    "glm4v": Family(
        "Glm4v",
        "Glm4vProcessor",
        partial(Glm4vImageProcessorPil, size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56}),
        {
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "out_hidden_size": 64,
                "image_size": 56,
            },
            "image_token_id": IMAGE,
            "video_token_id": 6,
            "image_start_token_id": 4,
            "image_end_token_id": 5,
            "video_start_token_id": 7,
            "video_end_token_id": 8,
        },
        image="<start><image><stop>",
        names={"image_token": "<image>", "video_token": "<video>"},
    ),
    "internvl": Family(
        "InternVL",
        "InternVLProcessor",
        partial(GotOcr2ImageProcessorPil, size=SQUARE, crop_to_patches=True, max_patches=3),
        {
            "text_config": QWEN2,
            "vision_config": {**EYE, "image_size": [32, 32], "patch_size": [8, 8]},
            "image_token_id": IMAGE,
            "image_seq_length": 4,
        },
        image="<image>\n",
        names={
            "context_image_token": "<image>",
            "start_image_token": "<start>",
            "end_image_token": "<stop>",
            "video_token": "<video>",
        },
        settings={"image_seq_length": 4},
    ),
    "llava": llava(
        "Llava",
        partial(LlavaImageProcessorPil, size={"shortest_edge": 32}, crop_size=SQUARE),
        LLAMA,
    ),
    "llava_next": llava(
        "LlavaNext",
        partial(
            LlavaNextImageProcessorPil,
            size={"shortest_edge": 32},
            crop_size=SQUARE,
            image_grid_pinpoints=GRID,
        ),
        MISTRAL,
        image_grid_pinpoints=GRID,
    ),
    "llava_onevision": Family(
        "LlavaOnevision",
        "LlavaOnevisionProcessor",
        partial(LlavaOnevisionImageProcessorPil, size=SQUARE, image_grid_pinpoints=GRID),
        {
            "text_config": QWEN2,
            "vision_config": SIGLIP,
            "image_token_index": IMAGE,
            "video_token_index": 6,
            "image_grid_pinpoints": GRID,
        },
        image="<image>\n",
        content=IMAGES_FIRST,
        names={"image_token": "<image>", "video_token": "<video>"},
        settings={"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    ),
    "aya_vision": Family(
        "AyaVision",
        "AyaVisionProcessor",
        partial(GotOcr2ImageProcessorPil, size=SQUARE, crop_to_patches=True, max_patches=3),
        {
            "text_config": {"model_type": "cohere2", **TEXT, "sliding_window": 64},
            "vision_config": {**SIGLIP, "patch_size": 8},
            "image_token_index": IMAGE,
        },
        image="<0>",
        content=IMAGES_FIRST,
        names={"image_token": "<0>"},
        settings={
            "patch_size": 8,
            "img_size": 32,
            "downsample_factor": 2,
            "image_token": "<0>",
            "img_patch_token": "<image>",
            "start_of_img_token": "<start>",
            "end_of_img_token": "<stop>",
        },
    ),
    "gemma3": Family(
        "Gemma3",
        "Gemma3Processor",
        partial(Gemma3ImageProcessorPil, size=SQUARE),
        {
            "text_config": {**TEXT, "sliding_window": 64},
            "vision_config": SIGLIP,
            "image_token_index": IMAGE,
            "boi_token_index": 4,
            "eoi_token_index": 5,
            "mm_tokens_per_image": 4,
        },
        image="<start>",
        turns={"alternate": True},
        names={"image_token": "<image>", "boi_token": "<start>", "eoi_token": "<stop>"},
        settings={"image_seq_length": 4},
    ),
    "idefics2": Family(
        "Idefics2",
        "Idefics2Processor",
        partial(
            Idefics2ImageProcessorPil,
            size={"shortest_edge": 28, "longest_edge": 56},
            do_image_splitting=False,
        ),
        {
            "text_config": {**MISTRAL, "sliding_window": 64},
            "vision_config": {**EYE, "image_size": 56, "patch_size": 14},
            "perceiver_config": {
                "hidden_size": 64,
                "resampler_n_latents": 3,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 16,
                "num_key_value_heads": 2,
            },
            "image_token_id": IMAGE,
        },
        names={"image_token": "<image>", "image_boundary_token": "<start>"},
        settings={"image_seq_len": 3},
    ),
    "smolvlm": Family(
        "SmolVLM",
        "SmolVLMProcessor",
        partial(
            SmolVLMImageProcessorPil,
            size={"longest_edge": 32},
            max_image_size={"longest_edge": 32},
            do_image_splitting=False,
        ),
        {
            "text_config": LLAMA,
            "vision_config": {**EYE, "patch_size": 8},
            "image_token_id": IMAGE,
            "scale_factor": 4,
            "pad_token_id": 0,
        },
        names={
            "image_token": "<image>",
            "fake_image_token": "<start>",
            "end_of_utterance_token": "</s>",
            "global_image_token": "<stop>",
            "video_token": "<video>",
        },
        settings={"image_seq_len": 1},
        needs="num2words",
    ),
    "mistral3": pixtral("Mistral3", {"image_token": "<image>"}, spatial_merge_size=2),
    "pixtral": pixtral("Llava", {}, vision_feature_select_strategy="full"),
    "mllama": Family(
        "Mllama",
        "MllamaProcessor",
        partial(MllamaImageProcessorPil, size=SQUARE, max_image_tiles=2),
        {
            "text_config": {**TEXT, "num_hidden_layers": 3, "cross_attention_layers": [1]},
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 2,
                "intermediate_size": 48,
                "vision_output_dim": 64,
                "image_size": 32,
                "patch_size": 16,
                "max_num_tiles": 2,
                "intermediate_layers_indices": [0],
                "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
            },
            "image_token_index": IMAGE,
        },
    ),
    "ovis2": Family(
        "Ovis2",
        "Ovis2Processor",
        partial(Ovis2ImageProcessorPil, size=SQUARE, max_patches=2),
        {
            "text_config": QWEN2,
            "vision_config": {**EYE, "patch_size": 16, "hidden_stride": 1, "vocab_size": 24},
            "image_token_id": IMAGE,
            "visual_indicator_token_ids": [7, 8, 9, 10, 11],
            "vocab_size": TEXT["vocab_size"],
            "hidden_size": 64,
        },
        image="<image>\n",
        renamed={
            "<image>": "<IMG_ATOM>",
            "<start>": "<image>",
            "<0>": "<IMG_START>",
            "<1>": "<IMG_GRID>",
            "<2>": "<IMG_COL>",
            "<3>": "<IMG_ROW>",
            "<4>": "<IMG_END>",
        },
        settings={"image_seq_length": 4},
    ),
    "pali_gemma": Family(
        "PaliGemma",
        "PaliGemmaProcessor",
        partial(SiglipImageProcessorPil, size=SQUARE, image_seq_length=4),
        {
            "text_config": {"model_type": "gemma", **TEXT},
            "vision_config": {**SIGLIP, "projection_dim": 64},
            "image_token_index": IMAGE,
            "projection_dim": 64,
            "hidden_size": 64,
        },
        content="",
        images=1,
    ),
    "lfm2_vl": Family(
        "Lfm2Vl",
        "Lfm2VlProcessor",
        partial(ImageSettings, "Lfm2VlImageProcessor"),
        {
            "text_config": {
                "model_type": "lfm2",
                **TEXT,
                "layer_types": ["conv", "full_attention"],
                "block_ff_dim": 96,
            },
            "vision_config": {
                "model_type": "siglip2_vision_model",
                **EYE,
                "num_patches": 16,
            },
            "image_token_id": IMAGE,
            "projector_hidden_size": 64,
        },
        needs="torchvision",
    ),
    "fast_vlm": Built(tiny_models.fast_vlm, "LlavaProcessor"),
    "idefics3": Built(tiny_models.idefics3, "Idefics3Processor"),
    "blip2_opt": Built(tiny_blip.blip2_opt, "PlainTextProcessor", images=1),
    "blip2_t5": Built(tiny_blip.blip2_t5, "PlainTextProcessor", images=1),
    "instructblip_t5": Built(tiny_blip.instructblip_t5, "PlainTextProcessor", images=1),
    "instructblip_llama": Built(tiny_blip.instructblip_llama, "PlainTextProcessor", images=1),
    "llama": Built(llama, "TextProcessor", images=0),
    "llama_base": Built(partial(llama, chat_template=None), "TextProcessor", images=0),
}
