"""Training of compressors (RACC) as planned in a file, with models in this process. Needs torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from bottega._util.durable_files import lock_file, os_errors, replace_file
from bottega._util.progress import SILENT, Display, plural
from bottega.compression import CompressorConfig, RaccModel, save
from bottega.compression.objective import TrainingExample, TrainingObjective
from bottega.compression.persistence import SETTINGS, fingerprint, same_model
from bottega.compression.training import CHECKPOINT, TrainingProgress, train
from bottega.errors import LoadError, SettingError, StoreBusyError
from bottega.evaluation import benchmark
from bottega.evaluation.benchmark import Benchmark, is_passage
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.benchmarks.passages import with_passages
from bottega.evaluation.compressor_plan import Plan, TrainingSettings
from bottega.evaluation.methods.method_actor import check_images, filled_knowledge
from bottega.evaluation.methods.retrieval import check_retrieve, open_retrieval, retriever_factory
from bottega.evaluation.methods.training_data import (
    GoldPassageSampler,
    RetrievedPassageSampler,
    TrainingSampler,
    check_training_data,
    check_training_images,
    names_gold_passages,
    passages_of,
    split_validation,
    training_items,
)
from bottega.generation import TransformersGenerator
from bottega.kv_prefix import Geometry
from bottega.naming import local_model
from bottega.recipes.racc_store import PassageSizes, load_model, source_bytes
from bottega.recipes.racc_training import check_answers, new_compressor, training_objective

# `preset` is recorded as the settings that it sets.
UNRECORDED = ("out", "preset")
SETTINGS_FILE, LOSSES, LOCK = "training.json", "losses.jsonl", "lock"
PROGRESS_LINES = 20
# Yields a function that returns whether the training shall stop after the current step.
Interruption = Callable[[], AbstractContextManager[Callable[[], bool]]]


def describe_training(plan: Plan, display: Display = SILENT) -> list[str]:
    """Return lines on the data and the steps of a training. Loads no model."""
    settings = plan.settings
    _open_models(settings)  # checks their names
    data = _read_benchmark(settings, display)
    _, held_out = split_validation(training_items(data), settings.validate, settings.seed)
    return [_questions(data, len(held_out)), f"{_sizes(plan, plan.compressor)}; {_steps(plan)}"]


def _open_models(
    settings: TrainingSettings, trust_remote_code: bool = False
) -> tuple[TransformersGenerator, TransformersGenerator | None]:
    """Return base model and hyper model, not loaded yet; None for the base model."""
    check_retrieve(settings.retrieve, settings.embed)
    base = local_model(settings.model, trust_remote_code)
    return base, local_model(settings.hyper, trust_remote_code) if settings.hyper else None


def train_compressor(
    plan: Plan,
    *,
    trust_remote_code: bool = False,
    display: Display = SILENT,
    describe: Callable[[str], object] = lambda line: None,
    interruption: Interruption = lambda: nullcontext(lambda: False),
) -> bool:
    """Train as planned and return whether the training finished. Its folder keeps checkpoints: the
    same plan resumes.

    `describe` receives lines on the models and the data before the first step. The training ends
    after a step if the function that `interruption` yields returns True.
    """
    settings = plan.settings
    base, hyper = _open_models(settings, trust_remote_code)
    data = _read_benchmark(settings, display)
    model = load_model(base, display.waiting)
    hyper_model = load_model(hyper, display.waiting) if hyper else None
    check_training_images(data, model, hyper_model, distill=plan.training.distill)
    objective = training_objective(
        model, hyper_model, layer=settings.layer, answer_tokens=settings.answer_tokens
    )
    if not plan.training.distill:
        check_answers(objective, training_items(data))
    config = replace(
        plan.compressor, width=objective.hyper.width, geometry=Geometry.of(objective.base)
    )
    with (
        _training_examples(settings, data, display) as (sampler, held_out),
        _lock(settings.out),
    ):
        _check_folder(replace(plan, compressor=config), objective, data)
        if (settings.out / SETTINGS).exists():  # also if its checkpoint was deleted
            display.note(f"{settings.out} holds the finished compressor of this training")
            return True
        racc = new_compressor(config, objective, seed=plan.training.seed, pipe=settings.pipe)
        for line in _description(plan, racc, data, len(held_out)):
            describe(line)
        if (settings.out / CHECKPOINT).exists():
            display.note(f"resuming from the checkpoint in {settings.out}")
        elif settings.calibrate:
            examples = sampler.sample(settings.calibrate, -1)
            relevant = sum(any(one.relevant) for one in examples)
            display.note(
                f"{relevant} of the first {len(examples)} examples have a relevant passage"
            )
            with display.waiting("calibrating"):
                objective.calibrate(racc, examples)
        with interruption() as stopped:
            finished = _train(racc, objective, sampler, held_out, plan, display, stopped)
        if finished:
            save(
                racc,
                settings.out,
                hyper=objective.hyper,
                base=objective.base,
                tokenizers=objective.tokenizers,
            )
        return finished


def _read_benchmark(settings: TrainingSettings, display: Display) -> Benchmark:
    data = load_benchmark(settings.benchmark, seed=settings.seed, on_error=display.warn)
    if settings.seed == 0 and all(map(is_passage, data.knowledge)):
        raise SettingError(
            f"{data.name} has no training questions, so training generates them from seed, and seed"
            " 0 generates the questions of `bottega eval`",
            hint="set seed to another number: seed = 20000",
        )
    if settings.passages is not None:
        data = with_passages(data, settings.passages, on_error=display.warn)
    check_training_data(data, settings.shots)
    if not names_gold_passages(training_items(data), passages_of(data)):
        check_images(_searched(data), settings.retrieve)
    return replace(data, relevance=settings.relevance or data.relevance)


def _searched(data: Benchmark) -> Benchmark:
    """Return a benchmark of the passages, with the training questions as its items."""
    return replace(data, knowledge=passages_of(data), items=training_items(data))


@contextmanager
def _training_examples(
    settings: TrainingSettings, data: Benchmark, display: Display
) -> Iterator[tuple[TrainingSampler, list[TrainingExample]]]:
    """Yield the sampler of training examples and the validation examples."""
    passages, questions = passages_of(data), training_items(data)
    items, held_out = split_validation(questions, settings.validate, settings.seed)
    seed, shots, batch = settings.seed, settings.shots, settings.batch
    if names_gold_passages(questions, passages):
        sample = partial(
            GoldPassageSampler,
            passages=passages,
            seed=seed,
            shots=shots,
            hard=settings.hard_negatives,
            batch=batch,
            scores=data.passage_scores,
        )
        with display.waiting("reading questions and passages"):
            samplers = [sample(part) for part in (items, held_out) if part]
        yield samplers[0], samplers[-1].of(held_out)
        return
    searched = _searched(data)
    retrieval = open_retrieval(
        settings.retrieve,
        settings.embed,
        questions=(passage.query.text for passage in passages),
        seed=seed,
        display=display,
    )
    with filled_knowledge(searched, retrieval, display=display) as knowledge:
        with display.waiting("indexing passages"):
            retrieve = retriever_factory(retrieval)(searched, knowledge)
        sampler = RetrievedPassageSampler(
            data, items, retrieve, seed=seed, shots=shots, batch=batch
        )
        yield sampler, sampler.of(held_out)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock the folder of a training: two processes would overwrite each other's checkpoints.
    Raises `StoreBusyError`."""
    with os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_file(folder / LOCK)
    if lock is None:
        raise StoreBusyError(
            f"another process is training the compressor in {folder}",
            hint="wait until it finishes, or name another folder as out",
        )
    with lock:
        yield


def _check_folder(plan: Plan, objective: TrainingObjective, data: Benchmark) -> None:
    """Record the training in its folder, or check that the folder belongs to it. Raises
    `LoadError`."""
    out = plan.settings.out
    named = names_gold_passages(training_items(data), passages_of(data))
    settings = {
        **{name: value for name, value in asdict(plan.settings).items() if name not in UNRECORDED},
        "relevance": None if named else data.relevance,
        "compressor": asdict(plan.compressor),
        "training": asdict(plan.training),
        "data": benchmark.fingerprint(data),
        "hyper": fingerprint(objective.hyper.model),
        "base": fingerprint(objective.base),
        "tokenizers": objective.tokenizers,
    }
    file = out / SETTINGS_FILE
    if not file.exists():
        if (out / SETTINGS).exists() or (out / CHECKPOINT).exists():
            raise LoadError(
                f"{out} holds a compressor from another training",
                hint="name another folder as out",
            )
        replace_file(file, f"{json.dumps(settings, indent=2)}\n".encode())
        return
    try:
        stored = dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise LoadError(
            f"{file} is damaged", hint=f"delete {out} and run the command again"
        ) from error
    if changed := [n for n, value in settings.items() if not _equal(n, stored.get(n), value)]:
        own = "use the settings in its training.json"
        if "relevance" in changed and stored.get("relevance"):
            own = f'set relevance = "{stored["relevance"]}"'
        raise LoadError(
            f"{out} holds a training with another {' and another '.join(changed)}",
            hint=f"name another folder as out, or {own}",
        )


def _equal(name: str, stored: object, value: object) -> bool:
    if name not in ("hyper", "base"):
        return stored == value
    try:  # fingerprints are rounded differently on another machine
        return same_model(str(stored), str(value))
    except ValueError:
        return False


def _description(plan: Plan, racc: RaccModel, data: Benchmark, held_out: int) -> Iterator[str]:
    """Yield lines on a training whose models are loaded."""
    text, images = np.mean([source_bytes(one) for one in passages_of(data)], axis=0)
    yield _sizes(plan, racc.config)
    yield f"per passage: {PassageSizes.of(text, images, racc.config)}"
    yield _questions(data, held_out)
    yield f"{sum(one.numel() for one in racc.parameters())} parameters, {_steps(plan)}"


def _sizes(plan: Plan, config: CompressorConfig) -> str:
    settings = plan.settings
    return (
        f"{settings.hyper or settings.model} compresses a passage into "
        f"{plural(config.document_prompts, 'prompt')}, and {plural(settings.shots, 'passage')} and"
        f" a question into {config.query_prompts}"
        f" positions before {settings.model}"
    )


def _questions(data: Benchmark, held_out: int) -> str:
    return (
        f"{data.name}: {plural(len(training_items(data)) - held_out, 'training question')},"
        f" {plural(held_out, 'validation question')}, {plural(len(passages_of(data)), 'passage')}"
    )


def _steps(plan: Plan) -> str:
    count = plan.settings.batch * plan.training.accumulate
    return (
        f"{plural(plan.training.steps, 'step')} of {plural(count, 'example')};"
        f" output folder {plan.settings.out}"
    )


def _train(
    racc: RaccModel,
    objective: TrainingObjective,
    sampler: TrainingSampler,
    held_out: list[TrainingExample],
    plan: Plan,
    display: Display,
    stopped: Callable[[], bool],
) -> bool:
    out, steps = plan.settings.out, plan.training.steps
    with display.progress("training", steps) as advance:
        reached = 0

        def report(now: TrainingProgress) -> None:
            nonlocal reached
            advance(now.step + 1 - reached)  # a resumed training starts above 0
            reached = now.step + 1
            with os_errors(out), (out / LOSSES).open("a") as losses:
                losses.write(json.dumps(asdict(now)) + "\n")
            shown = reached == steps or reached % max(1, steps // PROGRESS_LINES) == 0
            if shown or now.validation is not None:
                validated = "" if now.validation is None else f", validation {now.validation:.4f}"
                display.note(f"step {reached}: loss {now.loss:.4f}, rate {now.rate:.1e}{validated}")

        return train(
            racc,
            objective,
            sampler,
            plan.training,
            folder=out,
            held_out=held_out,
            report=report,
            stopped=stopped,
        )
