"""How sharply should similar pictures outvote dissimilar ones? Measured on procedural classes.

The matching head weighs demonstrations by exp(sharpness * cosine). Too soft, and a crowd of
poor matches wins; too sharp, and only the nearest neighbour counts.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from training.episodes import Pool

GRID = (5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 40.0, 60.0, 100.0)


def vote(similarity: Tensor, classes: Tensor, ways: int, sharpness: float) -> Tensor:
    """(q,) winning class of each query. similarity (q, k), classes (q, k)."""
    weight = (similarity * sharpness).softmax(dim=-1)
    return torch.zeros(len(weight), ways).scatter_add_(1, classes, weight).argmax(1)


def compare(pool: Pool, retrieve: int) -> dict[float, float]:
    """Accuracy by sharpness: the last view of a class asks, the others are the knowledge base."""
    groups, ways, views = pool.shape
    label = torch.arange(ways).repeat_interleave(views - 1)
    right = dict.fromkeys(GRID, 0.0)
    for pictures in F.normalize(pool.pictures, dim=-1):
        base, asked = pictures[:, :-1].flatten(0, 1), pictures[:, -1]
        near = (asked @ base.T).topk(min(retrieve, len(base)), dim=1)
        for sharpness in GRID:
            winner = vote(near.values, label[near.indices], ways, sharpness)
            right[sharpness] += (winner == torch.arange(ways)).float().mean().item() / groups
    return right


def table(pool: Pool) -> str:
    rows = ["| retrieved | " + " | ".join(f"{s:g}" for s in GRID) + " |"]
    rows.append("|---" * (len(GRID) + 1) + "|")
    for retrieve in (5, 10, 20, 10_000):
        figures = compare(pool, retrieve).values()
        name = "all" if retrieve == 10_000 else str(retrieve)
        rows.append(f"| {name} | " + " | ".join(f"{f:.3f}" for f in figures) + " |")
    return "\n".join(rows)
