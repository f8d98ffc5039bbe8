"""A loaded vision-language model with its processor. Blocking; needs torch and transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from transformers.cache_utils import DynamicLayer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from bottega.errors import BottegaError, GenerationError, ModelLoadError
from bottega.generation.prefix_reuse import Reader, behind
from bottega.generation.sampling import Row, Sampler, Stopper, finish
from bottega.generation.tokenization import ControlTokens, Rendered, Spelled, pictures_of
from bottega.generation.vision_cache import VisionCache
from bottega.image import Image
from bottega.types import Completion, Message, Prefix, Prompt, Sampling, Usage

hf: Any = transformers  # half annotated: what it returns is checked by use
HUB_WITHIN = 10.0


def load_parts(source: str, dtype: str) -> tuple[Any, Any]:
    try:
        model, processor = _stored(source, dtype)
    except Exception as error:  # transformers raises whatever its files provoke
        raise ModelLoadError(
            f"{source} cannot be loaded as a vision-language model: {first_line(error)}",
            hint="give the folder or the hub id of a model for image-text-to-text; "
            "a hub id needs the network or a filled cache",
        ) from error
    if not hasattr(processor, "image_processor"):
        raise ModelLoadError(
            f"{source} has no image processor", hint="use a model that takes images"
        )
    return model, processor


def _stored(source: str, dtype: str) -> tuple[Any, Any]:
    """Model and processor, as stored; the cache goes before the hub. Raises what the libraries do.

    A hub that cannot be reached would be tried for minutes, file by file: it is asked once first.
    """
    try:
        return _load(source, dtype, local_files_only=True)
    except (OSError, ValueError):  # not cached; what the hub says is reported instead
        if Path(source).exists():
            raise
    huggingface_hub.HfApi().model_info(source, timeout=HUB_WITHIN)
    return _load(source, dtype, local_files_only=False)


def _load(source: str, dtype: str, local_files_only: bool) -> tuple[Any, Any]:
    processor = _load_processor(source, local_files_only)
    model = hf.AutoModelForImageTextToText.from_pretrained(
        source, dtype=dtype, local_files_only=local_files_only
    )
    return model, processor


def _load_processor(source: str, local_files_only: bool) -> Any:
    """Many families (Qwen-VL, SmolVLM) take videos too, which needs torchvision: where only that
    is missing, their processor is built for images alone."""
    try:
        return hf.AutoProcessor.from_pretrained(source, local_files_only=local_files_only)
    except ImportError as error:
        if "torchvision" not in str(error).lower():
            raise
    return _images_only(source, local_files_only)


def _images_only(source: str, local_files_only: bool) -> Any:
    def part(kind: Any) -> Any:
        return kind.from_pretrained(source, local_files_only=local_files_only)

    parts = {"image_processor": part(hf.AutoImageProcessor), "tokenizer": part(hf.AutoTokenizer)}
    family: Any = PROCESSOR_MAPPING[type(part(hf.AutoConfig))]

    def arguments(cls: Any, /, *_: object, **__: object) -> list[object]:
        return [parts.get(name) for name in cls.get_attributes()]

    def check(self: object, name: str, argument: object) -> None:
        """The library's check has no notion of a part that is absent."""

    # A class of its own leaves the library's untouched for others in this process.
    overrides = {
        "_get_arguments_from_pretrained": classmethod(arguments),
        "check_argument_for_proper_class": check,
    }
    return part(type(family.__name__, (family,), overrides))


def first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__


@dataclass(frozen=True)
class LoadedModel:
    model: Any
    processor: Any
    ends: frozenset[int]
    control: ControlTokens
    vision_cache: VisionCache | None
    reader: Reader | None = None

    @classmethod
    def load(cls, source: str, device: str | None, dtype: str, keep: int = 0) -> LoadedModel:
        """`keep` bytes of what was read are kept for prompts that begin alike."""
        target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        # Half precision is slow on CPUs, and some kernels do not have it.
        kind = "float32" if dtype == "auto" and target.type == "cpu" else dtype
        model, processor = load_parts(source, kind)
        processor.tokenizer.padding_side = "left"
        if processor.tokenizer.pad_token is None:
            processor.tokenizer.pad_token = processor.tokenizer.eos_token
        model, ends = model.to(target).eval(), _end_tokens(model, processor)
        # `generate` would mix in the settings that came with the model: a repetition penalty
        # punishes the very label that a demonstration shows.
        model.generation_config = hf.GenerationConfig()
        vision_cache = VisionCache.of(model, processor)
        reader = Reader.of(model, processor, vision_cache, keep)
        return cls(model, processor, ends, ControlTokens.of(processor), vision_cache, reader)

    def render(self, prompt: Prompt, sampling: Sampling, prefix: Prefix | None = None) -> Rendered:
        parts = [part for message in prompt.messages for part in message.parts]
        images = tuple(part for part in parts if isinstance(part, Image))
        prefilled = bool(prompt.messages) and prompt.messages[-1].role == "assistant"
        try:
            text = self.processor.apply_chat_template(
                [self._turn(message) for message in prompt.messages],
                add_generation_prompt=not prefilled,
                continue_final_message=prefilled,
            )
        except Exception as error:  # a template may raise anything, on purpose or not
            raise GenerationError(
                f"the model's chat template refuses the prompt: {first_line(error)}",
                hint="does the model take this order of roles, several images, a system turn?",
            ) from error
        marker = getattr(self.processor, "image_token", None)
        if marker and text.count(marker) != len(images):
            raise GenerationError(
                f"the rendered prompt has {text.count(marker)} places for {len(images)} images",
                hint="does the template take images there, and that many?",
            )
        return Rendered(text, images, sampling, prefix=prefix)

    def decode(self, rendered: Rendered) -> Rendered:
        """With the pictures that `answer` needs. Raises `ImageError`."""
        needed = {
            image.sha256: image
            for image in rendered.images
            if self.vision_cache is None or not self.vision_cache.knows(image.sha256)
        }
        return replace(
            rendered, pictures={sha: one.decode_for_model() for sha, one in needed.items()}
        )

    def encode(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """What the model takes, left padded, of prompts that all have images or all have none."""
        return dict(self._inputs([self.decode(self.render(one, Sampling())) for one in prompts]))

    def answer(self, batch: Sequence[Rendered]) -> list[tuple[tuple[Completion, ...], Usage]]:
        """The batch's prompts have the same number of samples, and all or none have images."""
        try:
            with torch.inference_mode():
                return self._answer(batch)
        except BottegaError:
            raise
        except Exception as error:
            raise GenerationError(
                f"the model failed: {first_line(error)}", hint=_failure_hint(error)
            ) from error

    def _answer(self, batch: Sequence[Rendered]) -> list[tuple[tuple[Completion, ...], Usage]]:
        samples = batch[0].samples
        rows = [Row(one.sampling, index) for one in batch for index in range(samples)]
        spelled = self._spelled(batch)
        inputs, prompt_tokens = self._read(batch, spelled)
        drawn = self._draw(inputs, rows)
        if self.reader is not None and spelled:
            self.reader.keep(spelled, samples, inputs)
        return [
            _collect(one.sampling.n, drawn[i * samples : (i + 1) * samples], prompt_tokens[i])
            for i, one in enumerate(batch)
        ]

    def _spelled(self, batch: Sequence[Rendered]) -> list[Spelled]:
        if self.reader is None or not self.reader.trusts or batch[0].prefix:
            return []
        return [self.reader.spell(one.text, one.shown, one.pictures) for one in batch]

    def _read(
        self, batch: Sequence[Rendered], spelled: Sequence[Spelled]
    ) -> tuple[dict[str, Any], list[int]]:
        """The batch for `generate`, and each prompt's number of tokens."""
        samples = batch[0].samples
        if batch[0].prefix:
            return self._behind(batch)
        ordinary = partial(self._inputs, batch, spelled)
        if self.reader is not None and spelled:
            known = self.reader.inputs(spelled, samples, pictures_of(batch), ordinary)
            if known is not None:
                return known, [len(row) for row in spelled]
        inputs = ordinary()
        prompt_tokens = inputs["attention_mask"].sum(dim=1).tolist()
        if samples > 1:
            inputs = self._prefilled(inputs, samples) or self._inputs(
                [again for one in batch for again in [self.decode(one)] * samples]
            )
        elif self.reader is not None and spelled:
            inputs |= self.reader.noting(spelled, inputs)
        return inputs, prompt_tokens

    def _behind(self, batch: Sequence[Rendered]) -> tuple[dict[str, Any], list[int]]:
        rows = [self.decode(one) for one in batch for _ in range(one.samples)]
        inputs = self._inputs(rows)
        prompt_tokens = inputs["attention_mask"].sum(dim=1).tolist()
        return behind(self.model, inputs, rows), prompt_tokens[:: batch[0].samples]

    def _draw(self, inputs: Any, rows: Sequence[Row]) -> list[tuple[Completion, int]]:
        length = inputs["input_ids"].shape[1]
        sampler = Sampler(rows, self.model.device)
        output = self.model.generate(
            **inputs,
            generation_config=self._settings(max(row.sampling.max_tokens for row in rows)),
            logits_processor=[sampler],
            stopping_criteria=[Stopper(rows, length, self._decode)],
        )
        made = output[:, length:]
        logprobs = sampler.logprobs(made[:, -1])
        return [
            finish(tokens, values, self.ends, row, self._decode)
            for tokens, values, row in zip(made.tolist(), logprobs, rows, strict=True)
        ]

    def _prefilled(self, inputs: Any, samples: int) -> dict[str, Any] | None:
        """The batch with each row `samples` times, its prompt read once for all of them.

        None for caches that hold more than keys and values of every token (sliding windows,
        recurrent states): they cannot be taken one token back. Nor can a single token.
        """
        if inputs["input_ids"].shape[1] == 1:
            return None
        settings = self._settings(1, return_dict_in_generate=True)
        cache = self.model.generate(**inputs, generation_config=settings).past_key_values
        if not all(type(layer) is DynamicLayer for layer in getattr(cache, "layers", [None])):
            return None
        cache.crop(-1)  # `generate` has to read at least one token
        cache.batch_repeat_interleave(samples)
        if (deltas := getattr(self.model.model, "rope_deltas", None)) is not None:
            # Qwen's position offsets, a row each, stay on the model between the two calls.
            self.model.model.rope_deltas = deltas.repeat_interleave(samples, dim=0)
        kept = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        return {
            **{name: rows.repeat_interleave(samples, dim=0) for name, rows in kept.items()},
            "past_key_values": cache,
        }

    def _inputs(self, batch: Sequence[Rendered], spelled: Sequence[Spelled] = ()) -> Any:
        texts = [one.text for one in batch]
        bos = self.processor.tokenizer.bos_token
        # Many templates write the first token themselves.
        special = not (bos and texts[0].startswith(bos))
        tokens = {"padding": True, "return_tensors": "pt", "add_special_tokens": special}
        shown = [sha for one in batch for sha in one.shown]
        if self.vision_cache is None or not shown:
            return self._processed(batch, texts, tokens)
        features = self.vision_cache.features(shown, pictures_of(batch))
        tokenizer = self.processor.tokenizer
        encoded = (
            tokenizer.pad({"input_ids": [row.ids for row in spelled]}, return_tensors="pt")
            if spelled
            else tokenizer([self.vision_cache.spelled(text) for text in texts], **tokens)
        ).to(self.model.device)
        read = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        return read | self.vision_cache.given([features[sha] for sha in shown])

    def _processed(
        self, batch: Sequence[Rendered], texts: list[str], tokens: Mapping[str, object]
    ) -> Any:
        images = [[one.pictures[image.sha256] for image in one.images] for one in batch]
        inputs = self.processor(text=texts, images=images if any(images) else None, **tokens)
        return inputs.to(self.model.device, self.model.dtype)

    def _settings(self, max_tokens: int, **more: bool) -> Any:
        return hf.GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=sorted(self.ends),
            pad_token_id=self.processor.tokenizer.pad_token_id,
            **more,
        )

    def _decode(self, tokens: list[int]) -> str:
        text = str(self.processor.tokenizer.decode(tokens, skip_special_tokens=True))
        return self.control.restore(text)

    def _turn(self, message: Message) -> dict[str, object]:
        parts = [
            {"type": "text", "text": self.control.plain(part)}
            if isinstance(part, str)
            else {"type": "image"}
            for part in message.parts
        ]
        return {"role": message.role, "content": parts}


def _collect(
    n: int, drawn: Sequence[tuple[Completion, int]], prompt_tokens: int
) -> tuple[tuple[Completion, ...], Usage]:
    copies = n // len(drawn)
    completions = tuple(replace(completion) for completion, _ in drawn) * copies
    return completions, Usage(prompt_tokens, sum(count for _, count in drawn) * copies)


def _end_tokens(model: Any, processor: Any) -> frozenset[int]:
    found = model.generation_config.eos_token_id
    several = found if isinstance(found, list) else [found]
    return frozenset(
        token for token in (*several, processor.tokenizer.eos_token_id) if token is not None
    )


def _failure_hint(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError) or "memory" in str(error).lower():
        return "lower `max_batch` or `prefix_cache_mb`, show less, or reduce the images"
    return "does the model take several images in one prompt, and prompts of this length?"
