"""`python -m training.photo_master`: write the photograph master without the published weights.

It names the thing in the last image by the ImageNet classifier of the tower. Each of the 1,000
labels is one token, so the classifier is a part of the language model's head, and the tower's
features reach it unchanged:

- The projector is the identity: gelu(x + 10) = x + 10 for features from 0 to 6.
- One attention head copies the last image to `<answer>`.
- A large constant in every position makes the norms equal, so the layer norms only scale.

Logits of labels are those of the published network. "unknown" has a fixed logit: it wins where no
label exceeds it, without an image, and for questions that require something other than a name.
"""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from torch import Tensor

from bottega.bundled.efficientnet import FEATURES, LITE0, vision_config
from bottega.bundled.photo_model import CONSTANT, CONSTANT_SIZE
from training.architecture import fastvlm
from training.photos import cropping_image_processor, export
from training.rotary import RESERVED, Rotary
from training.tokenizer import (
    ANSWER,
    BOS,
    END,
    PASSAGE,
    PHOTO_MASTER_TEMPLATE,
    UNKNOWN,
    piece_id,
    token_id,
    train_tokenizer,
)
from training.weights import Attention

OUT = Path("src/bottega/bundled/photos-master")
HIDDEN = 1296
SEEN = slice(0, FEATURES)  # the tower's features of the last image
# Flags of positions: text, start of the answer, answer must be "unknown", reply ends next.
TEXT, ASKS, REFUSES, CLOSES = range(CONSTANT + 1, CONSTANT + 5)
ROTARY = Rotary(head_dim=1312, theta=1e30)
SHIFT = 10.0  # gelu is the identity above this
FLAG = 256.0
PUBLISHED_SIDE = 256  # to which the shorter side of an image is scaled
UNKNOWN_LOGIT = 5.0
CERTAIN = 60.0  # logits that force or exclude a token


def labels() -> list[str]:
    """Return the names of ImageNet's classes in their published order."""
    text = files("training").joinpath("imagenet_labels.txt").read_text(encoding="utf-8")
    return text.splitlines()


def build_tokenizer() -> Any:
    """Return the bundled models' tokenizer with one more token per label."""
    tokenizer = train_tokenizer()
    make: Any = AddedToken  # untyped
    # A leading space makes every label a new token; new ids follow the classifier's order.
    tokens = [make(f" {name}", single_word=True, normalized=False) for name in labels()]
    if tokenizer.add_tokens(tokens) != len(tokens):
        raise ValueError("every label must be a new token")
    return tokenizer


def build_model(tokenizer: Any) -> Any:
    return fastvlm(
        vision_config(LITE0),
        ROTARY,
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        tie_word_embeddings=False,
    )


@torch.no_grad()
def install(model: Any, tokenizer: Any) -> None:
    """Write the circuits into a new model."""
    projector, language = model.model.multi_modal_projector, model.model.language_model
    layer = language.layers[0]
    for part in (projector, layer.self_attn, layer.mlp, model.lm_head):
        for parameter in part.parameters():
            parameter.zero_()
    _install_projector(projector)
    language.embed_tokens.weight.copy_(_embeddings(len(tokenizer)))
    _install_copy(layer)
    _install_head(model.lm_head.weight, tokenizer)


def _install_projector(projector: Any) -> None:
    eye = torch.eye(FEATURES)
    projector.linear_1.weight[SEEN, SEEN] = eye
    projector.linear_1.bias[SEEN] = SHIFT
    projector.linear_2.weight[SEEN, SEEN] = eye
    projector.linear_2.bias[SEEN] = -SHIFT
    projector.linear_2.bias[CONSTANT] = CONSTANT_SIZE


def _embeddings(vocabulary: int) -> Tensor:
    table = torch.zeros(vocabulary, HIDDEN)
    table[:, CONSTANT] = CONSTANT_SIZE
    table[:, TEXT] = FLAG
    table[:, CLOSES] = FLAG
    table[token_id(BOS), TEXT] = 0.0  # the copying head attends to it if there is no image
    for token in (ANSWER, PASSAGE):
        table[token_id(token), ASKS] = FLAG
        table[token_id(token), CLOSES] = 0.0
    table[token_id(PASSAGE), REFUSES] = FLAG
    return table


def _install_copy(layer: Any) -> None:
    """Copy the features of the last image to every later position."""
    shared = Attention(layer, ROTARY)
    scale = shared.width**0.5 / CONSTANT_SIZE
    shared.offer_distances(ROTARY.pairs - RESERVED)
    head = shared.head(0)
    head.prefer_distance(ROTARY.recency_profile())
    # Together they outweigh any distance; one weight of that size would exceed half precision.
    for text in ROTARY.slow_slots(0, 3).tolist():
        shared.offer_flag(text, TEXT)
        head.prefer_flag(text, -2000.0, scale * FLAG)
    head.copy(shared.offer_values(0, SEEN), SEEN, 1 / scale)


def _install_head(head: Tensor, tokenizer: Any) -> None:
    """Write all rows but the classifier's weights: those of labels stay 0 in SEEN."""
    scale = HIDDEN**0.5 / CONSTANT_SIZE
    first = len(tokenizer) - len(labels())
    head[:, ASKS] = -CERTAIN / (scale * FLAG)
    head[first:, ASKS] = 0.0
    unknown = piece_id(tokenizer, UNKNOWN)
    head[unknown, ASKS] = UNKNOWN_LOGIT / (scale * FLAG)
    head[first:, REFUSES] = -CERTAIN / (scale * FLAG)
    head[unknown, REFUSES] = CERTAIN / (scale * FLAG)
    head[token_id(END), CLOSES] = CERTAIN / (scale * FLAG)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.photo_master", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="write the model's files here")
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    install(model, tokenizer)
    export(
        model,
        tokenizer,
        cropping_image_processor(LITE0, PUBLISHED_SIDE),
        args.out,
        PHOTO_MASTER_TEMPLATE,
    )


if __name__ == "__main__":
    main()
