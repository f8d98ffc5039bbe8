"""Circuits of the decoder: in-context learning by hand-written weights.

Gradient descent alone found no visual matching within 600 steps, so circuits are installed;
training could only refine them.

Layer 0 gives each position five facts, one per head: the nearest image before it (or that a turn
was opened since, as in a question), the previous token, a fading mixture of the last tokens, the
same mixture one position earlier, and the topic, the last word that names a requested property. Its
MLP selects the match key of a position: the image or, after a question about a property, the value
of that property (`training.key_circuit`).

Layer 1 has one matching head. A position attends to positions in earlier answers that follow the
same token in the same context (`<answer>` finds the first tokens of earlier answers, and each later
token its successor) and weighs them by the match of their keys: a vote of similar demonstrations.
The value is the token at that position. Answers of any length are copied token by token until
`<end>`. Statements of passages are found in the same way. The MLP does the sums
(`training.arithmetic_circuit`).

Attention scores below are in nats: differences of log attention weight.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import FastVlmForConditionalGeneration

from bottega.tasks.glyphs import NAMES
from bottega.tasks.rules import RULES
from bottega.tasks.task import STATES, TOPIC_WORDS
from training import architecture as a
from training.arithmetic_circuit import install_sums
from training.concepts import CONCEPTS
from training.key_circuit import install_image_barrier, install_keys, install_steps
from training.naming_circuit import flag_named_words, install_digit_circuit, install_naming
from training.rotary import RESERVED, peak_profile
from training.tokenizer import ANSWER, BOS, NUMBERS, SYSTEM, USER, VOCABULARY, piece_id, token_id
from training.tower import EMBEDDING
from training.vision import VisionReader
from training.weights import (
    ASKING,
    CONTEXT_COPY,
    CONTEXT_NORM,
    FLAG,
    KEY_COPY,
    MATCH,
    NEAREST,
    NORM_0,
    NORM_1,
    NORM_WRITTEN,
    OPENER_NORM,
    PREVIOUS,
    RECENT,
    RECENT_BEFORE,
    RULE_GAIN,
    SEEN_COPY,
    SEEN_INPUT,
    TEXT_NORM,
    TEXT_SIZE,
    TOKEN_COPY,
    TOPIC_COPY,
    Attention,
    Head,
    Units,
    dims,
)

STATING = 0.87


@dataclass(frozen=True)
class Strengths:
    """Scores of the matching head in nats; `install` states their constraints."""

    image: float = 30.0  # at cosine 1; the only one that is tuned
    before: float = 140.0
    context: float = 60.0
    in_question: float = 220.0
    blind: float = 22.0  # the opening "unknown" yields to any demonstration with an image
    write: float = 6.0  # size of the copied token against the position's own


CODE_WIDTHS = (a.SHORTER_CODE, a.SHORT_CODE, a.CODE)


def spherical_codes(
    seed: int = 0, steps: int = 250, widths: tuple[int, int, int] = CODE_WIDTHS
) -> Tensor:
    """Return distinct unit codes of shape (VOCABULARY, last width).

    Their prefixes of the other widths are well-separated codes, too: the copies of earlier tokens
    keep only a prefix.
    """
    rng = torch.Generator().manual_seed(seed)
    code = torch.randn(VOCABULARY, widths[-1], generator=rng).requires_grad_()
    optimizer = torch.optim.Adam([code], lr=0.03)
    others = ~torch.eye(VOCABULARY, dtype=torch.bool)
    for _ in range(steps):
        loss = torch.zeros(())
        for width, weight in zip(widths, (0.3, 1.0, 1.0), strict=True):
            unit = F.normalize(_unit_parts(code, widths)[:, :width], dim=-1)
            loss = loss + weight * (20 * (unit @ unit.T)[others]).logsumexp(0)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    with torch.no_grad():
        codes: Tensor = _unit_parts(code, widths)
    return codes


def _unit_parts(code: Tensor, widths: tuple[int, int, int]) -> Tensor:
    """Normalize parts to norms in proportion to their widths, so a prefix has the same norm in all
    codes.
    """
    shorter, short, full = widths
    sizes = [shorter, short - shorter, full - short]
    parts = torch.split(code, sizes, dim=1)
    scaled = [
        F.normalize(part, dim=-1) * math.sqrt(size / full)
        for part, size in zip(parts, sizes, strict=True)
    ]
    return torch.cat(scaled, dim=1)


@torch.no_grad()
def install(
    model: FastVlmForConditionalGeneration,
    codes: Tensor,
    tokenizer: Any,
    strengths: Strengths,
    is_master: bool = False,
    seed: int = 0,
) -> None:
    """Write the circuits into the decoder of a new model.

    Constraints on the strengths: a position without the right previous token scores at most image +
    context, at a position's own answer; the opening demonstration (before - blind) must score above
    that, and any real one (before - 0.4 image) above the opening one. `in_question` outweighs all
    others.
    """
    language = model.model.language_model
    rng = torch.Generator().manual_seed(seed)
    for layer in language.layers:
        attention = layer.self_attn
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            linear.weight.zero_()
            if linear.bias is not None:
                linear.bias.zero_()
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
            linear.weight.copy_(
                torch.randn(linear.weight.shape, generator=rng) / linear.in_features**0.5
            )
        layer.mlp.down_proj.weight.zero_()
    table = embeddings(codes, tokenizer, language.config.hidden_size)
    units = Units(language.layers[0].mlp, NORM_0)
    written = Units(language.layers[1].mlp, NORM_WRITTEN)
    _install_reading(language.layers[0])
    install_keys(units, is_master)
    install_steps(units)
    install_image_barrier(units)
    _install_match(language.layers[1], strengths)
    install_sums(written, codes, tokenizer)
    if is_master:
        flag_named_words(table, tokenizer)
        install_digit_circuit(language.layers, units)
        install_naming(written, codes, tokenizer)
    language.embed_tokens.weight.copy_(table)


def embeddings(codes: Tensor, tokenizer: Any, hidden: int) -> Tensor:
    table = torch.zeros(VOCABULARY, hidden)
    table[:, a.TOKEN] = codes
    for token, flag in ((USER, a.OPENS), (SYSTEM, a.OPENS), (BOS, a.STARTS)):
        table[token_id(token), flag] = 1.0
        # The head that copies images also copies these tokens: their code must be empty.
        table[token_id(token), a.SHORT] = 0.0
    answer = token_id(ANSWER)
    for word, flags in _special_words(tokenizer):
        table[word, flags] = FLAG
    # A verb such as "is" opens a statement as <answer> opens an answer, with less weight: if the
    # verb is part of a label, the beginning of the label must win.
    for verb in STATES:
        table[piece_id(tokenizer, f" {verb}"), a.SHORT] = STATING * table[answer, a.SHORT]
    table[answer, a.ANSWERS] = FLAG
    table[:, a.TEXT] = TEXT_SIZE
    table[[token_id(token) for token in (USER, SYSTEM, BOS)], a.TEXT] = 0.0
    return table


def _special_words(tokenizer: Any) -> list[tuple[int, list[int]]]:
    """Return token ids and their flags."""
    found = []
    for topic, words in zip(dims(a.TOPIC).tolist(), TOPIC_WORDS.values(), strict=True):
        found += [(piece_id(tokenizer, f" {word}"), [topic]) for word in words]
    for name, dim in zip(NAMES, dims(a.NAMED).tolist(), strict=True):
        found.append((piece_id(tokenizer, f" {name}"), [dim]))
    for rule, dim in zip(RULES, dims(a.RULE).tolist(), strict=True):
        found.append((piece_id(tokenizer, rule), [dim, a.IS_RULE]))
    found += [(piece_id(tokenizer, f" {number}"), [a.NUMBER]) for number in NUMBERS]
    found.append((piece_id(tokenizer, ":"), [a.COLON]))
    return found


def _install_reading(layer: Any) -> None:
    shared = Attention(layer)
    root = shared.width**0.5
    token_scale, image_scale, opener_scale = root / TEXT_NORM, root, root / OPENER_NORM
    shared.offer_distances(a.ROTARY.pairs - RESERVED)
    text, opens, asks, starts = (int(slot) for slot in a.ROTARY.slow_slots(0, 4))
    shared.offer_flag(text, a.TEXT)
    shared.offer_flag(opens, a.OPENS)
    shared.offer_flag(starts, a.STARTS)
    shared.offer_flag(asks, a.TOPIC)
    shared.offer_flag(asks, a.NAMED)
    # No position holds both an image and a word, so their values share slots.
    image = shared.offer_values(0, a.KEY)
    seen = shared.offer_values(EMBEDDING, a.SEEN)
    short = shared.offer_values(EMBEDDING, a.SHORT)
    rule = shared.offer_values(EMBEDDING + a.SHORT_CODE, a.RULE)
    number = shared.offer_values(int(rule[-1]) + 1, a.NUMBER)
    topic = shared.offer_values(EMBEDDING + CONCEPTS, a.TOPIC)
    flags = [
        shared.offer_values(int(topic[-1]) + 1 + i, flag)
        for i, flag in enumerate((a.OPENS, a.STARTS, a.IS_RULE))
    ]

    nearest = shared.head(NEAREST)
    nearest.prefer_distance(a.ROTARY.recency_profile())
    # No distance outweighs the first score. Among other tokens, an image wins over the opener of
    # its turn one position earlier, and the opener over the image of the previous answer.
    nearest.prefer_flag(text, -15000.0, token_scale * TEXT_SIZE)
    nearest.prefer_flag(opens, -10.0, opener_scale)
    nearest.copy(image, a.KEY, KEY_COPY / image_scale)
    nearest.copy(seen, a.SEEN, SEEN_COPY / (SEEN_INPUT * image_scale))
    nearest.copy(flags[0], a.IN_QUESTION, KEY_COPY / opener_scale)
    nearest.copy(flags[1], a.BLIND, KEY_COPY / opener_scale)

    previous = shared.head(PREVIOUS)
    previous.prefer_distance(a.ROTARY.shift(peak_profile(), 1))
    copy_size = TOKEN_COPY / (token_scale * (a.SHORT_CODE / a.CODE) ** 0.5)
    previous.copy(short, a.BEFORE, copy_size)
    previous.copy(number, a.AFTER_NUMBER, TOKEN_COPY / (token_scale * FLAG))
    previous.copy(flags[2], a.AFTER_RULE, TOKEN_COPY / (token_scale * FLAG))

    mixed = CONTEXT_COPY / (token_scale * (a.SHORTER_CODE / a.CODE) ** 0.5 * CONTEXT_NORM)
    profile = a.ROTARY.context_profile()
    recent, before = shared.head(RECENT), shared.head(RECENT_BEFORE)
    for head in (recent, before):  # values of images in the same slots are no context
        head.prefer_flag(text, 25.0, token_scale * TEXT_SIZE)
    recent.prefer_distance(profile)
    recent.copy(short[: a.SHORTER_CODE], a.CONTEXT, mixed)
    # Nothing is recent at <answer>: neither a question nor an earlier label may sway a vote. The
    # head looks at <bos> instead, which has nothing to copy.
    recent.seek(a.ANSWERS, starts, 2000.0, token_scale * FLAG * opener_scale)
    recent.copy(rule, a.RULE, RULE_GAIN / (token_scale * FLAG))
    before.prefer_distance(a.ROTARY.shift(profile, 1))
    before.copy(short[: a.SHORTER_CODE], a.EARLIER, mixed)

    asking = shared.head(ASKING)
    asking.prefer_distance(a.ROTARY.topic_profile())
    asking.prefer_flag(text, 200.0, token_scale * TEXT_SIZE)
    asking.prefer_flag(asks, 80.0, token_scale * FLAG)
    asking.copy(topic, a.TOPIC, TOPIC_COPY / (token_scale * FLAG))
    names = seen[a.NAMED.start - a.SEEN.start : a.NAMED.stop - a.SEEN.start]
    asking.copy(names, a.NAMED, SEEN_COPY / (token_scale * FLAG))


def _install_match(layer: Any, strengths: Strengths) -> None:
    shared = Attention(layer)
    scale = shared.width**0.5 / NORM_1
    match: Head = shared.head(MATCH)
    # Constants take the slowest pairs; the longest copies come last, where a turn costs least.
    in_question, blind = (int(slot) for slot in a.ROTARY.slow_slots(0, 2))
    shared.offer_flag(in_question, a.IN_QUESTION)
    shared.offer_flag(blind, a.BLIND)
    match.prefer_flag(in_question, -strengths.in_question, scale * KEY_COPY)
    match.prefer_flag(blind, -strengths.blind, scale * KEY_COPY)
    short = (a.SHORT_CODE / a.CODE) ** 0.5 * TOKEN_COPY
    used = 2
    for query, key, nats, size in (
        (a.KEY, a.KEY, strengths.image, KEY_COPY**2),
        (a.SHORT, a.BEFORE, strengths.before, short),
        (a.CONTEXT, a.EARLIER, strengths.context, CONTEXT_COPY**2),
    ):
        used = match.match(query, key, used, nats, size * scale**2)
    match.copy(shared.offer_values(0, a.TOKEN), a.TOKEN, strengths.write / scale)


@torch.no_grad()
def install_vision(
    model: FastVlmForConditionalGeneration, vision: VisionReader, centre: Tensor, size: float
) -> None:
    """Copy the trained vision tower into the model. `centre` (EMBEDDING,) is the mean embedding,
    which becomes the origin; `size` is the mean length after that, which becomes 1.
    """
    tower, projector = vision.tower, model.model.multi_modal_projector
    model.model.vision_tower.load_state_dict(tower.vision.state_dict())
    inner = tower.linear_1.out_features
    first, second = projector.linear_1, projector.linear_2
    for linear in (first, second):
        linear.weight.zero_()
        linear.bias.zero_()
    first.weight[:inner], first.bias[:inner] = tower.linear_1.weight, tower.linear_1.bias
    second.weight[a.KEY, :inner] = tower.linear_2.weight / size
    second.bias[a.KEY] = (tower.linear_2.bias - centre) / size
    second.bias[a.IN_QUESTION] = SEEN_INPUT  # no answer continues after an image
    concepts = torch.cat([dims(a.SEEN), dims(a.DIGIT)])[: vision.reading.out_features]
    second.weight[concepts, :inner] = vision.reading.weight * SEEN_INPUT
    second.bias[concepts] = vision.reading.bias * SEEN_INPUT
