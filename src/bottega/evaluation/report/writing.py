"""A report's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bottega import __version__
from bottega.errors import MissingDependencyError, SettingError
from bottega.evaluation.report.figures import Section, sections
from bottega.evaluation.report.plots import plot
from bottega.evaluation.report.reading import KeptRun, read_run
from bottega.evaluation.report.rendering import render
from bottega.evaluation.report.tables import as_csv, as_markdown
from bottega.image import path_text

PAGE, CSV, MARKDOWN = "index.html", "results.csv", "results.md"


@dataclass(frozen=True)
class Report:
    """`unplotted` says why there are no plots, None where there are."""

    sections: Sequence[Section]
    files: Sequence[Path]
    unplotted: MissingDependencyError | None


def write_report(folders: Sequence[Path], out: Path) -> Report:
    """Reads the runs in `folders` as they are now, and writes to `out`."""
    runs = dict(zip(_names(folders), map(read_run, folders), strict=True))
    found = sections(runs)
    title = f"Report: {', '.join(dict.fromkeys(section.benchmark for section in found))}"
    made = f"Made {_now()} by bottega {__version__} from {_sources(runs)}"
    _make(out)
    texts = {
        PAGE: render(found, title=title, made=made),
        CSV: as_csv(found),
        MARKDOWN: as_markdown(found, title=title, made=made),
    }
    files = [_written(out / name, text) for name, text in texts.items()]
    try:
        return Report(found, [*files, *plot(found, out)], None)
    except MissingDependencyError as error:
        return Report(found, files, error)


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as much of their paths as tells them apart."""
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise SettingError("one folder is named twice", hint="name each run once")
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return [path_text(name) for name in names]


def _sources(runs: dict[str, KeptRun]) -> str:
    return f"run {next(iter(runs))}" if len(runs) == 1 else f"runs {', '.join(runs)}"


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(
            f"{out} cannot be made: {error.strerror}", hint="--out names a folder to write to"
        ) from error


def _written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", errors="replace", newline="\n")
    return path


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
