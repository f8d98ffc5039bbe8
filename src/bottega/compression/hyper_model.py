"""Frozen vision-language model whose hidden states a compressor reads (the paper's hyperMLLM)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bottega.kv_prefix import KEEP_NO_LOGITS, Batch, decoder_config
from bottega.types import Example


def image_groups(has_images: Sequence[bool]) -> list[list[int]]:
    """Return the indices of items with images and of items without, leaving out empty groups. A
    processor accepts either kind in one batch, but not both."""
    both = [[i for i, one in enumerate(has_images) if one is kind] for kind in (True, False)]
    return [group for group in both if group]


def split_by_images(passages: Sequence[Example]) -> list[list[Example]]:
    """Return the passages with images and those without, leaving out empty groups."""
    groups = image_groups([bool(one.query.images) for one in passages])
    return [[passages[i] for i in group] for group in groups]


def map_by_images(
    passages: Sequence[Example], read: Callable[[Sequence[Example]], Tensor]
) -> Tensor:
    """Apply `read` to passages with images and to those without; return rows in input order."""
    groups = image_groups([bool(one.query.images) for one in passages])
    rows = torch.cat([read([passages[i] for i in group]) for group in groups])
    # The rows are in the order of the groups; argsort inverts that permutation.
    order = torch.tensor([i for group in groups for i in group]).argsort()
    return rows[order.to(rows.device)]


Inputs = Mapping[str, Any]
TOKEN_INPUTS = ("input_ids", "attention_mask", "position_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class HiddenStates:
    """Hidden states of texts (batch, length, width) and the mask of their tokens. `prompted`
    (batch, prompts, width) are the states of prompts appended to each text."""

    hidden: Tensor
    mask: Tensor
    prompted: Tensor | None = None


class HyperModel:
    """Vision-language model as the paper's hyperMLLM (eq. 1 and 2). `layer` selects the hidden
    states, as transformers counts them: 0 are the embeddings, -1 is the output of the last norm. In
    an encoder-decoder (FlanT5) they are the encoder's, and prompts enter the decoder. The model is
    frozen; gradients pass through it to the prompts only."""

    def __init__(self, model: Any, *, layer: int = -1) -> None:
        self.model = model.requires_grad_(False).eval()
        self.layer = layer

    @property
    def device(self) -> torch.device:
        """Device of the model, to which a compressor must move."""
        device: torch.device = self.model.device
        return device

    @property
    def width(self) -> int:
        return int(decoder_config(self.model).hidden_size)

    @property
    def depth(self) -> int:
        return int(decoder_config(self.model).num_hidden_layers)

    @property
    def has_layer(self) -> bool:
        return -self.depth - 1 <= self.layer <= self.depth

    def embed(self, ids: Tensor) -> Tensor:
        """Return token embeddings (n, width) in full precision. Small training steps would be lost
        in the model's own precision."""
        embedded: Tensor = self.model.get_input_embeddings()(ids.to(self.device))
        return embedded.detach().float()

    def read(self, inputs: Inputs, prompts: Tensor | None = None) -> HiddenStates:
        """Return hidden states of left-padded `inputs`, with `prompts` (n, width) appended to each.
        The text is read once and without gradients, as it does not depend on the prompts. Raises
        `SettingError` for inputs that the model would silently misread."""
        batch, rows = Batch(self.model, inputs), None
        if prompts is not None:
            weights = self.model.get_input_embeddings().weight
            rows = prompts.to(weights.device, weights.dtype).expand(len(batch.ids), -1, -1)
        return self._encode(batch, rows) if batch.is_encoder_decoder else self._decode(batch, rows)

    def _decode(self, batch: Batch, rows: Tensor | None) -> HiddenStates:
        """Run text, then prompts on the KV cache of the text, through a decoder-only model."""
        layers = getattr(self._decoder, "layers", ())
        has_input = len(layers) == batch.geometry.layers and 0 <= self.layer < len(layers)
        if rows is None and has_input:  # later layers need not run
            return HiddenStates(_input_of(layers[self.layer], batch), batch.mask)
        merges_images = hasattr(getattr(self.model, "model", None), "get_placeholder_mask")
        if rows is not None and merges_images and not torch.is_grad_enabled():
            return self._decode_together(batch, rows)
        # The first pass needs no gradients: only the prompts of the second are trained.
        with torch.no_grad():
            out = batch.output(
                **batch.inputs_after(0),
                use_cache=rows is not None,
                output_hidden_states=[self.layer],
                logits_to_keep=KEEP_NO_LOGITS,
            )
        hidden = out.hidden_states[self.layer]
        if rows is None:
            return HiddenStates(hidden, batch.mask)
        mask, positions = batch.continuation(rows.shape[1])
        prompted = self._decoder(
            inputs_embeds=rows,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=out.past_key_values,
        )
        return HiddenStates(hidden, batch.mask, prompted.last_hidden_state)

    def _decode_together(self, batch: Batch, rows: Tensor) -> HiddenStates:
        """Run text and prompts in one pass: two passes of a few tokens take twice the time."""
        inputs = batch.inputs_after(0)
        mask, positions = batch.continuation(rows.shape[1])
        out = self.model.model(
            inputs_embeds=torch.cat([self.model.get_input_embeddings()(batch.ids), rows], dim=1),
            attention_mask=mask,
            position_ids=torch.cat([inputs["position_ids"], positions], dim=-1),
            output_hidden_states=[self.layer],
            use_cache=False,
            **{name: one for name, one in inputs.items() if name not in TOKEN_INPUTS},
        )
        length = batch.ids.shape[1]
        hidden = out.hidden_states[self.layer][:, :length]
        return HiddenStates(hidden, batch.mask, out.last_hidden_state[:, length:])

    def _encode(self, batch: Batch, rows: Tensor | None) -> HiddenStates:
        """Run the text through the encoder, and the prompts through the decoder."""
        with torch.no_grad():
            text = self.model.get_encoder()(
                inputs_embeds=self._embeddings(batch),
                attention_mask=batch.mask,
                output_hidden_states=[self.layer],
            )
        hidden = text.hidden_states[self.layer]
        if rows is None:
            return HiddenStates(hidden, batch.mask)
        prompted = self._decoder(
            inputs_embeds=rows,
            encoder_hidden_states=text.last_hidden_state,
            encoder_attention_mask=batch.mask,
            use_cache=False,
        )
        return HiddenStates(hidden, batch.mask, prompted.last_hidden_state)

    @property
    def _decoder(self) -> Any:
        """The decoder without a logits layer (BLIP's `get_decoder` returns a language model)."""
        return self.model.get_decoder().get_decoder()

    def _embeddings(self, batch: Batch) -> Tensor:
        """Return embeddings of text and images, merged as BLIP's wrappers do; the wrappers
        themselves would also run the decoder."""
        embedded: Tensor = self.model.get_input_embeddings()(batch.ids)
        images = {name: one for name, one in batch.inputs.items() if name not in TOKEN_INPUTS}
        if not images:
            return embedded
        features = self.model.get_image_features(**images, return_dict=True).pooler_output
        mask = self.model.get_placeholder_mask(batch.ids, inputs_embeds=embedded)
        return embedded.masked_scatter(mask, features.to(embedded))


class _ReachedError(Exception):
    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the input of the layer was reached")
        self.hidden = hidden


@torch.no_grad()
def _input_of(layer: nn.Module, batch: Batch) -> Tensor:
    """Return the hidden states that enter a layer, without running it or later layers."""

    def stop(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        raise _ReachedError(given[0])

    hook = layer.register_forward_pre_hook(stop)
    try:
        batch.output(**batch.inputs_after(0), use_cache=False, logits_to_keep=KEEP_NO_LOGITS)
    except _ReachedError as reached:
        return reached.hidden
    finally:
        hook.remove()
    raise AssertionError("unreachable: a pass goes through all layers")


def sentence_prompts(hyper: HyperModel, ids: Tensor, count: int) -> Tensor:
    """Return `count` initial prompts: the embeddings of a sentence's tokens (PIPE). The sentence is
    repeated or cut to that length."""
    times = -(-count // len(ids))
    return hyper.embed(ids.repeat(times)[:count])
