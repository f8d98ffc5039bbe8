"""Randomly initialised models of the families that a prefix is put in front of, and batches for
them: small enough to build in tests, unlike in every number that could be mixed up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

from bottega.bundled import bundled_folder
from bottega.kv_prefix import Geometry, KeyValues

hf: Any = transformers  # half annotated
VOCABULARY = 96
PAD, START, END, IMAGE = 0, 1, 2, 3
BEFORE = [START, 40, 41, 42, 43]  # a text that a prefix is read from
PROMPTS = ([10, IMAGE, 20, 21, 22, 23], [IMAGE, 30, 31])
# A generated image token would require an image.
TEXT_ONLY: dict[str, Any] = {"suppress_tokens": [IMAGE, 4]}
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": PAD,
    "bos_token_id": START,
    "eos_token_id": END,
}
LLAMA = {"model_type": "llama", "intermediate_size": 48, "num_key_value_heads": 4, **TEXT}
OPT = {
    "model_type": "opt",
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "dropout": 0.0,
    **TEXT,
}
T5 = {
    "model_type": "t5",
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 48,
    "num_layers": 4,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "vocab_size": VOCABULARY,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "decoder_start_token_id": PAD,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
VISION = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


@dataclass(frozen=True)
class Tiny:
    """Model with the image inputs of its processor."""

    model: Any
    tokens: int  # per image
    show: Callable[[Tensor], dict[str, Tensor]]
    size: int = 16

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(self.model.config.get_text_config().is_encoder_decoder)

    def inputs(
        self, *prompts: Sequence[int], first: int = 0, side: str = "left"
    ) -> dict[str, Tensor]:
        """Return padded prompts; IMAGE stands for the next image, counted from `first`."""
        rows = [self._expanded(prompt) for prompt in prompts]
        width = max(map(len, rows))
        gaps = [[PAD] * (width - len(row)) for row in rows]
        left = side == "left"
        ids = [g + row if left else row + g for g, row in zip(gaps, rows, strict=True)]
        real = [[0] * len(g) + [1] * len(r) for g, r in zip(gaps, rows, strict=True)]
        mask = torch.tensor(real if left else [line[::-1] for line in real])
        inputs = {"input_ids": torch.tensor(ids), "attention_mask": mask}
        if count := sum(list(prompt).count(IMAGE) for prompt in prompts):
            inputs |= self.show(_images(self.size)[first : first + count])
            if "image_grid_thw" in inputs:
                inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).int()
        return inputs

    def _expanded(self, prompt: Sequence[int]) -> list[int]:
        return [one for token in prompt for one in [token] * (self.tokens if token == IMAGE else 1)]


@cache
def _images(size: int) -> Tensor:
    return torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(7))


def _with_random_weights(model: Any) -> Any:
    """The usual initial weights are so small, some of them zero, that every prompt would get the
    same answer."""
    for weights in model.parameters():
        if weights.ndim > 1:
            spread = 3.0 * float(weights.detach().std())
            weights.data.normal_(0.0, min(max(spread, 0.06), 0.3))
    return model.eval().requires_grad_(False)


def _built(architecture: Any, config: Any) -> Any:
    torch.manual_seed(0)
    model = _with_random_weights(architecture(config))
    model.generation_config = hf.GenerationConfig(pad_token_id=PAD)
    return model


def _pixels(images: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": images}


def _with_question(images: Tensor) -> dict[str, Tensor]:
    question = 5 + (10 * images[:, 0, 0, :3].abs()).long() % 20
    return {"pixel_values": images, "qformer_input_ids": question}


def _rows(images: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": images[:, None]}


def _patches(images: Tensor) -> dict[str, Tensor]:
    count = len(images)
    return {
        "pixel_values": images.reshape(count * 24, -1)[:, :96],
        "image_grid_thw": torch.tensor([[1, 4, 6]] * count),
    }


def _blip(name: str, text: dict[str, Any], **queries: Any) -> Any:
    config = getattr(hf, f"{name}Config")(
        text_config=text,
        vision_config=VISION,
        qformer_config={
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": 32,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        num_query_tokens=3,
        image_token_index=IMAGE,
        **queries,
    )
    model = _built(getattr(hf, f"{name}ForConditionalGeneration"), config)
    model.language_model.generation_config = hf.GenerationConfig(pad_token_id=PAD)
    return model


def instructblip_opt() -> Tiny:
    return Tiny(_blip("InstructBlip", OPT), 3, _with_question)


def instructblip_llama() -> Tiny:
    """With grouped queries: fewer heads of keys and values than of queries."""
    return Tiny(_blip("InstructBlip", {**LLAMA, "num_key_value_heads": 2}), 3, _with_question)


def instructblip_t5() -> Tiny:
    return Tiny(_blip("InstructBlip", T5), 3, _with_question)


def blip2_opt() -> Tiny:
    return Tiny(_blip("Blip2", OPT), 3, _pixels)


def blip2_t5() -> Tiny:
    return Tiny(_blip("Blip2", T5), 3, _pixels)


def _qwen(name: str, **vision: Any) -> Tiny:
    config = getattr(hf, f"{name}Config")(
        text_config={**LLAMA, "model_type": "", "num_key_value_heads": 2, "rope_parameters": ROPE},
        vision_config={"depth": 1, "num_heads": 2, "patch_size": 4, **vision},
        image_token_id=IMAGE,
        video_token_id=4,
        vision_start_token_id=5,
        vision_end_token_id=6,
    )
    return Tiny(_built(getattr(hf, f"{name}ForConditionalGeneration"), config), 6, _patches, 32)


def qwen2_vl() -> Tiny:
    return _qwen("Qwen2VL", embed_dim=32, hidden_size=32)


def qwen2_5_vl() -> Tiny:
    return _qwen("Qwen2_5_VL", hidden_size=32, out_hidden_size=32, intermediate_size=48)


def _idefics(name: str, **text: Any) -> Tiny:
    config = getattr(hf, f"{name}Config")(
        text_config={**LLAMA, **text},
        vision_config={**VISION, "image_size": 32},
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=PAD,
    )
    return Tiny(_built(getattr(hf, f"{name}ForConditionalGeneration"), config), 4, _rows, 32)


def smolvlm() -> Tiny:
    return _idefics("SmolVLM", num_key_value_heads=2)


def idefics3() -> Tiny:
    return _idefics("Idefics3")


def llava_config(**text: Any) -> Any:
    return hf.LlavaConfig(
        text_config={**LLAMA, **text},
        vision_config={"model_type": "clip_vision_model", "projection_dim": 16, **VISION},
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )


def llava() -> Tiny:
    return Tiny(_built(hf.LlavaForConditionalGeneration, llava_config()), 4, _pixels)


def fast_vlm() -> Tiny:
    """The bundled model, with its own weights."""
    model = hf.AutoModelForImageTextToText.from_pretrained(bundled_folder("apprentice"))
    model.generation_config = hf.GenerationConfig(pad_token_id=PAD)
    return Tiny(model.eval().requires_grad_(False), 1, _pixels, 64)


DECODERS = {
    "instructblip_opt": instructblip_opt,
    "instructblip_llama": instructblip_llama,
    "blip2_opt": blip2_opt,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "smolvlm": smolvlm,
    "idefics3": idefics3,
    "llava": llava,
    "fast_vlm": fast_vlm,
}
ENCODER_DECODERS = {"instructblip_t5": instructblip_t5, "blip2_t5": blip2_t5}
ALL = [*DECODERS, *ENCODER_DECODERS]


@cache
def tiny(name: str) -> Tiny:
    return {**DECODERS, **ENCODER_DECODERS}[name]()


def random_prefix(model: Any, batch: int, length: int = 4, seed: int = 0) -> KeyValues:
    """Leaves that take gradients."""
    shape, source = Geometry.of(model), torch.Generator().manual_seed(seed)
    sizes = (batch, shape.kv_heads, length, shape.head_dim)

    def leaf() -> Tensor:
        return torch.randn(sizes, generator=source).requires_grad_()

    return KeyValues(tuple((leaf(), leaf()) for _ in range(shape.layers)))
