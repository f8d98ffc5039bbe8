"""Experiment: train the apprentice's tower further, with real characters beside synthetic images.

`python -m training.characters --images DIR --work FILE --out DIR` continues from the apprentice in
--models. The images are `alphabet/character/image.png`.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from training import architecture as a
from training.__main__ import OUT, assemble
from training.circuits import spherical_codes
from training.compressor import recalibrate
from training.concepts import CONCEPTS
from training.real_characters import load_characters
from training.tower import Tower
from training.vision import TrainingPhase, VisionReader, train_vision
from training.vision_batches import BatchMix
from training.weights import SEEN_INPUT

STEPS, SEED, PEAK = 750, 6, 1e-3
# Alphabets of Omniglot's `images_background_small1` and `images_background_small2`; the other
# ones were used to choose the settings.
ALPHABETS = ("Greek", "Latin", "Balinese", "Japanese_(katakana)", "Tagalog")


def train_characters(vision: VisionReader, images: Path, out: Path, steps: int) -> VisionReader:
    torch.manual_seed(3)
    real = load_characters([images / name for name in ALPHABETS])
    mix = BatchMix(alphabets=1, letters=20, siblings=4, real=real)
    return train_vision(vision, out, steps, TrainingPhase(mix, SEED, PEAK))


@torch.no_grad()
def exported_vision(folder: Path) -> VisionReader:
    """Return the tower and the reader of an exported apprentice: `install_vision` inverted."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    vision, projector = VisionReader(Tower()), model.model.multi_modal_projector
    tower, inner = vision.tower, vision.tower.linear_1.out_features
    tower.vision.load_state_dict(model.model.vision_tower.state_dict())
    first, second = projector.linear_1, projector.linear_2
    tower.linear_1.weight.copy_(first.weight[:inner])
    tower.linear_1.bias.copy_(first.bias[:inner])
    tower.linear_2.weight.copy_(second.weight[a.KEY, :inner])
    tower.linear_2.bias.copy_(second.bias[a.KEY])
    assert vision.reading.out_features == CONCEPTS
    vision.reading.weight.copy_(second.weight[a.SEEN, :inner] / SEEN_INPUT)
    vision.reading.bias.copy_(second.bias[a.SEEN] / SEEN_INPUT)
    return vision.eval()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.characters", description=__doc__)
    parser.add_argument("--images", type=Path, required=True, help="folder of alphabets")
    parser.add_argument("--work", type=Path, required=True, help="checkpoint file")
    parser.add_argument("--models", type=Path, default=OUT, help="read the model folders from here")
    parser.add_argument("--out", type=Path, required=True, help="write the model folders here")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    vision = exported_vision(args.models / "apprentice")
    train_characters(vision, args.images, args.work, args.steps)
    assemble(vision, spherical_codes(), a.APPRENTICE, False, args.out / "apprentice")
    recalibrate(args.out / "apprentice", args.models / "compressor", args.out / "compressor")


if __name__ == "__main__":
    main()
