"""The command `bottega tune`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, get_args

from typer import Option

from bottega._util.event_loops import run_closing
from bottega._util.progress import plural
from bottega.cli.answer import SHOTS
from bottega.cli.components import open_embedder
from bottega.cli.knowledge_files import note_embedder, open_to_search, refit_metrics, to_reindex
from bottega.cli.options import DefaultModel, Json, KnowledgeFile, Namespace, Seed
from bottega.cli.output import note, noting_interruption, print_json, print_table, say
from bottega.cli.shown_progress import progress
from bottega.errors import SettingError, StoreError
from bottega.evaluation.knowledge_rows import counted, open_rows, others, whole_name
from bottega.evaluation.methods.leave_one_out import (
    CHANCE_GAIN,
    LabelledSample,
    Selection,
    Setting,
    Trial,
    cached_embedders,
    fits_metric,
    fitted_trials,
    logistic_trial,
    model_trials,
    select,
    vote_trials,
)
from bottega.evaluation.methods.logistic import StoredLogistic
from bottega.evaluation.metrics.metric import Estimate, bounds
from bottega.generation.bundled_models import PhotoGenerator
from bottega.knowledge import KnowledgeBase
from bottega.knowledge.metric import SHRINKAGE, metric_name
from bottega.knowledge.stored_metric import NOTE, StoredMetric
from bottega.knowledge.stores import note_key
from bottega.knowledge.tuned_settings import LOGREG, VISUAL_RAG, TunedSettings, tuned_for
from bottega.naming import check_embedder, check_model, default_model, image_embedders, open_model
from bottega.protocols import Embedder, Generator
from bottega.reranking import DemonstrationOrder

GRID = (1, 5, 10, 20, 50)
SAMPLE = 200
SHRINKAGES = (0.5, SHRINKAGE, 0.9)  # of the fitted metrics to compare
KNN = "knn"
RESUMES = (
    "{file} keeps its settings until all examples are embedded again; repeat the command to resume"
)
COLUMNS = ("n", "accuracy", "low", "high", "difference", "low", "high")


@dataclass(frozen=True)
class Tuning:
    """Result of `bottega tune`: comparisons of embedders with metrics, of shots with orders, and of
    methods (the chosen setting and `logistic`). `scorer` names what compared shots and orders: the
    model, or knn."""

    sample: LabelledSample
    generator: Generator | None
    embedder: Selection
    shots: Selection
    methods: Selection
    logistic: Trial

    @property
    def scorer(self) -> str:
        if self.generator is None or _answers_as_vote(self.generator, self.setting.shrinkage):
            return KNN
        return self.generator.name

    @property
    def setting(self) -> Setting:
        return self.shots.chosen

    @property
    def method(self) -> str:
        best = self.methods.best if self.methods.is_change else self.methods.current
        return LOGREG if best is self.logistic else VISUAL_RAG

    @property
    def is_change(self) -> bool:
        return self.embedder.is_change or self.shots.is_change or self.methods.is_change


def tune(
    file: KnowledgeFile,
    method: Annotated[
        str,
        Option(
            metavar="NAME",
            help="Choose shots and order by visual-rag (a model with demonstrations), or only "
            "shots by knn (the weighted vote, without a model).",
        ),
    ] = VISUAL_RAG,
    model: DefaultModel = None,
    embed: Annotated[
        str | None,
        Option(
            metavar="LIST",
            help="Embedders to compare with that of the file, comma-separated.",
            show_default="bundled, pixels and, with the extra [photos], those of photographs",
        ),
    ] = None,
    sample: Annotated[int, Option(min=2, help="Maximum number of images to classify.")] = SAMPLE,
    seed: Seed = 0,
    namespace: Namespace = "",
    dry_run: Annotated[
        bool, Option("--dry-run", help="Report the choice and change nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Choose embedder, metric, shots, order and method by leave-one-out, and store the choice.

    A sample of the labelled images is classified, each by the other examples. Embedders and metrics
    are compared by the vote of the nearest examples (under a metric fitted to the labels, of the
    class means too); the current pair is replaced if another is better by more than one standard
    error and two images. Shots and orders are compared by the model, with the best embedder (a
    photograph model under a fitted metric: by the vote, which it computes), and replaced only for a
    clear gain (95 % interval above 0, McNemar's p below 0.05), estimated on images that did not
    select it. If a logistic regression is better by more than one standard error and two images,
    classify uses it by default. If the embedder changes, all examples are embedded again. The
    other commands use the stored choice by default."""
    names = _checked_options(method, model, embed)
    kept = f"{file} is unchanged; repeat the command, or set a smaller --sample"
    with (
        noting_interruption(lambda: kept),
        open_to_search(file, None, namespace, None, metric="cosine") as knowledge,
    ):
        with open_rows(file, namespace) as rows:
            view, spec = to_reindex(rows, None, None, file)
            stored = _stored(knowledge, dry_run)
            current = _current(stored, spec, rows.stored_metric)
        labelled = LabelledSample.of(knowledge, sample, seed)
        specs = dict.fromkeys([spec, *(names or _default_embedders(labelled))])
        embedders = cached_embedders(list(specs), knowledge, spec, labelled.pool, open_embedder)
        by_vote = _compare_embedders(labelled, embedders, current, seed)
        embedder = embedders[by_vote.chosen.embedder]
        generator = open_model(model or default_model(embedder)) if method == VISUAL_RAG else None
        by_shots = _compare_shots(labelled, embedder, by_vote.chosen, generator, seed)
        with progress("logistic regression", len(labelled.items)) as step:
            logistic = Trial(by_shots.chosen, logistic_trial(labelled, embedder, seed, step))
        methods = _compare_methods(labelled, by_shots, logistic, stored, seed)
        result = Tuning(labelled, generator, by_vote, by_shots, methods, logistic)
        if not dry_run:
            kept = RESUMES.format(file=file)
            _store(knowledge, namespace, view, result, embedder, seed)
        elsewhere = others(knowledge, namespace)
    if by_vote.chosen.embedder != spec and not dry_run:
        refit_metrics(file, elsewhere)
    if json:
        print_json(_document(result, seed, dry_run))
    else:
        _report(result, whole_name(file, namespace), seed, dry_run)
    if elsewhere and by_vote.chosen.embedder != spec:
        note(f"the new embedder also applies to other namespaces: {counted(elsewhere)}")


def _checked_options(method: str, model: str | None, embed: str | None) -> tuple[str, ...]:
    """Return the names of --embed. Raises `SettingError` before the file is opened."""
    if method not in (VISUAL_RAG, KNN):
        raise SettingError(
            f"--method must be {VISUAL_RAG} or {KNN}, got {method!r}", hint=f"set --method {KNN}"
        )
    if model:
        check_model(model)
    if method == KNN and model:
        raise SettingError(f"--method {KNN} calls no model, got --model", hint="remove --model")
    names = () if embed is None else tuple(name.strip() for name in embed.split(","))
    for name in names:
        check_embedder(name)
    return names


def _stored(knowledge: KnowledgeBase, dry_run: bool) -> TunedSettings | None:
    """Return the stored settings, None without any; replace damaged ones by the defaults."""
    try:
        return tuned_for(knowledge)
    except StoreError as error:
        note(f"{error}: they are replaced by the defaults")
        if not dry_run:
            TunedSettings(knowledge.embedder().fingerprint, SHOTS).store(knowledge)
        return None


def _current(stored: TunedSettings | None, spec: str, metric: StoredMetric | None) -> Setting:
    """Return the stored setting, else the defaults of `classify`."""
    shrinkage = metric.shrinkage if metric else None
    if stored is None:
        return Setting(spec, SHOTS, shrinkage=shrinkage)
    return Setting(spec, stored.shots, stored.order, shrinkage)


def _default_embedders(sample: LabelledSample) -> Sequence[str]:
    """Return the embedders to compare, with `dual` (image and words) if the questions differ."""
    questions = {example.query.text for example in sample.pool}
    return (*image_embedders(), *(("dual",) if len(questions) > 1 else ()))


def _compare_embedders(
    sample: LabelledSample, embedders: Mapping[str, Embedder], current: Setting, seed: int
) -> Selection:
    """Compare the embedders, each with every metric, by the vote. It has as many neighbours as the
    current setting has shots."""
    shots = current.shots
    with progress("embedding", len(sample.pool)) as step:
        plain = vote_trials(sample, embedders, [shots], step)
    found: dict[tuple[str, float | None], tuple[bool, ...]] = {
        (name, None): plain[name, shots] for name in embedders
    }
    if not fits_metric(sample):
        note("metric cosine: others need one label an example, and the same question for all")
    else:
        shrinkages = sorted({*SHRINKAGES, current.shrinkage or SHRINKAGE})
        for name, embedder in embedders.items():
            fitted = fitted_trials(sample, embedder, [shots], shrinkages)
            found |= {(name, one): fitted[one, shots] for one, _ in fitted}
    if (current.embedder, current.shrinkage) not in found:
        current = replace(current, shrinkage=None)
    trials = [
        Trial(replace(current, embedder=name, shrinkage=shrinkage), correct)
        for (name, shrinkage), correct in found.items()
    ]
    trials.sort(key=lambda one: one.setting != current)
    return select(trials, seed=seed, changes_at_one_error=True)


def _answers_as_vote(generator: Generator, shrinkage: float | None) -> bool:
    """Whether the model's answers are those of the vote, which needs no model: a photograph model's
    under a fitted metric."""
    return shrinkage is not None and isinstance(generator, PhotoGenerator)


def _compare_shots(
    sample: LabelledSample,
    embedder: Embedder,
    current: Setting,
    generator: Generator | None,
    seed: int,
) -> Selection:
    """Compare numbers of shots in the current order, and orders at the current number of shots."""
    shots = [count for count in GRID if count < len(sample.pool) and count != current.shots]
    settings = [current, *(replace(current, shots=count) for count in shots)]
    counts = [one.shots for one in settings]
    if current.shrinkage is not None and (
        generator is None or _answers_as_vote(generator, current.shrinkage)
    ):
        with progress("comparing shots", len(sample.pool)) as step:
            fitted = fitted_trials(sample, embedder, counts, [current.shrinkage])
            step(len(sample.pool))
        trials = [Trial(one, fitted[current.shrinkage, one.shots]) for one in settings]
        return select(trials, seed=seed)
    if generator is None:
        name = current.embedder
        with progress("comparing shots", len(sample.pool)) as step:
            found = vote_trials(sample, {name: embedder}, counts, step)
        trials = [Trial(one, found[name, one.shots]) for one in settings]
        return select(trials, seed=seed)
    orders = [one for one in get_args(DemonstrationOrder) if one != current.order]
    settings += [replace(current, order=order) for order in orders]
    with progress("classifying", len(settings) * len(sample.items)) as step:
        work = model_trials(sample, embedder, generator, settings, step)
        answers = run_closing(work, generator)
    return select([Trial(*pair) for pair in zip(settings, answers, strict=True)], seed=seed)


def _compare_methods(
    sample: LabelledSample,
    by_shots: Selection,
    logistic: Trial,
    stored: TunedSettings | None,
    seed: int,
) -> Selection:
    """Compare the chosen setting with logistic regression, the stored method first. Logistic
    regression is not compared if images have several labels."""
    chosen = next(one for one in by_shots.trials if one.setting == by_shots.chosen)
    trials = [chosen] if sample.multi_label else [chosen, logistic]
    if stored is not None and stored.method == LOGREG:
        trials.reverse()
    return select(trials, seed=seed, changes_at_one_error=True)


def _store(
    knowledge: KnowledgeBase,
    namespace: str,
    view: str,
    result: Tuning,
    embedder: Embedder,
    seed: int,
) -> None:
    """Embed all examples again if the embedder changes; then store metric, regression and settings.
    Without a change, fit the stored metric and regression to the current examples.

    Searches use the old vectors and settings until all new vectors exist.
    """
    if result.setting.embedder != result.embedder.current.setting.embedder:
        with progress("embedding", sum(knowledge.namespaces().values())) as step:
            knowledge.reindex(view, embedder, progress=step)
        note_embedder(knowledge, view, result.setting.embedder)
    if result.is_change or knowledge.note(note_key(NOTE, namespace)) is not None:
        knowledge.fit_metric(result.setting.shrinkage)
    if result.method == LOGREG:
        StoredLogistic.fit(knowledge, seed).store(knowledge)
    if result.is_change:
        shots, order = result.setting.shots, result.setting.order
        TunedSettings(embedder.fingerprint, shots, order, result.method).store(knowledge)


def _report(result: Tuning, file: str, seed: int, dry_run: bool) -> None:
    sample = result.sample
    say(
        f"{len(sample.items)} of {plural(len(sample.pool), 'labelled image')} of {file} (seed"
        f" {seed}), each classified by the others; 95 % intervals"
    )
    if sample.skipped:
        say(f"not classified: {plural(sample.skipped, 'image')} without another image of the label")
    if sample.copies:
        named = sample.copies[0].source or sample.copies[0].id
        say(f"left out: {plural(len(sample.copies), 'copy')} of other images, such as {named}")
    by_vote = result.embedder
    say(
        "\nembedder and metric, by the vote of"
        f" {plural(by_vote.current.setting.shots, 'neighbour')}, under a fitted metric also of the"
        " class means"
    )
    pairs = [(one.setting.embedder, metric_name(one.setting.shrinkage)) for one in by_vote.trials]
    _print_trials(("embedder", "metric"), pairs, by_vote)
    say(f"\nshots and order, by {result.scorer}")
    orders = [(trial.setting.shots, trial.setting.order) for trial in result.shots.trials]
    _print_trials(("shots", "order"), orders, result.shots)
    setting = result.setting
    say(
        f"\n{LOGREG}, a logistic regression on the vectors of {setting.embedder}:"
        f" {_interval(result.logistic.accuracy)}; minus the setting chosen above:"
        f" {_interval(_gain_of_logistic(result), '+')}"
    )
    done = "not stored: --dry-run" if dry_run else f"stored in {file}"
    say(
        f"\nchosen: {setting.embedder}, {metric_name(setting.shrinkage)},"
        f" {plural(setting.shots, 'shot')}, {setting.order}, classify by {result.method};"
        f" {done if result.is_change else 'nothing changes'}"
    )
    note(
        "the rows are optimistic: their images also select the setting; a gain is nested: each"
        " image is answered by the best setting of the other folds"
    )


def _print_trials(
    names: tuple[str, ...], labels: Sequence[tuple[object, ...]], found: Selection
) -> None:
    rows = []
    for label, trial in zip(labels, found.trials, strict=True):
        against = None if trial is found.current else trial.difference(found.current)
        rows.append((*label, len(trial.correct), *bounds(trial.accuracy), *bounds(against)))
    print_table((*names, *COLUMNS), rows)
    say(_decision(found))


def _decision(found: Selection) -> str:
    """Return a sentence on the change and its nested estimate."""
    interval = _interval(found.gain, "+")
    if found.best == found.current:
        return "the current setting is the best"
    if found.is_change:
        return f"the best replaces the current setting: gain {interval}"
    if found.changes_at_one_error:
        gain = _interval(found.best.difference(found.current), "+")
        return (
            f"the current setting stays: the gain of the best, {gain}, may be due to chance (a"
            f" change needs more than one standard error and {CHANCE_GAIN} images)"
        )
    return (
        f"the current setting stays: the gain of the best, {interval}, McNemar's p"
        f" {found.p_value:.3f}, may be due to chance (a change needs an interval above 0 and p"
        " below 0.05)"
    )


def _interval(estimate: Estimate, sign: str = "") -> str:
    value, low, high = (f"{one:{sign}.3f}" for one in vars(estimate).values())
    return f"{value} [{low}, {high}]"


def _gain_of_logistic(result: Tuning) -> Estimate:
    """Return the paired difference to the chosen setting."""
    chosen = next(one for one in result.shots.trials if one.setting == result.setting)
    return result.logistic.difference(chosen)


def _document(result: Tuning, seed: int, dry_run: bool) -> dict[str, object]:
    sample = result.sample
    return {
        "n": len(sample.items),
        "examples": len(sample.pool),
        "skipped": sample.skipped,
        "copies": [str(one.id) for one in sample.copies],
        "seed": seed,
        "scorer": result.scorer,
        "embedder": _selection(result.embedder),
        "shots": _selection(result.shots),
        "logreg": {
            **vars(result.logistic.accuracy),
            "difference": vars(_gain_of_logistic(result)),
        },
        "method": result.method,
        "chosen": asdict(result.setting),
        "changed": result.is_change,
        "stored": result.is_change and not dry_run,
    }


def _selection(found: Selection) -> dict[str, object]:
    trials = [
        {
            **asdict(trial.setting),
            **vars(trial.accuracy),
            "difference": vars(trial.difference(found.current)),
        }
        for trial in found.trials
    ]
    return {
        "trials": trials,
        "current": asdict(found.current.setting),
        "best": asdict(found.best.setting),
        "nested": vars(found.nested),
        "gain": vars(found.gain) | {"p_value": found.p_value},
        "changed": found.is_change,
    }
