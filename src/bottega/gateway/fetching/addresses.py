"""Which addresses a client may make this machine connect to: those of the public internet."""

from __future__ import annotations

import ipaddress
from ipaddress import IPv4Address, IPv6Address

# The registries of special addresses. `is_global` alone has been wrong in several Python versions.
NOT_PUBLIC_V4 = [
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network; Linux takes 0.0.0.0 for loopback
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT, with Alibaba's metadata
        "127.0.0.0/8",
        "168.63.129.16/32",  # Azure's host, though its address looks public
        "169.254.0.0/16",  # link-local, with most clouds' metadata
        "172.16.0.0/12",
        "192.0.0.0/24",  # protocol assignments, with Oracle's metadata
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
]
# Everything outside is loopback, mapped, compatible, NAT64, local, link-local or multicast.
UNICAST_V6 = ipaddress.IPv6Network("2000::/3")
NOT_PUBLIC_V6 = [
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments: Teredo, ORCHID, benchmarks
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: an IPv4 address inside
        "2620:4f:8000::/48",
        "3fff::/20",  # documentation
    )
]


def is_public(address: str) -> bool:
    """Global unicast, and nothing that carries another address inside: whoever needs a tunnel or
    NAT64 to reach an image does not get it here. False for what is no address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, IPv4Address):
        special = any(parsed in network for network in NOT_PUBLIC_V4)
    else:
        special = _is_special_v6(parsed)
    return parsed.is_global and not special


def _is_special_v6(address: IPv6Address) -> bool:
    return (
        address.scope_id is not None
        or address not in UNICAST_V6
        or any(address in network for network in NOT_PUBLIC_V6)
    )
