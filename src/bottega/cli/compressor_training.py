"""Training of compressors and compression of passages with a model in this process."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from bottega._util.event_loops import BACKGROUND_LOOP
from bottega._util.executor import Executor, LocalExecutor, batched, computed_ahead
from bottega.cli.components import check_retrieve, local_model, open_retrieval
from bottega.cli.compress import Plan, Settings
from bottega.cli.method_actor import check_images, filled_knowledge
from bottega.cli.output import note, say, waiting, warn
from bottega.cli.progress import progress
from bottega.compression import (
    InputBuilder,
    Manifest,
    PassageCompressor,
    PassageStore,
    RaccModel,
    load,
    save,
)
from bottega.compression.objective import TrainingExample, TrainingObjective
from bottega.compression.persistence import SETTINGS, fingerprint, same_model, with_current_names
from bottega.compression.training import CHECKPOINT, TrainingProgress, train
from bottega.errors import LoadError, SettingError
from bottega.evaluation import benchmark
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.benchmarks.passages import with_passages
from bottega.evaluation.benchmarks.source import current_spec
from bottega.evaluation.examples import is_passage
from bottega.evaluation.retriever_factory import retriever_factory
from bottega.evaluation.training_data import (
    GoldPassageSampler,
    RetrievedPassageSampler,
    TrainingSampler,
    names_gold_passages,
    passages_of,
    split_validation,
    training_items,
)
from bottega.generation import TransformersGenerator
from bottega.generation.loaded import LoadedModel
from bottega.kv_prefix import Geometry
from bottega.recipes.racc_training import new_compressor, training_objective
from bottega.types import Example

BATCH = 64
AHEAD = 2  # calls per worker: one is computed while the next one is sent
SETTINGS_FILE, LOSSES = "training.json", "losses.jsonl"
PROGRESS_LINES = 20


def load_model(generator: TransformersGenerator) -> LoadedModel:
    async def load() -> LoadedModel:
        try:
            await generator.load()
            return generator.loaded
        finally:
            await generator.aclose()  # ends its thread; the model stays usable

    with waiting(f"loading {generator.name}"):
        return asyncio.run(load())


class CompressorActor:
    """Trained compressor with its model. The digest of its weights must be `digest`."""

    def __init__(self, folder: Path, model: LoadedModel, digest: str) -> None:
        saved = load(folder)
        if saved.digest != digest:
            raise SettingError(
                f"the compressor in {folder} differs between this process and a worker",
                hint="copy the folder to all machines of the cluster",
            )
        self._compressor = PassageCompressor(
            saved.racc, saved.open_hyper(model.model), InputBuilder(model.encode, model.ends)
        )

    async def __call__(self, passages: Sequence[Example], /) -> Tensor:
        return await asyncio.to_thread(self._compress, passages)

    def _compress(self, passages: Sequence[Example]) -> Tensor:
        with torch.no_grad():
            return self._compressor.compress(passages).cpu()

    async def aclose(self) -> None:
        pass


@dataclass(frozen=True)
class CompressorFactory:
    """Factory of a `CompressorActor` from the name of its model."""

    folder: Path
    model: str
    digest: str

    def __call__(self) -> CompressorActor:
        return CompressorActor(self.folder, load_model(local_model(self.model)), self.digest)


class StoreBuilder:
    """Builder of a store of compressed passages by workers. Raises `LoadError` for another model
    and `StoreError` for a store of another compressor."""

    def __init__(
        self,
        compressor: Path,
        model: str,
        folder: Path,
        *,
        int8: bool,
        executor: Executor | None = None,
    ) -> None:
        saved = load(compressor)
        self._config, self._int8 = saved.racc.config, int8
        prompts, width = self._config.document_prompts, self._config.width
        manifest = Manifest(saved.digest, prompts, width, "int8" if int8 else "fp16")
        self.store = PassageStore(folder, manifest)
        factory = CompressorFactory(compressor, model, saved.digest)
        # One call at a time: a model computes one batch.
        self._workers = (executor or LocalExecutor()).start(factory, concurrency=1)
        self._ahead = 1 if executor is None else AHEAD * executor.count
        self._ids: set[str] = set()
        self._compressed, self._text_bytes = 0, 0
        self._errors: list[float] = []

    def build(
        self, passages: Iterable[tuple[str, Example]], done: Callable[[int], None] = lambda n: None
    ) -> None:
        """Compress new and changed passages, given with their ids; `done` gets the number of
        processed passages since its last call."""
        batches = batched(passages, BATCH)
        with self.store.building():
            for batch, rows in computed_ahead(batches, self._compress, self._ahead):
                self._add(batch, rows)
                done(len(batch))

    def close(self) -> None:
        """End the workers."""
        BACKGROUND_LOOP.run(self._workers.aclose())

    def _compress(self, batch: Sequence[tuple[str, Example]]) -> Tensor | None:
        missing = self.store.missing(batch)
        return BACKGROUND_LOOP.run(self._workers(missing)) if missing else None

    def _add(
        self, batch: Sequence[tuple[str, Example]], compress: Callable[[], Tensor | None]
    ) -> None:
        self._ids |= {id for id, _ in batch}
        for _, one in batch:
            self._text_bytes += len(f"{one.query.text}{one.reply}".encode())
        missing, rows = self.store.missing(batch), compress()
        if rows is None:
            return
        self._compressed += self.store.add(batch, lambda passages: rows)
        if self._int8:
            identities = {id(one) for one in missing}
            stored = self.store.get([pair for pair in batch if id(pair[1]) in identities])
            half = rows.half().float().flatten(1)
            norm = torch.linalg.vector_norm
            self._errors += (norm(stored.flatten(1) - half, dim=1) / norm(half, dim=1)).tolist()

    def summary(self) -> dict[str, float | None]:
        """Return counts and sizes in bytes per passage. `int8_error` is the mean of |int8 - fp16| /
        |fp16| over the passages compressed now."""
        numbers, count = self._config.document_prompts * self._config.width, len(self._ids)
        return {
            "passages": count,
            "compressed": self._compressed,
            "kept": len(self.store),
            "text_bytes": self._text_bytes / count if count else None,
            "fp16_bytes": 2 * numbers,
            "int8_bytes": numbers + 4 * self._config.document_prompts,
            "int8_error": sum(self._errors) / len(self._errors) if self._errors else None,
        }


def train_compressor(plan: Plan) -> bool:
    """Train as planned and return whether the training finished."""
    settings = plan.settings
    check_retrieve(settings.retrieve, settings.embed)
    base = local_model(settings.model)
    hyper = local_model(settings.hyper) if settings.hyper else None
    data = _read_benchmark(settings)
    model = load_model(base)
    objective = training_objective(
        model, load_model(hyper) if hyper else None, layer=settings.layer
    )
    config = replace(
        plan.compressor, width=objective.hyper.width, geometry=Geometry.of(objective.base)
    )
    with _training_examples(settings, data) as (sampler, held_out):
        _check_folder(replace(plan, compressor=config), objective, data)
        racc = new_compressor(config, objective, seed=plan.training.seed)
        _print_plan(plan, racc, data, len(held_out))
        if (settings.out / CHECKPOINT).exists():
            note(f"resuming from the checkpoint in {settings.out}")
        elif settings.calibrate:
            examples = sampler.sample(settings.calibrate, -1)
            relevant = sum(any(one.relevant) for one in examples)
            note(f"{relevant} of the first {len(examples)} examples have a relevant passage")
            with waiting("calibrating"):
                objective.calibrate(racc, examples)
        finished = _train(racc, objective, sampler, held_out, plan)
    if finished:
        save(racc, settings.out, hyper=objective.hyper, base=objective.base)
    return finished


def _read_benchmark(settings: Settings) -> Benchmark:
    data = load_benchmark(settings.benchmark, seed=settings.seed, on_error=warn)
    if settings.seed == 0 and all(map(is_passage, data.knowledge)):
        raise SettingError(
            f"{data.name} has no training questions, so training generates them from seed, and seed"
            " 0 generates the questions of `bottega eval`",
            hint="set seed to another number: seed = 20000",
        )
    if settings.passages is not None:
        data = with_passages(data, settings.passages, on_error=warn)
    return data


@contextmanager
def _training_examples(
    settings: Settings, data: Benchmark
) -> Iterator[tuple[TrainingSampler, list[TrainingExample]]]:
    """Yield the sampler of training examples and the validation examples."""
    passages, questions = passages_of(data), training_items(data)
    items, held_out = split_validation(questions, settings.validate, settings.seed)
    seed, shots, batch = settings.seed, settings.shots, settings.batch
    if names_gold_passages(questions, passages):
        hard = settings.hard_negatives
        with waiting("reading questions and passages"):
            samplers = [
                GoldPassageSampler(part, passages, seed=seed, shots=shots, hard=hard, batch=batch)
                for part in (items, held_out)
                if part
            ]
        yield samplers[0], samplers[-1].of(held_out)
        return
    searched = replace(data, knowledge=passages, items=questions)
    check_images(searched, settings.retrieve)
    retrieval = open_retrieval(
        settings.retrieve,
        settings.embed,
        questions=(passage.query.text for passage in passages),
        seed=seed,
    )
    with filled_knowledge(searched, retrieval) as knowledge:
        with waiting("indexing passages"):
            retrieve = retriever_factory(retrieval)(searched, knowledge)
        sampler = RetrievedPassageSampler(
            data, items, retrieve, seed=seed, shots=shots, batch=batch
        )
        yield sampler, sampler.of(held_out)


def _check_folder(plan: Plan, objective: TrainingObjective, data: Benchmark) -> None:
    """Record the training in its folder, or check that the folder belongs to it. Raises
    `LoadError`."""
    out = plan.settings.out
    settings = {
        **{name: value for name, value in asdict(plan.settings).items() if name != "out"},
        "compressor": asdict(plan.compressor),
        "training": asdict(plan.training),
        "data": benchmark.fingerprint(data),
        "hyper": fingerprint(objective.hyper.model),
        "base": fingerprint(objective.base),
    }
    file = out / SETTINGS_FILE
    if not file.exists():
        if (out / SETTINGS).exists() or (out / CHECKPOINT).exists():
            raise LoadError(
                f"{out} holds a compressor from another training",
                hint="name another folder as out",
            )
        out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings, indent=2) + "\n")
        return
    try:
        stored = with_current_names(json.loads(file.read_text()))
    except (ValueError, AttributeError) as error:
        raise LoadError(
            f"{file} is damaged", hint=f"delete {out} and run the command again"
        ) from error
    if changed := [n for n, value in settings.items() if not _equal(n, stored.get(n), value)]:
        raise LoadError(
            f"{out} holds a training with another {' and another '.join(changed)}",
            hint="name another folder as out, or use the settings in its training.json",
        )


def _equal(name: str, stored: object, value: object) -> bool:
    if name == "benchmark":
        return current_spec(str(stored)) == value
    if name not in ("hyper", "base"):
        return stored == value
    try:  # fingerprints are rounded differently on another machine
        return same_model(str(stored), str(value))
    except ValueError:
        return False


def _print_plan(plan: Plan, racc: RaccModel, data: Benchmark, held_out: int) -> None:
    settings, config, passages = plan.settings, racc.config, passages_of(data)
    text = sum(len(one.query.text.encode()) for one in passages) / len(passages)
    say(
        f"{settings.hyper or settings.model} compresses a passage into {config.document_prompts}"
        f" prompts ({text:.0f} bytes of text into {2 * config.document_prompts * config.width} as"
        f" fp16), and {settings.shots} passages and a question into {config.query_prompts}"
        f" positions before {settings.model}"
    )
    say(
        f"{data.name}: {len(training_items(data)) - held_out} training questions, {held_out}"
        f" validation questions, {len(passages)} passages"
    )
    say(
        f"{sum(one.numel() for one in racc.parameters())} parameters, {plan.training.steps} steps"
        f" of {settings.batch * plan.training.accumulate} examples; output folder {settings.out}"
    )


def _train(
    racc: RaccModel,
    objective: TrainingObjective,
    sampler: TrainingSampler,
    held_out: list[TrainingExample],
    plan: Plan,
) -> bool:
    out, steps = plan.settings.out, plan.training.steps
    with (
        progress("training", steps) as advance,
        (out / LOSSES).open("a") as losses,
        _interruption() as stopped,
    ):
        reached = 0

        def report(now: TrainingProgress) -> None:
            nonlocal reached
            advance(now.step + 1 - reached)  # a resumed training starts above 0
            reached = now.step + 1
            losses.write(json.dumps(asdict(now)) + "\n")
            losses.flush()
            shown = reached == steps or reached % max(1, steps // PROGRESS_LINES) == 0
            if shown or now.validation is not None:
                validated = "" if now.validation is None else f", validation {now.validation:.4f}"
                note(f"step {reached}: loss {now.loss:.4f}, rate {now.rate:.1e}{validated}")

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


@contextmanager
def _interruption() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed, so the current step can finish. The
    second Ctrl-C ends the process at once."""
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
