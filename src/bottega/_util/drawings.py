"""Centred drawings: handwritten characters and other ink on plain paper, for a small encoder."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageOps

SMALL = 64  # images up to this side keep their frame: it may carry the answer
ANALYSED = 400  # pixels a side that the analysis of a large image keeps: pens are thin
FILL = 0.8  # share of the square that the ink's longer side takes
GREY = 40  # largest mean range across channels of the ink: its colour may be the answer
PLAIN, PLAIN_BORDER = 24, 0.9  # difference from the paper; share of such pixels in the border
INK = 96  # least difference of the darkest ink from the paper; half of it is ink, too
LIGHT, DARK = 200, 55  # paper is brighter or darker
LEAST_INK, MOST_INK = 0.0005, 0.35  # shares of the image

TURNS = (-12, -7, 0, 7, 12)  # degrees of the views of a drawing

Grey = NDArray[np.int16]


def drawing_views(image: Pillow.Image) -> list[Pillow.Image]:
    """Return a centred drawing in several slants, whose features are to be averaged. Another image
    is its only view."""
    square = centred_drawing(image)
    if square is image:
        return [image]
    return [square.rotate(degrees, Pillow.Resampling.BILINEAR) for degrees in TURNS]


def centred_drawing(image: Pillow.Image) -> Pillow.Image:
    """Return grey ink on plain paper as a centred square in white on black. Return other images,
    and those of at most `SMALL` pixels on a side, unchanged."""
    if min(image.size) <= SMALL:
        return image
    factor = max(1, min(image.size) // ANALYSED)
    pixels = np.asarray(image.reduce(factor).convert("RGB"), np.int16)
    grey = pixels.mean(axis=2).astype(np.int16)
    paper = _paper(grey)
    if paper is None:
        return image
    difference = np.abs(grey - paper)
    peak = int(difference.max())
    ink = difference > max(peak, INK) // 2
    half_tones = ((difference > PLAIN) & ~ink).mean()
    is_sparse = LEAST_INK <= ink.mean() <= MOST_INK and half_tones <= ink.mean()
    if peak < INK or not is_sparse or np.ptp(pixels, axis=2)[ink].mean() > GREY:
        return image
    return _square(image, ink, factor, paper)


def _paper(grey: Grey) -> int | None:
    """Return the brightness of the paper, or None if the border has no plain one."""
    border = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    paper = int(np.median(border))
    is_plain = (np.abs(border - paper) <= PLAIN).mean() >= PLAIN_BORDER
    return paper if is_plain and (paper >= LIGHT or paper <= DARK) else None


def _square(image: Pillow.Image, ink: NDArray[np.bool_], factor: int, paper: int) -> Pillow.Image:
    """Return a square of `paper` with the box of `ink`, a mask reduced by `factor`, in its
    middle."""
    rows, columns = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
    left, top = int(columns[0]) * factor, int(rows[0]) * factor
    right = min((int(columns[-1]) + 1) * factor, image.width)
    bottom = min((int(rows[-1]) + 1) * factor, image.height)
    side = round(max(right - left, bottom - top) / FILL)
    square = Pillow.new("RGB", (side, side), (paper, paper, paper))
    corner = ((side - right + left) // 2, (side - bottom + top) // 2)
    square.paste(image.convert("RGB").crop((left, top, right, bottom)), corner)
    return ImageOps.invert(square) if paper >= LIGHT else square
