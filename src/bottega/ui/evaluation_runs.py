"""Library of evaluation runs: finds them in folders and caches them until their files change."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from bottega._util.caching import LRUCache
from bottega.errors import NotFoundError, StoreError
from bottega.evaluation.report.charts import Chart, by_shots
from bottega.evaluation.report.plots import shots_of
from bottega.evaluation.report.render import render
from bottega.evaluation.report.run_progress import FileState, RunProgress, file_state, read_progress
from bottega.evaluation.report.runs import StoredRun, read_run, thumbnail_names
from bottega.evaluation.report.sections import Section, sections
from bottega.evaluation.report.stream_sections import StreamSection, is_stream_run, stream_section
from bottega.evaluation.runs.run_store import FILE, is_running
from bottega.image import path_text

MAX_DEPTH = 3  # of run folders below the folder of runs
MAX_LOADED = 256 << 20  # bytes of the files of loaded runs
MAX_REPORTS = 64 << 20  # bytes
MAX_PROGRESS = 2000  # runs
# A run in progress is loaded again after this multiple of its loading time.
RELOAD_FACTOR = 5.0


@dataclass(frozen=True)
class LoadedRun:
    """Run with its results: `stream` for a run of streams, `section` for others. `images` are the
    SHA-256 of images with a thumbnail. Loading took `seconds` from `begun` (monotonic time)."""

    name: str
    run: StoredRun
    images: frozenset[str]
    state: FileState
    section: Section | None
    stream: StreamSection | None
    begun: float
    seconds: float = 0.0

    @property
    def size(self) -> int:
        """Return the size in the cache, in bytes; a run that is too large is cached alone."""
        return min(MAX_LOADED, sum(size for _, size in self.state))

    @cached_property
    def chart(self) -> Chart | None:
        """Return the chart by number of demonstrations, None without a result."""
        section = self.section
        if section is None or all(row.result.value is None for row in section.rows):
            return None
        metric = section.metric.replace("_", " ")
        return by_shots(shots_of(section), f"{metric} by number of demonstrations")


class RunLibrary:
    """Runs of `bottega eval` and `bottega stream` by name. Each root is a run or a folder with runs
    below it. Thread-safe."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots
        self._loaded: LRUCache[tuple[Path, bool], LoadedRun] = LRUCache(
            MAX_LOADED, lambda one: one.size
        )
        self._progress: LRUCache[Path, tuple[FileState, RunProgress]] = LRUCache(MAX_PROGRESS)
        self._reports: LRUCache[Path, tuple[FileState, bytes]] = LRUCache(
            MAX_REPORTS, lambda one: len(one[1])
        )

    def folders(self) -> dict[str, Path]:
        """Return the folders of all runs by name."""
        found: dict[str, Path] = {}
        for root in self.roots:
            for folder in _runs_below(root, MAX_DEPTH):
                name = path_text(folder.relative_to(root) if folder != root else folder.name)
                if len(self.roots) > 1 and folder != root:
                    name = f"{path_text(root.name)}/{name}"
                while name in found:
                    name += "'"
                found[name] = folder
        return found

    def folder(self, name: str) -> Path:
        """Return the folder of a run. Raises `NotFoundError`."""
        folder = self.folders().get(name)
        if folder is None:
            raise NotFoundError(
                f"there is no run {name[:100]!r}",
                hint="open the list of evaluations: it may have been deleted or moved",
            )
        return folder

    def progress(self, folder: Path) -> RunProgress:
        """Return the progress of a run. Raises `StoreError`."""
        state, cached = file_state(folder), self._progress.get(folder)
        if cached is not None and cached[0] == state:
            return replace(cached[1], running=is_running(folder))
        found = read_progress(folder)
        self._progress.put(folder, (state, found))
        return found

    def cached(self, folder: Path, *, traces: bool = True) -> LoadedRun | None:
        """Return a run as it was last loaded, None if it is not cached."""
        return self._loaded.get((folder, traces))

    def current(self, folder: Path, *, traces: bool = True) -> LoadedRun | None:
        """Return a cached run, None if it must be loaded. A run in progress may be a few seconds
        old. Raises `StoreError`."""
        cached = self.cached(folder, traces=traces)
        if cached is not None and (cached.state == file_state(folder) or _is_recent(cached)):
            return cached
        return None

    def load(self, name: str, *, traces: bool = True) -> LoadedRun:
        """Return a run with its results (`read_run` explains `traces`), from the cache if it is
        current. Raises `NotFoundError` and `StoreError`."""
        folder = self.folder(name)
        if (cached := self.current(folder, traces=traces)) is not None:
            return cached
        state, begun = file_state(folder), time.monotonic()
        run = read_run(folder, thumbnails=False, traces=traces)
        of_streams = is_stream_run(run)
        found = LoadedRun(
            name,
            run,
            thumbnail_names(folder),
            state,
            None if of_streams else sections({name: run})[0],
            stream_section(name, run) if of_streams else None,
            begun,
        )
        found = replace(found, seconds=time.monotonic() - begun)
        self._loaded.put((folder, traces), found)
        return found

    def report(self, name: str) -> bytes:
        """Return the page of `bottega report`. Raises `NotFoundError` and `StoreError`."""
        folder = self.folder(name)
        state, cached = file_state(folder), self._reports.get(folder)
        if cached is not None and cached[0] == state:
            return cached[1]
        run = read_run(folder)
        streams = [stream_section(name, run)] if is_stream_run(run) else []
        text = render(
            [] if streams else sections({name: run}),
            streams,
            title=f"Report: {name}",
            made="Created by the console",
        )
        page = text.encode(errors="replace")
        self._reports.put(folder, (state, page))
        return page


def _is_recent(cached: LoadedRun) -> bool:
    age = time.monotonic() - cached.begun
    return age < RELOAD_FACTOR * cached.seconds and is_running(cached.run.folder)


def changed_at(folder: Path) -> float:
    """Return the time of the last change of a run in unix seconds, 0 if it was deleted."""
    try:
        return max(moment for moment, _ in file_state(folder)) / 1e9
    except StoreError:
        return 0.0


def _is_run(folder: Path) -> bool:
    try:
        return (folder / FILE).is_file()
    except OSError:  # the folder cannot be searched
        return False


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the run folders at most `depth` levels below a folder. Unreadable folders are
    skipped."""
    if _is_run(folder):
        yield folder
        return
    if not depth:
        return
    try:
        with os.scandir(folder) as entries:
            inner = sorted(one.path for one in entries if one.is_dir(follow_symlinks=False))
    except OSError:
        return
    for path in inner:
        yield from _runs_below(Path(path), depth - 1)
