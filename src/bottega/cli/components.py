"""From the words of a command line to parts: models, prompts, embedders, traces."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import typer

from bottega import naming
from bottega.cli.output import waiting
from bottega.errors import EmbeddingError, SettingError, StoreBusyError, StoreError
from bottega.evaluation.retriever_factory import RETRIEVE
from bottega.generation import TransformersGenerator
from bottega.knowledge import DualEmbedder, FlmrEmbedder, TokenEmbedder
from bottega.naming import BUNDLED
from bottega.prompting import AppendixAPrompter, InterleavedPrompter
from bottega.protocols import Embedder, MultiVectorEmbedder, Prompter, Recorder
from bottega.recording import PriceTable, TokenPrice, TraceStore

NO_TRACES = "none"
FLMR = "flmr:"


def open_prompt(name: str) -> Prompter | None:
    """None for `auto`: the recipe takes the prompt that suits the model."""
    prompts: dict[str, Prompter | None] = {
        "auto": None,
        "paper": AppendixAPrompter(),
        "interleaved": InterleavedPrompter(),
    }
    if name not in prompts:
        raise SettingError(
            f"prompt is unknown, got {name!r}",
            hint=f"{naming.suggestion(name, prompts)}use auto, paper or interleaved",
        )
    return prompts[name]


def local_model(spec: str) -> TransformersGenerator:
    """Return a model that runs in this process, not loaded yet. Raises `SettingError`."""
    generator = naming.open_model(spec)
    if not isinstance(generator, TransformersGenerator):
        raise SettingError(
            f"a compressor needs the hidden states of a local model, got {spec}",
            hint="use bundled, a folder, or a Hugging Face id",
        )
    return generator


def open_embedder(spec: str) -> Embedder:
    naming.check_embedder(spec)
    try:
        with waiting(f"loading the embedder {spec}"):
            return naming.open_embedder(spec)
    except EmbeddingError as error:
        raise EmbeddingError(
            str(error),
            hint="--embed takes bundled, pixels, words, dual, or a sentence-transformers id (which"
            " needs a network once) or folder",
        ) from error


def check_retrieve(name: str, embed: str = BUNDLED) -> None:
    if name not in RETRIEVE:
        raise SettingError(
            f"retrieval method is unknown, got {name!r}",
            hint=f"{naming.suggestion(name, RETRIEVE)}use {', '.join(RETRIEVE)}",
        )
    if name == "hybrid" and embed != BUNDLED and not embed.startswith(FLMR):
        raise SettingError(
            f"hybrid compares tokens of the bundled tower or PreFLMR, not vectors of {embed}",
            hint="leave --embed out, name flmr:FOLDER, or take --retrieve dual",
        )
    if name != "hybrid" and embed.startswith(FLMR):
        raise SettingError(
            f"{embed} makes many vectors of a question, which {name} does not compare",
            hint="add --retrieve hybrid",
        )


def open_tokens(embed: str) -> MultiVectorEmbedder | None:
    """None for the bundled ones. Documents are encoded with their images, as RCTS does."""
    if not embed.startswith(FLMR):
        return None
    name = embed.removeprefix(FLMR)
    if not naming.is_folder_or_hub_id(name):
        raise SettingError(
            f"PreFLMR checkpoint is unknown, got {name!r}",
            hint="use --embed flmr:FOLDER or flmr:OWNER/NAME",
        )
    with waiting(f"loading the embedder {embed}"):
        return FlmrEmbedder(name, document_images=True, threads=os.cpu_count())


def open_retrieval(retrieve: str, embed: str) -> Embedder:
    """The knowledge base's vectors: `image` by the embedder `embed`, `text` by the bundled model's
    words (`bm25` and `hybrid` do not compare them, and these are made soonest), or else both."""
    check_retrieve(retrieve, embed)
    if retrieve == "image":
        return open_embedder(embed)
    words = TokenEmbedder.bundled()
    alone = retrieve in ("text", "bm25", "hybrid")
    return words if alone else DualEmbedder(open_embedder(embed), words)


def traces_path(given: Path | None) -> Path:
    """--traces, else BOTTEGA_TRACES, else traces.db in the user's application folder."""
    chosen = given or os.environ.get("BOTTEGA_TRACES") or None
    return Path(chosen) if chosen else Path(typer.get_app_dir("bottega")) / "traces.db"


def open_traces(given: Path | None) -> TraceStore:
    path = traces_path(given)
    path.parent.mkdir(parents=True, exist_ok=True)
    return TraceStore.open(path)


@contextmanager
def open_recorder(given: Path | None) -> Iterator[Recorder | None]:
    """The trace database that every answer goes to; None for `--traces none`."""
    if str(traces_path(given)) == NO_TRACES:
        yield None
        return
    with _hinted(traces_path(given)):
        traces = open_traces(given)
    with closing(traces):
        # Before a model is loaded and paid for, not when its answer is to be recorded.
        with _hinted(traces.path):
            traces.check_writable()
        yield traces


@contextmanager
def _hinted(path: Path) -> Iterator[None]:
    try:
        yield
    except StoreBusyError:
        raise
    except (OSError, StoreError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreError(
            f"answers cannot be recorded in {path}: {reason}",
            hint="--traces FILE or BOTTEGA_TRACES names another file; --traces none records"
            " nothing",
        ) from error


def open_prices(price: str | None) -> PriceTable:
    """`IN,OUT` in US dollars per million tokens, for every model; else genai-prices' figures."""
    if price is None:
        return PriceTable()
    try:
        given, made = (float(part) for part in price.split(","))
        if not (0 <= given < math.inf and 0 <= made < math.inf):
            raise ValueError
    except ValueError as error:
        raise SettingError(f"--price {price!r} is not IN,OUT", hint="--price 0.15,0.60") from error
    return PriceTable({"*": TokenPrice(given, made)})
