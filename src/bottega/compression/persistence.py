"""Which model a compressor was trained with."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bottega.compression.hyper_model import HyperModel
from bottega.compression.model import CompressorConfig, RaccModel
from bottega.errors import LoadError, SettingError
from bottega.kv_prefix import Geometry

SAMPLES = 2048  # of each tensor: nobody waits for billions of weights
APART = 2_654_435_761  # a prime: steps by it meet every row and column, and no place twice
LARGEST = 65504.0  # of half precision
TOLERANCE = 0.01  # of a tensor's usual size; bfloat16 rounds by 0.004 at most
LEAST = 1e-6  # what half precision has no numbers for


def fingerprint(model: Any) -> str:
    """Tells a model by its architecture, and by two numbers of every tensor: the usual size of its
    numbers, and a sum of them with fixed factors, of the same scale. Both are of samples: a change
    of a few weights may go unseen. Compare with `same`: precision rounds these."""
    named = sorted(model.state_dict().items())
    shapes = [(name, tuple(one.shape)) for name, one in named]
    architecture = hashlib.sha256(f"{type(model).__name__}{shapes}".encode()).hexdigest()[:16]
    numbers = [number for _, one in named for number in _told(one)]
    return " ".join([architecture, *(f"{number:.4g}" for number in numbers)])


def same(one: str, other: str) -> bool:
    """Whether two fingerprints are of one model, in whatever precision. Raises `ValueError` for
    what is none."""
    (first, mine), (second, others) = _parsed(one), _parsed(other)
    if first != second or len(mine) != len(others):
        return False
    return all(
        abs(number - wanted) <= TOLERANCE * max(mine[place - place % 2], LEAST / TOLERANCE)
        for place, (number, wanted) in enumerate(zip(mine, others, strict=True))
    )


def check_fingerprint(told: object) -> str:
    """Raises `ValueError`."""
    if not isinstance(told, str) or not all(map(math.isfinite, _parsed(told)[1])):
        raise ValueError("it does not say which models it was trained with")
    return told


def _parsed(told: str) -> tuple[str, list[float]]:
    architecture, *numbers = told.split(" ")
    return architecture, [float(number) for number in numbers]


def _told(weight: Tensor) -> tuple[float, float]:
    few = _sampled(weight)
    if not len(few):
        return 0.0, 0.0
    size = few.square().mean().sqrt()
    factors = torch.arange(len(few), dtype=torch.float64).square().cos()
    mixed = (few * factors).sum() / math.sqrt(len(few) / 2)
    return size.item(), mixed.item()


def _sampled(weight: Tensor) -> Tensor:
    """What half precision has no numbers for, as masks have it, is the largest it has."""
    flat, count = weight.detach().flatten(), weight.numel()
    if count > SAMPLES:
        places = torch.arange(SAMPLES) * APART % count
        flat = flat[places.to(flat.device)]
    told = flat.float().cpu().double()
    return told.nan_to_num(0.0, LARGEST, -LARGEST).clamp(-LARGEST, LARGEST)


WEIGHTS, SETTINGS = "compressor.safetensors", "compressor.json"
VERSION = 2  # 1 told models by the signs of a few weights


@dataclass(frozen=True)
class SavedCompressor:
    """`digest` names the weights and how they are used. `hyper` and `base` are the fingerprints of
    the two frozen models that the compressor was trained between, `layer` is the one whose states
    it reads."""

    racc: RaccModel
    digest: str
    hyper: str
    base: str
    layer: int

    def open(self, hyper: Any, base: Any) -> HyperModel:
        """The hyper model, ready to compress. Raises `LoadError` for models that the compressor was
        not made for: it would answer, and wrongly."""
        opened = self.open_hyper(hyper)
        _check("base", base, self.base)
        return opened

    def open_hyper(self, hyper: Any) -> HyperModel:
        """The same where nobody answers: what compresses passages ahead needs no base model."""
        _check("hyper", hyper, self.hyper)
        opened = HyperModel(hyper, layer=self.layer)
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


def save(racc: RaccModel, folder: Path, *, hyper: HyperModel, base: Any, half: bool = True) -> None:
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
    save_settings(racc.config, folder, hyper=hyper, base=base)


def save_settings(config: CompressorConfig, folder: Path, *, hyper: HyperModel, base: Any) -> None:
    """All but the weights: what they are built as, and which models they belong to."""
    settings = {
        "version": VERSION,
        "shape": asdict(config),
        "layer": hyper.layer,
        "hyper": fingerprint(hyper.model),
        "base": fingerprint(base),
    }
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _kept(one: Tensor, *, half: bool) -> Tensor:
    """Scales are measured, and of any size; a weight that half precision cannot hold is rare."""
    shorter = one.to(torch.float16)
    return shorter if half and bool(shorter.isfinite().all()) else one


def load(folder: str | Path) -> SavedCompressor:
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
    return SavedCompressor(racc, digest(racc, layer), hyper, base, layer)


def _built(config: CompressorConfig, weights: Mapping[str, Tensor]) -> RaccModel:
    """Nothing is drawn and no room made: a shape that the weights do not have costs no memory."""
    if wrong := _unusable(weights):
        raise ValueError(f"{wrong} cannot be used")
    with torch.device("meta"):
        racc = RaccModel(config)
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


def _shape(told: Mapping[str, Any]) -> CompressorConfig:
    geometry = Geometry(
        **{name: _whole(value, name) for name, value in dict(told["geometry"]).items()}
    )
    usual = CompressorConfig(1, geometry)
    config = CompressorConfig(**{**told, "geometry": geometry})
    for one in fields(CompressorConfig):
        value, kind = getattr(config, one.name), type(getattr(usual, one.name))
        if type(value) is not kind:
            raise ValueError(f"{one.name} is not of the type {kind.__name__}")
    return config


def _whole(value: object, name: str) -> int:
    if type(value) is not int:
        raise ValueError(f"{name} is not a whole number")
    return value


def digest(racc: RaccModel, layer: int) -> str:
    """Other weights or another use of them give other prompts."""
    used = json.dumps({"shape": asdict(racc.config), "layer": layer}, sort_keys=True)
    told = hashlib.sha256(used.encode())
    for name, weight in sorted(racc.state_dict().items()):
        told.update(name.encode())
        told.update(weight.contiguous().numpy().tobytes())
    return told.hexdigest()[:16]
