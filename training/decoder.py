"""Rebuild the decoders of the bundled models: `python -m training.decoder`.

The shipped vision towers and projectors stay. Model cards are not updated; the compressor keeps its
weights and is calibrated for the new decoder (`training.compressor`).
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from training.__main__ import OUT
from training.architecture import APPRENTICE, MASTER, Size, build_model
from training.circuits import Strengths, install, spherical_codes
from training.compressor import recalibrate
from training.export import export
from training.tokenizer import train_tokenizer


def rewrite(folder: Path, codes: Tensor, size: Size, is_master: bool, out: Path) -> None:
    """Export the model in `folder` with a new decoder and its existing card to `out`."""
    torch.manual_seed(0)
    shipped: Any = AutoModelForImageTextToText.from_pretrained(folder)
    tokenizer, model = train_tokenizer(), build_model(size)
    install(model, codes, tokenizer, Strengths(), is_master)
    for part in ("vision_tower", "multi_modal_projector"):
        getattr(model.model, part).load_state_dict(getattr(shipped.model, part).state_dict())
    export(model, tokenizer, out, (folder / "README.md").read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.decoder", description=__doc__)
    parser.add_argument("--models", type=Path, default=OUT, help="read the model folders from here")
    parser.add_argument("--out", type=Path, default=OUT, help="write the model folders here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    codes = spherical_codes()
    rewrite(args.models / "apprentice", codes, APPRENTICE, False, args.out / "apprentice")
    rewrite(args.models / "master", codes, MASTER, True, args.out / "master")
    recalibrate(args.out / "apprentice", args.models / "compressor", args.out / "compressor")


if __name__ == "__main__":
    main()
