"""Components from options: models, prompts, embedders, traces, prices."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import typer

from bottega._util.executor import Executor
from bottega._util.locations import StoreLocation
from bottega._util.postgres import is_postgres_url
from bottega._util.ray_executor import RayExecutor, check_address
from bottega.cli.output import waiting
from bottega.cli.shown_progress import TERMINAL
from bottega.errors import NotFoundError, SettingError, StoreBusyError, StoreError
from bottega.evaluation.methods import retrieval
from bottega.evaluation.methods.retrieval import OpenEmbedder
from bottega.evaluation.runs.run_store import FILE, is_run_file, open_run_traces
from bottega.knowledge.embedders.embedding_workers import WorkerEmbedders
from bottega.protocols import Recorder
from bottega.recording import PriceTable, TokenPrice, TraceStore

NO_TRACES = "none"
LOCAL = "local"  # --on

open_embedder = partial(retrieval.open_embedder, display=TERMINAL)


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


@contextmanager
def embedder_opener(on: str, workers: int | None) -> Iterator[OpenEmbedder]:
    """Yield the function that opens embedders: in this process, or in the workers of --on."""
    with open_executor(on, workers) as executor:
        if executor is None:
            yield open_embedder
            return
        with closing(WorkerEmbedders(executor)) as embedders:
            yield partial(open_embedder, load=embedders.open)


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
