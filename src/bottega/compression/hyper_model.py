"""What has pictures and what has none: a processor takes either in one batch, not both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bottega.kv_prefix import NO_LOGITS, Batch, decoder_config
from bottega.types import Example


def kinds(pictured: Sequence[bool]) -> list[list[int]]:
    """The places of those with pictures and of those without, those there are."""
    both = [[place for place, one in enumerate(pictured) if one is kind] for kind in (True, False)]
    return [places for places in both if places]


def parts(passages: Sequence[Example]) -> list[list[Example]]:
    return [[passages[place] for place in places] for places in kinds(_pictured(passages))]


def map_by_images(
    passages: Sequence[Example], read: Callable[[Sequence[Example]], Tensor]
) -> Tensor:
    """(passages, ...): what `read` makes of each kind, put together in their order."""
    places = [place for kind in kinds(_pictured(passages)) for place in kind]
    rows = torch.cat([read(part) for part in parts(passages)])
    return rows[torch.tensor(places).argsort().to(rows.device)]


def _pictured(passages: Sequence[Example]) -> list[bool]:
    return [bool(one.query.images) for one in passages]


Inputs = Mapping[str, Any]
OF_IDS = ("input_ids", "attention_mask", "position_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class HiddenStates:
    """Hidden states (batch, length, width) of texts, the mask of their tokens, and `prompted`
    (batch, prompts, width), those of prompts that stood behind each text."""

    hidden: Tensor
    mask: Tensor
    prompted: Tensor | None = None


class HyperModel:
    """A vision-language model as the paper's hyperMLLM (eq. 1 and 2).

    `layer` is the one whose hidden states are read, as transformers counts them: 0 are the
    embeddings, -1 comes after the last norm. In an encoder-decoder (FlanT5) they are the encoder's,
    and prompts stand in the decoder. The model is frozen; gradients only pass through it on their
    way to the prompts.
    """

    def __init__(self, model: Any, *, layer: int = -1) -> None:
        self.model = model.requires_grad_(False).eval()
        self.layer = layer

    @property
    def device(self) -> torch.device:
        """Where a compressor has to be: it is made on the CPU."""
        found: torch.device = self.model.device
        return found

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
        """Token embeddings (n, width), in full precision: small steps of training would be lost
        in the model's."""
        embedded: Tensor = self.model.get_input_embeddings()(ids.to(self.device))
        return embedded.detach().float()

    def read(self, inputs: Inputs, prompts: Tensor | None = None) -> HiddenStates:
        """`inputs` as the model takes them, left padded; `prompts` (n, width) stand behind each.

        The text is read without gradient, and once: it does not depend on the prompts. Raises
        `SettingError` for inputs that a model would misread in silence.
        """
        batch, rows = Batch(self.model, inputs), None
        if prompts is not None:
            weights = self.model.get_input_embeddings().weight
            rows = prompts.to(weights.device, weights.dtype).expand(len(batch.ids), -1, -1)
        return self._encoded(batch, rows) if batch.is_encoder_decoder else self._passed(batch, rows)

    def _passed(self, batch: Batch, rows: Tensor | None) -> HiddenStates:
        """Text and prompts through one stack of layers, the prompts on the cache of the text."""
        if rows is None and (layer := self._unread(batch)) is not None:
            return HiddenStates(_reaching(layer, batch), batch.mask)
        if rows is not None and self._joins and not torch.is_grad_enabled():
            return self._at_once(batch, rows)
        with torch.no_grad():
            out = batch.output(
                **batch.behind(0),
                use_cache=rows is not None,
                output_hidden_states=[self.layer],
                logits_to_keep=NO_LOGITS,
            )
        hidden = out.hidden_states[self.layer]
        if rows is None:
            return HiddenStates(hidden, batch.mask)
        mask, positions = batch.followed(rows.shape[1])
        prompted = self._decoder(
            inputs_embeds=rows,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=out.past_key_values,
        )
        return HiddenStates(hidden, batch.mask, prompted.last_hidden_state)

    def _unread(self, batch: Batch) -> nn.Module | None:
        """The layer that takes the states that are read; what comes from there on tells nothing."""
        layers = getattr(self._decoder, "layers", ())
        known = len(layers) == batch.geometry.layers and 0 <= self.layer < len(layers)
        return layers[self.layer] if known else None

    @property
    def _joins(self) -> bool:
        """Whether the model puts pictures into embeddings that it is given."""
        return hasattr(getattr(self.model, "model", None), "get_placeholder_mask")

    def _at_once(self, batch: Batch, rows: Tensor) -> HiddenStates:
        """Where no gradient is wanted, both together: two passes of a few tokens take twice the
        time of one."""
        inputs = batch.behind(0)
        mask, positions = batch.followed(rows.shape[1])
        out = self.model.model(
            inputs_embeds=torch.cat([self.model.get_input_embeddings()(batch.ids), rows], dim=1),
            attention_mask=mask,
            position_ids=torch.cat([inputs["position_ids"], positions], dim=-1),
            output_hidden_states=[self.layer],
            use_cache=False,
            **{name: one for name, one in inputs.items() if name not in OF_IDS},
        )
        length = batch.ids.shape[1]
        hidden = out.hidden_states[self.layer][:, :length]
        return HiddenStates(hidden, batch.mask, out.last_hidden_state[:, length:])

    def _encoded(self, batch: Batch, rows: Tensor | None) -> HiddenStates:
        """The text through the encoder, prompts through the decoder, which looks at the text."""
        with torch.no_grad():
            text = self.model.get_encoder()(
                inputs_embeds=self._shown(batch),
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
        """Without the layer that makes logits: a BLIP's decoder is a language model that has
        one."""
        return self.model.get_decoder().get_decoder()

    def _shown(self, batch: Batch) -> Tensor:
        """Embeddings of a text and its pictures, as BLIP's wrappers put them together: they would
        run the decoder, too."""
        embedded: Tensor = self.model.get_input_embeddings()(batch.ids)
        pictures = {
            name: one
            for name, one in batch.inputs.items()
            if name not in ("input_ids", "attention_mask")
        }
        if not pictures:
            return embedded
        features = self.model.get_image_features(**pictures, return_dict=True).pooler_output
        places = self.model.get_placeholder_mask(batch.ids, inputs_embeds=embedded)
        return embedded.masked_scatter(places, features.to(embedded))


class _ReachedError(Exception):
    def __init__(self, hidden: Tensor) -> None:
        super().__init__("states that are wanted, and nothing behind them")
        self.hidden = hidden


@torch.no_grad()
def _reaching(layer: nn.Module, batch: Batch) -> Tensor:
    """The hidden states that come to a layer, which is not run."""

    def stop(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        raise _ReachedError(given[0])

    hook = layer.register_forward_pre_hook(stop)
    try:
        batch.output(**batch.behind(0), use_cache=False, logits_to_keep=NO_LOGITS)
    except _ReachedError as reached:
        return reached.hidden
    finally:
        hook.remove()
    raise AssertionError("unreachable: a pass goes through all layers")


def sentence_prompts(hyper: HyperModel, ids: Tensor, count: int) -> Tensor:
    """PIPE: `count` prompts that begin as the embeddings of a sentence's tokens, which is repeated
    or cut to that length."""
    times = -(-count // len(ids))
    return hyper.embed(ids.repeat(times)[:count])
