"""Images for tables and archives, and their writers."""

from __future__ import annotations

import base64
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.builders import solid_image

if TYPE_CHECKING:
    from tests.cli.conftest import Run

FILES = ("cat/1.png", "cat/2.png", "dog/1.png")
LABELS = {"cat": 2, "dog": 1}
IMAGES = {name: solid_image(shade).data for shade, name in enumerate(FILES)}


def write_zip(path: Path, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def write_files(root: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def encoded(shade: int) -> str:
    return base64.b64encode(solid_image(shade).data).decode()


def added_labels(run: Run, *arguments: object) -> dict[str, int]:
    """Add the source and return the number of examples by answer."""
    added = run("add", "k.db", *arguments, "--embed", "pixels")
    assert added.code == 0, added.err
    listed: Any = run("ls", "k.db", "--limit", 100, "--json").json
    answers = [one["answer"] for one in listed]
    return {answer: answers.count(answer) for answer in sorted(set(answers))}
