"""Run every command and snippet of the documents.

In README.md and docs/*.md: ```bash and ```python blocks of one document run in order, in one new
folder with small sample images. A block below <!-- not run: REASON --> is skipped. A block below
<!-- server: URL --> is started; the next block runs when URL answers with 200, and the server ends
with the document. Programs come from the environment that runs this file; on Linux, commands run in
forks of one process (`preloading`). Two documents run in parallel.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from PIL import Image, ImageDraw

from docs.preloading import SNIPPET, preloaded_programs

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"(?:<!-- (not run|server): (.+?) -->\n)?^```(bash|python)\n(.*?)^```", re.DOTALL | re.MULTILINE
)
COMMAND = re.compile(r"^bottega ", re.MULTILINE)
STARTING_SECONDS = 120
DOCUMENTS_AT_A_TIME = 2
CLASSES = {"tabby": "sienna", "pug": "wheat", "parrot": "seagreen"}


def main() -> int:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    documents.sort(key=count_of_commands, reverse=True)  # longest first, to balance the workers
    failures = 0
    with preloaded_programs() as programs, ThreadPoolExecutor(DOCUMENTS_AT_A_TIME) as pool:
        for lines, failed in pool.map(partial(run_document, programs=programs), documents):
            print(*lines, sep="\n", end="\n" if lines else "", flush=True)
            failures += failed
    return 1 if failures else 0


def count_of_commands(document: Path) -> int:
    return sum(len(COMMAND.findall(block[4])) for block in blocks_of(document))


def blocks_of(document: Path) -> list[re.Match[str]]:
    return [one for one in BLOCK.finditer(document.read_text("utf-8")) if one[1] != "not run"]


def run_document(document: Path, programs: Path | None) -> tuple[list[str], int]:
    """Return the lines to print and the number of failed blocks."""
    lines, failures = [], 0
    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:
        draw_stand_in(Path(folder))
        for number, block in enumerate(blocks_of(document), 1):
            name = f"{document.name} block {number}"
            started = time.monotonic()
            if block[1] == "server":
                error = servers.enter_context(served(block[4], folder, block[2]))
            else:
                error = run_block(block[3], block[4], folder, programs)
            seconds = time.monotonic() - started
            lines.append(f"{'FAILED' if error else 'ok    '} {name} ({seconds:.1f} s)")
            if error:
                lines += [block[4], error]
            failures += bool(error)
    return lines, failures


def run_block(language: str, code: str, folder: str, programs: Path | None) -> str:
    """Return the output of a failed block, or an empty string."""
    done = subprocess.run(
        command(language, code, programs),
        cwd=folder,
        env=environment(folder, programs),
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


def command(language: str, code: str, programs: Path | None = None) -> list[str]:
    if language == "python":
        return [str(programs / SNIPPET), code] if programs else [sys.executable, "-c", code]
    return ["bash", "-euo", "pipefail", "-c", code]


def environment(folder: str, programs: Path | None = None) -> dict[str, str]:
    path = [programs, Path(sys.executable).parent, os.environ["PATH"]]
    return {
        **os.environ,
        "PATH": os.pathsep.join(str(one) for one in path if one is not None),
        "BOTTEGA_TRACES": str(Path(folder, "traces.db")),
        "OMP_NUM_THREADS": "1",  # two documents share two cores
    }


def draw_stand_in(folder: Path) -> None:
    """pets/train/CLASS/*.jpg and photo.jpg: differently coloured and sized shapes."""
    for label, colour in CLASSES.items():
        (folder / "pets" / "train" / label).mkdir(parents=True)
        for i in range(4):
            draw(colour, 40 + 9 * i).save(folder / "pets" / "train" / label / f"{i}.jpg")
    draw("wheat", 66).save(folder / "photo.jpg")


def draw(colour: str, size: int) -> Image.Image:
    image = Image.new("RGB", (size * 2, size + 30), "white")
    ImageDraw.Draw(image).ellipse((8, 8, size, size), fill=colour)
    return image


if __name__ == "__main__":
    sys.exit(main())
