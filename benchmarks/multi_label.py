"""Synthetic images with several labels, as JSONL: python -m benchmarks.multi_label DIR

Each scene has three labels: its shape, its colour and its texture. DIR gets train.jsonl, test.jsonl
and images, for `bottega eval jsonl:DIR`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import orjson
import torch

from bottega.tasks.attributes import ATTRIBUTES, VALUES, render_scenes, sample_values
from bottega.tasks.task import to_images

LABELLED = ("shape", "colour", "texture")
QUESTION = "Which shape, colour and texture are in the image above?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--examples", type=int, default=400)
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    (chosen.folder / "images").mkdir(parents=True, exist_ok=True)
    rows = list(scenes(chosen.folder, chosen.examples + chosen.items, chosen.seed))
    for name, part in (("test", rows[: chosen.items]), ("train", rows[chosen.items :])):
        (chosen.folder / f"{name}.jsonl").write_bytes(b"\n".join(map(orjson.dumps, part)))


def scenes(folder: Path, count: int, seed: int) -> Iterator[dict[str, object]]:
    """Write the images; yield a row for each."""
    rng = torch.Generator().manual_seed(seed)
    values = sample_values(rng, count)
    for number, (image, row) in enumerate(
        zip(to_images(render_scenes(rng, values)), values.tolist(), strict=True)
    ):
        path = f"images/{number}.png"
        (folder / path).write_bytes(image.data)
        words = dict(zip(ATTRIBUTES, row, strict=True))
        labels = [VALUES[name][words[name]] for name in LABELLED]
        yield {"image": path, "question": QUESTION, "labels": labels}


if __name__ == "__main__":
    main()
