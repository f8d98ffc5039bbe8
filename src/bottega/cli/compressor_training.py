"""Training of passage compressors, and compression with them."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from bottega.cli.components import check_retrieve, local_model, open_retrieval, open_tokens
from bottega.cli.compress import Plan, Settings
from bottega.cli.evaluation_run import check_images, filled_knowledge
from bottega.cli.output import note, progress, say, waiting, warn
from bottega.compression import (
    CompressorConfig,
    InputBuilder,
    Manifest,
    PassageCompressor,
    PassageStore,
    RaccModel,
    load,
    save,
)
from bottega.compression.objective import TrainingConfig, TrainingExample, TrainingObjective
from bottega.compression.persistence import SETTINGS, fingerprint, same_model
from bottega.compression.training import CHECKPOINT, TrainingProgress, train
from bottega.errors import LoadError, SettingError
from bottega.evaluation import benchmark
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.benchmarks.passages import with_passages
from bottega.evaluation.examples import is_passage
from bottega.evaluation.retriever_factory import CachingEmbedder, retriever_factory
from bottega.evaluation.training_data import (
    GoldPassageLessons,
    LessonSampler,
    RetrievedLessons,
    names_gold_passages,
    passages_of,
    split_validation,
    training_items,
)
from bottega.generation import TransformersGenerator
from bottega.generation.loaded import LoadedModel
from bottega.kv_prefix import Geometry
from bottega.recipes.racc_training import teaching, untrained
from bottega.types import Example

if TYPE_CHECKING:
    from bottega.generation.loaded import LoadedModel


def loaded(generator: TransformersGenerator) -> LoadedModel:
    with waiting(f"loading {generator.name}"):
        return asyncio.run(_loaded(generator))


async def _loaded(generator: TransformersGenerator) -> LoadedModel:
    try:
        await generator.load()
        return generator.loaded
    finally:
        await generator.aclose()  # ends its thread; the caller keeps the model


STORE_BATCH = 64


class StoreBuilder:
    """Writer that compresses passages into a store: `add` them, then `finish`."""

    def __init__(
        self, condenser: PassageCompressor, store: PassageStore, shape: CompressorConfig, int8: bool
    ) -> None:
        self._condenser, self._store, self._shape, self._int8 = condenser, store, shape, int8
        self._pending: list[tuple[str, Example]] = []
        self._ids: set[str] = set()
        self._compressed, self._text_bytes = 0, 0
        self._errors: list[float] = []

    @classmethod
    def open(cls, compressor: Path, model: LoadedModel, folder: Path, *, int8: bool) -> Self:
        """Open or create a store. Raises `LoadError` for another model, and `StoreError` for a
        store of another compressor."""
        saved = load(compressor)
        shape = saved.racc.config
        condenser = PassageCompressor(
            saved.racc, saved.open_hyper(model.model), InputBuilder(model.encode, model.ends)
        )
        precision = Manifest(
            saved.digest, shape.document_prompts, shape.width, "int8" if int8 else "fp16"
        )
        return cls(condenser, PassageStore(folder, precision), shape, int8)

    @property
    def seen(self) -> int:
        return len(self._ids)

    def lock(self) -> AbstractContextManager[None]:
        """Lock the store. Raises `StoreError` while another command builds it."""
        return self._store.building()

    def add(self, id: str, passage: Example) -> None:
        self._ids.add(id)
        self._text_bytes += len(f"{passage.query.text}{passage.reply}".encode())
        self._pending.append((id, passage))
        if len(self._pending) == STORE_BATCH:
            self.finish()

    def finish(self) -> None:
        passages, self._pending = self._pending, []
        made: list[tuple[Sequence[Example], Tensor]] = []

        def compress(batch: Sequence[Example]) -> Tensor:
            rows = self._condenser.compress(batch).cpu()
            made.append((batch, rows))
            return rows

        self._compressed += self._store.add(passages, compress)
        if self._int8:
            for batch, rows in made:
                self._measure(passages, batch, rows)

    @property
    def summary(self) -> dict[str, float | None]:
        """Counts and sizes. `int8_error` is the mean of |int8 - fp16| / |fp16| over the passages
        compressed by this command."""
        numbers = self._shape.document_prompts * self._shape.width
        errors = self._errors
        return {
            "passages": self.seen,
            "compressed": self._compressed,
            "kept": len(self._store),
            "text_bytes": self._text_bytes / self.seen if self.seen else None,
            "fp16_bytes": 2 * numbers,
            "int8_bytes": numbers + 4 * self._shape.document_prompts,
            "int8_error": sum(errors) / len(errors) if errors else None,
        }

    def _measure(
        self, passages: Sequence[tuple[str, Example]], batch: Sequence[Example], rows: Tensor
    ) -> None:
        chosen = {id(one) for one in batch}
        stored = self._store.get([one for one in passages if id(one[1]) in chosen])
        half = rows.half().float().flatten(1)
        self._errors += (
            torch.linalg.vector_norm(stored.flatten(1) - half, dim=1)
            / torch.linalg.vector_norm(half, dim=1)
        ).tolist()


TRAINING_FILE, LOSSES = "training.json", "losses.jsonl"
LOGGED_STEPS = 20  # lines of progress

TrainingSets = tuple[LessonSampler, list[TrainingExample]]


def train_as_planned(plan: Plan) -> bool:
    """Train, and save the compressor. Return False if training was stopped."""
    settings, course = plan.settings, plan.course
    check_retrieve(settings.retrieve, settings.embed)
    base = local_model(settings.model)
    hyper = local_model(settings.hyper) if settings.hyper else None
    data = _read(settings)
    model = loaded(base)
    objective = teaching(model, loaded(hyper) if hyper else None, layer=settings.layer)
    shape = replace(plan.shape, width=objective.hyper.width, geometry=Geometry.of(objective.base))
    with _lessons(settings, data) as (lessons, held_out):
        _check_or_write_settings(replace(plan, shape=shape), objective, data)
        racc = untrained(shape, objective, seed=course.seed)
        _print_plan(settings, course, racc, data, len(held_out))
        if (settings.out / CHECKPOINT).exists():
            note(f"resuming from the checkpoint in {settings.out}")
        elif settings.calibrate:
            _calibrate(objective, racc, lessons.sample(settings.calibrate, -1))
        done = _train(racc, objective, lessons, held_out, settings.out, course)
    if done:
        save(racc, settings.out, hyper=objective.hyper, base=objective.base)
    return done


def _read(settings: Settings) -> Benchmark:
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
def _lessons(settings: Settings, data: Benchmark) -> Iterator[TrainingSets]:
    passages, everything = passages_of(data), training_items(data)
    items, held_out_items = split_validation(everything, settings.validate, settings.seed)
    seed, shots, batch = settings.seed, settings.shots, settings.batch
    if names_gold_passages(everything, passages):
        with waiting("reading questions and passages"):
            lessons_of = [
                GoldPassageLessons(
                    part, passages, seed=seed, shots=shots, hard=settings.hard, batch=batch
                )
                for part in (items, held_out_items)
                if part
            ]
        yield lessons_of[0], lessons_of[-1].of(held_out_items)
        return
    corpus = replace(data, knowledge=passages, items=everything)
    check_images(corpus, settings.retrieve)
    embedder = CachingEmbedder(open_retrieval(settings.retrieve, settings.embed))
    with filled_knowledge(corpus, embedder, settings.retrieve) as knowledge:
        with waiting("indexing passages"):
            tokens = open_tokens(settings.embed)
            search = retriever_factory(settings.retrieve, embedder, tokens=tokens, seed=seed)
            retrieve = search(corpus, knowledge)
        lessons = RetrievedLessons(data, items, retrieve, seed=seed, shots=shots, batch=batch)
        yield lessons, lessons.of(held_out_items)


def _check_or_write_settings(plan: Plan, objective: TrainingObjective, data: Benchmark) -> None:
    """Write the training settings, or raise `LoadError` if the folder has other settings."""
    out = plan.settings.out
    current = {
        **{name: value for name, value in asdict(plan.settings).items() if name != "out"},
        "shape": asdict(plan.shape),
        "course": asdict(plan.course),
        "data": benchmark.fingerprint(data),
        "hyper": fingerprint(objective.hyper.model),
        "base": fingerprint(objective.base),
    }
    file = out / TRAINING_FILE
    if not file.exists():
        if (out / SETTINGS).exists() or (out / CHECKPOINT).exists():
            raise LoadError(
                f"{out} holds a compressor from another training",
                hint="name another folder as out",
            )
        out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(current, indent=2) + "\n")
        return
    try:
        before = json.loads(file.read_text())
    except ValueError as error:
        raise LoadError(f"{file} is damaged", hint=f"delete {out} and train again") from error
    changed = [
        name for name, value in current.items() if not _same_setting(name, before.get(name), value)
    ]
    if changed:
        raise LoadError(
            f"{out} holds a training with another {' and another '.join(changed)}",
            hint="name another folder as out, or use the settings in its training.json",
        )


def _same_setting(name: str, before: object, now: object) -> bool:
    if name not in ("hyper", "base"):
        return before == now
    try:  # fingerprints of one model differ in rounding between machines
        return same_model(str(before), str(now))
    except ValueError:
        return False


def _print_plan(
    settings: Settings, course: TrainingConfig, racc: RaccModel, data: Benchmark, held_out: int
) -> None:
    shape, compressing_model = racc.config, settings.hyper or settings.model
    parameters = sum(one.numel() for one in racc.parameters())
    passages = passages_of(data)
    text = sum(len(one.query.text.encode()) for one in passages) / len(passages)
    say(
        f"{compressing_model} compresses a passage into {shape.document_prompts} prompts"
        f" ({text:.0f} bytes of text into {_bytes(shape)} as fp16), and {settings.shots} passages"
        f" with a question into {shape.query_prompts} prompts for {settings.model}"
    )
    say(
        f"{data.name}: {len(training_items(data)) - held_out} training questions,"
        f" {held_out} validation questions, {len(passages)} passages"
    )
    say(
        f"{parameters} parameters, {course.steps} steps of {settings.batch * course.accumulate}"
        f" lessons, into {settings.out}"
    )


def _bytes(shape: CompressorConfig) -> int:
    return 2 * shape.document_prompts * shape.width


def _calibrate(
    objective: TrainingObjective, racc: RaccModel, lessons: list[TrainingExample]
) -> None:
    relevant = sum(any(one.relevant) for one in lessons)
    note(f"{relevant} of the first {len(lessons)} lessons have a relevant passage")
    with waiting("calibrating"):
        objective.calibrate(racc, lessons)


def _train(
    racc: RaccModel,
    objective: TrainingObjective,
    lessons: LessonSampler,
    held_out: list[TrainingExample],
    out: Path,
    course: TrainingConfig,
) -> bool:
    with (
        progress("training", course.steps) as step,
        (out / LOSSES).open("a") as losses,
        _stopping() as stopped,
    ):
        reached = 0

        def report(now: TrainingProgress) -> None:
            nonlocal reached
            step(now.step + 1 - reached)
            reached = now.step + 1
            losses.write(json.dumps(asdict(now)) + "\n")
            losses.flush()
            last = reached == course.steps
            if (
                now.validation is not None
                or last
                or reached % max(1, course.steps // LOGGED_STEPS) == 0
            ):
                note(_line(now))

        return train(
            racc,
            objective,
            lessons,
            course,
            folder=out,
            held_out=held_out,
            report=report,
            stopped=stopped,
        )


def _line(now: TrainingProgress) -> str:
    validated = "" if now.validation is None else f", validation {now.validation:.4f}"
    return f"step {now.step + 1}: loss {now.loss:.4f}, rate {now.rate:.1e}{validated}"


@contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells if Ctrl-C was pressed, to stop after the step. The second Ctrl-C
    stops at once."""
    pressed = False

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
