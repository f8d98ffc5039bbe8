"""Connections that `bottega serve --check` makes: the model list of each tier, and with `--probe`
one text and one image."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

from PIL import Image as Pillow

from bottega._util.postgres import display_url
from bottega._util.valkey import display_valkey_url
from bottega.cli.output import print_table
from bottega.errors import BottegaError, EndpointTimeoutError, UnreachableError
from bottega.gateway.config.settings import Config
from bottega.gateway.config.tiers import TierSettings
from bottega.gateway.errors import MisconfiguredError
from bottega.gateway.ports import ServedTier
from bottega.gateway.running.tiers import TierSet, key_variable
from bottega.gateway.upstreams import HttpUpstream
from bottega.image import Image
from bottega.openai_api.request import Body
from bottega.openai_api.transport import PLAIN_HINT

PROBES = {"text": "Reply with the word OK.", "image": "Which colour is this image? One word."}
PROBE_TOKENS = 16
PROBE_SIDE = 64  # some models reject images of fewer than 28 pixels a side
MOST_NAMED = 5  # models that an error names


@dataclass
class TierCheck:
    """Check of one tier: what was `found`, and the `faults`."""

    config: Config
    tier: TierSettings
    served: ServedTier
    found: list[str] = field(default_factory=list)
    faults: list[BottegaError] = field(default_factory=list)

    @property
    def row(self) -> Sequence[str]:
        upstream, judges = self.served.upstream, self.tier.name == self.config.shadow.judge
        endpoint = upstream.base_url if isinstance(upstream, HttpUpstream) else "this process"
        found = "; ".join(self.found) or "loads at the start"
        return self.tier.name + " (judge)" * judges, endpoint, found

    async def run(self, probe: bool) -> None:
        upstream = self.served.upstream
        try:
            if isinstance(upstream, HttpUpstream):
                self._look_up(await upstream.models())
            if probe:
                await self._probe()
        except BottegaError as error:
            self._fail("refuses" if _status(error) else "does not answer", error)

    def _look_up(self, models: Sequence[str] | None) -> None:
        """Look for the model in the server's list."""
        model = self.tier.upstream_name
        if models is None:
            self.found.append("up, without a list of models")
        elif any(_means(listed, model) for listed in models):
            self.found.append(f"up, lists {model}")
        else:
            self.found.append(f"up, does not list {model}")
            close = get_close_matches(model, models, MOST_NAMED, 0.5)
            named = f"similar: {', '.join(close)}" if close else ", ".join(models[:MOST_NAMED])
            self._add_fault(
                "model",
                f"{model!r} is not among the {len(models)} models of the server ({named})",
                f'write model = "openai:{close[0] if close else "NAME"}", or start the server with'
                " this model; --probe finds out whether it answers anyway",
            )

    async def _probe(self) -> None:
        for kind in PROBES:
            if kind == "image" and 0 in (self.tier.images, self.config.limits.images):
                self.found.append("takes no images")
                continue
            try:
                await self.served.upstream.complete(_probe_body(kind))
            except BottegaError as error:
                if kind == "text":
                    raise
                self._fail("refuses the image", error)
            else:
                self.found.append(f"answers the {kind}")
                if kind == "text":
                    self.faults.clear()  # of a list without the model

    def _fail(self, what: str, error: BottegaError) -> None:
        status = _status(error)
        self.found.append(f"{what} ({status})" if status else what)
        setting, hint = "", error.hint
        if isinstance(error, UnreachableError | EndpointTimeoutError):
            setting = "base_url"
            hint = hint if hint == PLAIN_HINT else "start the server, or correct base_url"
        elif status in (401, 403):
            variable = key_variable(self.tier) or "NAME"
            setting, hint = "api_key_env", f"export {variable}=... with a key of this server"
        elif status == 404:
            setting = "model"
        elif what == "refuses the image":
            setting, hint = "images", "write images = 0, or serve a model that reads images"
        self._add_fault(setting, str(error), hint)

    def _add_fault(self, setting: str, problem: str, hint: str) -> None:
        name = ".".join(filter(None, ("tiers", self.tier.name, setting)))
        self.faults.append(BottegaError(f"{self.config.file}: {name}: {problem}", hint=hint))


def check_connections(
    config: Config, tier_set: TierSet, environment: Mapping[str, str], *, probe: bool
) -> list[BottegaError]:
    """Print what was found at each tier, and return the faults. Blocks."""
    pairs = zip(config.tiers, tier_set.served, strict=True)
    checks = [TierCheck(config, tier, served) for tier, served in pairs]

    async def run() -> None:
        try:
            await asyncio.gather(*(one.run(probe) for one in checks))
        finally:
            await tier_set.aclose()

    asyncio.run(run())
    rows = [*(one.row for one in checks), *_servers(config, environment)]
    print_table(("tier", "endpoint", "found"), rows)
    return [fault for one in checks for fault in one.faults]


def _servers(config: Config, environment: Mapping[str, str]) -> Iterator[Sequence[str]]:
    """Yield the servers of the shared state, to which `print_config` has connected."""
    if (database := config.state.database_url(environment)) is not None:
        yield "(database)", display_url(database), "up"
    if (redis := config.state.redis_url(environment)) is not None:
        yield "(redis)", display_valkey_url(redis), "up"


def _status(error: BottegaError) -> int | None:
    source = error.__cause__ if isinstance(error, MisconfiguredError) else error
    status: int | None = getattr(source, "status", None)
    return status


def _means(listed: str, model: str) -> bool:
    """Return whether an id of a server's list means the model: Ollama adds the tag of the newest,
    Gemini a folder, and LiteLLM lists patterns."""
    if listed in (model, f"{model}:latest", f"models/{model}"):
        return True
    return "*" in listed and fnmatchcase(model, listed)


def _probe_body(kind: str) -> Body:
    parts: list[object] = [{"type": "text", "text": PROBES[kind]}]
    if kind == "image":
        pixels = Pillow.new("RGB", (PROBE_SIDE, PROBE_SIDE), "red")
        url = Image.from_pillow(pixels).data_url
        parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": PROBE_TOKENS}
