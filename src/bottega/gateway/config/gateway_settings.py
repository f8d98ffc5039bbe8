"""Settings of a gateway, one dataclass per section. examples/bottega.toml describes each one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from bottega._util.locations import StoreLocation
from bottega._util.postgres import is_postgres_url
from bottega._util.settings import FilePath, SettingPath, TextList
from bottega._util.valkey import is_valkey_url
from bottega.errors import SettingError
from bottega.gateway.config.routing_settings import (
    Cosine,
    ExperimentSettings,
    Fraction,
    Retrieve,
    RouterSettings,
    TierSettings,
    VariantSettings,
)
from bottega.knowledge.embedders.names import ALL_PARTS, BUNDLED, TEXT_ONLY, QueryPart, parts_read
from bottega.knowledge.milvus.database import is_milvus_url
from bottega.openai_api.transport import is_loopback
from bottega.recipes.cache_retrieval import BY_IMAGE, BY_QUESTION

# Narrower than the pattern that redacts logs: a model may be named `key-frames`.
SECRET = re.compile(
    r"\b(?:sk[-_]|gsk_|xai-|hf_|gh[pos]_|AIza|AKIA|eyJ)[A-Za-z0-9*_-]{12,}"
    r"|\b[Bb]earer\s+\S{8,}|://[^/@\s]+@"
)
Port = Annotated[int, Field(ge=0, le=65535)]


SECRET_HINT = (
    'store it in an environment variable and name that here: api_key_env = "MASTER_KEY";'
    " replace a key that was in a file with a new one"
)

URL_HINT = 'store the URL in an environment variable and name that here: {name}_env = "BOTTEGA_URL"'
URL_NAMES = ("database", "redis", "vectors")


# A URL with a user but without a password contains no secret.
SERVER_URL = re.compile(r"(?:postgres(?:ql)?|rediss?|valkeys?)://[^/@\s:]*@")


def reject_secrets(value: object, path: SettingPath) -> None:
    """Raise `SettingError` for a value that looks like a secret: configuration files are copied,
    shown and committed, so keys come from the environment."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "api_key":
                raise (path / name).error("must not be in a file", hint=SECRET_HINT)
            reject_secrets(inner, path / str(name))
    elif isinstance(value, list):
        for inner in value:
            reject_secrets(inner, path)
    elif isinstance(value, str) and SECRET.search(SERVER_URL.sub("", value)):
        name = path.name.rpartition(".")[2]
        hint = URL_HINT.format(name=name) if name in URL_NAMES else SECRET_HINT
        raise path.error("looks like a secret", hint=hint)


CACHE_FILE = "cache.db"
VIRTUAL = "bottega"  # the model name that clients use for all tiers
MB = 1 << 20


@dataclass(frozen=True)
class ServerSettings:
    """[gateway]: network addresses and the data folder. `allowed_origins` are the origins of web
    pages that may call the API from a browser."""

    host: str = "127.0.0.1"
    port: Port = 8000
    data: FilePath = Path("bottega-data")
    aliases: TextList = ()
    drain_seconds: NonNegativeFloat = 30.0
    max_concurrent: PositiveInt = 256
    allowed_hosts: TextList = ()
    allowed_origins: TextList = ()
    metrics_host: str = "127.0.0.1"
    metrics_port: Port | None = None
    finish_seconds: NonNegativeFloat = 60.0

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)


@dataclass(frozen=True)
class RouteSettings(RouterSettings):
    """[route]: choice of the tier. The first `cold_start` queries of a namespace go to the master.
    `fallback` selects the tiers that may answer for a tier that failed."""

    cold_start: NonNegativeInt = 0
    fallback: Literal["any", "up", "never"] = "any"


@dataclass(frozen=True)
class CacheSettings:
    """[cache]: the examples of each namespace, in `file` or in a PostgreSQL `database`. `vectors`
    is a Milvus server with the search index of a database. `database_env` and `vectors_env` name
    environment variables with the URLs. `retrieve` "nearest" searches by `embed` alone; the other
    names select a method of `CacheRetrieval`, with `embed` for images, `embed_text` for texts and a
    fixed number of `groups` of hashtags. No tier is shown examples less similar than
    `min_similarity`. `max_characters` is the maximum length of a stored example. `open_namespaces`
    is the maximum number of namespaces open at a time. With `reasoning`, all tiers are instructed
    to reason before they answer; clients get the answers alone."""

    file: FilePath | None = None
    database: str | None = None
    database_env: str | None = None
    vectors: str | None = None
    vectors_env: str | None = None
    embed: str = "dual"
    embed_text: str = "words"
    retrieve: Retrieve = "nearest"
    groups: PositiveInt | None = None
    capacity: PositiveInt | None = 100_000
    evict: Literal[
        "least-recent", "least-frequent", "least-saving", "random", "lru", "lfu", "fifo"
    ] = "least-recent"
    order: Literal["nearest-last", "nearest-first", "shuffled"] | None = None
    min_similarity: Cosine | None = None
    max_characters: PositiveInt = 32_000
    open_namespaces: PositiveInt = 64
    reasoning: bool = False

    @property
    def image_embed(self) -> str:
        """Embedder of images for all methods except nearest; the default, dual, includes words."""
        return BUNDLED if self.embed == "dual" else self.embed

    @property
    def reads(self) -> frozenset[QueryPart]:
        """Parts of a question that the search compares."""
        if self.retrieve in BY_QUESTION:
            return TEXT_ONLY
        if self.retrieve == "hybrid":
            return ALL_PARTS
        if self.retrieve == "nearest":
            return parts_read(self.embed)
        images = parts_read(self.image_embed)
        return images if self.retrieve in BY_IMAGE else images | TEXT_ONLY

    def location(self, environment: Mapping[str, str], data: Path) -> StoreLocation:
        """Return the location of the examples, by default a file in `data`. Raises
        `SettingError`."""
        url = _server_url(self.database, self.database_env, environment, "cache.database")
        return StoreLocation(url or self.file or data / CACHE_FILE)

    @property
    def database_setting(self) -> str | None:
        """Setting with the URL of the database, None without one."""
        return _setting("cache.database", self.database, self.database_env)

    def vectors_url(self, environment: Mapping[str, str]) -> str | None:
        """Return the URL of a Milvus server, None without one. Raises `SettingError`."""
        return _server_url(self.vectors, self.vectors_env, environment, "cache.vectors")


@dataclass(frozen=True)
class ReplaySettings:
    """[replay]: stored replies to repeated requests. `identity` selects whether images are equal if
    their bytes are, or if their pixels are."""

    seconds: NonNegativeFloat = 3600.0
    memory_mb: NonNegativeFloat = 256.0
    include_sampled: bool = False
    identity: Literal["bytes", "pixels"] = "bytes"


@dataclass(frozen=True)
class LimitSettings:
    """[limits]: limits of one request, and whether the gateway fetches images for it. `fields` are
    request fields that are forwarded in addition to the default ones."""

    body_mb: PositiveInt = 20
    messages: PositiveInt = 200
    text_characters: PositiveInt = 1_000_000
    images: NonNegativeInt = 16
    image_mb: PositiveInt = 20
    image_pixels: PositiveInt = 50_000_000
    request_pixels: PositiveInt = 50_000_000
    decoding_mb: PositiveInt = 256
    receiving_mb: PositiveInt = 512
    fetch_images: bool = False
    fetch_hosts: TextList = ()
    fetch_mb: PositiveInt = 20
    fetch_seconds: PositiveFloat = 10.0
    fields: TextList = ()


@dataclass(frozen=True)
class ShadowSettings:
    """[shadow]: comparison of a fraction `rate` of the apprentice's answers with the master's. With
    `gate`, demonstrations are shown only where these comparisons found a benefit; until there are
    enough of them, every answer is compared. The tier `judge` compares answers that no rule can
    compare, such as sentences; without it they count as undecided."""

    rate: Fraction = 0.0
    gate: bool = False
    judge: str | None = None


@dataclass(frozen=True)
class KeySettings:
    """[keys]: limits of keys that were created without their own. `required` None means required
    unless the host is loopback; `max_concurrent` None means half of gateway.max_concurrent."""

    required: bool | None = None
    max_concurrent: PositiveInt | None = None
    tiers: TextList = ()
    max_namespaces: NonNegativeInt = 16


@dataclass(frozen=True)
class TraceSettings:
    """[traces]: questions and answers of requests, kept for the console and `bottega log`: none,
    their texts, or with the images of the questions, of which the newest `images_mb` are kept."""

    store: Literal["none", "texts", "images"] = "none"
    keep_days: PositiveFloat = 7.0
    images_mb: PositiveInt = 2000


@dataclass(frozen=True)
class BatchSettings:
    """[batches]: files and batches. `concurrency` is the number of requests of all batches in
    progress. A file has at most `file_mb` and `max_requests` requests, all files of a key at most
    `storage_mb`. A key has at most `max_files` files and as many batches. A batch expires after
    `expire_hours`, a file after `keep_days`."""

    concurrency: NonNegativeInt = 4
    max_requests: PositiveInt = 50_000
    file_mb: PositiveInt = 200
    storage_mb: PositiveInt = 1000
    max_files: PositiveInt = 10_000
    expire_hours: PositiveFloat = 24.0
    keep_days: PositiveFloat = 30.0


@dataclass(frozen=True)
class TelemetrySettings:
    """[telemetry]: export of spans and metrics by OpenTelemetry, whose environment variables
    (OTEL_EXPORTER_OTLP_ENDPOINT and others) name the collector. With `capture_content` the spans
    contain the texts of prompts and answers."""

    enabled: bool = False
    capture_content: bool = False


@dataclass(frozen=True)
class ConsoleSettings:
    """[console]: pages at /ui, which need the extra [ui]. `runs` is a folder with evaluation
    runs."""

    enabled: bool = True
    runs: FilePath | None = None


@dataclass(frozen=True)
class FeedbackSettings:
    """[feedback]: with `corrections`, keys that may store can correct answers in their namespaces,
    which have at most `max_corrections` each."""

    corrections: bool = True
    max_corrections: PositiveInt = 1000


@dataclass(frozen=True)
class ResponseSettings:
    """[responses]: responses stored for `previous_response_id`, with their inputs and images. The
    oldest ones of a key are deleted above `max_per_key` and `mb_per_key`, all after `keep_days`."""

    store: bool = False
    max_per_key: PositiveInt = 1000
    mb_per_key: PositiveInt = 100
    keep_days: PositiveFloat = 30.0


@dataclass(frozen=True)
class StateSettings:
    """[state]: servers that several gateways share, as URLs or as names of environment variables
    with URLs, which may contain passwords. By default, state is in this process and in files of
    gateway.data."""

    database: str | None = None
    database_env: str | None = None
    redis: str | None = None
    redis_env: str | None = None

    @property
    def is_shared(self) -> bool:
        return self.database is not None or self.database_env is not None

    @property
    def database_setting(self) -> str | None:
        """Setting with the URL of the database, None without one."""
        return _setting("state.database", self.database, self.database_env)

    def database_url(self, environment: Mapping[str, str]) -> str | None:
        """Return the URL of the PostgreSQL database, None without one. Raises `SettingError`."""
        return _server_url(self.database, self.database_env, environment, "state.database")

    def redis_url(self, environment: Mapping[str, str]) -> str | None:
        """Return the URL of the Redis or Valkey server, None without one. Raises
        `SettingError`."""
        return _server_url(self.redis, self.redis_env, environment, "state.redis")


def _server_url(
    url: str | None, variable: str | None, environment: Mapping[str, str], name: str
) -> str | None:
    if url is not None or variable is None:
        return url
    found = environment.get(variable, "")
    if not is_server_url(name, found):
        raise SettingError(
            f"the environment variable {variable} must be a URL for {name}",
            hint=f"export {variable}={sample_url(name)}",
        )
    return found


def _setting(name: str, url: str | None, variable: str | None) -> str | None:
    if variable is not None:
        return f"{name}_env, the environment variable {variable}"
    return None if url is None else name


def sample_url(name: str) -> str:
    """Return an example of a URL for the setting with this name."""
    if name.endswith("redis"):
        return "redis://cache.example:6379/0"
    if name.endswith("vectors"):
        return "milvus://milvus.example:19530/default"
    return "postgresql://bottega@db.example:5432/bottega"


def is_server_url(name: str, text: str) -> bool:
    if name.endswith("vectors"):
        return is_milvus_url(text)
    return is_valkey_url(text) if name.endswith("redis") else is_postgres_url(text)


@dataclass(frozen=True)
class Config:
    """All settings of a gateway. `tiers` are ordered from cheapest to most expensive."""

    file: str
    tiers: tuple[TierSettings, ...]
    gateway: ServerSettings = ServerSettings()
    route: RouteSettings = RouteSettings()
    cache: CacheSettings = CacheSettings()
    replay: ReplaySettings = ReplaySettings()
    limits: LimitSettings = LimitSettings()
    shadow: ShadowSettings = ShadowSettings()
    keys: KeySettings = KeySettings()
    state: StateSettings = StateSettings()
    traces: TraceSettings = TraceSettings()
    batches: BatchSettings = BatchSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    console: ConsoleSettings = ConsoleSettings()
    feedback: FeedbackSettings = FeedbackSettings()
    responses: ResponseSettings = ResponseSettings()
    experiment: ExperimentSettings = field(default_factory=ExperimentSettings)

    @property
    def master(self) -> TierSettings:
        return self.tiers[-1]

    @property
    def stored_tiers(self) -> tuple[str, ...]:
        """Return the tiers whose answers are stored: those with `store_answers = true`, else the
        master unless it has `store_answers = false`."""
        chosen = any(tier.store_answers for tier in self.tiers)
        default = "" if chosen or self.master.store_answers is False else self.master.name
        return tuple(tier.name for tier in self.tiers if tier.store_answers or tier.name == default)

    def shots(self, tier: TierSettings) -> int:
        """Return the number of demonstrations for a tier."""
        default = 0 if tier.name in self.stored_tiers else 1
        return default if tier.shots is None else tier.shots

    def of_variant(self, variant: VariantSettings) -> Config:
        """Return the configuration with the cache and route settings of a variant."""
        cache = {} if variant.cache is None else vars(variant.cache)
        route = {} if variant.route is None else vars(variant.route)
        return replace(self, cache=replace(self.cache, **cache), route=replace(self.route, **route))

    @property
    def keys_required(self) -> bool:
        """Return whether requests need a key even if none exists. With shared state they do: a key
        that is added later would otherwise be required only by the gateways that start after it."""
        if self.keys.required is None:
            return self.state.is_shared or not self.gateway.is_loopback
        return self.keys.required

    def needs_keys(self, has_keys: bool) -> bool:
        """Return whether requests need a key. If keys exist, they are required even on loopback,
        where a proxy may serve the public, unless keys.required is false."""
        return self.keys_required or (self.keys.required is None and has_keys)

    @property
    def aliases(self) -> frozenset[str]:
        """Return the model names that mean `bottega`."""
        return frozenset([*self.gateway.aliases, *(tier.upstream_name for tier in self.tiers)])

    def override(self, *, host: str | None, port: int | None, data: Path | None) -> Config:
        """Return a copy with the values of the command line. Raises `SettingError`."""
        values: dict[str, Any] = {"host": host, "port": port, "data": data}
        given = {name: value for name, value in values.items() if value is not None}
        changed = replace(self, gateway=replace(self.gateway, **given))
        changed.check_public()
        return changed

    def check_public(self) -> None:
        """Raise `SettingError` for a public address without keys: other clients' requests would be
        paid for."""
        if not self.gateway.is_loopback and not self.keys_required:
            raise (SettingPath(self.file) / "keys" / "required").error(
                f"must not be false while other machines can reach {self.gateway.host}",
                hint='remove it and run bottega keys add, or set host = "127.0.0.1"',
            )
