"""`bottega compress train`, once its settings are read. Needs torch."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType

from bottega.cli.compressor_models import loaded, local
from bottega.cli.compressor_settings import Plan, Settings
from bottega.cli.measuring import check_retrieval, filled
from bottega.cli.output import note, progress, say, waiting, warn
from bottega.cli.resolving import check_retrieve, open_retrieval, open_tokens
from bottega.compression import Racc, Shape, save
from bottega.compression.fingerprints import fingerprint, same
from bottega.compression.saving import SETTINGS
from bottega.compression.training import Course, Lesson, Progress, Teaching, train
from bottega.compression.training.checkpoints import NAME
from bottega.errors import LoadError, SettingError
from bottega.evaluation import benchmark
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.benchmarks.passages import with_passages
from bottega.evaluation.labels import is_passage
from bottega.evaluation.lessons import (
    Drawn,
    FoundLessons,
    ToldLessons,
    passages_of,
    says_which_passage,
    set_aside,
    taught_items,
)
from bottega.evaluation.memo import MemoEmbedder
from bottega.evaluation.searching import searching
from bottega.prefixing import Geometry
from bottega.recipes.training import teaching, untrained

BEGUN, LOSSES = "training.json", "losses.jsonl"
TOLD = 20  # lines of progress

Taught = tuple[Drawn, list[Lesson]]


def train_as_planned(plan: Plan) -> bool:
    """False if it was stopped."""
    settings, course = plan.settings, plan.course
    check_retrieve(settings.retrieve, settings.embed)
    base, hyper = local(settings.model), local(settings.hyper) if settings.hyper else None
    data = _read(settings)
    model = loaded(base)
    between = teaching(model, loaded(hyper) if hyper else None, layer=settings.layer)
    shape = replace(plan.shape, width=between.hyper.width, geometry=Geometry.of(between.base))
    with _lessons(settings, data) as (lessons, held_out):
        _begin(replace(plan, shape=shape), between, data)
        racc = untrained(shape, between, seed=course.seed)
        _say_plan(settings, course, racc, data, len(held_out))
        if (settings.out / NAME).exists():
            note(f"goes on from the checkpoint in {settings.out}")
        elif settings.calibrate:
            _calibrate(between, racc, lessons.drawn(settings.calibrate, -1))
        done = _train(racc, between, lessons, held_out, settings.out, course)
    if done:
        save(racc, settings.out, hyper=between.hyper, base=between.base)
    return done


def _read(settings: Settings) -> Benchmark:
    data = load_benchmark(settings.benchmark, seed=settings.seed, on_bad=warn)
    if settings.seed == 0 and all(map(is_passage, data.knowledge)):
        raise SettingError(
            f"{data.name} knows no questions, so those are taught that seed draws, and seed 0 draws"
            " the ones that `bottega eval` asks",
            hint="set seed to another number: seed = 20000",
        )
    if settings.passages is not None:
        data = with_passages(data, settings.passages, on_bad=warn)
    return data


@contextmanager
def _lessons(settings: Settings, data: Benchmark) -> Iterator[Taught]:
    passages, everything = passages_of(data), taught_items(data)
    items, aside = set_aside(everything, settings.validate, settings.seed)
    seed, shots, batch = settings.seed, settings.shots, settings.batch
    if says_which_passage(everything, passages):
        with waiting("reading questions and passages"):
            told = [
                ToldLessons(part, passages, seed=seed, shots=shots, hard=settings.hard, batch=batch)
                for part in (items, aside)
                if part
            ]
        yield told[0], told[-1].of(aside)
        return
    shelf = replace(data, knowledge=passages, items=everything)
    check_retrieval(shelf, settings.retrieve)
    embedder = MemoEmbedder(open_retrieval(settings.retrieve, settings.embed))
    with filled(shelf, embedder, settings.retrieve) as knowledge:
        with waiting("indexing passages"):
            tokens = open_tokens(settings.embed)
            search = searching(settings.retrieve, embedder, tokens=tokens, seed=seed)
            retrieve = search(shelf, knowledge)
        lessons = FoundLessons(data, items, retrieve, seed=seed, shots=shots, batch=batch)
        yield lessons, lessons.of(aside)


def _begin(plan: Plan, between: Teaching, data: Benchmark) -> None:
    """What is in the folder is of this very training. Raises `LoadError`."""
    out = plan.settings.out
    told = {
        **{name: value for name, value in asdict(plan.settings).items() if name != "out"},
        "shape": asdict(plan.shape),
        "course": asdict(plan.course),
        "data": benchmark.fingerprint(data),
        "hyper": fingerprint(between.hyper.model),
        "base": fingerprint(between.base),
    }
    file = out / BEGUN
    if not file.exists():
        if (out / SETTINGS).exists() or (out / NAME).exists():
            raise LoadError(
                f"{out} holds a compressor that this command has not trained",
                hint="name another folder as out",
            )
        out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(told, indent=2) + "\n")
        return
    try:
        before = json.loads(file.read_text())
    except ValueError as error:
        raise LoadError(f"{file} is damaged", hint=f"delete {out}, and train anew") from error
    changed = [name for name, value in told.items() if not _alike(name, before.get(name), value)]
    if changed:
        raise LoadError(
            f"{out} is of a training with another {' and another '.join(changed)}",
            hint="name another folder as out, or use the settings that it was begun with",
        )


def _alike(name: str, before: object, now: object) -> bool:
    if name not in ("hyper", "base"):
        return before == now
    try:  # rounded otherwise on another machine
        return same(str(before), str(now))
    except ValueError:
        return False


def _say_plan(
    settings: Settings, course: Course, racc: Racc, data: Benchmark, held_out: int
) -> None:
    shape, who = racc.shape, settings.hyper or settings.model
    parameters = sum(one.numel() for one in racc.parameters())
    passages = passages_of(data)
    text = sum(len(one.query.text.encode()) for one in passages) / len(passages)
    say(
        f"{who} compresses a passage into {shape.document_prompts} prompts ({text:.0f} bytes of"
        f" text into {_bytes(shape)} as fp16), {settings.shots} passages and a question into"
        f" {shape.query_prompts} places before {settings.model}"
    )
    say(
        f"{data.name}: {len(taught_items(data)) - held_out} questions teach, {held_out} validate;"
        f" {len(passages)} passages"
    )
    say(
        f"{parameters} parameters, {course.steps} steps of {settings.batch * course.accumulate}"
        f" lessons, into {settings.out}"
    )


def _bytes(shape: Shape) -> int:
    return 2 * shape.document_prompts * shape.width


def _calibrate(between: Teaching, racc: Racc, lessons: list[Lesson]) -> None:
    relevant = sum(any(one.relevant) for one in lessons)
    note(f"{relevant} of the first {len(lessons)} lessons have a relevant passage")
    with waiting("measuring where to start"):
        between.calibrate(racc, lessons)


def _train(
    racc: Racc,
    between: Teaching,
    lessons: Drawn,
    held_out: list[Lesson],
    out: Path,
    course: Course,
) -> bool:
    with (
        progress("training", course.steps) as step,
        (out / LOSSES).open("a") as losses,
        _stopping() as stopped,
    ):
        reached = 0

        def report(now: Progress) -> None:
            nonlocal reached
            step(now.step + 1 - reached)
            reached = now.step + 1
            losses.write(json.dumps(asdict(now)) + "\n")
            losses.flush()
            last = reached == course.steps
            if now.validation is not None or last or reached % max(1, course.steps // TOLD) == 0:
                note(_line(now))

        return train(
            racc,
            between,
            lessons,
            course,
            folder=out,
            held_out=held_out,
            report=report,
            stopped=stopped,
        )


def _line(now: Progress) -> str:
    validated = "" if now.validation is None else f", validation {now.validation:.4f}"
    return f"step {now.step + 1}: loss {now.loss:.4f}, rate {now.rate:.1e}{validated}"


@contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: a step is finished first. Pressed again it ends at once."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
