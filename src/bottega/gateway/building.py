"""From a configuration to a gateway that answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from typing import cast

from starlette.routing import BaseRoute

from bottega.errors import SettingError
from bottega.gateway.accounts import Accounts
from bottega.gateway.answering import Answering
from bottega.gateway.cache_file import CacheFile
from bottega.gateway.database import FILE
from bottega.gateway.fetching import Fetcher
from bottega.gateway.house import House, Spaces
from bottega.gateway.ledger import Ledger
from bottega.gateway.limiter import Limiter
from bottega.gateway.limits import Limits
from bottega.gateway.metrics import Metrics
from bottega.gateway.namespaces import Namespaces
from bottega.gateway.pictures import Fetch
from bottega.gateway.repeat_keys import Identity
from bottega.gateway.repeats import Bodies, Flights, Repeats
from bottega.gateway.serving import Gateway, Replaying
from bottega.gateway.settings import MB, VIRTUAL, ClientLimits, Config
from bottega.gateway.settling import Settling
from bottega.gateway.tiers import Staff, hire
from bottega.generation.recent import Recent
from bottega.image import Image

KEEP_ENCODED = 64 * MB


def build(
    config: Config,
    environment: Mapping[str, str] = os.environ,
    *,
    staff: Staff | None = None,
    spaces: Spaces | None = None,
    more: Sequence[BaseRoute] = (),
) -> House:
    """Opens the ledger and the accounts; models and caches are loaded when it runs. Raises
    `SettingError` and `StoreError`. `staff` and `spaces` are those of a pipeline that somebody else
    made."""
    staff = staff or hire(config, environment)
    metrics = Metrics([one.name for one in staff.served])
    for name, breaker in staff.breakers.items():
        metrics.breaker(name, breaker)
    staff = staff.timed(metrics.upstream)
    if spaces is None:
        file = CacheFile(config, staff, metrics)
        spaces = Namespaces(file.open, config.cache.open_namespaces)
    with ExitStack() as opened:
        config.gateway.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        accounts = Accounts.open(config.gateway.data / FILE)
        opened.callback(accounts.close)
        protected = check_keys(config, accounts)
        ledger = Ledger.open(config.gateway.data / FILE)
        opened.callback(ledger.close)
        ledger.set_master(config.master.name)
        limiter = Limiter(ledger)
        gateway = Gateway(
            Answering(staff.served, _data_urls()),
            spaces,
            Settling(staff.prices),
            models(config),
            limits=_limits(config.limits),
            authenticate=accounts.authenticate if protected else None,
            limiter=limiter,
            replaying=_replaying(config),
            fetch=_fetch(config.limits),
        )
        opened.pop_all()
    return House(config, staff, spaces, metrics, accounts, ledger, gateway, limiter, more)


def check_keys(config: Config, accounts: Accounts) -> bool:
    """Whether requests need a key. Who has made keys means them, even on loopback: a proxy may
    stand in front."""
    alive = any(account.revoked is None for account in accounts.list())
    required = config.keys_required or (config.keys.required is None and alive)
    if required and not alive:
        where = config.gateway.data
        raise SettingError(
            f"requests to {config.gateway.host} need a key, and there are none in {where}",
            hint=f'bottega keys add NAME --data {where}, or host = "127.0.0.1" without keys',
        )
    return required


def models(config: Config) -> dict[str, str]:
    """What clients may ask for: by default the router chooses."""
    names = [VIRTUAL, *sorted(config.aliases)]
    return dict.fromkeys(names, "") | {f"{VIRTUAL}/{t.name}": t.name for t in config.tiers}


def _replaying(config: Config) -> Replaying | None:
    """Most of the memory holds bodies: replies are short, images are not."""
    replay, memory = config.replay, int(config.replay.memory_mb * MB)
    if not (replay.seconds and memory):
        return None
    return Replaying(
        Repeats(memory // 4, replay.seconds),
        Bodies(memory - memory // 4),
        Flights(),
        cast(Identity, replay.identity),
        replay.sampled,
    )


def _limits(given: ClientLimits) -> Limits:
    known = {one.name for one in fields(Limits)}
    return Limits(**{name: value for name, value in vars(given).items() if name in known})


def _fetch(given: ClientLimits) -> Fetch | None:
    if not given.fetch_images:
        return None
    fetcher = Fetcher(
        enabled=True,
        hosts=given.fetch_hosts or None,
        max_bytes=given.fetch_mb * MB,
        seconds=given.fetch_seconds,
    )
    return fetcher.fetch


def _data_urls() -> Callable[[Image], str]:
    """The same few examples are shown again and again."""
    encoded: Recent[str] = Recent(KEEP_ENCODED, size=len)

    def data_url(image: Image) -> str:
        url = encoded.get(image.sha256)
        if url is None:
            encoded.put(image.sha256, url := image.data_url)
        return url

    return data_url
