"""A frozen vision-language model with a prefix of keys and values in front of its prompt.

g_base(v, q; Theta) of RACC's equation 5. The prompt stands at the positions behind the prefix. In
an encoder-decoder (FlanT5) the prefix stands in front of the answer, in the decoder's
self-attention; the encoder reads the prompt as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bottega.errors import SettingError
from bottega.prefixing.base import Batch, own_offsets
from bottega.prefixing.kv import KeyValues

FIXED = (
    "generation_config",
    "past_key_values",
    "max_length",
    "return_dict_in_generate",
    "decoder_start_token_id",
)


@dataclass(frozen=True, eq=False)
class Scores:
    """`logits` are (batch, length, vocabulary) for the prompt's tokens, or for the answer's in an
    encoder-decoder; `loss` is the mean over the labels that count."""

    logits: Tensor
    loss: Tensor | None


def forward(
    model: nn.Module,
    prefix: KeyValues,
    inputs: Mapping[str, Tensor],
    labels: Tensor | None = None,
) -> Scores:
    """One pass that carries gradients to the prefix.

    `inputs` are a processor's, padded on either side; their mask is (batch, length), without the
    prefix. `labels` are (batch, length), beside the ids, or the answers (batch, answer) of an
    encoder-decoder, -100 where nothing is to be learned. The prefix is cast to the model's dtype.
    Raises `SettingError`.
    """
    batch = Batch(model, inputs)
    output = batch.door(
        **batch.behind(prefix.length),
        past_key_values=batch.cache(batch.fitted(prefix)),
        labels=labels,
        use_cache=True,
    )
    return Scores(output.logits, output.loss)


def generate(
    model: nn.Module,
    prefix: KeyValues,
    inputs: Mapping[str, Tensor],
    *,
    max_new_tokens: int,
    num_beams: int = 1,
    num_return_sequences: int = 1,
    **settings: object,
) -> Tensor:
    """The new tokens alone, (batch x num_return_sequences, at most max_new_tokens).

    `inputs` as in `forward`, padded on the left. `settings` are those of transformers' `generate`;
    what the model's own generation config says holds where they are silent. Logits processors and
    stopping criteria see `prefix.length` dummy tokens in front of the prompt. Raises
    `SettingError`.
    """
    if wrong := [name for name in FIXED if name in settings]:
        raise SettingError(
            f"generate behind a prefix takes no {', '.join(wrong)}",
            hint="give the settings one by one, the length as max_new_tokens",
        )
    batch = Batch(model, inputs)
    if not (batch.is_encoder_decoder or bool(batch.mask[:, -1].all())):
        raise SettingError(
            "the prompts are padded on the right: the answer would follow the padding",
            hint='set the tokenizer\'s padding_side to "left"',
        )
    rows = batch.fitted(prefix).repeat(max(num_beams, num_return_sequences))
    arguments = batch.with_dummies(prefix.length)
    with own_offsets(model):
        tokens: Tensor = batch.door.generate(
            **settings,
            **arguments,
            past_key_values=batch.cache(rows),
            max_new_tokens=max_new_tokens,
            num_beams=num_beams,
            num_return_sequences=num_return_sequences,
        )
    shown = arguments["decoder_input_ids" if batch.is_encoder_decoder else "input_ids"]
    return tokens[:, shown.shape[1] :]


def read(model: nn.Module, inputs: Mapping[str, Tensor]) -> KeyValues:
    """The keys and values of a real text, (batch, kv_heads, length, head_dim), at the positions
    from 0, without gradients: a start for a learned prefix, or a text read ahead.

    Every row fills its length, as a prefix has no mask. In an encoder-decoder they are the
    decoder's own, of `decoder_input_ids`. Behind pictures, which take fewer positions than tokens
    in Qwen's models, a prompt of theirs stands later than in the real text. Raises `SettingError`.
    """
    batch = Batch(model, inputs)
    if not (batch.is_encoder_decoder or bool(batch.mask.all())):
        raise SettingError(
            "the texts are padded, and a prefix has no mask",
            hint="read texts of one length together, or each alone",
        )
    with torch.no_grad(), own_offsets(model):
        cache = batch.output(**batch.inputs, use_cache=True).past_key_values
    own = getattr(cache, "self_attention_cache", cache)
    return KeyValues(tuple((layer.keys, layer.values) for layer in own.layers))
