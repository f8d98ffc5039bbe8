from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import orjson
import pytest
import typer.main
from PIL import Image, ImageDraw

from bottega import naming
from bottega.cli import main
from bottega.generation import OpenAIGenerator, RetryPolicy
from bottega.knowledge import TokenEmbedder, TowerEmbedder
from tests.cli.table_files import IMAGES, write_files
from tests.server import Server

COLOURS = {"ruby": "crimson", "leaf": "forestgreen", "sky": "deepskyblue"}


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> object:
        return orjson.loads(self.out)


Run = Callable[..., Ran]

# Commands share these immutable objects; a separate process would build them again.
COMMANDS = cache(typer.main.get_command)
TOWER = staticmethod(cache(TowerEmbedder.bundled))
WORDS = staticmethod(cache(TokenEmbedder.bundled))


async def no_sleep(seconds: float) -> None:
    """Replace the wait before a retry."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Return a function that runs `bottega ARGUMENTS` in an empty folder with its own traces."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BOTTEGA_TRACES", str(tmp_path / "traces.db"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(typer.main, "get_command", COMMANDS)
    monkeypatch.setattr(TowerEmbedder, "bundled", TOWER)
    monkeypatch.setattr(TokenEmbedder, "bundled", WORDS)
    without_waits = partial(OpenAIGenerator, retries=RetryPolicy(sleep=no_sleep))
    monkeypatch.setattr(naming, "OpenAIGenerator", without_waits)

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["bottega", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            main()
        out, err = capsys.readouterr()
        code = exit_info.value.code
        return Ran(code if isinstance(code, int) else 0, out, err)

    return run


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Return a folder of three classes that differ in colour, four images each; query.jpg beside
    it is of class leaf."""
    root = tmp_path / "pets"
    for label, colour in COLOURS.items():
        (root / label).mkdir(parents=True)
        for i in range(4):
            _disc(colour, 30 + 5 * i).save(root / label / f"{i}.png")
    _disc("forestgreen", 42).save(tmp_path / "query.jpg", quality=95)
    return root


def _disc(colour: str, size: int) -> Image.Image:
    image = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(image).ellipse((5, 5, 5 + size, 5 + size), fill=colour)
    return image


@pytest.fixture
def served(endpoint: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Return the endpoint that `--model openai:NAME` calls."""
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
    return endpoint


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Write `IMAGES` into the current folder of `run`."""
    write_files(tmp_path, IMAGES)
    return tmp_path
