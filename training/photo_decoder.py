"""Decoder of the photograph model: hand-written weights that compute a soft vote.

It reads demonstrations as the decoder of `training.circuits` does, with three differences. The
question is not read. The vote is soft: a demonstration counts exp(10 x cosine), so the label of one
demonstration does not simply win. A second head of layer 1 compares the most similar demonstration
with a fixed similarity and answers "unknown" below it.

The vote is copied into dimensions of its own, and the MLP of layer 1 raises every token whose share
exceeds about a quarter: the softmax over 1,152 tokens then gives roughly the share as the
confidence. Without that, tokens of no demonstration would hold most of the probability of a divided
vote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import FastVlmForConditionalGeneration

from training.architecture import fastvlm
from training.rotary import RESERVED, Rotary, peak_profile
from training.tokenizer import (
    ANSWER,
    BOS,
    SYSTEM,
    UNKNOWN,
    USER,
    VOCABULARY,
    piece_id,
    token_id,
)
from training.weights import (
    CONTEXT_COPY,
    CONTEXT_NORM,
    FLAG,
    KEY_COPY,
    NEAREST,
    PREVIOUS,
    RECENT,
    RECENT_BEFORE,
    TEXT_SIZE,
    TOKEN_COPY,
    Attention,
)

HEADS = 4
ROTARY = Rotary(head_dim=384, theta=1e30)
MATCH, NOVELTY = range(2)  # heads of layer 1
SHORTER, SHORT_WIDTH, CODE = CODE_WIDTHS = (24, 48, 128)
MATCH_SIZE = 256  # dimensions of an image's match key


def _after(before: slice | int, size: int) -> slice:
    start = before.stop if isinstance(before, slice) else before + 1
    return slice(start, start + size)


KEY = slice(0, MATCH_SIZE)  # match key of a position: the last image
TEXT = KEY.stop  # set for text; zero for images and for <user>, <system> and <bos>
TOKEN = _after(TEXT, CODE)  # code of the token
SHORT = slice(TOKEN.start, TOKEN.start + SHORT_WIDTH)
BEFORE = _after(TOKEN, SHORT_WIDTH)  # SHORT of the previous token
CONTEXT = _after(BEFORE, SHORTER)  # fading mixture of the last tokens
EARLIER = _after(CONTEXT, SHORTER)  # CONTEXT of the previous token
OPENS = EARLIER.stop  # set for <user> and <system>
STARTS, IN_QUESTION, BLIND, ANSWERS = (OPENS + i for i in range(1, 5))
VOTE = _after(ANSWERS, CODE)  # the copied tokens by their shares
HIDDEN = 616
UNITS = 2 * VOCABULARY
assert VOTE.stop <= HIDDEN

TEXT_NORM = (TEXT_SIZE**2 + 1) ** 0.5
OPENER_NORM = (2.0 - SHORT_WIDTH / CODE) ** 0.5
NORM_1 = 3.37  # of text positions in layer 1, and after its attention
NORM_WRITTEN = 3.43
IN_QUESTION_INPUT = 0.1  # size of this flag beside an image of norm 1 in the projector's output


@dataclass(frozen=True)
class Strengths:
    """Scores in nats, and shares and sizes in logits; chosen on classes that no evaluation uses."""

    match: float = 10.0  # at cosine 1
    novelty: float = 60.0  # the same, of the head that decides between an answer and "unknown"
    least_similar: float = 0.12  # below this cosine no demonstration is similar
    before: float = 140.0
    context: float = 60.0
    in_question: float = 220.0
    blind: float = 40.0  # the opening "unknown" yields to any demonstration with an image
    unknown: float = 4.0  # share of "unknown" if no demonstration is similar
    presence: float = 5.0  # logits that a shown token gains
    shown: tuple[float, float] = (0.2, 0.3)  # shares over which it gains them
    share: float = 6.5  # logits at share 1


def build_model(vision_config: dict[str, Any]) -> Any:
    return fastvlm(
        vision_config,
        ROTARY,
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=UNITS,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        tie_word_embeddings=False,
    )


@torch.no_grad()
def install(
    model: FastVlmForConditionalGeneration, codes: Tensor, tokenizer: Any, strengths: Strengths
) -> None:
    """Write the circuits into the decoder of a new model. `codes`: (VOCABULARY, CODE)."""
    language = model.model.language_model
    for layer in language.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            linear.weight.zero_()
            if linear.bias is not None:
                linear.bias.zero_()
        for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            linear.weight.zero_()
    language.embed_tokens.weight.copy_(_embeddings(codes))
    _install_reading(language.layers[0])
    _install_match(language.layers[1], codes[piece_id(tokenizer, UNKNOWN)], strengths)
    _install_presence(language.layers[1].mlp, codes, strengths)
    root = HIDDEN**0.5 / NORM_WRITTEN
    head = model.lm_head.weight
    head.zero_()
    head[:, VOTE] = codes * strengths.share / root


def _embeddings(codes: Tensor) -> Tensor:
    table = torch.zeros(VOCABULARY, HIDDEN)
    table[:, TOKEN] = codes
    table[:, TEXT] = TEXT_SIZE
    for token, flag in ((USER, OPENS), (SYSTEM, OPENS), (BOS, STARTS)):
        row = table[token_id(token)]
        row[flag], row[TEXT] = 1.0, 0.0
        row[SHORT] = 0.0  # the head that copies images also copies these tokens
    table[token_id(ANSWER), ANSWERS] = FLAG
    return table


def _install_reading(layer: Any) -> None:
    """Install the nearest image, the previous token and two mixtures of the last tokens, as in
    `training.circuits`."""
    shared = Attention(layer, ROTARY)
    root = shared.width**0.5
    token_scale, opener_scale = root / TEXT_NORM, root / OPENER_NORM
    shared.offer_distances(ROTARY.pairs - RESERVED)
    text, opens, starts = (int(slot) for slot in ROTARY.slow_slots(0, 3))
    shared.offer_flag(text, TEXT)
    shared.offer_flag(opens, OPENS)
    shared.offer_flag(starts, STARTS)
    image = shared.offer_values(0, KEY)
    short = shared.offer_values(KEY.stop, SHORT)
    flags = [shared.offer_values(int(short[-1]) + 1 + i, f) for i, f in enumerate((OPENS, STARTS))]

    nearest = shared.head(NEAREST)
    nearest.prefer_distance(ROTARY.recency_profile())
    nearest.prefer_flag(text, -15000.0, token_scale * TEXT_SIZE)
    nearest.prefer_flag(opens, -10.0, opener_scale)
    nearest.copy(image, KEY, KEY_COPY / root)
    nearest.copy(flags[0], IN_QUESTION, KEY_COPY / opener_scale)
    nearest.copy(flags[1], BLIND, KEY_COPY / opener_scale)

    previous = shared.head(PREVIOUS)
    previous.prefer_distance(ROTARY.shift(peak_profile(), 1))
    previous.copy(short, BEFORE, TOKEN_COPY / (token_scale * (SHORT_WIDTH / CODE) ** 0.5))

    mixed = CONTEXT_COPY / (token_scale * (SHORTER / CODE) ** 0.5 * CONTEXT_NORM)
    profile = ROTARY.context_profile()
    recent, before = shared.head(RECENT), shared.head(RECENT_BEFORE)
    for head in (recent, before):  # values of images in the same slots are no context
        head.prefer_flag(text, 25.0, token_scale * TEXT_SIZE)
    recent.prefer_distance(profile)
    recent.copy(short[:SHORTER], CONTEXT, mixed)
    # Empty at <answer>: neither a question nor an earlier label may change the vote.
    recent.seek(ANSWERS, starts, 2000.0, token_scale * FLAG * opener_scale)
    before.prefer_distance(ROTARY.shift(profile, 1))
    before.copy(short[:SHORTER], EARLIER, mixed)


def _install_match(layer: Any, unknown: Tensor, strengths: Strengths) -> None:
    shared = Attention(layer, ROTARY)
    scale = shared.width**0.5 / NORM_1
    match, novelty = shared.head(MATCH), shared.head(NOVELTY)
    in_question, blind = (int(slot) for slot in ROTARY.slow_slots(0, 2))
    shared.offer_flag(in_question, IN_QUESTION)
    shared.offer_flag(blind, BLIND)
    short = (SHORT_WIDTH / CODE) ** 0.5 * TOKEN_COPY
    used = 2
    for query, key, nats, size in (
        (KEY, KEY, strengths.match, KEY_COPY**2),
        (SHORT, BEFORE, strengths.before, short),
        (CONTEXT, EARLIER, strengths.context, CONTEXT_COPY**2),
    ):
        used = match.match(query, key, used, nats, size * scale**2)
    match.prefer_flag(in_question, -strengths.in_question, scale * KEY_COPY)
    # Both heads share their keys; they differ in the weight of the image.
    novelty.q.copy_(match.q)
    novelty.q_bias.copy_(match.q_bias)
    novelty.q[:, KEY] *= strengths.novelty / strengths.match
    # An image's own position matches best: the flag must outweigh the larger weight there, too.
    novelty.q_bias[in_question] *= 4
    match.prefer_flag(blind, -strengths.blind, scale * KEY_COPY)
    # Only at <answer>, and only as much as a demonstration of the least similarity.
    aside = 400.0
    novelty.prefer_flag(blind, -aside, scale * KEY_COPY)
    sought = aside + strengths.novelty * strengths.least_similar
    novelty.seek(ANSWERS, blind, sought, scale * FLAG * scale * KEY_COPY)
    token = shared.offer_values(0, TOKEN)
    foreign = shared.offer_values(int(token[-1]) + 1, BLIND)
    match.copy(token, VOTE, 1 / scale)
    novelty.o[VOTE, int(foreign[0])] = unknown * strengths.unknown / (scale * KEY_COPY)


def _install_presence(mlp: Any, codes: Tensor, strengths: Strengths) -> None:
    """Add `presence` logits to each token whose share exceeds `shown`: a step of two gated units a
    token, 8 units of its gate wide."""
    low, high = strengths.shown
    scale = HIDDEN**0.5 / NORM_WRITTEN
    slope = 8 / (high - low)
    for part, (way, edge) in enumerate(((1.0, low), (-1.0, high))):
        rows = slice(part * VOCABULARY, (part + 1) * VOCABULARY)
        mlp.gate_proj.weight[rows, VOTE] = codes * slope / scale
        mlp.gate_proj.weight[rows, TEXT] = -edge * slope / (scale * TEXT_SIZE)
        # After its first token a label is hardly ever in doubt: the step is twice as high there.
        mlp.up_proj.weight[rows, TEXT] = 2 / (scale * TEXT_SIZE)
        mlp.up_proj.weight[rows, ANSWERS] = -1 / (scale * FLAG)
        mlp.down_proj.weight[VOTE, rows] = (
            way * codes.T * strengths.presence / (8 * strengths.share)
        )
