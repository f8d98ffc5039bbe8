"""Tests of centred drawings."""

import numpy as np
import pytest
from PIL import Image, ImageDraw

from bottega._util.drawings import FILL, ROTATIONS, UNCHANGED_SIDE, centred_drawing, drawing_views


def drawing(
    side: int = 105,
    *,
    box: tuple[int, int, int, int] = (10, 20, 40, 30),
    ink: object = (0, 0, 0),
    paper: object = (255, 255, 255),
) -> Image.Image:
    image = Image.new("RGB", (side, side), paper)  # type: ignore[arg-type]
    ImageDraw.Draw(image).rectangle(box, outline=ink, width=3)  # type: ignore[arg-type]
    return image


def ink_box(image: Image.Image) -> tuple[int, int, int, int]:
    box = image.convert("L").point(lambda value: 255 * (value > 127)).getbbox()
    assert box is not None
    return box


def test_ink_is_centred_at_a_fixed_size() -> None:
    left, top, right, bottom = ink_box(found := centred_drawing(drawing()))
    assert found.width == found.height
    assert (right - left) / found.width == pytest.approx(FILL, abs=0.03)
    assert (left + right) / 2 == pytest.approx(found.width / 2, abs=1)
    assert (top + bottom) / 2 == pytest.approx(found.height / 2, abs=1)
    assert (right - left, bottom - top) == (31, 11)  # no distortion


def test_both_polarities_give_one_image() -> None:
    light = centred_drawing(drawing(ink=(255,) * 3, paper=(0,) * 3))
    dark = centred_drawing(drawing())
    assert np.array_equal(np.asarray(light), np.asarray(dark))
    assert np.asarray(dark)[0, 0].tolist() == [0, 0, 0]


def test_position_does_not_matter() -> None:
    moved = centred_drawing(drawing(box=(60, 70, 90, 80)))
    assert np.array_equal(np.asarray(moved), np.asarray(centred_drawing(drawing())))


def test_a_large_drawing_is_centred() -> None:
    left, _, right, _ = ink_box(found := centred_drawing(drawing(1200, box=(100, 200, 400, 300))))
    assert (right - left) / found.width == pytest.approx(FILL, abs=0.05)


def noise() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (100, 100, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize(
    "image",
    [
        drawing(UNCHANGED_SIDE),
        drawing(ink=(200, 0, 0)),
        drawing(paper=(128, 128, 128)),
        drawing(ink=(180,) * 3),
        Image.new("RGB", (100, 100), "white"),
        noise(),
        noise().convert("L").convert("RGB"),
        Image.linear_gradient("L").convert("RGB"),
    ],
    ids=["small", "red ink", "grey paper", "pale ink", "blank", "colour noise", "noise", "ramp"],
)
def test_other_images_stay(image: Image.Image) -> None:
    assert centred_drawing(image) is image


def test_a_drawing_has_several_views_and_another_image_one() -> None:
    views = drawing_views(drawing())
    assert len({view.tobytes() for view in views}) == len(ROTATIONS)
    assert views[ROTATIONS.index(0)].tobytes() == centred_drawing(drawing()).tobytes()
    assert drawing_views(image := noise()) == [image]
