"""Compressed passages on disk, so that an answer compresses none (the paper's pre-saving)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bottega.errors import StoreError
from bottega.types import Example

Precision = Literal["fp16", "int8"]
Compress = Callable[[Sequence[Example]], Tensor]

MANIFEST, CODES, SCALES, ENTRIES = "manifest.json", "codes.bin", "scales.bin", "entries.jsonl"
VERSION = 1
BATCH = 64


@dataclass(frozen=True)
class Manifest:
    """`compressor` is the digest of its weights: prompts of two compressors are not comparable."""

    compressor: str
    prompts: int
    width: int
    precision: Precision = "fp16"
    version: int = VERSION

    @classmethod
    def found(cls, folder: str | Path, compressor: str, prompts: int, width: int) -> Manifest:
        """In the precision of the store that is there, if there is one."""
        path = Path(folder).expanduser() / MANIFEST
        precision: Precision = _read(path).precision if path.exists() else "fp16"
        return cls(compressor, prompts, width, precision)


class PassageStore:
    """One row of (prompts, width) for each passage, memory-mapped.

    An entry is a line in `entries.jsonl`, written after its row is on disk: what a killed process
    left behind is cut off, and the same `add` goes on. A passage whose text, pictures or answer
    changed is compressed anew; its old row stays until the store is built again. int8 has a scale
    for each prompt. Raises `StoreError` for a store of another compressor or precision.
    """

    def __init__(self, folder: str | Path, manifest: Manifest) -> None:
        self._folder = Path(folder).expanduser()
        self._manifest = manifest
        self._folder.mkdir(parents=True, exist_ok=True)
        self._check()
        self._place: dict[str, tuple[int, str]] = {}
        self._count = self._recovered()

    def __len__(self) -> int:
        return len(self._place)

    @property
    def bytes_a_passage(self) -> int:
        return self._row * self._kind.itemsize + (self._manifest.prompts * 2 if self._scaled else 0)

    def add(
        self,
        passages: Sequence[tuple[str, Example]],
        compress: Compress,
        report: Callable[[int], None] = lambda done: None,
    ) -> int:
        """Ids with their passages. Returns how many were compressed: what is there is skipped."""
        told = [(id, one, content(one)) for id, one in passages]
        missing = [one for one in told if self._place.get(one[0], (0, ""))[1] != one[2]]
        for start in range(0, len(missing), BATCH):
            batch = missing[start : start + BATCH]
            with torch.no_grad():
                rows = compress([one for _, one, _ in batch])
            self._append([(id, mark) for id, _, mark in batch], rows)
            report(min(start + BATCH, len(missing)))
        return len(missing)

    def get(self, passages: Sequence[tuple[str, Example]]) -> Tensor:
        """(passages, prompts, width) in float32. Raises `StoreError` for one that is missing or has
        changed since it was compressed."""
        places = [self._place_of(id, one) for id, one in passages]
        shape = (-1, self._manifest.prompts, self._manifest.width)
        rows = self._mapped(CODES, self._kind).reshape(shape)[places].astype(np.float32)
        if self._scaled:
            scales = self._mapped(SCALES, np.dtype(np.float16)).reshape(shape[:2])[places]
            rows *= scales[..., None].astype(np.float32)
        return torch.from_numpy(rows)

    def _place_of(self, id: str, passage: Example) -> int:
        place, mark = self._place.get(id, (-1, ""))
        if mark != content(passage):
            missing = "has changed since it was compressed" if mark else "is not compressed"
            raise StoreError(
                f"passage {id} {missing}",
                hint="run `bottega compress build` again: it compresses what is new",
            )
        return place

    def _append(self, entries: Sequence[tuple[str, str]], rows: Tensor) -> None:
        values = rows.float().cpu().numpy()
        if self._scaled:
            scales = np.maximum(np.abs(values).max(-1) / 127, 1e-6).astype(np.float16)
            codes = np.rint(values / scales[..., None].astype(np.float32))
            _write(self._folder / SCALES, scales.tobytes())
            values = codes.clip(-127, 127)
        _write(self._folder / CODES, values.astype(self._kind).tobytes())
        lines = [json.dumps([id, mark]) + "\n" for id, mark in entries]
        _write(self._folder / ENTRIES, "".join(lines).encode())
        for place, (id, mark) in enumerate(entries, self._count):
            self._place[id] = (place, mark)
        self._count += len(entries)

    def _check(self) -> None:
        path = self._folder / MANIFEST
        if not path.exists():
            if any(self._folder.iterdir()):
                raise StoreError(
                    f"{self._folder} holds files that are not a store's",
                    hint="give an empty folder",
                )
            _write(path, json.dumps(asdict(self._manifest), sort_keys=True).encode())
            return
        found = _read(path)
        if found != self._manifest:
            raise StoreError(
                f"{self._folder} was built as {found}, and {self._manifest} is asked for",
                hint="build another folder with this compressor, or use the one it was built with",
            )

    def _recovered(self) -> int:
        """Cuts off what an interrupted `add` left. Returns the number of rows."""
        path = self._folder / ENTRIES
        whole = path.read_bytes() if path.exists() else b""
        whole = whole[: whole.rfind(b"\n") + 1]
        lines = [json.loads(line) for line in whole.splitlines()]
        self._place = {id: (place, mark) for place, (id, mark) in enumerate(lines)}
        sizes = {CODES: self._row * self._kind.itemsize, ENTRIES: 0}
        if self._scaled:
            sizes[SCALES] = self._manifest.prompts * 2
        for name, size in sizes.items():
            part, length = self._folder / name, size * len(lines) or len(whole)
            if part.exists():
                if part.stat().st_size < length:
                    raise StoreError(f"{part} is too short", hint="delete the folder, build anew")
                os.truncate(part, length if lines else 0)
        return len(lines)

    def _mapped(self, name: str, kind: np.dtype[np.generic]) -> NDArray[np.generic]:
        path = self._folder / name
        if not self._count:
            return np.zeros(0, kind)
        return np.memmap(path, kind, mode="r")

    @property
    def _scaled(self) -> bool:
        return self._manifest.precision == "int8"

    @property
    def _kind(self) -> np.dtype[np.generic]:
        return np.dtype(np.int8 if self._scaled else np.float16)

    @property
    def _row(self) -> int:
        return self._manifest.prompts * self._manifest.width


def check_built(folder: str | Path) -> None:
    """Raises `StoreError` if nothing was built there."""
    if not (Path(folder).expanduser() / MANIFEST).exists():
        raise StoreError(
            f"there are no compressed passages in {folder}",
            hint="run `bottega compress build` first",
        )


def content(passage: Example) -> str:
    """Of what is compressed: another text, picture or answer under the same id is another
    passage."""
    images = [image.sha256 for image in passage.query.images]
    said = [passage.reply] if passage.answer else []
    return hashlib.sha256(json.dumps([passage.query.text, images, *said]).encode()).hexdigest()[:16]


def _read(path: Path) -> Manifest:
    try:
        return Manifest(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise StoreError(f"{path} is damaged", hint="delete the folder, build anew") from error


def _write(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
