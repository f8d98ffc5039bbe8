"""Runs every command and snippet of the documents, so that none of them can go stale.

In README.md and docs/*.md: ```bash and ```python blocks of one document run in order, in one new
folder that holds a small stand-in for a user's images. A block below <!-- not run: REASON --> is
left out. One below <!-- server: URL --> is started, and the next block runs once URL answers with
200; it is ended after the document. The programs are those of the environment that runs this file.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from PIL import Image, ImageDraw

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"(?:<!-- (not run|server): (.+?) -->\n)?^```(bash|python)\n(.*?)^```", re.DOTALL | re.MULTILINE
)
STARTING_SECONDS = 120
CLASSES = {"tabby": "sienna", "pug": "wheat", "parrot": "seagreen"}


def main() -> int:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    failures = sum(run_document(document) for document in documents)
    return 1 if failures else 0


def run_document(document: Path) -> int:
    failures = 0
    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:
        draw_stand_in(Path(folder))
        blocks = BLOCK.finditer(document.read_text("utf-8"))
        for number, block in enumerate((one for one in blocks if one[1] != "not run"), 1):
            name = f"{document.name} block {number}"
            if block[1] == "server":
                done = servers.enter_context(served(block[4], folder, block[2]))
            else:
                done = run_block(block[3], block[4], folder)
            print(f"{'FAILED' if done else 'ok    '} {name}")
            if done:
                print(block[4], done, sep="\n")
            failures += bool(done)
    return failures


def run_block(language: str, code: str, folder: str) -> str:
    """What it wrote if it failed."""
    done = subprocess.run(
        command(language, code),
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    return "" if done.returncode == 0 else f"{done.stdout}\n{done.stderr}\nit ended with an error"


@contextmanager
def served(code: str, folder: str, url: str) -> Iterator[str]:
    """What it wrote if it did not start. A group of its own: bash may stand above the server."""
    if answers(url):
        yield f"something else answers at {url}"
        return
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command("bash", code),
            cwd=folder,
            env=environment(folder),
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            started = is_up(process, url)
            said.seek(0)
            yield "" if started else f"{said.read().decode()}\n{url} does not answer"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def is_up(process: subprocess.Popen[bytes], url: str) -> bool:
    end = time.monotonic() + STARTING_SECONDS
    while time.monotonic() < end and process.poll() is None:
        if answers(url):
            return True
        time.sleep(0.2)
    return False


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, TimeoutError):
        return False


def command(language: str, code: str) -> list[str]:
    if language == "python":
        return [sys.executable, "-c", code]
    return ["bash", "-euo", "pipefail", "-c", code]


def environment(folder: str) -> dict[str, str]:
    programs = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "BOTTEGA_TRACES": str(Path(folder, "traces.db")),
    }


def draw_stand_in(folder: Path) -> None:
    """pets/train/CLASS/*.jpg and photo.jpg: differently coloured and sized shapes."""
    for label, colour in CLASSES.items():
        (folder / "pets" / "train" / label).mkdir(parents=True)
        for i in range(4):
            draw(colour, 40 + 9 * i).save(folder / "pets" / "train" / label / f"{i}.jpg")
    draw("wheat", 66).save(folder / "photo.jpg")


def draw(colour: str, size: int) -> Image.Image:
    picture = Image.new("RGB", (size * 2, size + 30), "white")
    ImageDraw.Draw(picture).ellipse((8, 8, size, size), fill=colour)
    return picture


if __name__ == "__main__":
    sys.exit(main())
