from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.gateway.request.image_fetcher import is_public, system_resolve


async def test_the_system_resolves_a_name_to_addresses() -> None:
    assert {*await system_resolve("127.0.0.1", 80)} == {"127.0.0.1"}


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "10.255.255.255",
        "100.64.0.1",
        "100.100.100.200",
        "127.0.0.1",
        "127.255.255.254",
        "168.63.129.16",
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.192",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.1.1",
        "198.18.0.1",
        "198.19.255.255",
        "198.51.100.1",
        "203.0.113.1",
        "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::7f00:1",  # IPv4-compatible
        "::ffff:127.0.0.1",
        "::ffff:a00:1",
        "::ffff:8.8.8.8",
        "::ffff:0:127.0.0.1",  # translated
        "64:ff9b::7f00:1",
        "64:ff9b::808:808",
        "64:ff9b:1::7f00:1",
        "100::1",
        "2001::1",  # Teredo
        "2001:0:4136:e378:8000:63bf:80ff:fffe",
        "2001:2::1",
        "2001:10::1",
        "2001:20::1",
        "2001:db8::1",
        "2002:7f00:1::",
        "2002:a00:1::1",
        "3fff::1",
        "5f00::1",
        "fc00::1",
        "fd00:ec2::254",
        "fd20:ce::254",
        "fe80::1",
        "fe80::1%eth0",
        "2606:4700::1%eth0",
        "fec0::1",
        "ff02::1",
        "",
        "localhost",
        "127.1",
        "2130706433",
        "0x7f000001",
        "8.8.8.8 ",
        "8.8.8.8/32",
        "[::1]",
        "\u0661.1.1.1",
    ],
)
def test_address_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    ["1.1.1.1", "8.8.8.8", "100.63.255.255", "100.128.0.1", "172.15.0.1", "172.32.0.1",
     "192.167.1.1", "223.255.255.255", "2606:4700:4700::1111", "2a00:1450:4001::1"],
)  # fmt: skip
def test_address_is_public(address: str) -> None:
    assert is_public(address)


@given(st.ip_addresses())
def test_addresses_that_python_calls_special_are_not_public(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    if is_public(str(address)):
        assert not (
            address.is_private
            or address.is_loopback
            or address.is_link_local
            or address.is_multicast
            or address.is_reserved
            or address.is_unspecified
        )


@given(st.ip_addresses(v=4))
def test_embedded_addresses_are_not_public(inner: ipaddress.IPv4Address) -> None:
    number = int(inner)
    for outer in (
        number,  # compatible
        0xFFFF << 32 | number,  # mapped
        0x64FF9B << 96 | number,  # NAT64
        0x2002 << 112 | number << 80 | 1,  # 6to4
        0x20010000 << 96 | number ^ 0xFFFFFFFF,  # Teredo
    ):
        assert not is_public(str(ipaddress.IPv6Address(outer)))
