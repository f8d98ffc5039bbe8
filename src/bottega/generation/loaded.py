"""A loaded vision-language model with its processor. Blocking; needs torch and transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
from PIL import Image as Pillow
from torch import nn
from transformers.cache_utils import DynamicLayer

from bottega.errors import ModelLoadError, first_line
from bottega.generation.in_process import InProcessModel, check_length, to_reply
from bottega.generation.kv_caches import VisionCache
from bottega.generation.model_files import load_parts
from bottega.generation.plain_text import SAME_FILES
from bottega.generation.prefix_reuse import BatchReader, prefixed_inputs
from bottega.generation.sampling import GumbelSampler, SampleRow, StopCriterion, to_completion
from bottega.generation.token_tree import TokenTree
from bottega.generation.tokenization import (
    ControlTokens,
    RenderedPrompt,
    TokenizedPrompt,
    adds_special_tokens,
    decoded_images,
)
from bottega.generation.tree_generation import TreeGenerator
from bottega.kv_prefix import reading_model
from bottega.types import Completion, Prompt, Samples, Sampling

hf: Any = transformers  # partly annotated

# The weights of a smaller model stay in the CPU's cache, where the layout matters little.
MIN_BYTES = 64 * 1024 * 1024


def _generating_parts(model: Any) -> list[Any]:
    """Return the model, and the language model to which BLIP's wrappers delegate `generate`."""
    language_model = getattr(model, "language_model", None)
    return [model, *([language_model] if hasattr(language_model, "generation_config") else [])]


@dataclass(frozen=True)
class LoadedModel(InProcessModel):
    """Vision-language model of transformers."""

    reader: BatchReader | None = None

    @classmethod
    def load(
        cls,
        source: str,
        device: str | None,
        dtype: str,
        cache_bytes: int = 0,
        trust_remote_code: bool = False,
    ) -> LoadedModel:
        """Load a model; `cache_bytes` is the memory for prefixes that prompts share."""
        target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        # Half precision is slow on CPUs, and some kernels do not have it.
        precision = "float32" if dtype == "auto" and target.type == "cpu" else dtype
        model, processor = load_parts(source, precision, trust_remote_code)
        processor.tokenizer.padding_side = "left"
        if processor.tokenizer.pad_token is None:
            processor.tokenizer.pad_token = processor.tokenizer.eos_token
        ends = {processor.tokenizer.eos_token_id}
        model = model.to(target).eval()
        if target.type == "cpu" and model.dtype == torch.float32:
            make_column_major(model)
        for part in _generating_parts(model):
            found = part.generation_config.eos_token_id
            ends |= {*(found if isinstance(found, list) else [found])}
            # `generate` would apply the model's own settings: a repetition penalty lowers the
            # probability of the labels in the demonstrations.
            part.generation_config = hf.GenerationConfig()
        vision_cache = VisionCache.for_model(model, processor)
        reader = BatchReader.for_model(model, processor, vision_cache, cache_bytes)
        control = ControlTokens.for_processor(processor)
        loaded = cls(
            model, processor, frozenset(ends - {None}), control, vision_cache, reader=reader
        )
        if vision_cache is None:  # else it has compared tokens and features
            loaded._check_image_tokens(source)
        # Both reuse prefixes; the tree also saves work within the layers of a small decoder.
        tree = TokenTree.for_model(model) if vision_cache and not reader else None
        if tree is None:
            return loaded
        return replace(loaded, tree=TreeGenerator(tree, loaded.ends, loaded._decode))

    def _check_image_tokens(self, source: str) -> None:
        """Read one image. Raises `ModelLoadError` if the processor writes other image tokens than
        the model reads."""
        marker = getattr(self.processor, "image_token", None)
        try:
            with torch.inference_mode():
                reason = self._image_token_error(marker) if marker else None
        except ValueError as error:  # of the library's comparison with the features
            reason = first_line(error)
        except Exception:  # another kind of model; real errors appear when it answers
            return
        if reason is not None:
            processor = type(self.processor).__name__
            raise ModelLoadError(f"{source}: {processor} does not fit: {reason}", hint=SAME_FILES)

    def _image_token_error(self, marker: str) -> str | None:
        if marker not in self.processor.tokenizer.get_vocab():
            return f"the tokenizer has no token {marker}"
        inputs = self.processor(
            text=[f"{marker}image"], images=[[Pillow.new("RGB", (64, 48))]], return_tensors="pt"
        ).to(self.model.device, self.model.dtype)
        ids, token = inputs["input_ids"], self.model.config.image_token_id
        if ids.max() >= (rows := self.model.get_input_embeddings().num_embeddings):
            return f"the model reads {rows} tokens, the tokenizer writes token {int(ids.max())}"
        if not (ids == token).any():
            return f"image_token_id of config.json is {token}, the tokenizer writes no such token"
        self.model.generate(**inputs, generation_config=self._settings(1))
        return None

    def transformers_model(self) -> LoadedModel:
        return self

    def encode(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Return left-padded model inputs; either all prompts have images or none has."""
        return dict(self._inputs([self.decode(self.render(one, Sampling())) for one in prompts]))

    def _answer(self, batch: Sequence[RenderedPrompt]) -> list[Samples]:
        if self.tree is not None and not batch[0].prefix:
            return self._from_tree(self.tree, batch)
        reader = self.reader
        if reader is None or not reader.enabled or batch[0].prefix:
            return self._from_model(batch, None)
        try:
            return self._from_model(batch, reader)
        except Exception as error:  # models raise errors of any type here
            reason = first_line(error)
        answers = self._from_model(batch, None)  # raises an error that is not the cache's
        reader.disable(reason)
        return answers

    def _from_model(
        self, batch: Sequence[RenderedPrompt], reader: BatchReader | None
    ) -> list[Samples]:
        samples = batch[0].samples
        rows = [SampleRow(one.sampling, index) for one in batch for index in range(samples)]
        tokenized: list[TokenizedPrompt] = []
        if reader is not None:
            tokenized = [reader.tokenize(one.text, one.image_keys, one.decoded) for one in batch]
        inputs, prompt_tokens = self._read(batch, tokenized)
        generated = self._generate(inputs, rows)
        if reader is not None:
            reader.store(tokenized, samples, inputs)
        answers = []
        for i, one in enumerate(batch):
            found = generated[i * samples : (i + 1) * samples]
            answers.append(to_reply(one, found, prompt_tokens[i]))
        return answers

    def _read(
        self, batch: Sequence[RenderedPrompt], tokenized: Sequence[TokenizedPrompt]
    ) -> tuple[dict[str, Any], list[int]]:
        """Return the inputs for `generate` and the number of tokens of each prompt."""
        samples = batch[0].samples
        if batch[0].prefix:
            repeated = [self.decode(one) for one in batch for _ in range(samples)]
            inputs = self._inputs(repeated)
            prompt_tokens = inputs["attention_mask"].sum(dim=1).tolist()
            if self.tree is not None:
                pairs = zip(repeated, prompt_tokens, strict=True)
                # The prompt repeats the opening of its prefix, and these tokens are masked.
                lengths = (
                    one.prefix.length - one.prefix.opening + count
                    for one, count in pairs
                    if one.prefix
                )
                check_length(max(lengths), self.tree.tree.max_tokens)
            return prefixed_inputs(self.model, inputs, repeated), prompt_tokens[::samples]
        uncached = partial(self._inputs, batch, tokenized)
        if self.reader is not None and tokenized:
            cached = self.reader.inputs(tokenized, samples, decoded_images(batch), uncached)
            if cached is not None:
                return cached, [len(row) for row in tokenized]
        inputs = uncached()
        prompt_tokens = inputs["attention_mask"].sum(dim=1).tolist()
        if samples > 1:
            inputs = self._prefilled(inputs, samples) or self._inputs(
                [row for one in batch for row in [self.decode(one)] * samples]
            )
        elif self.reader is not None and tokenized:
            inputs |= self.reader.cache_inputs(tokenized, inputs)
        return inputs, prompt_tokens

    def _generate(self, inputs: Any, rows: Sequence[SampleRow]) -> list[tuple[Completion, int]]:
        length = self._prompt_length(inputs)
        sampler = GumbelSampler(rows, self.model.device)
        criterion = StopCriterion(rows, length, self._decode)
        output = reading_model(self.model, inputs).generate(
            **inputs,
            generation_config=self._settings(max(row.sampling.max_tokens for row in rows)),
            logits_processor=[sampler],
            stopping_criteria=[criterion],
        )
        new = output[:, length:]
        logprobs = sampler.logprobs(new[:, -1])
        return [
            to_completion(tokens[:count], values, self.ends, row, self._decode)
            for tokens, count, values, row in zip(
                new.tolist(), criterion.counts, logprobs, rows, strict=True
            )
        ]

    def _prompt_length(self, inputs: Mapping[str, Any]) -> int:
        """Return the length of the prompt in the output of `generate`: that of an encoder-decoder
        begins with the decoder's tokens."""
        if not self.model.config.get_text_config().is_encoder_decoder:
            return int(inputs["input_ids"].shape[1])
        begun = inputs.get("decoder_input_ids")
        return 1 if begun is None else int(begun.shape[1])

    def _prefilled(self, inputs: Any, samples: int) -> dict[str, Any] | None:
        """Read each prompt once and return the inputs with each row repeated `samples` times.

        Return None for caches that hold more than keys and values of every token (sliding windows,
        recurrent states), because these cannot be cropped by one token, and for one-token prompts.
        """
        if inputs["input_ids"].shape[1] == 1:
            return None
        settings = self._settings(1, return_dict_in_generate=True)
        reader = reading_model(self.model, inputs)
        cache = reader.generate(**inputs, generation_config=settings).past_key_values
        if not all(type(layer) is DynamicLayer for layer in getattr(cache, "layers", [None])):
            return None
        cache.crop(-1)  # `generate` must read at least one token
        cache.batch_repeat_interleave(samples)
        base = self.model.base_model
        if (deltas := getattr(base, "rope_deltas", None)) is not None:
            # Qwen keeps the position offsets, one per row, on the model between the two calls.
            base.rope_deltas = deltas.repeat_interleave(samples, dim=0)
        kept = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        return {
            **{name: rows.repeat_interleave(samples, dim=0) for name, rows in kept.items()},
            "past_key_values": cache,
        }

    def _inputs(
        self, batch: Sequence[RenderedPrompt], tokenized: Sequence[TokenizedPrompt] = ()
    ) -> Any:
        texts = [one.text for one in batch]
        special = adds_special_tokens(self.processor, texts[0])
        tokens = {"padding": True, "return_tensors": "pt", "add_special_tokens": special}
        images = [sha for one in batch for sha in one.image_keys]
        if self.vision_cache is None or not images:
            decoded = [[one.decoded[sha] for sha in one.image_keys] for one in batch]
            inputs = self.processor(text=texts, images=decoded if images else None, **tokens)
            return inputs.to(self.model.device, self.model.dtype)
        features = self.vision_cache.features(images, decoded_images(batch))
        tokenizer = self.processor.tokenizer
        encoded = (
            tokenizer.pad({"input_ids": [row.ids for row in tokenized]}, return_tensors="pt")
            if tokenized
            else tokenizer(
                [self.vision_cache.expand_placeholders(text) for text in texts], **tokens
            )
        ).to(self.model.device)
        ids = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        return ids | self.vision_cache.model_inputs([features[sha] for sha in images])

    def _settings(self, max_tokens: int, **more: bool) -> Any:
        start = getattr(self.model.config.get_text_config(), "decoder_start_token_id", None)
        return hf.GenerationConfig(
            decoder_start_token_id=start,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=sorted(self.ends),
            pad_token_id=self.processor.tokenizer.pad_token_id,
            **more,
        )


def make_column_major(model: nn.Module, min_bytes: int = MIN_BYTES) -> None:
    """Convert the weights of linear layers to column-major order in place, if they take at least
    `min_bytes` in total.

    Shapes and values stay the same. Weights that transformers maps from a file become private
    memory, which processes do not share and the system cannot drop. For one token, MKL multiplies
    by a row-major matrix at about half of the memory bandwidth. Layers with fewer outputs than
    inputs stay row-major, which is faster for them. A tied embedding changes with its linear layer.
    `save_pretrained` fails for tied weights in this order (transformers 5.23): make them contiguous
    first.
    """
    linears = [
        one
        for one in model.modules()
        if isinstance(one, nn.Linear) and one.out_features >= one.in_features
    ]
    weights = {id(one.weight): one.weight for one in linears}.values()
    if sum(weight.nbytes for weight in weights) < min_bytes:
        return
    for weight in weights:
        weight.data = weight.data.t().contiguous().t()
