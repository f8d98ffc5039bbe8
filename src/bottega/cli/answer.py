"""The commands `bottega ask` and `bottega classify`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from bottega._util.event_loops import for_each, run_closing
from bottega._util.locations import StoreLocation
from bottega._util.progress import plural
from bottega.cli.answer_output import ImageResult, answer_document, kept_text, report_images
from bottega.cli.answer_search import SearchChoice
from bottega.cli.components import NO_TRACES, open_prices, open_recorder, traces_option
from bottega.cli.knowledge_files import open_to_search
from bottega.cli.options import (
    By,
    DefaultModel,
    DefaultOrder,
    Embed,
    Json,
    KnowledgeFile,
    Namespace,
    PriceOption,
    PromptStyle,
    Stop,
    TraceFile,
    TrustRemoteCode,
    knowledge_option,
    options_from_fields,
)
from bottega.cli.output import note, noting_interruption, print_json, say, warn
from bottega.cli.shown_progress import progress
from bottega.errors import BottegaError, LoadError, MissingDependencyError, SettingError
from bottega.evaluation.methods.logistic import VECTOR_METHODS, VectorAnswer, VectorClassifier
from bottega.evaluation.methods.prompts import (
    NEAREST_LAST,
    REASONED,
    REASONING_TOKENS,
    check_prompt,
    open_prompt,
    parse_order,
)
from bottega.evaluation.outcomes import is_item_error
from bottega.image import Image
from bottega.knowledge import KnowledgeBase
from bottega.knowledge.loaders.scan import SUFFIXES, scan_images
from bottega.knowledge.tuned_settings import LOGREG, VISUAL_RAG, TunedSettings, tuned_for
from bottega.naming import (
    ModelSpec,
    check_torch,
    default_master,
    default_model,
    open_model,
    suggestion,
)
from bottega.parsing import last_answer
from bottega.pipeline import FixedRouter, Pipeline
from bottega.protocols import Generator, Tier
from bottega.recipes import share_features, visual_rag
from bottega.recipes.visual_rag import LABEL_TOKENS
from bottega.recording import is_abstention
from bottega.reranking import TopKReranker
from bottega.retrieval import DenseRetriever
from bottega.routing.novelty_gate import FALSE_UNKNOWN
from bottega.types import IMAGE_QUESTION, Query, Sampling, Trace

CONCURRENCY = 16
SHOTS, ASK_SHOTS = 10, 3  # defaults of classify and ask
AUTO = "auto"

ImageClassifier = Callable[[Query], Awaitable[Trace | VectorAnswer]]


@dataclass(frozen=True)
class ClassifyOptions:
    """Options of `bottega classify`."""

    model: DefaultModel = None
    method: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="visual-rag (a model with demonstrations); or, without a model, knn (the weighted"
            " vote of the nearest examples) or logreg (logistic regression on all examples).",
            show_default=f"that of bottega tune, else {VISUAL_RAG}",
        ),
    ] = None
    shots: Annotated[
        int | None,
        Option(
            min=1,
            help="Number of demonstrations, or of neighbours with --method knn.",
            show_default=f"that of bottega tune, else {SHOTS}",
        ),
    ] = None
    namespace: Namespace = ""
    by: By = None
    embed: Embed = None
    prompt: PromptStyle = AUTO
    order: DefaultOrder = None
    max_tokens: Annotated[
        int | None,
        Option(
            min=1,
            help="Maximum tokens of a reply.",
            show_default=f"{LABEL_TOKENS}, or {REASONING_TOKENS} with --prompt {REASONED}",
        ),
    ] = None
    stop: Stop = None
    false_unknown: Annotated[
        float | None,
        Option(
            min=0,
            max=1,
            help="Share of photographs like the labelled ones that the photograph model may answer"
            " with unknown by mistake. A larger share rejects more other photographs, too.",
            show_default=f"{FALSE_UNKNOWN}",
        ),
    ] = None
    price: PriceOption = None
    traces: TraceFile = None
    json: Json = False

    def chosen_method(self, tuned: TunedSettings | None) -> str:
        """Return the method: that of bottega tune, unless one is set or an option needs a model."""
        if self.method is not None:
            return self.method
        asks_model = any(value is not None for value in self._model_options.values())
        return VISUAL_RAG if tuned is None or asks_model else tuned.method

    @property
    def _model_options(self) -> dict[str, object]:
        """Options that only a model uses; None where they are not set."""
        return {
            "model": self.model,
            "prompt": None if self.prompt == AUTO else self.prompt,
            "order": None if self.order == NEAREST_LAST else self.order,
            "max_tokens": self.max_tokens,
            "stop": self.stop or None,
            "false_unknown": self.false_unknown,
            "price": self.price,
            "traces": None if str(self.traces) == NO_TRACES else self.traces,
        }

    @property
    def sampling(self) -> Sampling:
        tokens = self.max_tokens or (REASONING_TOKENS if self.prompt == REASONED else LABEL_TOKENS)
        return Sampling(max_tokens=tokens, stop=tuple(self.stop or ()))

    def check(self) -> None:
        """Raise `SettingError` for an unknown method, or options that it does not use."""
        if self.method is not None:
            check_method(self.method, **self._model_options)


@options_from_fields()
def classify(
    file: KnowledgeFile,
    images: Annotated[list[Path], Argument(metavar="IMAGE", help="Images, or folders of images.")],
    options: ClassifyOptions,
) -> None:
    """Classify images with the most similar labelled images as demonstrations (Visual RAG).

    --method knn and --method logreg classify without a model. The default method is the one that
    bottega tune chose.
    """
    if file.file is not None and file.file.suffix.lower() in SUFFIXES:
        raise SettingError(
            f"{file} is an image, but the first argument is the knowledge base",
            hint="write bottega classify K.db IMAGE",
        )
    style, ordered = open_prompt(options.prompt), parse_order(options.order or NEAREST_LAST)
    options.check()
    results = [ImageResult(path) for path in chain.from_iterable(map(_images, images))]
    # Fails before the files are opened.
    generator = open_model(options.model) if options.model else None
    classify_one: ImageClassifier
    with ExitStack() as stack:
        knowledge = stack.enter_context(
            open_to_search(file, options.embed, options.namespace, options.by)
        )
        shots, tuned = options.shots, tuned_for(knowledge)
        method = options.chosen_method(tuned)
        _note_fewer_examples(None if method == LOGREG else shots, knowledge)
        if tuned is not None:
            shots, ordered = shots or tuned.shots, ordered if options.order else tuned.order
        shots = shots or SHOTS
        if len(labels := knowledge.labels()) == 1:
            note(f"{file} has the label {labels[0]!r} only; add images of other classes")
        if method == VISUAL_RAG:
            record = stack.enter_context(open_recorder(options.traces))
            generator = generator or _default_model(knowledge)
            check_prompt(options.prompt, generator)
            pipeline = visual_rag(
                knowledge,
                generator,
                labels=labels,
                shots=shots,
                prompt=style,
                order=ordered,
                multi_label=knowledge.is_multi_label(),
                sampling=options.sampling,
                record=record,
                price=open_prices(options.price),
                false_unknown=FALSE_UNKNOWN
                if options.false_unknown is None
                else options.false_unknown,
            )
            classify_one, models = pipeline.trace, [generator]
        else:
            classify_one, models = VectorClassifier(knowledge, method, shots), []
        _classify(classify_one, models, results, options.json)
    report_images(results, options.json)
    if any(one.error for one in results):
        raise Exit(1)


def _default_model(knowledge: KnowledgeBase) -> Generator:
    """Return the bundled model for a knowledge base. Raises `MissingDependencyError` without torch,
    which the other methods do not need."""
    try:
        check_torch()
    except MissingDependencyError as error:
        error.hint = f"{error.hint}; or set --method knn, which needs no model"
        raise
    return open_model(default_model(knowledge.embedder()))


def _classify(
    classify: ImageClassifier,
    models: Sequence[Generator],
    results: Sequence[ImageResult],
    json: bool,
) -> None:
    """Classify the images; after Ctrl-C, report those that are done."""
    with noting_interruption(lambda: kept_text(results)):
        try:
            with progress("classifying", len(results)) as step:
                run_closing(_classify_all(classify, results, step), *models)
        except KeyboardInterrupt:
            report_images([one for one in results if one.is_done], json)
            raise


def _note_fewer_examples(shots: int | None, knowledge: KnowledgeBase) -> None:
    if shots is not None and shots > len(knowledge):
        note(f"{shots} shots requested; only {plural(len(knowledge), 'example')} available")


@options_from_fields()
def ask(
    question: Annotated[str, Argument(metavar="QUESTION", help="The question.")],
    image: Annotated[
        list[Path] | None,
        Option("--image", "-i", metavar="FILE", help="An image; may be repeated."),
    ] = None,
    kb: Annotated[
        StoreLocation | None,
        knowledge_option("Use demonstrations from this knowledge base."),
    ] = None,
    shots: Annotated[
        int | None,
        Option(
            min=1,
            help="Number of demonstrations.",
            show_default=f"that of bottega tune, else {ASK_SHOTS}",
        ),
    ] = None,
    namespace: Namespace = "",
    by: By = None,
    model: DefaultModel = None,
    trust_remote_code: TrustRemoteCode = False,
    embed: Embed = None,
    *,
    choice: SearchChoice,
    max_tokens: Annotated[int, Option(min=1, help="Maximum tokens of the answer.")] = 512,
    stop: Stop = None,
    price: PriceOption = None,
    traces: TraceFile = None,
    json: Json = False,
) -> None:
    """Ask a question, with similar examples as demonstrations if --kb is given."""
    if kb is None and (namespace or by):
        raise SettingError("--namespace and --by need a knowledge base", hint="add --kb K.db")
    choice.check(has_knowledge=kb is not None)
    if not question.strip():
        raise SettingError(f"question is empty, got {question!r}", hint="write a question")
    sampling = Sampling(max_tokens=max_tokens, stop=tuple(stop or ()))
    query = Query(question, tuple(Image.open(path) for path in image or ()))
    generator = ModelSpec(model, trust_remote_code=trust_remote_code).open() if model else None
    knowledge = open_to_search(kb, embed, namespace, by) if kb else None
    generator = generator or open_model(
        default_model(knowledge.embedder()) if knowledge else default_master(query.images)
    )
    tuned = tuned_for(knowledge) if knowledge else None
    if knowledge:
        _note_fewer_examples(shots, knowledge)
        share_features(generator, knowledge)
    shots = shots or (tuned.shots if tuned else ASK_SHOTS)
    prompt = choice.prompter(generator)
    rerank = TopKReranker(tuned.order if tuned else NEAREST_LAST)
    searcher = choice.searcher(
        generator, shots=shots, prompt=prompt, parse=last_answer, rerank=rerank, sampling=sampling
    )
    with closing(knowledge) if knowledge else nullcontext(), open_recorder(traces) as record:
        pipeline = Pipeline(
            route=FixedRouter(Tier(generator.name, generator, shots if knowledge else 0)),
            retrieve=DenseRetriever(knowledge.search) if knowledge else None,
            rerank=rerank,
            search=searcher,
            fetch=choice.fetch(shots),
            prompt=prompt,
            parse=last_answer,
            record=record,
            price=open_prices(price),
            sampling=sampling,
        )
        with choice.progress(generator):
            trace = run_closing(pipeline.trace(query), generator)
    if json:
        print_json(answer_document(trace))
        return
    say(trace.answer.text)
    _note_search(trace, traces)
    if knowledge is None:
        _note_missing(generator.name, trace)
    questions = {one.example.query.text for one in trace.candidates}
    if len(questions) == 1 and question not in questions:
        note(
            f"the shown examples answer another question: {questions.pop()!r}; ask that question,"
            f" or add examples of yours to {kb}"
        )


def _note_search(trace: Trace, traces: StoreLocation | None) -> None:
    if trace.tree is not None and str(traces) != NO_TRACES:
        calls, id = plural(trace.tree.calls, "completion"), trace.id
        note(f"{calls}; show the search with bottega explain {id}{traces_option(traces)}")


def _note_missing(model: str, trace: Trace) -> None:
    """Note the options that a bundled model needs to answer without a knowledge base."""
    has_image = bool(trace.query.images)
    if model == "bundled:apprentice":
        image = "" if has_image else "add --image FILE, "
        note(
            f"the apprentice answers from demonstrations only: {image}add --kb K.db, or set --model"
        )
    elif model.startswith("bundled:") and not has_image and is_abstention(trace.answer.text):
        note(f"{model} answers questions about images: add --image FILE")


def _images(path: Path) -> list[Path]:
    """Return the path, or all images below a folder in order."""
    if not path.is_dir():
        return [path]
    scan = scan_images(path)
    for error in scan.errors:
        warn(error)
    if scan.unread:
        note(f"{path}: not read: {scan.unread_text}")
    if not scan.images:
        raise LoadError(f"{path} holds no images", hint="name an image, or a folder of images")
    return scan.images


async def _classify_all(
    classify: ImageClassifier, results: Sequence[ImageResult], done: Callable[[int], None]
) -> None:
    async def one(item: ImageResult) -> None:
        try:
            image = await asyncio.to_thread(Image.open, item.path)
            item.trace = await classify(Query(IMAGE_QUESTION, (image,)))
        except BottegaError as error:
            if not is_item_error(error):
                raise
            item.error = error
        done(1)

    await for_each(results, one, limit=CONCURRENCY)


def check_method(method: str, **model_options: object) -> None:
    """Raise `SettingError` for an unknown method, and for model options that the method would
    ignore.

    Options that are not set are None.
    """
    methods = (VISUAL_RAG, *VECTOR_METHODS)
    if method not in methods:
        raise SettingError(
            f"--method must be {', '.join(methods[:-1])} or {methods[-1]}, got {method!r}",
            hint=f"{suggestion(method, methods)}set e.g. --method knn",
        )
    given = [
        f"--{name.replace('_', '-')}" for name, value in model_options.items() if value is not None
    ]
    if method in VECTOR_METHODS and given:
        raise SettingError(
            f"--method {method} calls no model, got {', '.join(given)}",
            hint=f"remove {' and '.join(given)}, or set --method {VISUAL_RAG}",
        )
