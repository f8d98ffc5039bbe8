"""Runs every command and snippet of the documents, so that none of them can go stale.

In README.md and docs/*.md: ```bash and ```python blocks of one document run in order, in one new
folder that holds a small stand-in for a user's images. A block below <!-- not run: REASON --> is
left out. The programs are those of the environment that runs this file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"(<!-- not run: .+? -->\n)?^```(bash|python)\n(.*?)^```", re.DOTALL | re.MULTILINE
)
CLASSES = {"tabby": "sienna", "pug": "wheat", "parrot": "seagreen"}


def main() -> int:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    failures = sum(run_document(document) for document in documents)
    return 1 if failures else 0


def run_document(document: Path) -> int:
    blocks = [(m[2], m[3]) for m in BLOCK.finditer(document.read_text("utf-8")) if not m[1]]
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        draw_stand_in(Path(folder))
        for number, (language, code) in enumerate(blocks, 1):
            failures += not run_block(language, code, folder, f"{document.name} block {number}")
    return failures


def run_block(language: str, code: str, folder: str, name: str) -> bool:
    programs = Path(sys.executable).parent
    command = (
        [sys.executable, "-c", code]
        if language == "python"
        else ["bash", "-euo", "pipefail", "-c", code]
    )
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "BOTTEGA_TRACES": str(Path(folder, "traces.db")),
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    print(f"{'ok    ' if done.returncode == 0 else 'FAILED'} {name}")
    if done.returncode != 0:
        print(code, done.stdout, done.stderr, sep="\n")
    return done.returncode == 0


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
