"""Training conversations for the decoder: images as precomputed embeddings, labels as random
tokens.

A label has no meaning outside its conversation: it is a run of one to six random tokens, or a
random combination of words, sampled for each conversation. Only the images determine the answer.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bottega.tasks.handwriting import (
    draw_characters,
    join,
    paint,
    sample_alphabet,
    sample_mixed_styles,
)
from training.image_batches import sample_siblings
from training.surfaces import render_surfaces, sample_neighbours, sample_surfaces
from training.tokenizer import (
    ANSWER,
    BOS,
    END,
    IMAGE,
    SPECIAL,
    UNKNOWN,
    USER,
    label_words,
    token_id,
)
from training.tower import Tower

Ids = list[int]
IGNORE = -100


@dataclass
class ImagePool:
    """Projected images of many classes: (groups, classes, views, EMBEDDING)."""

    images: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        groups, classes, views, _ = self.images.shape
        return groups, classes, views


@torch.no_grad()
def sample_pool(
    tower: Tower, centre: Tensor, size: float, seed: int, groups: int, views: int = 5
) -> ImagePool:
    """Sample groups of 20 classes, a quarter of them siblings; each fourth group has surfaces."""
    rng, rows = torch.Generator().manual_seed(seed), []
    for group in range(groups):
        each = torch.arange(20).repeat_interleave(views)
        if group % 4 == 3:
            grounds = sample_surfaces(rng, 20)
            near = sample_neighbours(rng, grounds.rows(torch.arange(5)))
            images = render_surfaces(rng, grounds.rows(each))
            images[: 5 * views] = render_surfaces(rng, near.rows(each[: 5 * views]))
        else:
            letters = sample_alphabet(rng, 15)
            letters = join([letters, sample_siblings(rng, letters.rows(torch.arange(5)))])
            style = sample_mixed_styles(rng, torch.zeros(len(each), dtype=torch.long), shared=0.8)
            generated = draw_characters(
                rng, letters.rows(each), style.boldness, style.fill, free=0.1
            )
            images = paint(rng, generated, style)
        projected = (tower((images * 255).round()) - centre) / size
        rows.append(projected.view(20, views, -1))
    return ImagePool(torch.stack(rows))


@dataclass
class Episode:
    """One conversation; `target` holds the next token where the loss counts."""

    ids: Ids
    target: Ids
    images: Tensor  # (images, EMBEDDING)
    label: Ids  # the last answer


class EpisodeSampler:
    """Sampler of conversations from a pool."""

    def __init__(self, pool: ImagePool, tokenizer: Any, seed: int) -> None:
        self.pool, self.rng = pool, np.random.default_rng(seed)
        self.unknown: Ids = tokenizer.encode(UNKNOWN)
        self.bos, self.end, self.image, self.user, self.answer = (
            token_id(t) for t in (BOS, END, IMAGE, USER, ANSWER)
        )
        words = label_words()
        self.bare: list[Ids] = [tokenizer.encode(word) for word in words]
        self.after: list[Ids] = [tokenizer.encode(f" {word}") for word in words]
        self.vocabulary = len(tokenizer)

    def label(self) -> Ids:
        if self.rng.random() < 0.5:
            return self._random(int(self.rng.integers(1, 7)))
        ids = list(self.bare[self.rng.integers(len(self.bare))])
        for _ in range(self.rng.integers(0, 3)):
            ids += self.after[self.rng.integers(len(self.after))]
        return ids[:8]

    def labels(self, count: int) -> list[Ids]:
        """Return distinct labels; sometimes they share the first word, as in "sea lion", "sea
        horse".
        """
        shared = self.label()[:1] if self.rng.random() < 0.2 else []
        found: dict[tuple[int, ...], None] = {}
        while len(found) < count:
            found[tuple(shared + self.label())] = None
        return [list(label) for label in found]

    def question(self) -> Ids:
        size = int(self.rng.choice([0, 0, 0, 5, 10, 60], p=[0.3, 0.1, 0.1, 0.25, 0.2, 0.05]))
        return self._random(int(self.rng.integers(size + 1)))

    def _random(self, size: int) -> Ids:
        return [int(t) for t in self.rng.integers(len(SPECIAL), self.vocabulary, size)]

    def episode(self, count: int) -> Episode:
        """Return `count` demonstrations and one query whose class is among them."""
        rng, (groups, classes, views) = self.rng, self.pool.shape
        if rng.random() < 0.25:
            group, kind = rng.integers(groups, size=classes), rng.integers(classes, size=classes)
        else:
            group, kind = np.full(classes, rng.integers(groups)), rng.permutation(classes)
        ways = int(rng.integers(1, min(classes, count) + 1)) if count else 0
        again = rng.integers(ways, size=count - ways) if count else np.zeros(0, dtype=np.int64)
        shown = np.concatenate([rng.permutation(ways), again])
        view = rng.integers(views - 1, size=count)
        wanted = int(shown[rng.integers(count)]) if count else 0
        images = self.pool.images[group[shown], kind[shown], view]
        query = self.pool.images[group[wanted], kind[wanted], views - 1]
        order = self._order(images, query)
        labels = self.labels(classes)
        answers = [labels[c] for c in shown[order]]
        last = labels[wanted] if count else self.unknown
        return self._write(torch.cat([images[order], query[None]]), answers, last)

    def _order(self, images: Tensor, query: Tensor) -> NDArray[np.int64]:
        """Return a random order, or one by similarity with the nearest last, as after retrieval."""
        if len(images) and self.rng.random() < 0.4:
            closeness = F.cosine_similarity(images, query[None])
            return closeness.argsort().numpy()
        return self.rng.permutation(len(images))

    def _write(self, images: Tensor, answers: list[Ids], last: Ids) -> Episode:
        ids = [self.bos, self.answer, *self.unknown, self.end]
        target = [IGNORE] * len(ids)
        question = self.question()
        same = self.rng.random() < 0.7
        for turn, answer in enumerate([*answers, last]):
            text = question if same else self.question()
            opening = [self.user, *text, self.image, self.answer]
            ids += [*opening, *answer, self.end]
            # No model can name a new label, except the last one, which was shown before.
            nameable = turn == len(answers) or answer in answers[:turn]
            wanted = [*answer, self.end] if nameable else [IGNORE] * (len(answer) + 1)
            target += [IGNORE] * (len(opening) - 1) + wanted + [IGNORE]
        return Episode(ids, target, images, last)


def collate(episodes: list[Episode], table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return right-padded (b, t, hidden) inputs with image embeddings, and (b, t) mask and
    targets."""
    longest = max(len(e.ids) for e in episodes)
    ids = torch.zeros(len(episodes), longest, dtype=torch.long)
    target = torch.full((len(episodes), longest), IGNORE)
    mask = torch.zeros(len(episodes), longest, dtype=torch.long)
    for row, episode in enumerate(episodes):
        size = len(episode.ids)
        ids[row, :size], mask[row, :size] = torch.tensor(episode.ids), 1
        target[row, :size] = torch.tensor(episode.target)
    embedded = F.embedding(ids, table)
    is_image = ids == token_id(IMAGE)
    shown = torch.cat([e.images for e in episodes])
    padded = F.pad(shown, (0, table.shape[1] - shown.shape[1]))
    return embedded.masked_scatter(is_image[..., None], padded), mask, target
