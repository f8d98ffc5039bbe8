from __future__ import annotations

import torch

from bottega.tasks.task import Seeds


def test_a_seed_gives_the_same_words_and_pictures_again() -> None:
    first, again, other = Seeds(3), Seeds(3), Seeds(4)
    assert first.words.random() == again.words.random() != other.words.random()
    shown = [torch.rand(4, generator=seeds.pictures) for seeds in (first, again, other)]
    assert torch.equal(shown[0], shown[1])
    assert not torch.equal(shown[0], shown[2])


def test_no_task_shares_its_pictures_with_the_small_seeds_of_training() -> None:
    small = {torch.Generator().manual_seed(n).initial_seed() for n in range(1000)}
    assert small.isdisjoint(Seeds(n).pictures.initial_seed() for n in range(1000))
