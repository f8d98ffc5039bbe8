"""Inputs for tiny models without a processor: one token per word."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from bottega.compression.hyper_model import HyperModel, InputBuilder, ProcessorInputs, PromptEncoder
from bottega.compression.model import CompressorConfig, RaccModel
from bottega.image import Image
from bottega.kv_prefix import Geometry
from bottega.types import Example, Message, Prompt, Query
from tests.kv_prefix.tiny_models import END, IMAGE, START, VOCABULARY, Tiny, tiny

USER, ASSISTANT = 10, 11
FIRST_WORD = 20


def word(text: str) -> int:
    return FIRST_WORD + zlib.crc32(text.encode()) % (VOCABULARY - FIRST_WORD)


def _turn(message: Message) -> list[int]:
    role = USER if message.role == "user" else ASSISTANT
    tokens = [token for part in message.parts for token in _tokens(part)]
    return [role, *tokens, *([END] if message.role == "user" else [])]


def _tokens(part: str | Image) -> list[int]:
    return [word(one) for one in part.split()] if isinstance(part, str) else [IMAGE]


def word_encoder(tiny: Tiny) -> PromptEncoder:
    """Return an encoder with one token per word: `<s>`, the turns, and the start of the assistant's
    turn unless the prompt contains it. An encoder-decoder gets an end token. All images have equal
    pixels."""

    def encode(prompts: Sequence[Prompt]) -> ProcessorInputs:
        rows = []
        for prompt in prompts:
            ids = [START, *(token for message in prompt.messages for token in _turn(message))]
            opened = [] if prompt.messages[-1].role == "assistant" else [ASSISTANT]
            rows.append([*ids, *opened, *([END] if tiny.is_encoder_decoder else [])])
        return tiny.inputs(*rows)

    return encode


def encode(prompts: Sequence[Prompt]) -> ProcessorInputs:
    return word_encoder(model())(prompts)


def model() -> Tiny:
    return tiny("llava")


def hyper(layer: int = -1) -> HyperModel:
    return HyperModel(model().model, layer=layer)


def texts() -> InputBuilder:
    return InputBuilder(encode, frozenset({END}))


def shape(**changes: Any) -> CompressorConfig:
    usual = {"document_prompts": 4, "query_prompts": 3, "prompting": "reading"}
    return CompressorConfig(32, Geometry.of(model().model), **{**usual, **changes})


def racc(**changes: Any) -> RaccModel:
    built = shape(**changes)  # building the model uses the random state
    torch.manual_seed(0)
    return RaccModel(built).eval()


def passage(text: str, *images: Image) -> Example:
    return Example(Query(text, images), "")


def passages(count: int, about: str = "") -> list[Example]:
    return [passage(f"the home of {about} number {i} is place {i * 7 % 13}") for i in range(count)]
