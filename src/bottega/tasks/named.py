"""Glyphs with names: the one set of characters that the bundled models are taught by name."""

import functools

import torch
from torch import Tensor

from bottega.tasks.drawing import draw
from bottega.tasks.draws import integers
from bottega.tasks.glyphs import Programs, alphabet
from bottega.tasks.nuisance import mixed_styles, paint

NAMES = (
    "babra", "cedol", "dimar", "fosin", "gulet", "hapok", "jirun", "kelba",
    "lomid", "mupar", "nasik", "pelod", "quvin", "ratem", "sobil", "tukan",
    "vadro", "wimel", "xanot", "yerib", "zulof", "brask", "clune", "drifo",
)  # fmt: skip
SEED = 314


@functools.cache
def named_glyphs() -> Programs:
    """One glyph a name, of two strokes at least."""
    letters = alphabet(torch.Generator().manual_seed(SEED), 4 * len(NAMES), library=40)
    return letters.rows((letters.count >= 2).nonzero()[: len(NAMES), 0])


def draw_named(rng: torch.Generator, name: Tensor, jitter: float = 1.0) -> Tensor:
    """(n, 3, 64, 64) in 0..1, the glyphs of `name` (n,), each in a style of its own."""
    style = mixed_styles(rng, torch.arange(len(name)))
    style.resolution = integers(rng, 2, (len(name),))
    strokes = draw(rng, named_glyphs().rows(name), style.boldness, style.fill, 0.1, jitter)
    return paint(rng, strokes, style)
