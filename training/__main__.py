"""`python -m training --work DIR`: all stages from scratch to two model folders, their figures and
a compressor.

A stage with an existing file in the work folder is skipped; long stages resume after an
interruption.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from training.architecture import APPRENTICE as APPRENTICE_SIZE
from training.architecture import MASTER as MASTER_SIZE
from training.architecture import Size, build_model
from training.circuits import Strengths, install, install_vision, spherical_codes
from training.compressor import TRAINING, print_progress, train_compressor
from training.export import export
from training.master_vision import load_master, train_master
from training.model_card import apprentice_card, master_card
from training.model_figures import APPRENTICE, MASTER, figures
from training.tokenizer import train_tokenizer
from training.tower import Tower, centre_and_size, load_tower, train_tower
from training.vision import TrainingPhase, VisionReader, load_vision, train_vision
from training.vision_batches import FIRST_MIX, SECOND_MIX

TOWER_STEPS, VISION_STEPS, MASTER_STEPS = 3200, 3000, 400
FIRST_PHASE = TrainingPhase(FIRST_MIX, seed=2, peak=1.5e-3)
SECOND_PHASE = TrainingPhase(SECOND_MIX, seed=4, peak=1.2e-3)
OUT = Path("src/bottega/bundled")


def stage(work: Path, name: str, make: Callable[[Path], object]) -> Path:
    """Return the file of a stage. It is written under another name first, so an existing file is
    complete.
    """
    path = work / f"{name}.pt"
    if not path.exists():
        print(f"stage {name}", flush=True)
        make(work / f"{name}.part")
        (work / f"{name}.part").rename(path)
    return path


def train_first_phase(tower: Tower, out: Path, steps: int) -> VisionReader:
    torch.manual_seed(1)
    return train_vision(VisionReader(tower), out, steps, FIRST_PHASE)


def train_second_phase(vision: VisionReader, out: Path, steps: int) -> VisionReader:
    return train_vision(vision, out, steps, SECOND_PHASE)


def assemble(vision: VisionReader, codes: Tensor, size: Size, is_master: bool, out: Path) -> None:
    torch.manual_seed(0)
    tokenizer, model = train_tokenizer(), build_model(size)
    install(model, codes, tokenizer, Strengths(), is_master)
    install_vision(model, vision, *centre_and_size(vision.tower))
    export(model, tokenizer, out, "# Being measured\n")


def run(
    work: Path,
    out: Path,
    tower_steps: int,
    eye_steps: int,
    master_steps: int,
    compressor_steps: int,
) -> None:
    work.mkdir(parents=True, exist_ok=True)
    tower = stage(work, "tower", lambda path: train_tower(path, tower_steps))
    first_path = stage(
        work, "school", lambda path: train_first_phase(load_tower(tower), path, eye_steps)
    )
    vision_path = stage(
        work, "eye", lambda path: train_second_phase(load_vision(first_path), path, eye_steps)
    )
    codes_path = stage(work, "codes", lambda path: torch.save(spherical_codes(), path))
    codes: Tensor = torch.load(codes_path, weights_only=True)
    assemble(load_vision(vision_path), codes, APPRENTICE_SIZE, False, out / "apprentice")
    master_path = stage(
        work, "master", lambda path: train_master(load_vision(vision_path), path, master_steps)
    )
    assemble(load_master(master_path), codes, MASTER_SIZE, True, out / "master")
    config = replace(TRAINING, steps=compressor_steps)
    train_compressor(
        out / "apprentice", out / "compressor", work / "compressor", config, report=print_progress
    )


def write_cards(out: Path) -> None:
    for name, card, settings in (
        ("apprentice", apprentice_card, APPRENTICE),
        ("master", master_card, MASTER),
    ):
        text = card(figures(out / name, settings))
        (out / name / "README.md").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of the files of stages")
    parser.add_argument("--out", type=Path, default=OUT, help="parent of the model folders")
    parser.add_argument("--tower-steps", type=int, default=TOWER_STEPS)
    parser.add_argument("--eye-steps", type=int, default=VISION_STEPS)
    parser.add_argument("--master-steps", type=int, default=MASTER_STEPS)
    parser.add_argument("--compressor-steps", type=int, default=TRAINING.steps)
    parser.add_argument("--no-figures", action="store_true", help="write no model cards")
    args = parser.parse_args()
    # One thread: the second core generates images, and two threads on a busy machine are slower.
    torch.set_num_threads(1)
    logging: Any = transformers.logging  # untyped
    logging.disable_progress_bar()
    run(
        args.work,
        args.out,
        args.tower_steps,
        args.eye_steps,
        args.master_steps,
        args.compressor_steps,
    )
    if not args.no_figures:
        write_cards(args.out)


if __name__ == "__main__":
    main()
