"""Errors of a gateway that cannot listen."""

from __future__ import annotations

import socket

import pytest

from bottega.errors import SettingError
from bottega.gateway.config.gateway_settings import ServerSettings
from bottega.gateway.running.process import bind_socket


def test_a_port_in_use_is_reported_with_another_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingError, match=f"cannot listen on 127.0.0.1:{port}") as caught:
            bind_socket(ServerSettings(host="127.0.0.1", port=port))
    other = port + 20 if port + 20 <= 65535 else 8000
    assert caught.value.hint == f"use --port {other}, or --port 0 for a free one"
