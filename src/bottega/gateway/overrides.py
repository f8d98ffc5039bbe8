"""What a client may ask of the gateway itself: by headers, or behind the model's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bottega.gateway.refusals import Refusal

PREFIX = "x-bottega-"
MODEL = "bottega"
MOST_SHOTS = 64
WORDS = {"no-store": "store", "no-retrieve": "retrieve", "no-replay": "replay"}
HINT = "bottega:shots=2,master-rate=0.5,namespace=team,no-store,no-retrieve,no-replay"


@dataclass(frozen=True)
class Overrides:
    """`tier` is asked instead of what a router would choose. None leaves things as they are."""

    tier: str | None = None
    shots: int | None = None
    master_rate: float | None = None
    namespace: str | None = None
    store: bool = True
    retrieve: bool = True
    replay: bool = True


NONE = Overrides()


def read_overrides(model: str, headers: Mapping[str, str], tiers: Mapping[str, str]) -> Overrides:
    """`tiers` maps every model id that clients may use to the tier it names, "" for the router's
    choice. A header wins over the model's suffix. Raises `Refusal`."""
    name, _, suffix = model.partition(":") if model not in tiers else (model, "", "")
    if name not in tiers:
        raise Refusal(
            f"the model {model[:200]!r} does not exist",
            status=404,
            code="model_not_found",
            param="model",
            hint=f"use one of {', '.join(tiers)}",
        )
    found = replace(NONE, tier=tiers[name]) if tiers[name] else NONE
    for setting in filter(None, suffix.split(",")):
        word, _, value = setting.partition("=")
        found = _with(found, word.strip(), value.strip(), "model", tiers)
    for header, value in headers.items():
        word = header.removeprefix(PREFIX)
        if word == "cache":
            for part in filter(None, value.split(",")):
                found = _with(found, part.strip(), "", header, tiers)
        else:
            found = _with(found, word, value, header, tiers)
    return found


def _with(
    found: Overrides, word: str, value: str, param: str, tiers: Mapping[str, str]
) -> Overrides:
    try:
        match word:
            case "shots" if 0 <= (shots := int(value)) <= MOST_SHOTS:
                return replace(found, shots=shots)
            case "master-rate" if 0 <= (rate := float(value)) <= 1:
                return replace(found, master_rate=rate)
            case "namespace" if value:
                return replace(found, namespace=value)
            case "route" if tiers.get(f"{MODEL}/{value}"):
                return replace(found, tier=value)
            case "no-store":
                return replace(found, store=False)
            case "no-retrieve":
                return replace(found, retrieve=False)
            case "no-replay":
                return replace(found, replay=False)
    except ValueError:
        pass
    said = f"{word}={value}" if value else word
    raise Refusal(f"{said[:200]!r} is no override", code="invalid_override", param=param, hint=HINT)
