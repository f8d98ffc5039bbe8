"""Components from options: models, prompts, embedders, traces, prices."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import orjson
import typer

from bottega import naming
from bottega._util.executor import Executor
from bottega._util.identity import Exclude
from bottega._util.locations import StoreLocation
from bottega._util.postgres import is_postgres_url
from bottega._util.ray_executor import RayExecutor, check_address
from bottega.bundled.photo_model import PHOTOS
from bottega.cli.output import note, waiting
from bottega.errors import (
    DISTRIBUTION,
    EmbeddingError,
    NotFoundError,
    SettingError,
    StoreBusyError,
    StoreError,
)
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.source import read_options
from bottega.evaluation.methods.retrieval import EXCLUDE, bundled_token_embedder
from bottega.evaluation.methods.retriever_factory import CachingEmbedder, CachingTokenEmbedder
from bottega.evaluation.methods.specifications import METHODS
from bottega.evaluation.runs.run_store import FILE
from bottega.evaluation.runs.run_traces import is_run_file, open_run_traces
from bottega.generation import TransformersGenerator
from bottega.image import Image
from bottega.knowledge import FlmrEmbedder
from bottega.knowledge.embedders import names
from bottega.knowledge.embedders.embedding_workers import WorkerEmbedders
from bottega.knowledge.embedders.flmr import INSTRUCTION
from bottega.knowledge.embedders.names import BUNDLED
from bottega.knowledge.index.vector_index import VectorMetric
from bottega.parsing import SynonymParser
from bottega.prompting import AppendixAPrompter, InterleavedPrompter, ReasoningPrompter
from bottega.protocols import (
    Embedder,
    Generator,
    MultiVectorEmbedder,
    Prompter,
    Recorder,
    turns_only,
)
from bottega.recipes.cache_retrieval import (
    GROUPED,
    RETRIEVE,
    TEXT_ONLY,
    WITHOUT_METRIC,
    WITHOUT_TEXT,
    CacheRetrieval,
    DraftModel,
)
from bottega.recording import PriceTable, TokenPrice, TraceStore
from bottega.retrieval import TfidfKeywordExtractor

NO_TRACES = "none"
LOCAL = "local"  # --on
REASONED, REASONING_TOKENS = "reasoned", 512  # a value of --prompt, and its --max-tokens
FLMR = "flmr:"
FLMR_OPTIONS: dict[str, int | str] = {"query_tokens": 32, "choices": "no"}


def open_prompt(name: str) -> Prompter | None:
    """Return the prompter; None for `auto`, where the recipe selects it by model."""
    prompts: dict[str, Prompter | None] = {
        "auto": None,
        "paper": AppendixAPrompter(),
        "interleaved": InterleavedPrompter(),
        REASONED: ReasoningPrompter(),
    }
    if name not in prompts:
        hint = f"{naming.suggestion(name, prompts)}use auto, paper, interleaved or reasoned"
        raise SettingError(f"prompt is unknown, got {name!r}", hint=hint)
    return prompts[name]


def check_executor(on: str, workers: int | None) -> None:
    """Raise `SettingError` or `MissingDependencyError` for options of `open_executor`."""
    if on != LOCAL:
        check_address(on)
    elif workers is not None:
        raise SettingError(
            f"--workers applies only to --on ray, got --workers {workers}",
            hint="add --on ray, or remove --workers",
        )


@contextmanager
def open_executor(on: str, workers: int | None) -> Iterator[Executor | None]:
    """Open the Ray cluster of --on; None for `local`."""
    check_executor(on, workers)
    if on == LOCAL:
        yield None
        return
    with waiting(f"connecting to {on}"):
        executor = RayExecutor(on, workers)
    with closing(executor):
        yield executor


def check_prompt(name: str, generator: Generator) -> None:
    """Raise `SettingError` for a prompt that the model was not trained to read."""
    if name in ("paper", REASONED) and turns_only(generator):
        raise SettingError(
            f"{generator.name} reads brief turns only, got --prompt {name}",
            hint="remove --prompt",
        )


def local_model(spec: str, trust_remote_code: bool = False) -> TransformersGenerator:
    """Return a model that runs in this process, not loaded yet. Raises `SettingError`."""
    generator = naming.ModelSpec(spec, trust_remote_code=trust_remote_code).open()
    if not isinstance(generator, TransformersGenerator):
        raise SettingError(
            f"a compressor needs the hidden states of a local model, got {spec}",
            hint="use bundled, a folder, or a Hugging Face id",
        )
    return generator


def explain_embedder(default: str, images: Sequence[Image], command: str) -> None:
    """Note why these images have this embedder, and the command that sets another one."""
    if default == PHOTOS:
        note(f"embedder photos: the images look like photographs; to change it: {command} NAME")
    elif not naming.has_photos() and naming.are_photographs(images):
        note(
            "the images look like photographs, which need another embedder: install"
            f" {DISTRIBUTION}[{PHOTOS}], then run {command} photos"
        )
    else:
        note(
            "embedder bundled: the images do not look like photographs; if they are photographs:"
            f" {command} photos"
        )


OpenEmbedder = Callable[[str], Embedder]
# Hints name both: most commands have options, compress train has the settings of a file.
SET_EMBED = "set the embedder (embed or --embed) to"
SET_RETRIEVE = "set the retrieval method (retrieve or --retrieve) to"


@contextmanager
def embedder_opener(on: str, workers: int | None) -> Iterator[OpenEmbedder]:
    """Yield the function that opens embedders: in this process, or in the workers of --on."""
    with open_executor(on, workers) as executor:
        if executor is None:
            yield open_embedder
            return
        with closing(WorkerEmbedders(executor)) as embedders:
            yield partial(open_embedder, load=embedders.open)


def open_embedder(spec: str, load: OpenEmbedder = names.open_embedder) -> Embedder:
    """Return the embedder of a name. Raises `SettingError`, and `EmbeddingError` with a hint."""
    naming.check_embedder(spec)
    try:
        with waiting(f"loading the embedder {spec}"):
            return load(spec)
    except EmbeddingError as error:
        raise EmbeddingError(
            str(error),
            hint=f"{SET_EMBED} photos, bundled, pixels, words, minilm, dual, or a"
            " sentence-transformers folder or id (needs a network once)",
        ) from error


def check_retrieve(name: str, embed: str = BUNDLED) -> None:
    if name not in RETRIEVE:
        hint = f"{naming.suggestion(name, RETRIEVE)}use {', '.join(RETRIEVE)}"
        raise SettingError(f"retrieval method is unknown, got {name!r}", hint=hint)
    if name == "hybrid" and embed != BUNDLED and not embed.startswith(FLMR):
        raise SettingError(
            f"hybrid needs token vectors of the bundled model or PreFLMR, got {embed}",
            hint=f"{SET_EMBED} bundled or flmr:FOLDER, or {SET_RETRIEVE} dual",
        )
    if name != "hybrid" and embed.startswith(FLMR):
        raise SettingError(
            f"{embed} computes several vectors per question, which {name} does not support",
            hint=f"{SET_RETRIEVE} hybrid",
        )


def check_retrieval_options(
    retrieve: Collection[str], *, embed_text: str | None, metric: VectorMetric, groups: int | None
) -> None:
    """Raise `SettingError` for an option that none of the retrieval methods uses."""
    if embed_text is not None:
        naming.check_text_embedder(embed_text)
    chosen = " and ".join(retrieve)
    unused = (
        ("--embed-text", embed_text is not None, WITHOUT_TEXT, "dual"),
        ("--metric l2", metric == "l2", WITHOUT_METRIC, "dual"),
        ("--groups", groups is not None, set(RETRIEVE) - set(GROUPED), "hashtag"),
    )
    for option, given, without, other in unused:
        if given and set(retrieve) <= set(without):
            raise SettingError(
                f"{option} has no effect on --retrieve {chosen}",
                hint=f"remove it, or set --retrieve {other}",
            )


def check_rerank(rerank: str, methods: Collection[str]) -> None:
    """Raise `SettingError` for a re-ranker that none of the methods uses."""
    shown = [name for name in methods if METHODS[name].shows_demonstrations]
    if rerank != "none" and methods and not shown:
        raise SettingError(
            f"--rerank {rerank} has no effect on --methods {','.join(methods)}",
            hint="remove it, or add visual-rag",
        )


def open_tokens(embed: str) -> MultiVectorEmbedder | None:
    """Return a PreFLMR embedder, with document images as in RCTS; None for the bundled one.

    Options follow the checkpoint: `flmr:DIR,query_tokens=512,choices=yes,instruction=Question:`.
    The instruction comes last, so it may contain commas. Raises `SettingError`.
    """
    if not embed.startswith(FLMR):
        return None
    spec, given, instruction = embed.removeprefix(FLMR).partition(",instruction=")
    name, comma, options = spec.partition(",")
    chosen = read_options("flmr", options if comma else None, FLMR_OPTIONS)
    if chosen.get("choices", "no") not in ("yes", "no"):
        raise SettingError(f"choices is unknown, got {chosen['choices']!r}", hint="use yes or no")
    if not naming.is_folder_or_hub_id(name):
        raise SettingError(
            f"PreFLMR checkpoint is unknown, got {name!r}",
            hint="use --embed flmr:FOLDER or flmr:OWNER/NAME",
        )
    with waiting(f"loading the embedder {embed}"):
        return FlmrEmbedder(
            name,
            document_images=True,
            instruction=instruction if given else INSTRUCTION,
            query_tokens=int(chosen["query_tokens"]) if "query_tokens" in chosen else None,
            choices=chosen.get("choices") == "yes",
            threads=os.cpu_count(),
        )


def open_retrieval(
    retrieve: str,
    embed: str,
    embed_text: str | None = None,
    *,
    questions: Iterable[str] = (),
    draft: DraftModel | None = None,
    groups: int | None = None,
    exclude: Exclude = EXCLUDE,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> CacheRetrieval:
    """Return the retrieval method of a name; each query of a run is embedded once.

    `embed` embeds images, and also text for `text` if it reads text only. `embed_text` defaults to
    the text part of `embed` if that ends in `:average` or `:raw-average`, else to words.
    `questions` give the document frequencies of keywords; if all are equal, hashtags group images.
    `progress` receives the number of examples that `hybrid` embedded.
    """
    check_retrieve(retrieve, embed)
    name = next(one for one in RETRIEVE if one == retrieve)
    questions = list(questions)
    model, averages = names.average_parts(embed)
    image = text = average = tokens = None
    if name not in TEXT_ONLY:
        image = CachingEmbedder(open_embedder(f"{model}:image" if averages else embed))
    if name == "text" and names.reads_text_only(embed):
        text = CachingEmbedder(open_embedder(embed_text or embed))
    elif name != "image":
        default = f"{model}:text" if averages and name not in TEXT_ONLY[1:] else "words"
        text = CachingEmbedder(open_embedder(embed_text or default))
    if averages and name not in ("image", *TEXT_ONLY):
        average = CachingEmbedder(open_embedder(embed))
    elif averages and name == "image":
        image = CachingEmbedder(open_embedder(embed))
    if name == "hybrid":
        tokens = CachingTokenEmbedder(open_tokens(embed) or bundled_token_embedder(), progress)
    return CacheRetrieval(
        name,
        image=image,
        text=text,
        average=average,
        tokens=tokens,
        draft=draft,
        extract=TfidfKeywordExtractor(questions, longest=1),
        groups=groups,
        group_images=len(set(questions)) == 1,
        exclude=exclude,
        seed=seed,
    )


def with_synonyms(data: Benchmark, file: Path | None) -> Benchmark:
    """Return the benchmark with a parser that accepts other names of labels. `file` is a JSON
    object with the names of each label. Raises `SettingError`."""
    if file is None:
        return data
    try:
        names = orjson.loads(file.read_bytes())
        if not all(isinstance(one, str) for some in names.values() for one in some):
            raise ValueError
    except OSError as error:
        raise SettingError(
            f"{file} cannot be read: {error.strerror}", hint="check the path"
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        raise SettingError(
            f"{file} is not a JSON object of lists of names",
            hint='write e.g. {"cat": ["tabby", "Persian cat"], "dog": ["pug"]}',
        ) from error
    if unknown := [label for label in names if label not in data.labels]:
        raise SettingError(
            f"{file} has names of {unknown[0]!r}, which is not a label of {data.name}",
            hint=f"use its labels: {', '.join(data.labels[:20])}"
            if data.labels
            else "remove --synonyms: the answers are free text",
        )
    return replace(data, parse=SynonymParser(names, multi_label=data.multi_label))


def traces_location(given: StoreLocation | None) -> StoreLocation:
    """Return --traces, else BOTTEGA_TRACES, else traces.db in the application folder."""
    chosen = os.environ.get("BOTTEGA_TRACES")
    if given is None and chosen:
        return StoreLocation(chosen if is_postgres_url(chosen) else Path(chosen))
    return given or StoreLocation(Path(typer.get_app_dir("bottega")) / "traces.db")


def traces_option(given: StoreLocation | None) -> str:
    """Return the option that a command needs to read the same traces."""
    return "" if given is None else f" --traces {shlex.quote(str(given))}"


def stored_traces(given: StoreLocation | None) -> TraceStore:
    """Open a trace store, or the traces of a run, for reading. Raises `NotFoundError` if there is
    none."""
    location = traces_location(given)
    file = location.file
    if file is None:
        return open_traces(location)
    if file.is_dir():
        if not (file / FILE).is_file():
            raise NotFoundError(
                f"{file} holds no run",
                hint="set --traces to a trace database, or to the --out folder of bottega eval or"
                " stream",
            )
        file /= FILE
    if not file.exists():
        if given is None:
            raise NotFoundError(
                f"no answer is recorded yet: {file} does not exist",
                hint="run bottega ask, classify or eval, or set --traces to another file",
            )
        raise NotFoundError(
            f"{file} does not exist", hint="set --traces to an existing file or folder"
        )
    return open_run_traces(file) if is_run_file(file) else TraceStore.open(file)


def open_traces(given: StoreLocation | None) -> TraceStore:
    location = traces_location(given)
    if location.file is not None:
        location.file.parent.mkdir(parents=True, exist_ok=True)
    return TraceStore.open(location.target)


@contextmanager
def open_recorder(given: StoreLocation | None) -> Iterator[Recorder | None]:
    """Open the trace database; None for `--traces none`."""
    location = traces_location(given)
    if str(location) == NO_TRACES:
        yield None
        return
    with _trace_errors(location):
        traces = open_traces(location)
    with closing(traces):
        # Fail before a model is loaded or paid for.
        with _trace_errors(location):
            traces.check_writable()
        yield traces


@contextmanager
def _trace_errors(location: StoreLocation) -> Iterator[None]:
    try:
        yield
    except StoreBusyError:
        raise
    except (OSError, StoreError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreError(
            f"traces cannot be stored in {location}: {reason}",
            hint="set --traces or BOTTEGA_TRACES to another file or URL; --traces none disables"
            " recording",
        ) from error


def open_prices(price: str | None, option: str = "--price") -> PriceTable:
    """Parse `IN,OUT` in US dollars per million tokens; else use the prices of genai-prices."""
    if price is None:
        return PriceTable()
    try:
        prompt, completion = (float(part) for part in price.split(","))
        if not (0 <= prompt < math.inf and 0 <= completion < math.inf):
            raise ValueError
    except ValueError as error:
        raise SettingError(
            f"{option} must be IN,OUT, got {price!r}", hint=f"set e.g. {option} 0.15,0.60"
        ) from error
    return PriceTable({"*": TokenPrice(prompt, completion)})
