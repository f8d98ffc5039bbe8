"""Saved compressors, and fingerprints of the models they were trained with."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from bottega._util.durable_files import os_errors, replace_file
from bottega.compression.hyper_model import HyperModel, InputBuilder
from bottega.compression.model import CompressorConfig, RaccModel
from bottega.errors import LoadError, SettingError
from bottega.kv_prefix import Geometry

SAMPLES = 2048  # per tensor; reading billions of weights would take too long
STRIDE = 2_654_435_761  # a prime, so samples cover all rows and columns without repetition
LARGEST = 65504.0  # in half precision
TOLERANCE = 0.01  # relative to a tensor's RMS; bfloat16 rounds by 0.004 at most
LEAST = 1e-6  # half precision cannot represent less


def fingerprint(model: Any) -> str:
    """Return a fingerprint of a model's architecture and weights. Each tensor contributes its RMS
    and a fixed random projection of the same scale. Both use a sample of the weights, so a change
    of a few weights may go unnoticed. Compare fingerprints with `same_model`, which tolerates
    rounding."""
    named = sorted(model.state_dict().items())
    shapes = [(name, tuple(one.shape)) for name, one in named]
    architecture = hashlib.sha256(f"{type(model).__name__}{shapes}".encode()).hexdigest()[:16]
    numbers = [number for _, one in named for number in _statistics(one)]
    return " ".join([architecture, *(f"{number:.4g}" for number in numbers)])


def same_model(one: str, other: str) -> bool:
    """Return whether two fingerprints belong to one model, in any precision. Raises `ValueError`
    for malformed fingerprints."""
    (first, mine), (second, others) = _parsed(one), _parsed(other)
    if first != second or len(mine) != len(others):
        return False
    return all(
        # Even indices hold the RMS, the scale of both numbers of a tensor.
        abs(number - wanted) <= TOLERANCE * max(mine[i - i % 2], LEAST / TOLERANCE)
        for i, (number, wanted) in enumerate(zip(mine, others, strict=True))
    )


def _parsed(fingerprint: str) -> tuple[str, list[float]]:
    architecture, *numbers = fingerprint.split(" ")
    return architecture, [float(number) for number in numbers]


def _statistics(weight: Tensor) -> tuple[float, float]:
    """Return the RMS of a weight's sample and a fixed projection of it, in the same scale."""
    flat, count = weight.detach().flatten(), weight.numel()
    if not count:
        return 0.0, 0.0
    if count > SAMPLES:
        indices = torch.arange(SAMPLES) * STRIDE % count
        flat = flat[indices.to(flat.device)]
    # Masks hold numbers beyond half precision: clamp, or a model loaded in fp16 would differ. Sums
    # in double precision do not depend on the order in which a CPU adds.
    sample = flat.float().cpu().double().nan_to_num(0.0, LARGEST, -LARGEST)
    sample = sample.clamp(-LARGEST, LARGEST)
    factors = torch.arange(len(sample), dtype=torch.float64).square().cos()
    projection = (sample * factors).sum() / math.sqrt(len(sample) / 2)
    return sample.square().mean().sqrt().item(), projection.item()


WEIGHTS, SETTINGS = "compressor.safetensors", "compressor.json"
VERSION = 3


@dataclass(frozen=True)
class SavedCompressor:
    """Compressor loaded from a folder. `digest` identifies the weights and their use. `hyper` and
    `base` are fingerprints of the two frozen models, `tokenizers` the digests of their tokenizers;
    `layer` is the layer of `hyper` whose states are read."""

    racc: RaccModel
    digest: str
    hyper: str
    base: str
    layer: int
    tokenizers: Mapping[str, str] = field(default_factory=dict)

    def open(self, hyper: Any, base: Any) -> HyperModel:
        """Return the hyper model, ready to compress. Raises `LoadError` for other models than those
        of training: answers would be wrong."""
        if hyper is base and self.hyper == self.base:
            _check("", base, self.base)
        hyper_model = self.open_hyper(hyper)
        _check("base ", base, self.base)
        return hyper_model

    def open_hyper(self, hyper: Any) -> HyperModel:
        """Return the hyper model without a check of the base model, to pre-compress passages."""
        _check("hyper ", hyper, self.hyper)
        hyper_model = HyperModel(hyper, layer=self.layer)
        if not hyper_model.has_layer:
            raise LoadError(
                f"the hyper model has no layer {self.layer}, which {SETTINGS} names",
                hint=f"restore {SETTINGS}, or train the compressor again",
            )
        return hyper_model

    def check_tokenizers(self, **inputs: InputBuilder) -> None:
        """Raise `LoadError` for inputs (`hyper`, `base`) of other tokenizers than in training: a
        model would read other words."""
        for name, builder in inputs.items():
            if self.tokenizers.get(name, builder.tokenizer) != builder.tokenizer:
                raise LoadError(
                    f"this compressor was trained with another tokenizer of the {name} model",
                    hint="restore the tokenizer files of the model, or train the compressor again",
                )


def _check(role: str, model: Any, wanted: str) -> None:
    if not same_model(fingerprint(model), wanted):
        raise LoadError(
            f"this compressor was trained with another {role}model",
            hint="use the model it was trained with, or train a compressor for this one",
        )


def save(
    racc: RaccModel,
    folder: Path,
    *,
    hyper: HyperModel,
    base: Any,
    half: bool = True,
    tokenizers: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write weights, by default in half precision, and settings into `folder`. `tokenizers` are
    those of `TrainingObjective`. Raises `SettingError` for weights that are not finite, and
    `StoreError` if the folder cannot be written."""
    buffers = dict(racc.named_buffers())
    weights = {}
    for name, weight in racc.state_dict().items():
        shorter = weight.detach().to(torch.float16)
        # Scales (buffers) lose too much in half precision, and large weights become infinite.
        fits = half and name not in buffers and bool(shorter.isfinite().all())
        weights[name] = (shorter if fits else weight.detach()).contiguous()
    if wrong := _unusable(weights):
        raise SettingError(
            f"{wrong} of this compressor has values that are not finite, or no spread",
            hint="train again with a lower learning rate or smaller loss weights",
        )
    with os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / WEIGHTS, to_bytes(weights))
    save_settings(racc.config, folder, hyper=hyper, base=base, tokenizers=tokenizers)


def save_settings(
    config: CompressorConfig,
    folder: Path,
    *,
    hyper: HyperModel,
    base: Any,
    tokenizers: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write the architecture and the fingerprints of the two models, without the weights."""
    settings = {
        "version": VERSION,
        "compressor": asdict(config),
        "layer": hyper.layer,
        "hyper": fingerprint(hyper.model),
        "base": fingerprint(base),
        "tokenizers": dict(tokenizers),
    }
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    replace_file(folder / SETTINGS, text.encode())


def load(folder: str | Path) -> SavedCompressor:
    """Load a compressor that `save` wrote. Raises `LoadError` if that is not possible."""
    path = Path(folder).expanduser()
    try:
        settings = json.loads((path / SETTINGS).read_text())
        if settings["version"] != VERSION:
            raise ValueError(f"format version must be {VERSION}, got {settings['version']}")
        layer = _integer(settings["layer"], "layer")
        hyper, base = settings["hyper"], settings["base"]
        if not all(map(math.isfinite, (*_parsed(hyper)[1], *_parsed(base)[1]))):
            raise ValueError("the fingerprints of its models are malformed")
        weights = load_file(path / WEIGHTS)
        tokenizers = {name: str(one) for name, one in settings["tokenizers"].items()}
        geometry = settings["compressor"]["geometry"].items()
        sizes = Geometry(**{name: _integer(value, name) for name, value in geometry})
        config = CompressorConfig(**{**settings["compressor"], "geometry": sizes})
        racc = _built(config, weights)
    except Exception as error:  # JSON, safetensors and torch raise many types
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise LoadError(
            f"{path} holds no readable compressor: {reason}",
            hint="name a folder that `bottega compress train` wrote, or train again",
        ) from error
    return SavedCompressor(racc, digest(racc, layer), hyper, base, layer, tokenizers)


def _built(config: CompressorConfig, weights: Mapping[str, Tensor]) -> RaccModel:
    """Build the model on the meta device: a config that does not match allocates no memory."""
    if wrong := _unusable(weights):
        raise ValueError(f"{wrong} has values that are not finite, or no spread")
    with torch.device("meta"):
        racc = RaccModel(config)
    racc.load_state_dict({name: one.float() for name, one in weights.items()}, assign=True)
    return racc.eval()


def _unusable(weights: Mapping[str, Tensor]) -> str:
    """Return the name of the first unusable tensor, or "". A spread of 0 marks a constant dimension
    in `Modulation`, but compressors divide by theirs."""
    for name, one in weights.items():
        divides = name in ("documents.spread", "queries.spread")
        if not bool(one.isfinite().all()) or (divides and bool((one <= 0).any())):
            return name
    return ""


def _integer(value: object, name: str) -> int:
    if type(value) is not int:
        raise ValueError(f"{name} must be an integer, got {value!r}")
    return value


def digest(racc: RaccModel, layer: int) -> str:
    """Return a digest of the weights and of their use (config and layer)."""
    used = json.dumps({"compressor": asdict(racc.config), "layer": layer}, sort_keys=True)
    sha256 = hashlib.sha256(used.encode())
    for name, weight in sorted(racc.state_dict().items()):
        sha256.update(name.encode())
        sha256.update(weight.contiguous().numpy().tobytes())
    return sha256.hexdigest()[:16]
