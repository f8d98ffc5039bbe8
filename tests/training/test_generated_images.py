"""Generated images and labels for the training of the bundled models."""

from __future__ import annotations

import torch

from training.image_batches import CLASSES, VIEWS, draw_batch
from training.tokenizer import train_tokenizer


def test_batch_depends_only_on_its_seed() -> None:
    first, again, other = (draw_batch(torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert first.shape == (CLASSES * VIEWS, 3, 64, 64)
    assert first.dtype == torch.uint8
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_views_of_a_class_differ_but_are_not_blank() -> None:
    batch = draw_batch(torch.Generator().manual_seed(5)).view(CLASSES, VIEWS, -1).float()
    assert (batch.std(dim=2) > 1).float().mean() > 0.98
    assert not torch.equal(batch[:, 0], batch[:, 1])


def test_tokenizer_round_trips_any_label() -> None:
    tokenizer = train_tokenizer()
    for label in ("tennis court", "Straße", "犬と猫", "  spaced  ", "a\tb", "🐶", "x" * 50):
        assert tokenizer.decode(tokenizer.encode(label, add_special_tokens=False)) == label
