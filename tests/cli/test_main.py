from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from bottega.cli.app import app, lazy_commands
from bottega.cli.eval import PANELS
from bottega.cli.help import LazyCommand
from tests.cli.conftest import Run


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "bottega", "stats", "no.db"], capture_output=True)
    assert done.returncode == 1
    assert b"error: knowledge base no.db does not exist" in done.stderr


def test_help_has_no_line_breaks_within_a_paragraph(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "800")
    text = run("eval", "--help").out
    assert "vote-strict counts ties as wrong" in text
    assert "BENCHMARK" in text


def test_options_of_eval_are_in_panels_and_fit_80_columns(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("eval", "--help").out.splitlines()
    panels = [line.split()[1] for line in lines if line.startswith("╭─")]
    assert panels == ["Arguments", "Options", *(name.split()[0] for name in PANELS)]
    assert max(map(len, lines)) <= 80
    # The rows of the longest help text: half the lines of one wide table.
    start = next(i for i, line in enumerate(lines) if line.startswith("│ --retrieve "))
    end = next(i for i, line in enumerate(lines) if line.startswith("│ --embed-text "))
    assert end - start < 16
    assert not any("…" in line for line in lines)


def paths(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command."""
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from paths(
                inner.load() if isinstance(inner, LazyCommand) else inner, (*path, name)
            )


def test_every_help_screen_is_readable_at_80_columns(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line is truncated, and no Python type appears: flags take no value."""
    monkeypatch.setenv("COLUMNS", "80")
    found = list(paths(typer.main.get_command(app)))
    assert ("keys", "rotate") in found and ("verify",) in found
    for path in found:
        lines = run(*path, "--help").out.splitlines()
        assert max(map(len, lines)) <= 80
        assert [line for line in lines if re.search(r"…|<[A-Za-z]", line)] == [], path
        flag = next(line for line in lines if "--help" in line)
        words = [word for word in flag.split() if word != "-h"]
        assert words[1:5] == ["--help", "Show", "this", "message"], path


def test_the_help_screen_has_the_first_paragraph_of_every_command() -> None:
    for lazy in lazy_commands():
        if not lazy.hidden:
            assert lazy.help == (lazy.load().help or "").split("\n\n")[0], lazy.name


def test_a_misspelt_command_gets_a_suggestion(run: Run) -> None:
    failed = run("clasify")
    assert failed.code == 2
    assert "Did you mean 'classify'" in failed.err


def test_completions_of_commands_import_no_command() -> None:
    """Completions of options do: they need the command's parameters."""
    for typed, completed, imported in (
        ("bottega serv", ["serve"], False),
        ("bottega keys ro", ["rotate"], True),
        ("bottega classify --met", ["--method"], True),
    ):
        environment = {
            "COMP_WORDS": typed,
            "COMP_CWORD": str(len(typed.split()) - 1),
            "_BOTTEGA_COMPLETE": "complete_bash",
        }
        code = (
            "import sys; from bottega.cli.app import app\n"
            "try: app(prog_name='bottega')\n"
            "finally: print('bottega.types' in sys.modules, file=sys.stderr)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        assert done.stdout.split() == completed
        assert done.stderr.split() == [str(imported)]
