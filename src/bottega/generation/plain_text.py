"""Prompts without a chat template (BLIP-2, InstructBLIP, PaliGemma: one image before plain text),
and models that read text only (needs torch and transformers)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import transformers
from PIL import Image as Pillow

from bottega.errors import ModelLoadError
from bottega.generation.openai_compatible import ANSWER, NEXT_QUESTION, render_turns
from bottega.types import Message

hf: Any = transformers  # partly annotated
# The prompt of InstructBLIP's authors for OK-VQA, and of BLIP-2's for FlanT5.
QUESTION = "Question: {} Short answer:"
FAMILIES = ("blip-2", "instructblip")
# The words by which PaliGemma knows its tasks.
TASKS = ("answer ", "caption", "cap ", "describe", "detect ", "ocr", "question ", "segment ")
SAME_FILES = (
    "download the current files of the model: config.json, the weights, the tokenizer,"
    " processor_config.json and preprocessor_config.json belong together"
)
Turn = Mapping[str, Any]


class PlainTextProcessor:
    """Processor with the interface of those that have a chat template. The library's own processor
    pads between the image tokens and the text, so the states of a text would depend on the other
    texts of its batch."""

    max_images = 1

    def __init__(self, processor: Any, config: Any) -> None:
        self.tokenizer, self.image_processor = processor.tokenizer, processor.image_processor
        self.image_token = str(processor.image_token)
        self.apply_chat_template = partial(_prompt, self.image_token, QUESTION.format)
        self._qformer_tokenizer = getattr(processor, "qformer_tokenizer", None)
        # Absolute positions limit the text that the Q-Former reads; the question is at the end.
        self._qformer_length = getattr(config.qformer_config, "max_position_embeddings", None)
        if self._qformer_tokenizer is not None:
            self._qformer_tokenizer.truncation_side = "left"
        count = getattr(processor, "num_query_tokens", None) or config.num_query_tokens
        self._image_ids = [_image_token_id(self.tokenizer, self.image_token, config)] * count

    def __call__(
        self,
        text: Sequence[str],
        images: Sequence[Sequence[Pillow.Image]] | None = None,
        *,
        add_special_tokens: bool = True,
        **_: object,
    ) -> Any:
        """Return left-padded model inputs. `images` are those of each text: one, or none at all."""
        shown = list(chain.from_iterable(images or ()))
        texts = [one.replace(self.image_token, "") for one in text]
        ids = self.tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
        rows = [[*(self._image_ids if shown else ()), *row] for row in ids]
        # Left, whatever the folder says: answers follow the last token.
        found = dict(self.tokenizer.pad({"input_ids": rows}, padding_side="left"))
        if shown:
            found["pixel_values"] = self.image_processor(shown)["pixel_values"]
            found |= self._qformer_inputs(texts)
        return hf.BatchFeature(found, tensor_type="pt")

    def _qformer_inputs(self, texts: list[str]) -> dict[str, Any]:
        """Return the text as InstructBLIP's Q-Former reads it; nothing for BLIP-2."""
        if self._qformer_tokenizer is None:
            return {}
        found = self._qformer_tokenizer(
            texts,
            padding=True,
            truncation=self._qformer_length is not None,
            max_length=self._qformer_length,
        )
        return {f"qformer_{name}": found[name] for name in ("input_ids", "attention_mask")}


class TextProcessor:
    """Tokenizer with the interface of a processor, for models that read no images. Without a chat
    template, turns are those of `render_turns`."""

    max_images = 0
    image_processor = None

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.stop = () if tokenizer.chat_template else (NEXT_QUESTION,)

    def apply_chat_template(
        self, conversation: Sequence[Turn], *, continue_final_message: bool = False, **options: bool
    ) -> str:
        if self.tokenizer.chat_template:
            options |= {"tokenize": False, "continue_final_message": continue_final_message}
            return str(self.tokenizer.apply_chat_template(conversation, **options))
        turns = [Message(turn["role"], (_text(turn["content"]),)) for turn in conversation]
        text = render_turns(turns)
        return text.removesuffix(f"\n\n{ANSWER}") if continue_final_message else text

    def __call__(self, text: Sequence[str], images: None = None, **options: Any) -> Any:
        found = self.tokenizer(text, **options)
        return hf.BatchFeature({name: found[name] for name in ("input_ids", "attention_mask")})


def with_plain_text(model: Any, processor: Any) -> Any:
    """Return the processor, for models without a chat template one that writes plain text."""
    kind = model.config.model_type
    if kind in FAMILIES:
        return PlainTextProcessor(processor, model.config)
    if kind == "paligemma" and not processor.chat_template:
        processor.max_images = 1
        processor.apply_chat_template = partial(_prompt, processor.image_token, _task)
    return processor


def _prompt(
    image_token: str, question: Callable[[str], str], conversation: Sequence[Turn], **_: bool
) -> str:
    """Return the plain text of the turns, with an image token in front of it per image."""
    parts = chain.from_iterable(turn["content"] for turn in conversation)
    images = sum(part["type"] == "image" for part in parts)
    turns = [(turn["role"], _text(turn["content"])) for turn in conversation]
    return f"{image_token * images}{plain_text(turns, question)}"


def _task(text: str) -> str:
    return text if text.startswith(TASKS) else f"answer en {text}"


def plain_text(
    turns: Iterable[tuple[str, str]], question: Callable[[str], str] = QUESTION.format
) -> str:
    """Return turns (role, text) as lines. A user turn that is answered, or the last one, is a
    question; another one is a passage."""
    given = list(turns)
    lines: list[str] = []
    for index, (role, text) in enumerate(given):
        following = given[index + 1][0] if index + 1 < len(given) else "assistant"
        if role == "assistant" and lines:
            lines[-1] = f"{lines[-1]} {text}"
        elif role == "user" and following == "assistant" and text:
            lines.append(question(text))
        else:
            lines.append(text)
    return "\n".join(lines)


def _text(content: Sequence[Mapping[str, str]]) -> str:
    return " ".join(part["text"] for part in content if part["type"] == "text")


def _image_token_id(tokenizer: Any, token: str, config: Any) -> int:
    """Return the id of the image token. Raises `ModelLoadError` if model and tokenizer disagree:
    the model would read other tokens as images."""
    index = int(tokenizer.convert_tokens_to_ids(token))
    if index != config.image_token_id:
        raise ModelLoadError(
            f"image_token_index must be the id of {token} in the tokenizer, {index}, got"
            f" {config.image_token_id}",
            hint=SAME_FILES,
        )
    return index
