"""Options of a request: namespace, tier, number of demonstrations, switches; and experiments, which
split requests between two sets of options."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from bottega.gateway.accounting.ledger_schema import Account
from bottega.gateway.errors import unknown_model
from bottega.openai_api.errors import ApiError
from bottega.openai_api.request import ChatRequest

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
Unit = Literal["question", "user", "account", "namespace"]


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


NO_OVERRIDES = Overrides()


@dataclass(frozen=True)
class Experiment:
    """Split of requests between the variants a and b, each with its options. All requests of one
    `unit` get the same variant; `share` is the fraction of units that get b. `settings` identify
    the settings of a and b that are not options."""

    name: str
    unit: Unit
    share: float
    a: Overrides
    b: Overrides
    settings: tuple[str, str] = ("", "")

    def assign(
        self, overrides: Overrides, account: Account, namespace: str, request: ChatRequest
    ) -> tuple[str, Overrides]:
        """Return the variant's name and the options of the request. A request that sets
        an option of variants itself belongs to no variant."""
        if replace(overrides, namespace=None, store=True, replay=True) != NO_OVERRIDES:
            return "", overrides
        digest = hashlib.sha256(f"{self.name}\0{self.unit}\0".encode())
        for part in self._unit_of(account, namespace, request):
            digest.update(b"%d:" % len(part) + part)
        is_b = int.from_bytes(digest.digest()[:8], "big") < self.share * 2**64
        chosen = self.b if is_b else self.a
        kept = {name: getattr(overrides, name) for name in ("namespace", "store", "replay")}
        return f"{self.name}:{'b' if is_b else 'a'}", replace(chosen, **kept)

    def body_scope(self, account: Account) -> tuple[str, ...]:
        """Return the key parts, besides body and namespace, on which the variant depends."""
        by_account = self.unit in ("account", "user")
        return f"share={self.share}", *([f"account={account.id}"] if by_account else ())

    def reply_scope(self, variant: str) -> tuple[str, ...]:
        """Return the key parts that separate the replies of this variant from others."""
        return (variant, self.settings[variant.endswith(":b")]) if variant else ()

    def _unit_of(self, account: Account, namespace: str, request: ChatRequest) -> list[bytes]:
        match self.unit:
            case "namespace":
                parts = [namespace]
            case "account":
                parts = [account.id]
            case "user":  # names of users are the client's own
                parts = [account.id, str(request.body.get("user") or "")]
            case "question":
                parts = [request.question, *(image.url for image in request.images)]
        return [part.encode(errors="replace") for part in parts]
