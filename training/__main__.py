"""`python -m training --work DIR`: every stage from nothing to two measured model folders
and a compressor.

A stage whose file already lies in the work folder is not run again; the long ones go on from
where they were interrupted.
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
from training.card import apprentice_card, master_card
from training.circuits import Strengths, install, install_eye, spherical_codes
from training.compressor import COURSE, told, train_compressor
from training.export import export
from training.lessons import PRACTICE, SCHOOL
from training.mastery import load_master, train_master
from training.measure import APPRENTICE, MASTER, figures
from training.schooling import Eye, Term, load_eye, train_eye
from training.tokenizer import train_tokenizer
from training.tower import Tower, centre_and_size, load_tower, train_tower

TOWER_STEPS, EYE_STEPS, MASTER_STEPS = 3200, 3000, 400
SCHOOL_TERM = Term(SCHOOL, seed=2, peak=1.5e-3)
PRACTICE_TERM = Term(PRACTICE, seed=4, peak=1.2e-3)
OUT = Path("src/bottega/bundled")


def stage(work: Path, name: str, make: Callable[[Path], object]) -> Path:
    """The stage's file, made under another name first: a file that is there is whole."""
    path = work / f"{name}.pt"
    if not path.exists():
        print(f"stage {name}", flush=True)
        make(work / f"{name}.part")
        (work / f"{name}.part").rename(path)
    return path


def first_term(tower: Tower, out: Path, steps: int) -> Eye:
    torch.manual_seed(1)
    return train_eye(Eye(tower), out, steps, SCHOOL_TERM)


def second_term(eye: Eye, out: Path, steps: int) -> Eye:
    return train_eye(eye, out, steps, PRACTICE_TERM)


def assemble(eye: Eye, codes: Tensor, size: Size, knows: bool, out: Path) -> None:
    torch.manual_seed(0)
    tokenizer, model = train_tokenizer(), build_model(size)
    install(model, codes, tokenizer, Strengths(), knows)
    install_eye(model, eye, *centre_and_size(eye.tower))
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
    schooled = stage(work, "school", lambda path: first_term(load_tower(tower), path, eye_steps))
    seeing = stage(work, "eye", lambda path: second_term(load_eye(schooled), path, eye_steps))
    coded = stage(work, "codes", lambda path: torch.save(spherical_codes(), path))
    codes: Tensor = torch.load(coded, weights_only=True)
    assemble(load_eye(seeing), codes, APPRENTICE_SIZE, False, out / "apprentice")
    knowing = stage(work, "master", lambda path: train_master(load_eye(seeing), path, master_steps))
    assemble(load_master(knowing), codes, MASTER_SIZE, True, out / "master")
    course = replace(COURSE, steps=compressor_steps)
    train_compressor(
        out / "apprentice", out / "compressor", work / "compressor", course, report=told
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
    parser.add_argument("--work", type=Path, required=True, help="stages are kept here")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder of the model folders")
    parser.add_argument("--tower-steps", type=int, default=TOWER_STEPS)
    parser.add_argument("--eye-steps", type=int, default=EYE_STEPS)
    parser.add_argument("--master-steps", type=int, default=MASTER_STEPS)
    parser.add_argument("--compressor-steps", type=int, default=COURSE.steps)
    parser.add_argument("--no-figures", action="store_true", help="leave the cards unwritten")
    args = parser.parse_args()
    # One thread: the second core draws pictures, and two threads on a busy machine are slower.
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
