"""A trained compressor on disk, and what it may be used with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bottega.compression.hyper import Hyper
from bottega.compression.racc import Racc, Shape
from bottega.errors import LoadError
from bottega.prefixing.kv import Geometry

WEIGHTS, SETTINGS = "compressor.safetensors", "compressor.json"
VERSION = 1


@dataclass(frozen=True)
class Saved:
    """`digest` names the weights. `hyper` and `base` are the fingerprints of the two frozen models
    that the compressor was trained between, `layer` is the one whose states it reads."""

    racc: Racc
    digest: str
    hyper: str
    base: str
    layer: int

    def check(self, hyper: Any, base: Any) -> Hyper:
        """The hyper model, ready to compress. Raises `LoadError` for models that the compressor was
        not made for: it would answer, and wrongly."""
        opened = self.compressing(hyper)
        _check("base", base, self.base)
        return opened

    def compressing(self, hyper: Any) -> Hyper:
        """The same where nobody answers: what compresses passages ahead needs no base model."""
        _check("hyper", hyper, self.hyper)
        return Hyper(hyper, layer=self.layer)


def _check(name: str, model: Any, wanted: str) -> None:
    if fingerprint(model) != wanted:
        raise LoadError(
            f"this compressor was trained with another {name} model",
            hint=f"give the one it was trained with, or train one for this: {wanted}",
        )


def save(racc: Racc, folder: Path, *, hyper: Hyper, base: Any, half: bool = True) -> None:
    """Weights in half precision, unless told otherwise, and settings beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {
        name: one.detach().to(torch.float16 if half else one.dtype).contiguous()
        for name, one in racc.state_dict().items()
    }
    save_file(kept, folder / WEIGHTS)
    settings = {
        "version": VERSION,
        "shape": asdict(racc.shape),
        "layer": hyper.layer,
        "hyper": fingerprint(hyper.model),
        "base": fingerprint(base),
    }
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def load(folder: str | Path) -> Saved:
    """Raises `LoadError`."""
    place = Path(folder).expanduser()
    try:
        settings = json.loads((place / SETTINGS).read_text())
        weights = load_file(place / WEIGHTS)
        shape = dict(settings["shape"])
        racc = Racc(Shape(**{**shape, "geometry": Geometry(**shape["geometry"])}), _room(weights))
        racc.load_state_dict({name: one.float() for name, one in weights.items()})
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise LoadError(
            f"{place} holds no compressor that can be read: {error}",
            hint="give the folder that `bottega compress train` wrote",
        ) from error
    if settings["version"] != VERSION:
        raise LoadError(f"{place} was written by another version", hint="train the compressor anew")
    return Saved(
        racc.eval(), digest(weights), settings["hyper"], settings["base"], settings["layer"]
    )


def _room(weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Prompts of the right sizes, to be replaced."""
    names = "documents.prompts", "queries.prompts"
    if not set(names) <= set(weights):
        return None
    documents, queries = (weights[name].float() for name in names)
    return documents, queries


def digest(weights: Mapping[str, Tensor]) -> str:
    told = hashlib.sha256()
    for name in sorted(weights):
        told.update(name.encode())
        told.update(weights[name].contiguous().numpy().tobytes())
    return told.hexdigest()[:16]


def fingerprint(model: Any) -> str:
    """Names a model's architecture and weights, whatever their precision and place: by the shapes
    of all of them and the signs of a few numbers of each."""
    told = hashlib.sha256(type(model).__name__.encode())
    for name, weight in sorted(model.state_dict().items()):
        few = weight.flatten()[:: max(1, weight.numel() // 32)][:32]
        told.update(f"{name}{tuple(weight.shape)}{(few > 0).tolist()}".encode())
    return told.hexdigest()[:16]
