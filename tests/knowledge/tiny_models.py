"""Model folders with random weights, as small as their architectures allow."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
    FastVlmConfig,
    FastVlmForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

START, END, IMAGE = "<|startoftext|>", "<|endoftext|>", "<image>"
TEXT_TOKENS = 16


def letters() -> PreTrainedTokenizerFast:
    """One token a letter."""
    words = [START, END, IMAGE, *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=[(START, 0), (END, 1)]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=START,
        eos_token=END,
        pad_token=END,
        unk_token=END,
        additional_special_tokens=[IMAGE],
        model_max_length=TEXT_TOKENS,
    )


def save_clip(folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    layers = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = CLIPConfig(
        text_config={
            **layers,
            **tokens,
            "vocab_size": 32,
            "max_position_embeddings": TEXT_TOKENS,
        },
        vision_config={**layers, "image_size": 32, "patch_size": 8},
        projection_dim=12,
    )
    CLIPModel(config).save_pretrained(folder)
    images = CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    processor = CLIPProcessor(images, letters())  # type: ignore[no-untyped-call]
    processor.save_pretrained(folder)
    return folder


def save_fast_vlm(folder: Path, seed: int = 0, *, decoder_seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = FastVlmConfig(
        vision_config={
            "model_type": "resnet",
            "embedding_size": 8,
            "hidden_sizes": [8, 8, 8, 16],
            "hidden_size": 16,
            "depths": [1, 1, 1, 1],
            "layer_type": "basic",
        },
        text_config={
            "model_type": "llama",
            "hidden_size": 96,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vocab_size": 32,
        },
        image_token_index=2,
    )
    model = FastVlmForConditionalGeneration(config)
    torch.manual_seed(decoder_seed)
    torch.nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(folder)
    images = CLIPImageProcessorPil(size={"height": 64, "width": 64}, do_center_crop=False)
    processor = LlavaProcessor(  # type: ignore[no-untyped-call]
        images, letters(), patch_size=64, vision_feature_select_strategy="full"
    )
    processor.save_pretrained(folder)
    return folder
