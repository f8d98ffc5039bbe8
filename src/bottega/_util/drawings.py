"""Recognition of photographs, and centred drawings: ink on plain paper, for a small encoder."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageOps

from bottega.errors import ImageError
from bottega.image import Image

UNCHANGED_SIDE = 64  # images up to this size are not centred: the position may matter
# Least side of reduced images: at `UNCHANGED_SIDE`, a large one would keep its frame.
LEAST_SIDE = 2 * UNCHANGED_SIDE
ANALYSIS_SIDE = 400  # least shorter side during analysis, in pixels: pens are thin
FILL = 0.8  # share of the square that the ink's longer side takes
MAX_COLOUR_RANGE = 40  # of the ink, mean over pixels: coloured ink may be the answer
PAPER_TOLERANCE = 24  # largest difference of plain paper from its median
MIN_PLAIN_BORDER = 0.9  # share of the border that is plain paper
MIN_CONTRAST = 96  # of the strongest ink to the paper; ink has over half of that contrast
MIN_LIGHT_PAPER, MAX_DARK_PAPER = 200, 55  # paper is brighter or darker
MIN_INK, MAX_INK = 0.0005, 0.35  # shares of the image
ROTATIONS = (-12, -7, 0, 7, 12)  # in degrees, one for each view of a drawing
Grey = NDArray[np.int16]

LOSSY_TYPES = {"image/jpeg", "image/webp", "image/avif", "image/heic"}
# Images of the synthetic tasks and the digits are not larger, and never in a lossy format.
LARGE_SIDE = 64
PHOTOGRAPH_SIDE = 64
MIN_SPREAD, MIN_COLOURS = 4.0, 150  # mean range across channels; distinct colours out of 32,768
# Entropy in bits of the brightness in 32 bins, and the largest share of pixels within `TONE_WIDTH`
# adjacent levels: paper or a painted background has one tone.
MIN_ENTROPY, MAX_TONE, TONE_WIDTH = 2.9, 0.55, 17


def drawing_views(image: Pillow.Image) -> list[Pillow.Image]:
    """Return the centred drawing at each of `ROTATIONS`, for averaging their features. An image
    that is no drawing is returned as its only view."""
    square = centred_drawing(image)
    if square is image:
        return [image]
    return [square.rotate(degrees, Pillow.Resampling.BILINEAR) for degrees in ROTATIONS]


def centred_drawing(image: Pillow.Image) -> Pillow.Image:
    """Return grey ink on plain paper as a centred square in white on black. Return other images,
    and those of at most `UNCHANGED_SIDE` pixels on a side, unchanged."""
    if min(image.size) <= UNCHANGED_SIDE:
        return image
    factor = max(1, min(image.size) // ANALYSIS_SIDE)
    pixels = np.asarray(image.reduce(factor).convert("RGB"), np.int16)
    grey = pixels.mean(axis=2).astype(np.int16)
    paper = _paper(grey)
    if paper is None:
        return image
    difference = np.abs(grey - paper)
    peak = int(difference.max())
    ink = difference > max(peak, MIN_CONTRAST) // 2
    half_tones = ((difference > PAPER_TOLERANCE) & ~ink).mean()
    is_sparse = MIN_INK <= ink.mean() <= MAX_INK and half_tones <= ink.mean()
    if (
        peak < MIN_CONTRAST
        or not is_sparse
        or np.ptp(pixels, axis=2)[ink].mean() > MAX_COLOUR_RANGE
    ):
        return image
    return _square(image, ink, factor, paper)


def _paper(grey: Grey) -> int | None:
    """Return the brightness of the paper, or None if the border is not plain paper."""
    border = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    paper = int(np.median(border))
    is_plain = (np.abs(border - paper) <= PAPER_TOLERANCE).mean() >= MIN_PLAIN_BORDER
    return paper if is_plain and (paper >= MIN_LIGHT_PAPER or paper <= MAX_DARK_PAPER) else None


def _square(image: Pillow.Image, ink: NDArray[np.bool_], factor: int, paper: int) -> Pillow.Image:
    """Return a square with the bounding box of the ink in its middle, in white on black.

    `paper` is the brightness around the ink. `ink` is a mask of the image reduced by `factor`.
    """
    rows, columns = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
    left, top = int(columns[0]) * factor, int(rows[0]) * factor
    right = min((int(columns[-1]) + 1) * factor, image.width)
    bottom = min((int(rows[-1]) + 1) * factor, image.height)
    side = round(max(right - left, bottom - top) / FILL)
    square = Pillow.new("RGB", (side, side), (paper, paper, paper))
    corner = ((side - right + left) // 2, (side - bottom + top) // 2)
    square.paste(image.convert("RGB").crop((left, top, right, bottom)), corner)
    return ImageOps.invert(square) if paper >= MIN_LIGHT_PAPER else square


def is_photograph(image: Image) -> bool:
    """Return whether the image has many colours or many tones, and a lossy format or more than
    `LARGE_SIDE` pixels a side. Small photographs in lossless formats are not recognised: drawings
    of their size have as many tones."""
    if not may_be_photograph(image):
        return False
    try:
        small = image.decode(2 * PHOTOGRAPH_SIDE).convert("RGB")
    except ImageError:
        return False  # the model will report it
    small.thumbnail((PHOTOGRAPH_SIDE, PHOTOGRAPH_SIDE))
    pixels = np.asarray(small, dtype=np.int16)
    spread = float(np.ptp(pixels, axis=2).mean())
    colours = len(np.unique((pixels // 8).reshape(-1, 3), axis=0))
    return (spread >= MIN_SPREAD and colours >= MIN_COLOURS) or _has_many_tones(small)


def _has_many_tones(image: Pillow.Image) -> bool:
    counts = np.array(image.convert("L").histogram()) / (image.width * image.height)
    bins = counts.reshape(32, 8).sum(axis=1)
    bins = bins[bins > 0]
    tone = np.convolve(counts, np.ones(TONE_WIDTH)).max()
    return bool(-(bins @ np.log2(bins)) >= MIN_ENTROPY and tone < MAX_TONE)


def may_be_photograph(image: Image) -> bool:
    """Return False for images that `is_photograph` rejects without decoding them."""
    return image.media_type in LOSSY_TYPES or min(image.width, image.height) > LARGE_SIDE
