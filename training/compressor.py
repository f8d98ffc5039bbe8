"""Bundled compressor: RACC from the apprentice to itself, trained on synthetic facts.

Each training example is an image with a question and five passages of its episode, one of which
answers it. Evaluation episodes have other seeds: the compressor has seen the names and relations,
but no invented fact of the passages.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from bottega.compression import CompressorConfig, HyperModel, RaccModel, save
from bottega.compression.objective import TrainingConfig, TrainingObjective
from bottega.compression.persistence import load, save_settings
from bottega.compression.training import TrainingProgress, train
from bottega.evaluation.methods.training_data import GoldPassageSampler
from bottega.generation.loaded import LoadedModel
from bottega.kv_prefix import Geometry
from bottega.recipes.racc_training import new_compressor, training_objective
from bottega.tasks.glyphs import FactTask

PASSAGES, BATCH, HARD_NEGATIVES = 5, 32, 0.5
EPISODES, QUERIES = 40, 100
SEED = 20_000  # `bottega eval` generates its questions with seed 0
# The frozen heads of the bundled decoder attend to certain positions only: prompts appended to a
# text would learn little of it. Layer 1 is the first whose states know names and relations.
LAYER, PROMPTS = 1, 8
TRAINING = TrainingConfig(
    steps=700,
    learning_rate=1e-3,
    warmup_steps=50,
    weight_decay=0.0,
    answer_weight=0.0,
    cache_weight=1.0,
    prdb=False,
    hide_scores=0.5,
    checkpoint_every=100,
)
FactSampler = GoldPassageSampler


def fact_batches(episodes: int = EPISODES, queries: int = QUERIES, seed: int = SEED) -> FactSampler:
    """Return training batches. In half of the examples another passage is about the same name, and
    one about the same relation.
    """
    task = FactTask(queries=queries, episodes=episodes).generate(seed)
    return GoldPassageSampler(
        task.items, task.knowledge, seed=seed, shots=PASSAGES, hard=HARD_NEGATIVES, batch=BATCH
    )


def racc_objective(model: LoadedModel) -> TrainingObjective:
    """Return the objective with the apprentice as hyper and base model."""
    return training_objective(model, layer=LAYER)


def compressor_config(model: LoadedModel) -> CompressorConfig:
    width = HyperModel(model.model).width
    return CompressorConfig(width, Geometry.of(model.model), PROMPTS, PROMPTS, prompting="reading")


def train_compressor(
    apprentice: Path,
    out: Path,
    work: Path,
    config: TrainingConfig = TRAINING,
    batches: FactSampler | None = None,
    report: Callable[[TrainingProgress], None] = lambda progress: None,
) -> RaccModel:
    """Train and save a compressor; resume from the checkpoint in `work`."""
    model = LoadedModel.load(str(apprentice), "cpu", "float32")
    batches, objective = batches or fact_batches(), racc_objective(model)
    racc = new_compressor(compressor_config(model), objective)
    objective.calibrate(racc, batches.sample(512, -1))
    train(racc, objective, batches, config, folder=work, report=report)
    save(racc, out, hyper=objective.hyper, base=model.model)
    return racc


@torch.no_grad()
def recalibrate(apprentice: Path, compressor: Path, out: Path) -> None:
    """Keep the weights in `compressor` and measure its scales again with a new decoder.

    The scales of hidden states, keys and values are buffers. The learned weights are parameters
    relative to these scales.
    """
    model = LoadedModel.load(str(apprentice), "cpu", "float32")
    objective, racc = racc_objective(model), load(compressor).racc
    learned = {name: one.clone() for name, one in racc.named_parameters()}
    objective.calibrate(racc, fact_batches().sample(512, -1))
    racc.load_state_dict(learned, strict=False)
    save(racc, out, hyper=objective.hyper, base=model.model)


def describe(apprentice: Path, out: Path) -> None:
    """Write the settings beside the weights in `out` again after a change of their format."""
    model = LoadedModel.load(str(apprentice), "cpu", "float32")
    objective = racc_objective(model)
    save_settings(compressor_config(model), out, hyper=objective.hyper, base=model.model)
    load(out).open(model.model, model.model)


def print_progress(progress: TrainingProgress) -> None:
    if progress.step % 50 == 0:
        print(f"step {progress.step}: loss {progress.loss:.4f}", flush=True)
