"""Model folders with random weights, as small as their architectures allow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    FastVlmConfig,
    FastVlmForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.bert.modeling_bert import BertEncoder

START, END, IMAGE = "<|startoftext|>", "<|endoftext|>", "<image>"
TEXT_TOKENS = 16


def letters() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per letter."""
    words = [START, END, IMAGE, *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=[(START, 0), (END, 1)]
    )
    return PreTrainedTokenizerFast(
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
    processor = CLIPProcessor(images, letters())
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
    processor = LlavaProcessor(
        images, letters(), patch_size=64, vision_feature_select_strategy="full"
    )
    processor.save_pretrained(folder)
    return folder


FLMR_WORDS = (
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]"),
    *(".", ",", ":", "?", "!", "find", "this", "that", "red", "green", "blue", "what", "is", "it"),
)


def save_flmr(folder: Path, seed: int = 0) -> Path:
    """A PreFLMR of two layers with 12 query tokens, 4 + 16 image tokens and 8 dimensions, in the
    names of the released checkpoints."""
    torch.manual_seed(seed)
    layers = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = {**layers, "vocab_size": len(FLMR_WORDS), "max_position_embeddings": 40}
    vision = {**layers, "image_size": 32, "patch_size": 8}
    write_flmr(folder, text, vision, prefix=4, dimension=8, query_tokens=12)
    for name in ("query_tokenizer", "context_tokenizer"):
        (folder / name).mkdir()
        (folder / name / "vocab.txt").write_text("\n".join(FLMR_WORDS))
    return folder


def write_flmr(
    folder: Path,
    text: dict[str, Any],
    vision: dict[str, Any],
    *,
    prefix: int,
    dimension: int,
    query_tokens: int,
) -> None:
    mapping = BertConfig(
        **{**text, "num_hidden_layers": 1}, is_decoder=True, add_cross_attention=True
    )
    hidden, seen = text["hidden_size"], vision["hidden_size"]
    size = prefix * dimension
    parts = {
        "context_text_encoder.bert_model": BertModel(BertConfig(**text)),
        "query_text_encoder.bert_model": BertModel(BertConfig(**text)),
        "context_text_encoder_linear": torch.nn.Linear(hidden, dimension, bias=False),
        "query_text_encoder_linear": torch.nn.Linear(hidden, dimension, bias=False),
        "context_vision_encoder.vision_model.vision_model": CLIPVisionModel(
            CLIPVisionConfig(**vision)
        ),
        "context_vision_projection.model": torch.nn.Sequential(
            torch.nn.Linear(seen, size // 2), torch.nn.Tanh(), torch.nn.Linear(size // 2, size)
        ),
        "transformer_mapping_input_linear": torch.nn.Linear(seen, hidden),
        "transformer_mapping_network": BertEncoder(mapping),
        "transformer_mapping_output_linear": torch.nn.Linear(hidden, dimension),
    }
    weights = {
        f"{part}.{name}": weight.contiguous()
        for part, module in parts.items()
        for name, weight in module.state_dict().items()
    }
    config = {
        "model_type": "flmr",
        "dim": dimension,
        "mapping_network_prefix_length": prefix,
        "transformer_mapping_num_hidden_layers": 1,
        "transformer_mapping_cross_attention_length": 32,
        "transformer_mapping_config_base": "bert-base-uncased",
        "mask_punctuation": True,
        "mask_instruction_token": ":",
        "text_config": {**text, "model_type": "flmr_text_model", "query_maxlen": query_tokens},
        "vision_config": {**vision, "model_type": "flmr_vision_model"},
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")


def save_colbert(folder: Path, seed: int = 0) -> Path:
    """Write one BERT layer with 128 dimensions per token in sentence-transformers' layout."""
    from sentence_transformers import MultiVectorEncoder

    torch.manual_seed(seed)
    bert = BertConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=TEXT_TOKENS,
    )
    BertModel(bert).save_pretrained(folder / "bert")
    letters().save_pretrained(folder / "bert")
    MultiVectorEncoder(str(folder / "bert")).save_pretrained(str(folder / "colbert"))
    return folder / "colbert"
