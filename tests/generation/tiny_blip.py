"""Randomly initialised BLIP-2 and InstructBLIP in folders of the published format: config,
processor, tokenizers and weights."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import pre_tokenizers, processors
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

hf: Any = transformers  # half annotated
IMAGE_TOKEN = "<image>"
QUERIES = 3  # tokens per image
CHARACTERS = [*string.ascii_letters, *string.digits, *".,:?!-'\""]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
T5 = {
    "model_type": "t5",
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}


def byte_tokenizer(*, reverse: bool = False) -> Any:
    """Return OPT's kind: bytes, with `</s>` before each text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=reverse)
    pieces = ["<pad>", "</s>", *alphabet]
    made = hf.GPT2Tokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[],
        **{f"{name}_token": "</s>" for name in ("bos", "eos", "unk")},
        pad_token="<pad>",
    )
    made._tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", 1)]
    )
    return made


def t5_tokenizer() -> Any:
    """Return FlanT5's kind: characters after `▁` for a space, with `</s>` after each text."""
    scored = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -2.0)]
    scored += [(one, -3.0) for one in CHARACTERS]
    return hf.T5Tokenizer(vocab=scored, extra_ids=0)


def llama_tokenizer() -> Any:
    pieces = ["<unk>", "<s>", "</s>", "▁", "\n", *CHARACTERS]
    return hf.LlamaTokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[],
        pad_token="</s>",
    )


def qformer_tokenizer() -> Any:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *CHARACTERS, *(f"##{one}" for one in CHARACTERS)]
    return hf.BertTokenizer(vocab={piece: index for index, piece in enumerate(pieces)})


def blip2_opt(folder: Path, *, tokenizer: Any = None) -> Path:
    text = {"model_type": "opt", "ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0, **SIZES}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return _save(folder, "Blip2", {**text, **ends}, tokenizer or byte_tokenizer())


def blip2_t5(folder: Path) -> Path:
    return _save(folder, "Blip2", T5, t5_tokenizer())


def instructblip_t5(folder: Path) -> Path:
    return _save(folder, "InstructBlip", T5, t5_tokenizer())


def instructblip_llama(folder: Path) -> Path:
    text = {"model_type": "llama", "intermediate_size": 24, "num_key_value_heads": 2, **SIZES}
    ends = {"pad_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    return _save(folder, "InstructBlip", {**text, **ends}, llama_tokenizer())


def _save(folder: Path, family: str, text: dict[str, Any], tokenizer: Any) -> Path:
    pixels = BlipImageProcessorPil(size={"height": 28, "width": 28})
    tokenizers = [tokenizer, *([qformer_tokenizer()] if family == "InstructBlip" else [])]
    processor = getattr(hf, f"{family}Processor")(pixels, *tokenizers, num_query_tokens=QUERIES)
    part = {**SIZES, "intermediate_size": 24}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    qformer = {**part, **dropout, "encoder_hidden_size": 16, "vocab_size": 160}
    config = getattr(hf, f"{family}Config")(
        text_config={"vocab_size": 320, "max_position_embeddings": 2048, **text},
        vision_config={**part, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14},
        qformer_config=qformer,
        num_query_tokens=QUERIES,
        # The processor has added it to the tokenizer.
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
    )
    torch.manual_seed(0)
    model = getattr(hf, f"{family}ForConditionalGeneration")(config).eval()
    for weights in model.parameters():
        # The usual initial weights, some of them zero, would give all prompts the same answer.
        if weights.ndim > 1:
            weights.data.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
