"""Image URLs that an upstream fetches itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from bottega.errors import SettingError
from bottega.gateway.config.config_file import parse_config
from bottega.gateway.ports import TierCapabilities
from tests.builders import solid_image
from tests.gateway.harness import QUESTION, Harness, harness, raw
from tests.gateway.test_responses import raw as responses
from tests.gateway.upstreams import upstream
from tests.server import Server, ok

URL = "https://images.example/cat.png?size=1"


@contextmanager
def gateway(folder: Path, endpoint: Server, *tiers: str, **more: Any) -> Iterator[Harness]:
    capabilities = {name: TierCapabilities(image_urls=True) for name in tiers}
    endpoint.answers = [ok("a cat")]
    with harness(folder, master=upstream(endpoint), capabilities=capabilities, **more) as server:
        yield server


def with_url(url: str = URL, **more: Any) -> list[Any]:
    parts = [
        {"type": "image_url", "image_url": {"url": url, **more}},
        {"type": "text", "text": QUESTION},
    ]
    return [{"role": "user", "content": parts}]


def test_url_is_passed_on_and_nothing_is_kept(endpoint: Server, tmp_path: Path) -> None:
    with gateway(tmp_path, endpoint, "master") as server:
        messages = with_url(detail="low")
        for number in (1, 2):
            reply = raw(server, messages)
            assert reply.headers["x-bottega-passed"] == "image urls"
            assert reply.headers["x-bottega-route"] == "master"
            assert endpoint.bodies[-1]["messages"] == messages
            assert len(endpoint.bodies) == number  # not replayed
        mixed = with_url()
        data = {"type": "image_url", "image_url": {"url": solid_image(1).data_url}}
        mixed[0]["content"].append(data)
        raw(server, mixed)
        assert endpoint.bodies[-1]["messages"] == mixed
        assert server.examples() == []
        given = [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]
        responses(server, given)
        sent = endpoint.bodies[-1]["messages"][0]["content"][0]
        assert sent == {"type": "image_url", "image_url": {"url": URL}}


def test_only_tiers_with_the_setting_get_urls(endpoint: Server, tmp_path: Path) -> None:
    with gateway(tmp_path, endpoint, "master") as server:
        with pytest.raises(openai.BadRequestError, match="no image URLs"):
            raw(server, with_url(), "bottega/apprentice")
        raw(server, with_url(), "bottega:master-rate=0")
        assert server.wait(2).route == "master"
    with gateway(tmp_path, endpoint) as server:
        with pytest.raises(openai.BadRequestError) as refused:
            raw(server, with_url())
        assert refused.value.code == "image_url_not_fetched"


def test_gateway_fetches_if_it_can(endpoint: Server, tmp_path: Path) -> None:
    async def fetch(url: str) -> Any:
        return solid_image(7)

    with gateway(tmp_path, endpoint, "master", fetch=fetch) as server:
        reply = raw(server, with_url(), "bottega/master")
        assert "x-bottega-passed" not in reply.headers
        assert endpoint.bodies[-1]["messages"][0]["content"][0]["image_url"]["url"].startswith(
            "data:"
        )
        assert [example.query.images for example in server.examples()] == [(solid_image(7),)]


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example/cat.png",
        "https://user:secret@images.example/cat.png",
        "https:///cat.png",
        "https://images.example:99999/cat.png",
        "https://[::1/cat.png",
        "https://images.example/" + "x" * 9000,
    ],
)
def test_unsafe_urls_are_rejected(shared: Harness, url: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        raw(shared, with_url(url))
    assert refused.value.code == "invalid_image_url"
    assert refused.value.param == "messages[0].content[0].image_url.url"
    assert "secret" not in refused.value.message


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    capabilities = {"master": TierCapabilities(image_urls=True)}
    with harness(tmp_path_factory.mktemp("urls"), capabilities=capabilities) as server:
        yield server


def test_models_in_the_process_cannot_fetch() -> None:
    with pytest.raises(SettingError, match="image_urls"):
        parse_config('[tiers.small]\nmodel = "bundled"\nimage_urls = true')
    config = parse_config('[tiers.small]\nmodel = "openai:x"\nimage_urls = true')
    assert config.tiers[0].image_urls
