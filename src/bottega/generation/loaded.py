"""A loaded vision-language model with its processor. Blocking; needs torch and transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from PIL import Image as Pillow
from transformers.cache_utils import DynamicLayer

from bottega.errors import GenerationError, ModelLoadError
from bottega.generation.control import ControlTokens
from bottega.generation.decoding import Row, Sampler, Stopper, finish
from bottega.generation.hub import hf, load_parts
from bottega.generation.sight import Sight
from bottega.image import Image
from bottega.types import Completion, Message, Prompt, Sampling, Usage


@dataclass(frozen=True)
class Rendered:
    """A prompt as the model's template writes it. `pictures` are its images decoded, by sha256,
    but for those that the model remembers."""

    text: str
    images: tuple[Image, ...]
    sampling: Sampling
    pictures: Mapping[str, Pillow.Image] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Greedy samples are all alike: one is drawn and copied."""
        return self.sampling.n if self.sampling.temperature > 0 else 1

    @property
    def shape(self) -> tuple[bool, int, int, int, int]:
        """Prompts with equal or near shapes fit in one batch with little padding. Only those that
        are equal in the first two may share one."""
        limit = self.sampling.max_tokens
        return (bool(self.images), self.samples, limit, len(self.images), len(self.text))


@dataclass(frozen=True)
class LoadedModel:
    model: Any
    processor: Any
    ends: frozenset[int]
    control: ControlTokens
    sight: Sight | None

    @classmethod
    def load(cls, source: str, device: str | None, dtype: str) -> LoadedModel:
        target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        # Half precision is slow on CPUs, and some kernels do not have it.
        kind = "float32" if dtype == "auto" and target.type == "cpu" else dtype
        model, processor = _parts(source, kind)
        processor.tokenizer.padding_side = "left"
        if processor.tokenizer.pad_token is None:
            processor.tokenizer.pad_token = processor.tokenizer.eos_token
        model, ends = model.to(target).eval(), _end_tokens(model, processor)
        # `generate` would mix in the settings that came with the model: a repetition penalty
        # punishes the very label that a demonstration shows.
        model.generation_config = hf.GenerationConfig()
        return cls(model, processor, ends, ControlTokens.of(processor), Sight.of(model, processor))

    def render(self, prompt: Prompt, sampling: Sampling) -> Rendered:
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
                f"the model's chat template refuses the prompt: {_line(error)}",
                hint="does the model take this order of roles, several images, a system turn?",
            ) from error
        marker = getattr(self.processor, "image_token", None)
        if marker and text.count(marker) != len(images):
            raise GenerationError(
                f"the rendered prompt has {text.count(marker)} places for {len(images)} images",
                hint="does the template take images there, and that many?",
            )
        return Rendered(text, images, sampling)

    def decode(self, rendered: Rendered) -> Rendered:
        """With the pictures that `answer` needs. Raises `ImageError`."""
        needed = {
            image.sha256: image
            for image in rendered.images
            if self.sight is None or not self.sight.knows(image.sha256)
        }
        return replace(rendered, pictures={sha: one.decode() for sha, one in needed.items()})

    def answer(self, batch: Sequence[Rendered]) -> list[tuple[tuple[Completion, ...], Usage]]:
        """The batch's prompts have the same number of samples, and all or none have images."""
        try:
            with torch.inference_mode():
                return self._answer(batch)
        except Exception as error:
            raise GenerationError(
                f"the model failed: {_line(error)}", hint=_failure_hint(error)
            ) from error

    def _answer(self, batch: Sequence[Rendered]) -> list[tuple[tuple[Completion, ...], Usage]]:
        inputs, samples = self._inputs(batch), batch[0].samples
        prompt_tokens = inputs["attention_mask"].sum(dim=1).tolist()
        if samples > 1:
            inputs = self._prefilled(inputs, samples) or self._inputs(
                [again for one in batch for again in [self.decode(one)] * samples]
            )
        rows = [Row(one.sampling, index) for one in batch for index in range(samples)]
        drawn = self._draw(inputs, rows)
        return [
            _collect(one.sampling.n, drawn[i * samples : (i + 1) * samples], prompt_tokens[i])
            for i, one in enumerate(batch)
        ]

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
        recurrent states): they cannot be taken one token back.
        """
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

    def _inputs(self, batch: Sequence[Rendered]) -> Any:
        texts = [one.text for one in batch]
        bos = self.processor.tokenizer.bos_token
        # Many templates write the first token themselves.
        special = not (bos and texts[0].startswith(bos))
        tokens = {"padding": True, "return_tensors": "pt", "add_special_tokens": special}
        shown = [image.sha256 for one in batch for image in one.images]
        if self.sight is None or not shown:
            return self._processed(batch, texts, tokens)
        pictures = {sha: picture for one in batch for sha, picture in one.pictures.items()}
        seen = self.sight.inputs(texts, shown, pictures)
        encoded = self.processor.tokenizer(seen.pop("text"), **tokens).to(self.model.device)
        return {name: encoded[name] for name in ("input_ids", "attention_mask")} | seen

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


def _parts(source: str, dtype: str) -> tuple[Any, Any]:
    try:
        model, processor = load_parts(source, dtype)
    except Exception as error:  # transformers raises whatever its files provoke
        raise ModelLoadError(
            f"{source} cannot be loaded as a vision-language model: {_line(error)}",
            hint="give the folder or the hub id of a model for image-text-to-text; "
            "a hub id needs the network or a filled cache",
        ) from error
    if not hasattr(processor, "image_processor"):
        raise ModelLoadError(
            f"{source} has no image processor", hint="use a model that takes images"
        )
    return model, processor


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
        return "lower `max_batch`, show fewer demonstrations, or reduce the images"
    return "does the model take several images in one prompt, and prompts of this length?"


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__
