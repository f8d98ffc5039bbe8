"""Options of a request: namespace, tier, number of demonstrations, switches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bottega.gateway.errors import unknown_model
from bottega.openai_api.errors import ApiError

PREFIX = "x-bottega-"
MODEL = "bottega"
MAX_SHOTS = 64
MAX_MODEL = 1000
SWITCHES = ("no-store", "no-retrieve", "no-replay")
FORMS = {
    "shots": f"a whole number from 0 to {MAX_SHOTS}",
    "master-rate": "a number from 0 to 1",
    "namespace": "a name",
}
EXAMPLE = "bottega:shots=2,no-store"


@dataclass(frozen=True)
class Overrides:
    """Options of one request; None and True keep the configured behaviour. `tier` replaces the
    router's choice."""

    tier: str | None = None
    shots: int | None = None
    master_rate: float | None = None
    namespace: str | None = None
    store: bool = True
    retrieve: bool = True
    replay: bool = True


def read_overrides(model: str, headers: Mapping[str, str], tiers: Mapping[str, str]) -> Overrides:
    """Return the overrides. `tiers` maps every model id that clients may use to its tier, "" for
    the router's choice. A header takes precedence over the model's suffix. Raises `ApiError`."""
    # A model id such as qwen2.5vl:7b may contain the separator itself.
    name, _, suffix = model.partition(":") if model not in tiers else (model, "", "")
    if name not in tiers or len(model) > MAX_MODEL:
        raise unknown_model(model, tiers)
    settings = [(word, "model") for word in filter(None, suffix.split(","))]
    for header, value in headers.items():
        word = header.removeprefix(PREFIX)  # "cache" takes switches; others are name and value
        words = value.split(",") if word == "cache" else [f"{word}={value}"]
        settings += [(word, header) for word in filter(None, words)]
    found: dict[str, Any] = {"tier": tiers[name] or None}
    for setting, param in settings:
        found |= _read(setting.strip(), param, tiers)
    return Overrides(**found)


def _read(setting: str, param: str, tiers: Mapping[str, str]) -> dict[str, object]:
    word, _, value = setting.partition("=")
    try:
        match word:
            case "shots" if 0 <= (shots := int(value)) <= MAX_SHOTS:
                return {"shots": shots}
            case "master-rate" if 0 <= (rate := float(value)) <= 1:
                return {"master_rate": rate}
            case "namespace" if value:
                return {"namespace": value}
            case "route" if tiers.get(f"{MODEL}/{value}"):
                return {"tier": value}
            case _ if word in SWITCHES and not value:
                return {word.removeprefix("no-"): False}
    except ValueError:
        pass
    raise _error(setting[:200], param, tiers)


def _error(setting: str, param: str, tiers: Mapping[str, str]) -> ApiError:
    word, _, value = setting.partition("=")
    names = [tier for tier in tiers.values() if tier]
    forms = {**FORMS, **({"route": _joined(names)} if names else {})}
    message, hint = f"{word} is invalid, got {value!r}", f"use {forms.get(word)}"
    if word in SWITCHES:
        hint = f"write {word} without a value"
    elif word not in forms:
        message, hint = (
            f"{setting!r} is not an override",
            f"use {_joined([*forms, *SWITCHES])}: {EXAMPLE}",
        )
    return ApiError(message, code="invalid_override", param=param, hint=hint)


def _joined(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def read_variant(text: str, tiers: Mapping[str, str]) -> Overrides:
    """Return the options of a variant, such as "shots=4,no-retrieve". `tiers` as for
    `read_overrides`. Raises `ApiError`."""
    return read_overrides(f"{MODEL}:{text}" if text else MODEL, {}, tiers)


def has_only_variant_options(overrides: Overrides) -> bool:
    """Return whether only options are set that a variant may have."""
    return overrides.namespace is None and overrides.store and overrides.replay
