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

# Every command would make these anew, as a process of its own must; none of them changes.
COMMANDS = cache(typer.main.get_command)
TOWER = staticmethod(cache(TowerEmbedder.bundled))
WORDS = staticmethod(cache(TokenEmbedder.bundled))


async def at_once(seconds: float) -> None:
    """How long to wait before trying again is not the commands' affair."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs `bottega ARGUMENTS` in an empty folder, with traces of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BOTTEGA_TRACES", str(tmp_path / "traces.db"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(typer.main, "get_command", COMMANDS)
    monkeypatch.setattr(TowerEmbedder, "bundled", TOWER)
    monkeypatch.setattr(TokenEmbedder, "bundled", WORDS)
    impatient = partial(OpenAIGenerator, retries=RetryPolicy(sleep=at_once))
    monkeypatch.setattr(naming, "OpenAIGenerator", impatient)

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["bottega", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return Ran(code if isinstance(code, int) else 0, out, err)

    return run


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Three classes that differ in colour, four images each, with query.jpg of class leaf."""
    root = tmp_path / "pets"
    for label, colour in COLOURS.items():
        (root / label).mkdir(parents=True)
        for i in range(4):
            _draw(colour, 30 + 5 * i).save(root / label / f"{i}.png")
    _draw("forestgreen", 42).save(tmp_path / "query.jpg", quality=95)
    return root


def _draw(colour: str, size: int) -> Image.Image:
    picture = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(picture).ellipse((5, 5, 5 + size, 5 + size), fill=colour)
    return picture


@pytest.fixture
def served(endpoint: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The endpoint, as the one that `--model openai:NAME` asks."""
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
    return endpoint
