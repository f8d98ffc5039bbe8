"""Consistency of compose.yaml and the configuration that it mounts, without Docker."""

from typing import Any, cast
from urllib.parse import urlsplit

import pytest
import yaml  # type: ignore[import-untyped]

from bottega.gateway.config.config_file import load_config
from bottega.gateway.config.gateway_settings import Config
from tests.paths import ROOT


@pytest.fixture
def services() -> dict[str, Any]:
    return cast(
        dict[str, Any], yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))["services"]
    )


@pytest.fixture
def config(services: dict[str, Any]) -> Config:
    file, inside, _ = services["gateway"]["volumes"][0].split(":")
    assert inside in (ROOT / "Dockerfile").read_text("utf-8")
    return load_config(ROOT / file)


def test_apprentice_matches_the_compose_service(services: dict[str, Any], config: Config) -> None:
    apprentice = config.tiers[0]
    host = urlsplit(apprentice.base_url or "").hostname
    assert host is not None
    command = services[host]["command"]
    assert apprentice.upstream_name == command[0]
    assert f"--max-model-len={apprentice.context}" in command
    assert f'--limit-mm-per-prompt={{"image":{apprentice.images}}}' in command


def test_the_image_has_the_packages_of_its_configuration(
    services: dict[str, Any], config: Config
) -> None:
    """As it stands, the gateway compares photographs, and its console opens."""
    extras = services["gateway"]["build"]["args"]["EXTRAS"].split(",")
    assert config.cache.embed == "by-kind" and {"local", "photos", "ui"} <= {*extras}


def test_compose_requires_the_masters_key(services: dict[str, Any], config: Config) -> None:
    name = config.master.api_key_env
    assert name is not None
    assert services["gateway"]["environment"][name].startswith(f"${{{name}:?")


def test_compose_sets_shutdown_time_and_memory(services: dict[str, Any], config: Config) -> None:
    gateway = services["gateway"]
    assert float(gateway["stop_grace_period"].removesuffix("s")) > config.gateway.drain_seconds
    bodies = config.gateway.max_concurrent * config.limits.body_mb
    assert bodies * 2 < int(gateway["mem_limit"].removesuffix("g")) * 1024
    [folder] = gateway["tmpfs"]
    assert config.limits.receiving_mb < int(folder.partition("size=")[2].removesuffix("m"))
