"""Options that are generated from the fields of dataclasses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from bottega.cli.options import options_from_fields
from bottega.evaluation.config import RunConfig
from bottega.evaluation.search_config import SearchOptions
from bottega.evaluation.streams.stream_plan import StreamConfig


def parsed(kind: Any, *arguments: str) -> Any:
    """Return the instance that a command with the options of `kind` gets."""
    found: list[Any] = []

    def command(config: Any) -> None:
        found.append(config)

    command.__annotations__["config"] = kind
    app = Typer()
    app.command()(options_from_fields()(command))
    CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return found[0]


@pytest.mark.parametrize("kind", [RunConfig, SearchOptions, StreamConfig])
def test_a_command_without_options_gets_the_defaults(kind: Callable[[], Any]) -> None:
    assert parsed(kind) == kind()


@pytest.mark.parametrize(
    ("kind", "arguments", "expected"),
    [
        (RunConfig, ("--methods", "knn, vote"), {"methods": ("knn", "vote")}),
        (RunConfig, ("--shots", "5,10", "--seed", "3"), {"shots": (5, 10), "seed": 3}),
        (RunConfig, ("--stop", "\\n\\n", "--stop", "END"), {"stop": ("\n\n", "END")}),
        (RunConfig, ("--no-rationales", "--allow-overlap"), {"rationales": False}),
        (SearchOptions, ("--no-early-stop", "--alpha", "0.5"), {"early_stop": False, "alpha": 0.5}),
        (StreamConfig, ("--master-rate", "0.2,1"), {"rates": (0.2, 1.0)}),
        (StreamConfig, ("--start", "none,warm", "--controls", "none"), {"controls": ()}),
        (StreamConfig, ("--tiers", "a,b,c"), {"tiers": ("a", "b", "c")}),
    ],
)
def test_given_options_set_their_fields(
    kind: Any, arguments: tuple[str, ...], expected: dict[str, object]
) -> None:
    found = parsed(kind, *arguments)
    assert {name: getattr(found, name) for name in expected} == expected
