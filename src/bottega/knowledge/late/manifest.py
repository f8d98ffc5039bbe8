"""What of a token array's files counts, in a file that is replaced as a whole."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bottega.knowledge.late.files import checksum

VERSION = 1
MANIFEST = "manifest.json"
# How every manifest begins, also one that was damaged or cut off since.
BEGINNING = b'{"content": {"crcs": '


@dataclass
class Manifest:
    """Bytes beyond the sizes here are of an append that was interrupted."""

    fingerprint: str
    dimension: int
    version: int = VERSION
    generation: int = 0
    scale: float = 0.0  # of the int8 copy
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of each file
    crcs: dict[str, int] = field(default_factory=dict)
    deleted: list[int] = field(default_factory=list)  # positions


def believed(folder: Path, fingerprint: str, dimension: int) -> Manifest | None:
    """The folder's, if it is of this embedder and its files are whole."""
    content = read_manifest(folder)
    if content is None or content.get("version") != VERSION:
        return None
    held = Manifest(**content)
    if (held.fingerprint, held.dimension) != (fingerprint, dimension):
        return None
    whole = all(
        checksum(folder / f"{name}.{held.generation}", size) == held.crcs[name]
        for name, size in held.sizes.items()
    )
    return held if whole else None


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    body = json.dumps(content, sort_keys=True)
    text = json.dumps({"crc": zlib.crc32(body.encode()), "content": content}, sort_keys=True)
    draft = folder / f"{MANIFEST}.new"
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """None if there is none, or none that can be believed."""
    try:
        held = json.loads((folder / MANIFEST).read_text())
        content, crc = held["content"], held["crc"]
        body = json.dumps(content, sort_keys=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return content if isinstance(content, dict) and zlib.crc32(body.encode()) == crc else None


def is_manifest(path: Path) -> bool:
    """Whether it was written here, damaged or not: another program may use the same name."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(BEGINNING)) == BEGINNING
