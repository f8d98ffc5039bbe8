"""The settings of a gateway, one dataclass a section. Every one of them is described in
examples/bottega.toml."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from bottega.errors import SettingError
from bottega.naming import REMOTE

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Read = TypeVar("Read", bound="DataclassInstance")
Table = Mapping[str, object]

# Narrower than what errors are searched for: a model may well be called `key-frames`.
SECRET = re.compile(
    r"\b(?:sk[-_]|gsk_|xai-|hf_|gh[pos]_|AIza|AKIA|eyJ)[A-Za-z0-9*_-]{12,}"
    r"|\b[Bb]earer\s+\S{8,}|://[^/@\s]+@"
)
NAMES: dict[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}
EXAMPLES: dict[type, str] = {str: '"..."', int: "1", float: "0.5", bool: "true"}


@dataclass(frozen=True)
class Place:
    """Where something stands: `tiers.master.timeout` of a file."""

    file: str
    key: str = ""

    def __truediv__(self, name: str) -> Place:
        return Place(self.file, f"{self.key}.{name}" if self.key else name)

    def error(self, what: str, *, hint: str) -> SettingError:
        return SettingError(f"{self.file}: {self.key or 'the file'} {what}", hint=hint)


def within(
    default: Any, low: float = -math.inf, high: float = math.inf, *, above: float = -math.inf
) -> Any:
    """A number from `low` to `high`, and more than `above`."""
    return field(default=default, metadata={"low": low, "high": high, "above": above})


def one_of(default: Any, *words: str) -> Any:
    return field(default=default, metadata={"words": words})


def read(kind: type[Read], table: object, at: Place, **told: object) -> Read:
    """The dataclass `kind` from a table: fields that are not given keep their defaults. What is
    `told` the table cannot say."""
    given = as_table(table, at)
    hints = get_type_hints(kind)
    known = {one.name: one for one in dataclasses.fields(kind) if one.name not in told}
    check_known(given, known, at)
    values = dict(told)
    for name, value in given.items():
        values[name] = _converted(value, hints[name], at / name)
        _check_value(values[name], known[name].metadata, at / name)
    return kind(**values)


def as_table(value: object, at: Place) -> Table:
    if not isinstance(value, dict):
        last = at.key.rpartition(".")[2]
        raise at.error("is not a table", hint=f"write [{at.key}] and its settings below: {last}")
    return value


def check_known(given: Iterable[str], known: Iterable[str], at: Place) -> None:
    names = list(known)
    for name in given:
        if name not in names:
            raise (at / name).error("is not a setting", hint=meant(name, names))


def meant(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"


def refuse_secrets(value: object, at: Place) -> None:
    """Files are copied, shown and committed: keys come from the environment."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "api_key":
                raise (at / name).error("would hold a secret", hint=_instead(at))
            refuse_secrets(inner, at / str(name))
    elif isinstance(value, list):
        for inner in value:
            refuse_secrets(inner, at)
    elif isinstance(value, str) and SECRET.search(value):
        raise at.error("looks like a secret", hint=_instead(at))


def _instead(at: Place) -> str:
    return (
        'put it into an environment variable and write its name: api_key_env = "MASTER_KEY";'
        " what was in a file should be replaced by a new key"
    )


def _converted(value: object, kind: Any, at: Place) -> Any:
    origin = get_origin(kind)
    if origin in (Union, UnionType):  # TOML has no null: what is there is not None
        [kind] = [one for one in get_args(kind) if one is not NoneType]
        return _converted(value, kind, at)
    if origin is tuple:
        return _row(value, get_args(kind)[0], at)
    if origin is Mapping:
        return as_table(value, at)
    if origin is Literal:
        _check_value(_plain(value, str, at), {"words": get_args(kind)}, at)
        return value
    if kind is Path:
        return Path(_plain(value, str, at)).expanduser()
    return _plain(value, kind, at)


def _row(value: object, kind: Any, at: Place) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise at.error("is not a list", hint=f"write {at.key.rpartition('.')[2]} = [...]")
    return tuple(_converted(one, kind, at) for one in value)


def _plain(value: object, kind: type, at: Place) -> Any:
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError as error:
            raise at.error("is out of range", hint="use a smaller number") from error
    if type(value) is not kind:  # True is an int to isinstance
        raise at.error(
            f"is {NAMES.get(type(value), type(value).__name__)}, not {NAMES[kind]}",
            hint=f"write {at.key.rpartition('.')[2]} = {EXAMPLES[kind]}",
        )
    return value


def _check_value(value: Any, rule: Mapping[str, Any], at: Place) -> None:
    if words := rule.get("words"):
        for word in value if isinstance(value, tuple) else (value,):
            if word not in words:
                raise at.error(f"is not one of {', '.join(words)}", hint=meant(word, words))
    if "low" in rule:
        low, high, above = rule["low"], rule["high"], rule["above"]
        for number in value if isinstance(value, tuple) else (value,):
            if not (low <= number <= high and number > above and math.isfinite(number)):
                raise at.error("is out of range", hint=f"use {_range(low, high, above)}")


def _range(low: float, high: float, above: float) -> str:
    least = f"more than {above:g}" if above > -math.inf else f"{low:g} or more"
    return least if high == math.inf else f"{least}, at most {high:g}"


VIRTUAL = "bottega"  # the model that clients ask for, whoever answers
ROUTES = ("always", "coin", "budget", "coverage", "confidence")
MB = 1 << 20


@dataclass(frozen=True)
class ServerSettings:
    """[gateway]"""

    host: str = "127.0.0.1"
    port: int = within(8000, 0, 65535)
    data: Path = Path("bottega-data")
    aliases: tuple[str, ...] = ()
    drain_seconds: float = within(30.0, 0)
    max_concurrent: int = within(256, 1)
    allowed_hosts: tuple[str, ...] = ()
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = within(None, 0, 65535)
    finish_seconds: float = within(60.0, 0)

    @property
    def is_loopback(self) -> bool:
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True)
class TierSettings:
    """[tiers.NAME]. None stands for what suits the model, or its place among the tiers.
    `output_tokens` are reserved from a key's budget for a request without a token limit."""

    name: str
    model: str
    base_url: str | None = None
    api_key_env: str | None = None
    teaches: bool | None = None
    shots: int | None = within(None, 0)
    images: int | None = within(None, 0)
    tools: bool | None = None
    audio: bool = False
    context: int | None = within(None, 1)
    price: tuple[float, ...] | None = within(None, 0)
    output_tokens: int = within(4096, 1)
    timeout: float = within(120.0, above=0)
    retries: int = within(2, 0)
    concurrency: int = within(16, 1)
    extra_body: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_remote(self) -> bool:
        return self.model.startswith(REMOTE)

    @property
    def takes_tools(self) -> bool:
        return self.is_remote if self.tools is None else self.tools

    @property
    def upstream_name(self) -> str:
        """What the endpoint calls the model."""
        return self.model.removeprefix(REMOTE)


@dataclass(frozen=True)
class RouteSettings:
    """[route]. `cold_start`: so many first queries of a namespace all go to the master.
    `fallback`: who may answer for a tier that failed."""

    by: str | None = one_of(None, *ROUTES)
    tier: str | None = None
    master_rate: float | None = within(None, 0, 1)
    seed: int = within(0, 0)
    usd_per_1k: float | None = within(None, above=0)
    at_least: float | None = within(None, -1, 1)
    below: float | None = within(None, 0, 1)
    samples: int | None = within(None, 2, 16)
    cold_start: int = within(0, 0)
    fallback: str = one_of("any", "any", "up", "never")


@dataclass(frozen=True)
class CacheSettings:
    """[cache]. `at_least`: what is less similar is not shown, whoever answers. `longest`:
    characters of an answer that may be kept. `open_namespaces`: so many are held open at once."""

    file: Path | None = None
    embed: str = "dual"
    retrieve: str = one_of("nearest", "nearest", "bm25")
    capacity: int | None = within(100_000, 1)
    evict: str = one_of("least-recent", "least-recent", "least-frequent", "least-saving", "random")
    order: str = one_of("nearest-last", "nearest-last", "nearest-first", "shuffled")
    at_least: float | None = within(None, -1, 1)
    longest: int = within(32_000, 1)
    open_namespaces: int = within(64, 1)


@dataclass(frozen=True)
class ReplaySettings:
    """[replay]: exact repeats. `identity` says whether the same pixels in another file are one."""

    seconds: float = within(3600.0, 0)
    memory_mb: float = within(256.0, 0)
    sampled: bool = False
    identity: str = one_of("bytes", "bytes", "pixels")


@dataclass(frozen=True)
class LimitSettings:
    """[limits]: what one request may hold, and whether the gateway fetches images for it. `fields`
    are request fields that are forwarded in addition to the default ones."""

    body_mb: int = within(20, 1)
    messages: int = within(200, 1)
    text_characters: int = within(1_000_000, 1)
    images: int = within(16, 0)
    image_mb: int = within(20, 1)
    image_pixels: int = within(40_000_000, 1)
    request_pixels: int = within(50_000_000, 1)
    decoding_mb: int = within(256, 1)
    fetch_images: bool = False
    fetch_hosts: tuple[str, ...] = ()
    fetch_mb: int = within(20, 1)
    fetch_seconds: float = within(10.0, above=0)
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShadowSettings:
    """[shadow]: of the apprentice's answers so many are compared with the master's; `gate` shows
    demonstrations only where these comparisons found that they help, and has every answer compared
    until there are enough of them."""

    rate: float = within(0.0, 0, 1)
    gate: bool = False


@dataclass(frozen=True)
class KeySettings:
    """[keys]. `required` None means unless the host is loopback. The others apply to keys that were
    created without their own limit; `max_concurrent` None means half of gateway.max_concurrent."""

    required: bool | None = None
    max_concurrent: int | None = within(None, 1)
    tiers: tuple[str, ...] = ()
    max_namespaces: int = within(16, 0)


@dataclass(frozen=True)
class Config:
    """`tiers` stand cheapest first."""

    file: str
    tiers: tuple[TierSettings, ...]
    gateway: ServerSettings = ServerSettings()
    route: RouteSettings = RouteSettings()
    cache: CacheSettings = CacheSettings()
    replay: ReplaySettings = ReplaySettings()
    limits: LimitSettings = LimitSettings()
    shadow: ShadowSettings = ShadowSettings()
    keys: KeySettings = KeySettings()

    @property
    def master(self) -> TierSettings:
        return self.tiers[-1]

    @property
    def teachers(self) -> tuple[str, ...]:
        """Whose answers are kept: the last tier's, if none says that it teaches and that one does
        not say that it does not."""
        said = any(tier.teaches for tier in self.tiers)
        usual = "" if said or self.master.teaches is False else self.master.name
        return tuple(tier.name for tier in self.tiers if tier.teaches or tier.name == usual)

    def shots(self, tier: TierSettings) -> int:
        usual = 0 if tier.name in self.teachers else 1
        return usual if tier.shots is None else tier.shots

    @property
    def keys_required(self) -> bool:
        return not self.gateway.is_loopback if self.keys.required is None else self.keys.required

    def needs_keys(self, some_are_made: bool) -> bool:
        """Who has made keys means them, even on loopback: a proxy may stand in front."""
        return self.keys_required or (self.keys.required is None and some_are_made)

    @property
    def aliases(self) -> frozenset[str]:
        """Model ids that mean `bottega`."""
        return frozenset([*self.gateway.aliases, *(tier.upstream_name for tier in self.tiers)])

    def told(self, *, host: str | None, port: int | None, data: Path | None) -> Config:
        """With what a command line says otherwise."""
        said = self.gateway
        listening = replace(
            said,
            host=said.host if host is None else host,
            port=said.port if port is None else port,
            data=said.data if data is None else data,
        )
        changed = replace(self, gateway=listening)
        changed.check_public()
        return changed

    def check_public(self) -> None:
        """Nobody else's requests are paid for by accident."""
        if not self.gateway.is_loopback and not self.keys_required:
            raise (Place(self.file) / "keys" / "required").error(
                f"is false, and {self.gateway.host} can be reached by others",
                hint='leave it out (bottega keys add makes keys), or host = "127.0.0.1"',
            )
