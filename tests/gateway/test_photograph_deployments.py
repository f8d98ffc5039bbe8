"""The configurations of deploy/, the chart and examples/compose.toml, served with photographs."""

from __future__ import annotations

import io
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web
from PIL import Image as Pillow

from bottega._util.drawings import is_photograph
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import FILE
from bottega.gateway.accounting.savings import savings
from bottega.gateway.config.config_file import load_config
from bottega.gateway.config.gateway_settings import Config, StateSettings
from bottega.gateway.running.build import build
from bottega.image import Image
from bottega.knowledge.embedders.names import open_embedder
from bottega.naming import has_photos
from tests.gateway.gateways import ask, run_gateway
from tests.gateway.helm_charts import render
from tests.gateway.test_deploy import CHART, DEPLOY, chart_config
from tests.paths import ROOT
from tests.server import Server, ok

KINDS, RIGHT, SEED, REQUESTS = 8, 0.6, 5, 200
CONFIGS: Mapping[str, Callable[[], Config]] = {
    "chart": lambda: chart_config(render(CHART, "try")),
    "deploy": lambda: load_config(DEPLOY / "bottega.toml"),
    "compose": lambda: load_config(ROOT / "examples/compose.toml"),
}


def photograph(kind: int, number: int) -> Image:
    """Return a seeded JPEG image with the colours and shapes of its kind."""
    shapes, noise = np.random.default_rng(kind), np.random.default_rng((kind, number))
    coarse = shapes.uniform(0, 255, (6, 6, 3)) + noise.normal(0, 12, (6, 6, 3))
    small = Pillow.fromarray(coarse.clip(0, 255).astype(np.uint8))
    pixels = np.asarray(small.resize((160, 160), Pillow.Resampling.BICUBIC), np.float64)
    pixels += noise.normal(0, 8, pixels.shape)
    file = io.BytesIO()
    Pillow.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return Image.from_bytes(file.getvalue())


@dataclass
class Models:
    """Models that know each photograph: the master is right, the apprentice in a known share."""

    truth: dict[str, str] = field(default_factory=dict)

    def says(self, model: str, url: str) -> str:
        is_right = random.Random(f"{SEED} {url}").random() < RIGHT
        is_master = model == "gpt-4.1"
        return self.truth[url] if is_master or is_right else f"not {self.truth[url]}"

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read() or b"{}")
        if not body:  # the list of models
            return await ok("")(request)
        *_, last = body["messages"]
        url = next(one["image_url"]["url"] for one in last["content"] if "image_url" in one)
        return await ok(self.says(body["model"], url))(request)


def served_at(config: Config, url: str, folder: Path) -> Config:
    """Return the configuration with mock models and files instead of servers."""
    return replace(
        config,
        tiers=tuple(replace(one, base_url=url) for one in config.tiers),
        gateway=replace(config.gateway, data=folder),
        cache=replace(config.cache, database_env=None),
        state=StateSettings(),
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not has_photos(), reason="needs the extra [photos]")
@pytest.mark.parametrize("name", CONFIGS)
def test_photographs_are_compared_and_the_apprentice_is_measured(
    endpoint: Server, tmp_path: Path, name: str
) -> None:
    models = Models()
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]] = models
    endpoint.answers = [answer]
    config = served_at(CONFIGS[name](), endpoint.url, tmp_path)
    open_embedder(config.cache.embed)  # imports torch, outside of the time-outs of a start
    server = build(config, {"MASTER_API_KEY": "sk-any"})
    rng, right = random.Random(SEED), list[bool]()
    with run_gateway(server) as url:
        for number in range(REQUESTS):
            kind = rng.randrange(KINDS)
            photo = photograph(kind, number)
            assert is_photograph(photo)
            models.truth[photo.data_url] = f"kind {kind}"
            reply, headers = send(url, photo)
            text = reply["choices"][0]["message"]["content"]
            if headers["x-bottega-route"] == "master":
                assert text == f"kind {kind}"
                continue
            right.append(text == f"kind {kind}")
            assert int(headers["x-bottega-demonstrations"]) > 0
            least = config.route.min_similarity
            assert least is not None and least <= float(headers["x-bottega-similarity"]) < 0.999
    assert len(right) > REQUESTS / 4
    with closing(Ledger(tmp_path / FILE)) as ledger:
        found = savings(ledger)
    assert found.agreement is not None and found.agreement.served.n > 0
    served = found.agreement.served
    assert served.low <= sum(right) / len(right) <= served.high


def send(url: str, photo: Image) -> tuple[dict[str, Any], dict[str, str]]:
    content = [
        {"type": "image_url", "image_url": {"url": photo.data_url}},
        {"type": "text", "text": "Which kind is this?"},
    ]
    return ask(url, "", messages=[{"role": "user", "content": content}])
