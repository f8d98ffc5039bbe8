"""Construction of a gateway from its configuration."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from tempfile import TemporaryDirectory

from starlette.routing import BaseRoute

from bottega.errors import SettingError, StoreError, store_errors
from bottega.gateway.accounting.access import Access, KeyDefaults, LocalLimiter
from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import FILE, Account
from bottega.gateway.apis.admin import admin_routes
from bottega.gateway.apis.feedback import FeedbackEndpoint
from bottega.gateway.config.config_file import tier_of_model
from bottega.gateway.config.gateway_settings import MB, Config, LimitSettings
from bottega.gateway.config.overrides import Experiment, read_variant
from bottega.gateway.request.cached_examples import Forget
from bottega.gateway.request.chat import Gateway, ResponseCache
from bottega.gateway.request.completion import Completer
from bottega.gateway.request.finalization import Finalizer
from bottega.gateway.request.image_fetcher import ImageFetcher
from bottega.gateway.request.reading import BudgetedRetriever, DecodeBudget, Fetch, Limits
from bottega.gateway.request.request_traces import RequestTraces
from bottega.gateway.request.response_store import ResponseStore
from bottega.gateway.request.shadow_calls import ShadowRunner
from bottega.gateway.running.cache_views import check_cache
from bottega.gateway.running.caches import NamespaceOpener, NamespacePool
from bottega.gateway.running.server import GatewayServer, TenantPool
from bottega.gateway.running.tiers import PipelineTenantPool, TierSet, build_tiers, pipeline_tiers
from bottega.gateway.state.response_cache import BodyCache, ReplyCache, StoredReplies
from bottega.gateway.state.shared import SharedState, check_redis
from bottega.gateway.telemetry.logs import WarningLogger
from bottega.gateway.telemetry.metrics import Metrics
from bottega.knowledge import KnowledgeBase
from bottega.openai_api.request import data_url_cache
from bottega.pipeline import Pipeline
from bottega.recording import CompositeRecorder, TraceStore
from bottega.telemetry import open_exporter

log = logging.getLogger(__name__)
OpenBase = Callable[[str], KnowledgeBase]
# Called with the server, the function that opens the knowledge base of a namespace (None for a
# user's pipeline), and the function that forgets replies after a change to a namespace.
MoreRoutes = Callable[[GatewayServer, OpenBase | None, Forget], Sequence[BaseRoute]]
ConnectState = Callable[[ReplyCache], SharedState]
TRACES_FILE = "traces.db"
NEVER_MATCHES = re.compile(r"(?!)")


def no_routes(
    server: GatewayServer, open_base: OpenBase | None, forget: Forget
) -> Sequence[BaseRoute]:
    return ()


def forget_nothing(namespace: str) -> None:
    """Forget no replies: there is no cache."""


def build(
    config: Config,
    environment: Mapping[str, str] = os.environ,
    *,
    more_routes: MoreRoutes = no_routes,
) -> GatewayServer:
    """Build a gateway: open the ledger and the accounts. Models and caches are loaded when the
    server starts. `more_routes` returns the routes of the console. Raises `SettingError` and
    `StoreError`."""
    tier_set = build_tiers(config, environment)
    with _open_stores(config, environment) as (accounts, ledger, connect, opened):
        metrics = Metrics(one.name for one in tier_set.served)
        decoding = DecodeBudget(config.limits.decoding_mb * MB)
        tier_set = tier_set.prepared(metrics, decoding)
        traces = _open_traces(config, environment)
        if traces is not None:
            opened.callback(traces.close)
        file = NamespaceOpener(config, tier_set, metrics, ledger, decoding, traces)
        check_cache(config)
        tenants = NamespacePool(file.open, config.cache.open_namespaces)  # opens nothing yet
        gateway_server = _gateway_server(
            config, file.tier_set, tenants, metrics, accounts, ledger, decoding, connect
        )
        _set_traces(gateway_server, traces)
        opened.pop_all()  # from here on the server closes the stores
    gateway = gateway_server.gateway
    if gateway_server.state is not None:
        file.shared_gates = gateway_server.state.gates
    repeats = gateway.response_cache.replies
    # Shared repeats survive a restart of the gateway without the ledger's record of them.
    if gateway.response_cache.enabled and gateway_server.state is None:
        gateway.finalizer = replace(gateway.finalizer, remember=ledger.set_repeat)
        gateway.stored = StoredReplies(ledger.repeat)
    if config.shadow.rate:
        gateway.shadow = ShadowRunner(
            gateway.completer,
            gateway.finalizer,
            gateway_server.recorder,
            file.record_shadow_sample,
            repeats,
            config.shadow.judge,
        )

    def forget(namespace: str) -> None:
        tenants.call_soon(repeats.clear)  # the response cache belongs to the event loop
        if gateway_server.state is not None:
            gateway_server.state.invalidate_all()

    feedback = FeedbackEndpoint(
        gateway,
        ledger,
        config.feedback,
        tenants.base,
        find_query=_no_query if traces is None else traces.find_query,
        forget=forget,
        observe=metrics.feedback,
    )
    gateway_server.feedback = feedback
    routes = admin_routes(accounts, ledger, tenants.base, forget=forget)
    more = [*more_routes(gateway_server, tenants.base, forget), *feedback.routes()]
    gateway_server.build_app([*routes, *more])
    return gateway_server


def build_for_pipeline(
    pipeline: Pipeline, config: Config, *, more_routes: MoreRoutes = no_routes
) -> GatewayServer:
    """Build a gateway that serves a user's pipeline. Raises `SettingError` and `StoreError`."""
    with _open_stores(config, os.environ) as (accounts, ledger, connect, opened):
        metrics = Metrics(tier.name for tier in pipeline.tiers)
        decoding = DecodeBudget(config.limits.decoding_mb * MB)
        tier_set = pipeline_tiers(pipeline).prepared(metrics, decoding)
        if pipeline.retrieve is not None:
            pipeline = replace(pipeline, retrieve=BudgetedRetriever(pipeline.retrieve, decoding))
        traces = _open_traces(config, os.environ)
        if traces is not None:
            opened.callback(traces.close)
            record = CompositeRecorder(pipeline.record, traces.recorder(""))
            pipeline = replace(pipeline, record=record)
        gateway_server = _gateway_server(
            config,
            tier_set,
            PipelineTenantPool(pipeline),
            metrics,
            accounts,
            ledger,
            decoding,
            connect,
        )
        _set_traces(gateway_server, traces)
        gateway_server.gateway.background = NEVER_MATCHES  # a pipeline answers every text
        gateway_server.tracer = pipeline.tracer
        opened.pop_all()
    feedback = FeedbackEndpoint(
        gateway_server.gateway, ledger, config.feedback, observe=metrics.feedback
    )
    gateway_server.feedback = feedback
    more = more_routes(gateway_server, None, forget_nothing)
    gateway_server.build_app([*more, *feedback.routes()])
    return gateway_server


def _set_traces(gateway_server: GatewayServer, traces: RequestTraces | None) -> None:
    gateway_server.traces = traces
    if traces is not None:
        gateway = gateway_server.gateway
        gateway.finalizer = replace(gateway.finalizer, failures=traces.recorder)


@contextmanager
def _open_stores(
    config: Config, environment: Mapping[str, str]
) -> Iterator[tuple[Accounts, Ledger, ConnectState | None, ExitStack]]:
    """Open the accounts and the ledger, and check the servers of any shared state. On exit, close
    them unless the caller has called `pop_all`."""
    with ExitStack() as opened:
        check_data_folder(config)
        config.gateway.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        database = config.state.database_url(environment)
        redis = config.state.redis_url(environment)
        location = database or config.gateway.data / FILE
        with store_errors(config.state.database_setting):
            accounts = Accounts(location)
            opened.callback(accounts.close)
            ledger = Ledger(location, repeat_seconds=config.replay.seconds)
            opened.callback(ledger.close)
            ledger.set_master(config.master.name)
            ledger.set_hourly_prices({one.name: one.usd_per_hour for one in config.tiers})
        if redis is not None:
            check_redis(redis)
        connect = None
        if database is not None:
            connect = partial(SharedState, database, redis, ledger, config.replay.seconds)
        yield accounts, ledger, connect, opened


def _no_query(id: str) -> None:
    """Return no query: traces are not stored."""


def _open_traces(config: Config, environment: Mapping[str, str]) -> RequestTraces | None:
    """Open the store of request traces beside the ledger, None if they are not stored, or if it is
    damaged: the gateway answers without them."""
    if config.traces.store == "none":
        return None
    location = config.state.database_url(environment) or config.gateway.data / TRACES_FILE
    try:
        with store_errors(config.state.database_setting):
            store = TraceStore.open(location)
    except StoreError as error:
        log.error("traces are not stored: %s", error)
        return None
    return RequestTraces(
        store,
        images=config.traces.store == "images",
        keep_days=config.traces.keep_days,
        image_bytes=config.traces.images_mb * MB,
    )


def _gateway_server(
    config: Config,
    tier_set: TierSet,
    tenants: TenantPool,
    metrics: Metrics,
    accounts: Accounts,
    ledger: Ledger,
    decoding: DecodeBudget,
    connect: ConnectState | None,
) -> GatewayServer:
    protected = check_keys(config, accounts.list())
    response_cache = _response_cache(config)
    state = None if connect is None else connect(response_cache.replies)
    warn = WarningLogger(lambda problem: metrics.warned.labels(problem).inc())
    gateway = Gateway(
        Completer(
            tier_set.served,
            data_url_cache(),
            warn=warn,
            fallback=config.route.fallback,
            decoding=decoding,
            finish_seconds=config.gateway.finish_seconds,
        ),
        tenants,
        Finalizer(tier_set.prices, warn),
        models(config),
        limits=request_limits(config.limits),
        authenticate=accounts.authenticate if protected else None,
        access=Access(accounts.claim_namespace, key_defaults(config)),
        limiter=LocalLimiter(ledger) if state is None else state.limiter,
        response_cache=response_cache,
        fetch=build_fetch(config.limits),
        allowed_hosts=config.gateway.allowed_hosts,
        allowed_origins=config.gateway.allowed_origins,
        decoding=decoding,
        more_fields=frozenset(config.limits.fields),
        experiment=build_experiment(config),
        response_store=ResponseStore(ledger, config.responses) if config.responses.store else None,
    )
    server = GatewayServer(config, tier_set, tenants, metrics, accounts, ledger, gateway, state)
    if config.telemetry.enabled:
        exporter = open_exporter(capture_content=config.telemetry.capture_content)
        server.tracer, server.close_tracer = exporter.tracer, exporter.close
    if state is not None:
        gateway.commit = server.recorder.commit
        gateway.repeats = state.repeats
    return server


def check_data_folder(config: Config) -> None:
    """Raise `SettingError` if the data folder cannot be created or written. Creates nothing."""
    folder = config.gateway.data.absolute()
    try:
        existing = next(one for one in (folder, *folder.parents) if one.exists())
        if existing != folder or not config.state.is_shared:  # else nothing is written there
            with TemporaryDirectory(dir=existing):
                pass
    except OSError as error:
        raise SettingError(
            f"{config.file}: gateway.data {config.gateway.data} cannot be written:"
            f" {error.strerror}",
            hint="set gateway.data, BOTTEGA_DATA or --data to a folder that this user may write",
        ) from error


def check_keys(config: Config, made: Sequence[Account]) -> bool:
    """Return whether requests need a key. Raises `SettingError` if they do and there is none.

    Revoked and expired keys count: without valid keys the gateway must not be open to clients
    without one. A viewer's key sends no requests.
    """
    required = config.needs_keys(bool(made))
    now = time.time()
    if required and not any(account.is_valid(now) and not account.viewer for account in made):
        shared = config.state.is_shared
        where = "the database" if shared else config.gateway.data
        option = "" if shared else f" --data {where}"
        hint = f"run bottega keys add NAME{option}, or on loopback set [keys] required = false"
        if str(config.file) == "--demo":  # its data may be in a temporary folder
            hint = "run bottega keys add NAME --data FOLDER, then serve --demo --data FOLDER"
        raise SettingError(
            f"requests to {config.gateway.host} need a key, and there is no valid one in {where}",
            hint=hint,
        )
    return required


def key_defaults(config: Config) -> KeyDefaults:
    keys = config.keys
    half = max(1, config.gateway.max_concurrent // 2)
    return KeyDefaults(keys.max_concurrent or half, keys.tiers, keys.max_namespaces)


def models(config: Config) -> dict[str, str]:
    """Return the tier of each model name; "" means that the router chooses."""
    return tier_of_model(config.tiers, config.aliases)


def build_experiment(config: Config) -> Experiment | None:
    """Return the experiment of a checked configuration, None without one."""
    given, tiers = config.experiment, tier_of_model(config.tiers)
    if given.name is None:
        return None
    a, b = (read_variant(one.options, tiers) for one in (given.a, given.b))
    own = (repr((given.a.cache, given.a.route)), repr((given.b.cache, given.b.route)))
    return Experiment(given.name, given.unit, given.share, a, b, own)


def _response_cache(config: Config) -> ResponseCache:
    """Build the response cache. Three quarters of its memory hold request bodies, since images are
    longer than replies."""
    replay, memory = config.replay, int(config.replay.memory_mb * MB)
    return ResponseCache(
        ReplyCache(memory // 4, replay.seconds),
        BodyCache(memory - memory // 4),
        identity=replay.identity,
        sampled=replay.include_sampled,
        enabled=bool(replay.seconds and memory),
    )


def request_limits(given: LimitSettings) -> Limits:
    names = {one.name for one in fields(Limits)}
    return Limits(**{name: value for name, value in vars(given).items() if name in names})


def build_fetch(given: LimitSettings) -> Fetch | None:
    if not given.fetch_images:
        return None
    fetcher = ImageFetcher(
        hosts=given.fetch_hosts or None, max_bytes=given.fetch_mb * MB, seconds=given.fetch_seconds
    )
    return fetcher.fetch
