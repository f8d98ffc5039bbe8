"""The decoder's starting point: in-context classification written into the weights by hand.

Gradient descent alone found no visual matching within 600 steps, so the circuit is installed;
training can at most polish it. In words:

Layer 0 tells every position four things, one head each: the nearest picture before it (or that a
turn was opened since, as in a question), the token before it, a fading mixture of the last
tokens, and the same mixture one place earlier. Its MLP lets `<answer>` forget that mixture, so
that pictures alone decide how an answer begins. Layer 1 has one matching head. A position looks
for places in earlier answers that follow its own token in its own context (so `<answer>` finds
the first tokens of earlier answers, and each later token the one that followed) and weighs them
by the similarity of the pictures: a sharp vote of similar demonstrations. The value is the token
found there. Answers of any length are copied token by token until `<end>`.

Attention scores below are in nats: differences of log attention weight.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import FastVlmForConditionalGeneration

from training import architecture as a
from training.tokenizer import ANSWER, BOS, SYSTEM, USER, VOCABULARY
from training.tower import EMBEDDING, HIDDEN, Tower

NEAREST, PREVIOUS, RECENT, RECENT_BEFORE = range(4)  # layer 0
MATCH = 0  # layer 1; its other heads are free

TEXT_NORM = 2.0**0.5  # every token embedding: one flag and the code, each of norm 1
ANSWER_SIZE = 0.5  # the flag of <answer>, at the expense of TEXT
PICTURE_COPY, TOKEN_COPY = 1.0, 0.5
# Norm of a text position after layer 0; the copies of tokens are smaller right after a picture.
LAYER_1_NORM = (TEXT_NORM**2 + PICTURE_COPY**2 + 3 * TOKEN_COPY**2) ** 0.5
CODE = 72
CONTEXT_NORM = 0.49  # norm of a mixture of unlike unit codes under `context_profile`


@dataclass(frozen=True)
class Strengths:
    """Scores of the matching head in nats; see `install` for what they must outweigh."""

    picture: float = 30.0  # at cosine 1; the only one that is tuned
    before: float = 140.0
    context: float = 60.0
    asked: float = 220.0
    blind: float = 22.0  # the opening "unknown" yields to any demonstration with a picture
    write: float = 6.0  # size of the copied token against the position's own


def spherical_codes(seed: int = 0, steps: int = 250) -> Tensor:
    """(VOCABULARY, 72) unit codes, no two alike.

    Their first 24 and first 48 numbers are well spread codes of their own: the copies of earlier
    tokens keep only those.
    """
    rng = torch.Generator().manual_seed(seed)
    code = torch.randn(VOCABULARY, CODE, generator=rng).requires_grad_()
    optimizer = torch.optim.Adam([code], lr=0.03)
    others = ~torch.eye(VOCABULARY, dtype=torch.bool)
    for _ in range(steps):
        loss = torch.zeros(())
        for width, weight in ((24, 0.3), (48, 1.0), (CODE, 1.0)):
            unit = F.normalize(_unit_parts(code)[:, :width], dim=-1)
            loss = loss + weight * (20 * (unit @ unit.T)[others]).logsumexp(0)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    with torch.no_grad():
        codes: Tensor = _unit_parts(code)
    return codes


def _unit_parts(code: Tensor) -> Tensor:
    """Thirds of equal norm, so that a prefix has the same norm for every token."""
    parts = [F.normalize(part, dim=-1) for part in torch.split(code, 24, dim=1)]
    return torch.cat(parts, dim=1) / math.sqrt(len(parts))


def frequencies() -> Tensor:
    exponent = -torch.arange(a.PAIRS, dtype=torch.float64) / a.PAIRS
    frequency: Tensor = torch.exp(exponent * math.log(a.ROPE_THETA))
    return frequency


def fit_profile(distance: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """(pairs, 2) cosine and sine amplitudes: target(d) as a sum of turns of the rotary pairs.

    The slowest pairs are left to `prefer_keys`.
    """
    pairs = a.PAIRS - 8
    angle = distance[:, None].double() * frequencies()[:pairs]
    basis = torch.cat([angle.cos(), angle.sin()], dim=1) * weight[:, None]
    # The ridge keeps amplitudes small enough for half precision storage.
    gram = basis.T @ basis + 1e-6 * len(distance) * torch.eye(2 * pairs, dtype=torch.float64)
    amplitude: Tensor = torch.linalg.solve(gram, basis.T @ (target.double() * weight))
    return amplitude.view(2, pairs).transpose(0, 1)


def _distances(first: float) -> Tensor:
    far = torch.logspace(2.4, math.log10(a.MAX_POSITIONS), 600).round()
    return torch.cat([torch.arange(first, 250.0), far]).double()


def recency_profile() -> Tensor:
    """8 nats a token nearby, flattening beyond 150 tokens, falling up to MAX_POSITIONS."""
    distance = _distances(0)
    target = -1200 * torch.log1p(distance / 150)
    return fit_profile(distance, target - target.mean(), 1 / (1 + distance / 150))


def context_profile() -> Tensor:
    """Attention that fades over about six tokens, and is low at distance -1.

    Shifted by one place, -1 becomes a position's own token, which a context must not contain:
    it is what is being looked for.
    """
    distance = _distances(-1)
    target = -0.6 * (distance - 1)
    beyond = -5.4 - 30 * torch.log1p((distance - 10).clamp(min=0) / 30)
    target = torch.where(distance > 10, beyond, target)
    target[0], target[1] = -6.0, -1.2
    weight = torch.where(distance < 12, 20.0, 1 / (1 + distance / 50))
    weight[0] = 8.0
    return fit_profile(distance, target, weight)


def peak_profile(pairs: int = 20, nats: float = 20.0) -> Tensor:
    """A peak at distance 0: the fast pairs agree only there."""
    return nats * torch.stack([torch.ones(pairs), torch.zeros(pairs)], dim=1).double()


def shift(profile: Tensor, places: int) -> Tensor:
    """The same profile, `places` further back: each pair's phase moves by its frequency."""
    angle = places * frequencies()[: len(profile)]
    cos, sin = profile.unbind(dim=1)
    return torch.stack(
        [cos * angle.cos() - sin * angle.sin(), cos * angle.sin() + sin * angle.cos()], dim=1
    )


class Head:
    """One attention head's rows of the projection matrices."""

    def __init__(self, layer: Any, index: int) -> None:
        rows = slice(index * a.HEAD_DIM, (index + 1) * a.HEAD_DIM)
        attention = layer.self_attn
        self.q, self.q_bias = attention.q_proj.weight[rows], attention.q_proj.bias[rows]
        self.k, self.k_bias = attention.k_proj.weight[rows], attention.k_proj.bias[rows]
        self.v = attention.v_proj.weight[rows]
        self.o = attention.o_proj.weight[:, rows]
        self.root = a.HEAD_DIM**0.5  # attention divides scores by it

    def prefer_distance(self, profile: Tensor) -> None:
        """Add a score that depends on the distance only, through the biases."""
        size = profile.norm(dim=1).clamp(min=1e-6).sqrt() * self.root**0.5
        pair = torch.arange(len(profile))
        self.k_bias[pair] = size.float()
        self.q_bias[pair] = (profile[:, 0] * self.root / size).float()
        self.q_bias[pair + a.PAIRS] = -(profile[:, 1] * self.root / size).float()

    def prefer_keys(self, dim: int, slot: int, nats: float, size: float) -> None:
        """Add `nats` for keys whose normalised input has `size` in `dim`, whatever the query."""
        weight = (abs(nats) * self.root) ** 0.5
        self.q_bias[slot] = weight
        self.k[slot, dim] = weight / size * (1 if nats > 0 else -1)

    def match(self, query: Tensor, key: Tensor, slots: Tensor, nats: float, size: float) -> None:
        """Add `nats` where `query` here equals `key` there; `size` is the product of norms."""
        weight = (nats * self.root / size) ** 0.5
        self.q[slots, query] = weight
        self.k[slots, key] = weight

    def copy(self, source: Tensor, target: Tensor, gain: float) -> None:
        slot = torch.arange(len(source))
        self.v[slot, source] = gain**0.5
        self.o[target, slot] = gain**0.5


def dims(part: slice | int) -> Tensor:
    return torch.arange(part.start, part.stop) if isinstance(part, slice) else torch.tensor([part])


def slow_slots(used: int, count: int) -> Tensor:
    """`count` head dims from the slowest rotary pairs, after `used` ones were given away."""
    pair = a.PAIRS - 1 - (torch.arange(used, used + count) // 2)
    return pair + (torch.arange(used, used + count) % 2) * a.PAIRS


@torch.no_grad()
def install(
    model: FastVlmForConditionalGeneration, codes: Tensor, strengths: Strengths, seed: int = 0
) -> None:
    """Write the circuit into a fresh model's decoder.

    The strengths obey: a place without the right token before it scores picture + context at
    most, on a position's own answer; the opening demonstration (before - blind) stays above that,
    and any real one (before - 0.4 picture) above the opening one. `asked` outweighs everything.
    """
    language = model.model.language_model
    rng = torch.Generator().manual_seed(seed)
    for layer in language.layers:
        attention = layer.self_attn
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            linear.weight.zero_()
            linear.bias.zero_()
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
            linear.weight.copy_(torch.randn(linear.weight.shape, generator=rng) / HIDDEN**0.5)
        layer.mlp.down_proj.weight.zero_()
    language.embed_tokens.weight.copy_(_embeddings(codes))
    _install_context(language.layers[0])
    _install_forgetting(language.layers[0].mlp)
    _install_match(language.layers[1], strengths)


def _embeddings(codes: Tensor) -> Tensor:
    table = torch.zeros(VOCABULARY, HIDDEN)
    table[:, a.TOKEN] = codes
    table[:, a.TEXT] = 1.0
    for token, flag in ((USER, a.OPENS), (SYSTEM, a.OPENS), (BOS, a.STARTS)):
        row = a.token_id(token)
        table[row, a.TEXT], table[row, flag] = 0.0, 1.0
    answer = a.token_id(ANSWER)
    table[answer, a.TEXT], table[answer, a.ANSWERS] = (1 - ANSWER_SIZE**2) ** 0.5, ANSWER_SIZE
    return table


def _install_context(layer: Any) -> None:
    scale = HIDDEN**0.5 / TEXT_NORM  # what the first norm makes of a token's unit
    nearest, slots = Head(layer, NEAREST), slow_slots(0, 4).tolist()
    nearest.prefer_distance(recency_profile())
    # Far more than any distance can outweigh; among the rest, a picture wins over its turn's
    # opener one place before it, and the opener over the picture of the answer before.
    nearest.prefer_keys(a.TEXT, slots[0], -15000.0, scale)
    nearest.prefer_keys(a.OPENS, slots[2], -10.0, scale)
    picture = dims(a.PICTURE)
    nearest.copy(picture, picture, PICTURE_COPY / HIDDEN**0.5)
    for slot, (flag, known) in enumerate(((a.OPENS, a.ASKED), (a.STARTS, a.BLIND)), EMBEDDING):
        nearest.v[slot, flag], nearest.o[known, slot] = 1 / scale, PICTURE_COPY
    _copy_tokens(Head(layer, PREVIOUS), shift(peak_profile(), 1), a.SHORT, a.BEFORE, 1.0)
    context = context_profile()
    _copy_tokens(Head(layer, RECENT), context, a.SHORTER, a.CONTEXT, CONTEXT_NORM)
    _copy_tokens(Head(layer, RECENT_BEFORE), shift(context, 1), a.SHORTER, a.EARLIER, CONTEXT_NORM)


def _install_forgetting(mlp: Any) -> None:
    """Empty the context of `<answer>`, so that questions and earlier labels cannot sway a vote.

    A gated unit for each number: the gate opens for <answer> only and subtracts the context.
    """
    context = dims(a.CONTEXT)
    unit = torch.arange(len(context))
    # The token right after a picture: no token before it, a thinner context.
    scale = (HIDDEN / (TEXT_NORM**2 + PICTURE_COPY**2 + 1.3 * TOKEN_COPY**2)) ** 0.5
    opened = F.silu(torch.tensor(ANSWER_SIZE * scale)).item()
    mlp.gate_proj.weight[unit], mlp.up_proj.weight[unit] = 0.0, 0.0
    mlp.gate_proj.weight[unit, a.ANSWERS] = 1.0
    mlp.up_proj.weight[unit, context] = 1.0
    mlp.down_proj.weight[context, unit] = -1 / (opened * scale)


def _copy_tokens(head: Head, profile: Tensor, part: slice, target: slice, mixed: float) -> None:
    """`mixed` is the norm of the attended mixture of unit codes."""
    head.prefer_distance(profile)
    scale, source = HIDDEN**0.5 / TEXT_NORM, dims(part)
    share = (len(source) / CODE) ** 0.5  # norm of this part of a unit code
    head.copy(source, dims(target), TOKEN_COPY / (scale * share * mixed))


def _install_match(layer: Any, strengths: Strengths) -> None:
    scale = HIDDEN**0.5 / LAYER_1_NORM
    match = Head(layer, MATCH)
    # Constants take the slowest pair; the longest copies come last, where a turn costs least.
    asked, blind = (int(slot) for slot in slow_slots(0, 2))
    match.prefer_keys(a.ASKED, asked, -strengths.asked, scale * PICTURE_COPY)
    match.prefer_keys(a.BLIND, blind, -strengths.blind, scale * PICTURE_COPY)
    used = 2
    short = (len(dims(a.SHORT)) / CODE) ** 0.5
    for query, key, nats, size in (
        (a.PICTURE, a.PICTURE, strengths.picture, PICTURE_COPY**2),
        (a.SHORT, a.BEFORE, strengths.before, short * TOKEN_COPY),
        (a.CONTEXT, a.EARLIER, strengths.context, TOKEN_COPY**2),
    ):
        slots = slow_slots(used, len(dims(key)))
        match.match(dims(query), dims(key), slots, nats, size * scale**2)
        used += len(slots)
    match.copy(dims(a.TOKEN), dims(a.TOKEN), strengths.write / scale)


@torch.no_grad()
def install_tower(model: FastVlmForConditionalGeneration, tower: Tower, centre: Tensor) -> None:
    """Put the trained eye in; `centre` (EMBEDDING,) is the mean embedding, moved to the origin."""
    model.model.vision_tower.load_state_dict(tower.vision.state_dict())
    projector = model.model.multi_modal_projector
    projector.linear_1.load_state_dict(tower.linear_1.state_dict())
    projector.linear_2.weight.zero_()
    projector.linear_2.bias.zero_()
    projector.linear_2.weight[a.PICTURE] = tower.linear_2.weight
    projector.linear_2.bias[a.PICTURE] = tower.linear_2.bias - centre
