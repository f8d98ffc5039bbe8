"""`python -m training --work DIR`: every stage from nothing to a measured model folder.

A stage whose file already lies in the work folder is not run again.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from training.architecture import build_model
from training.card import model_card
from training.circuits import Strengths, install, install_tower, spherical_codes
from training.decoder import token_accuracy, train_decoder
from training.episodes import Writer, draw_pool
from training.evaluate import evaluate
from training.export import export
from training.pictures import draw_batch
from training.sharpness import table
from training.tokenizer import label_words, train_tokenizer
from training.tower import Tower, load_tower, train_tower

TOWER_STEPS, DECODER_STEPS = 3200, 0
OUT = Path("src/bottega/bundled/apprentice")
CENTRE_SEED, POOL_SEED, TRIAL_SEED, EPISODE_SEED = 5, 4242, 99, 7


def tower_stage(work: Path, steps: int) -> Tower:
    path = work / "tower.pt"
    if not path.exists():
        train_tower(work / "tower.part", steps)
        (work / "tower.part").rename(path)
    return load_tower(path)


def codes_stage(work: Path) -> Tensor:
    path = work / "codes.pt"
    if not path.exists():
        torch.save(spherical_codes(), path)
    codes: Tensor = torch.load(path, weights_only=True)
    return codes


@torch.no_grad()
def mean_embedding(tower: Tower, batches: int = 4) -> Tensor:
    rng = torch.Generator().manual_seed(CENTRE_SEED)
    return torch.cat([tower(draw_batch(rng)) for _ in range(batches)]).mean(0)


def run(work: Path, out: Path, tower_steps: int, decoder_steps: int) -> None:
    work.mkdir(parents=True, exist_ok=True)
    tower, codes = tower_stage(work, tower_steps), codes_stage(work)
    tokenizer, centre = train_tokenizer(), mean_embedding(tower)
    trial = draw_pool(tower, centre, TRIAL_SEED, groups=32)
    print(table(trial), flush=True)

    torch.manual_seed(0)
    model = build_model()
    install(model, codes, Strengths())
    install_tower(model, tower, centre)
    export(model, tokenizer, work / "installed", "# Circuit as installed, before training\n")
    judge = "token accuracy {:.4f}, loss {:.4f} on held-out conversations"
    print("installed:", judge.format(*token_accuracy(model, Writer(trial, tokenizer, 1), 320)))
    if decoder_steps:
        pool = draw_pool(tower, centre, POOL_SEED, groups=160)
        train_decoder(model, Writer(pool, tokenizer, EPISODE_SEED), decoder_steps)
        print("trained:", judge.format(*token_accuracy(model, Writer(trial, tokenizer, 1), 320)))
    export(model, tokenizer, out, "# Being measured\n")
    card = model_card(evaluate(out), tower_steps, len(label_words()), decoder_steps)
    (out / "README.md").write_text(card, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="stages are kept here")
    parser.add_argument("--out", type=Path, default=OUT, help="the model folder to write")
    parser.add_argument("--tower-steps", type=int, default=TOWER_STEPS)
    parser.add_argument("--decoder-steps", type=int, default=DECODER_STEPS)
    args = parser.parse_args()
    # One thread: the second core draws pictures, and two threads on a busy machine are slower.
    torch.set_num_threads(1)
    logging: Any = transformers.logging  # untyped
    logging.disable_progress_bar()
    run(args.work, args.out, args.tower_steps, args.decoder_steps)


if __name__ == "__main__":
    main()
