"""A trained compressor on disk, and what it may be used with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bottega.compression.fingerprints import check_fingerprint, fingerprint, same
from bottega.compression.hyper import Hyper
from bottega.compression.racc import Racc, Shape
from bottega.errors import LoadError, SettingError
from bottega.prefixing.kv import Geometry

WEIGHTS, SETTINGS = "compressor.safetensors", "compressor.json"
VERSION = 2  # 1 told models by the signs of a few weights


@dataclass(frozen=True)
class Saved:
    """`digest` names the weights and how they are used. `hyper` and `base` are the fingerprints of
    the two frozen models that the compressor was trained between, `layer` is the one whose states
    it reads."""

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
        opened = Hyper(hyper, layer=self.layer)
        if not opened.has_layer:
            raise LoadError(
                f"this compressor reads layer {self.layer}, which its hyper model does not have",
                hint=f"its {SETTINGS} was changed: restore it, or train the compressor anew",
            )
        return opened


def _check(name: str, model: Any, wanted: str) -> None:
    if not same(fingerprint(model), wanted):
        raise LoadError(
            f"this compressor was trained with another {name} model",
            hint="give the one it was trained with, or train a compressor for this one",
        )


def save(racc: Racc, folder: Path, *, hyper: Hyper, base: Any, half: bool = True) -> None:
    """Weights in half precision, unless told otherwise, and settings beside them. Raises
    `SettingError` for weights that are no numbers."""
    buffers = dict(racc.named_buffers())
    kept = {
        name: _kept(one.detach(), half=half and name not in buffers).contiguous()
        for name, one in racc.state_dict().items()
    }
    if wrong := _unusable(kept):
        raise SettingError(
            f"{wrong} of this compressor cannot be used: training went astray",
            hint="train anew with a lower rate or smaller loss weights",
        )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(kept, folder / WEIGHTS)
    save_settings(racc.shape, folder, hyper=hyper, base=base)


def save_settings(shape: Shape, folder: Path, *, hyper: Hyper, base: Any) -> None:
    """All but the weights: what they are built as, and which models they belong to."""
    settings = {
        "version": VERSION,
        "shape": asdict(shape),
        "layer": hyper.layer,
        "hyper": fingerprint(hyper.model),
        "base": fingerprint(base),
    }
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _kept(one: Tensor, *, half: bool) -> Tensor:
    """Scales are measured, and of any size; a weight that half precision cannot hold is rare."""
    shorter = one.to(torch.float16)
    return shorter if half and bool(shorter.isfinite().all()) else one


def load(folder: str | Path) -> Saved:
    """Raises `LoadError`."""
    place = Path(folder).expanduser()
    try:
        settings = json.loads((place / SETTINGS).read_text())
        if settings["version"] != VERSION:
            raise LoadError(
                f"{place} was written by another version", hint="train the compressor anew"
            )
        layer = _whole(settings["layer"], "layer")
        hyper, base = (check_fingerprint(settings[name]) for name in ("hyper", "base"))
        racc = _built(_shape(settings["shape"]), load_file(place / WEIGHTS))
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
        SettingError,
        SafetensorError,
    ) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise LoadError(
            f"{place} holds no compressor that can be read: {reason}",
            hint="give the folder that `bottega compress train` wrote",
        ) from error
    return Saved(racc, digest(racc, layer), hyper, base, layer)


def _built(shape: Shape, weights: Mapping[str, Tensor]) -> Racc:
    """Nothing is drawn and no room made: a shape that the weights do not have costs no memory."""
    if wrong := _unusable(weights):
        raise ValueError(f"{wrong} cannot be used")
    with torch.device("meta"):
        racc = Racc(shape)
    racc.load_state_dict({name: one.float() for name, one in weights.items()}, assign=True)
    return racc.eval()


def _unusable(weights: Mapping[str, Tensor]) -> str:
    """The first tensor that no answer could come of. A spread of 0 tells `Modulation` to leave a
    dimension as it is; compressors divide by theirs."""
    for name, one in weights.items():
        divides = name in ("documents.spread", "queries.spread")
        if not bool(one.isfinite().all()) or (divides and bool((one <= 0).any())):
            return name
    return ""


def _shape(told: Mapping[str, Any]) -> Shape:
    geometry = Geometry(
        **{name: _whole(value, name) for name, value in dict(told["geometry"]).items()}
    )
    usual = Shape(1, geometry)
    shape = Shape(**{**told, "geometry": geometry})
    for one in fields(Shape):
        value, kind = getattr(shape, one.name), type(getattr(usual, one.name))
        if type(value) is not kind:
            raise ValueError(f"{one.name} is not of the type {kind.__name__}")
    return shape


def _whole(value: object, name: str) -> int:
    if type(value) is not int:
        raise ValueError(f"{name} is not a whole number")
    return value


def digest(racc: Racc, layer: int) -> str:
    """Other weights or another use of them give other prompts."""
    used = json.dumps({"shape": asdict(racc.shape), "layer": layer}, sort_keys=True)
    told = hashlib.sha256(used.encode())
    for name, weight in sorted(racc.state_dict().items()):
        told.update(name.encode())
        told.update(weight.contiguous().numpy().tobytes())
    return told.hexdigest()[:16]
