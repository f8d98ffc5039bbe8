"""Gateway that `build` creates from a configuration, on loopback."""

from __future__ import annotations

import json
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bottega.gateway.config.config_file import parse_config
from bottega.gateway.config.gateway_settings import Config
from bottega.gateway.running.server import GatewayServer
from tests.gateway.harness import running

ENVIRONMENT = {"LARGE_KEY": "sk-of-the-large-one", "OPENAI_API_KEY": "sk-of-openai"}


def gateway_config(folder: Path, url: str, more: str = "", *, embed: str = "words") -> Config:
    text = f"""
        [gateway]
        data = "{folder}"
        aliases = ["gpt-4o"]
        [tiers.small]
        model = "openai:qwen"
        base_url = "{url}"
        price = [1.0, 1.0]
        [tiers.large]
        model = "openai:huge"
        base_url = "{url}"
        api_key_env = "LARGE_KEY"
        price = [10.0, 10.0]
        [route]
        router = "fixed"
        cold_start = 1
        [cache]
        embed = "{embed}"
    """
    return parse_config(textwrap.dedent(text) + more)


@contextmanager
def run_gateway(
    gateway_server: GatewayServer, *, ready: bool = True, port: int = 0
) -> Iterator[str]:
    with running(gateway_server.app, port) as url:
        end = time.monotonic() + 90  # a busy machine loads torch for half a minute
        while ready and not gateway_server.is_ready:
            assert time.monotonic() < end
            time.sleep(0.01)
        yield url


def ask(
    url: str, text: str, *, key: str = "sk-any", **more: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    body = {"model": "bottega", "messages": [{"role": "user", "content": text}], **more}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as reply:
        return json.load(reply), {k.lower(): v for k, v in reply.headers.items()}
