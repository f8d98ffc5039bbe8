"""Image URLs never reach the internal network."""

from __future__ import annotations

import pytest

from tests.gateway.image_servers import INSIDE, OUTSIDE, PIXEL, World, redirects

FORMS = [
    "127.0.0.2",
    "127.2",
    "127.0.2",
    "2130706434",
    "0x7f000002",
    "0x7f.2",
    "0X7F.0.0.2",
    "017700000002",
    "0177.0.0.2",
    "0177.0.0.02",
    "127.0.0.2.",
    "127.0.0.2..",
    "00000127.0.0.2",
    "127.000.000.002",
    "0.0.0.0",
    "0",
    "[::1]",
    "[::]",
    "[0:0:0:0:0:0:0:1]",
    "[0000::0001]",
    "[::ffff:127.0.0.2]",
    "[::FFFF:7f00:2]",
    "[0:0:0:0:0:ffff:127.0.0.2]",
    "[::127.0.0.2]",
    "[::ffff:0:127.0.0.2]",
    "[64:ff9b::127.0.0.2]",
    "[2002:7f00:2::]",
    "[2001:0:4136:e378:8000:63bf:80ff:fffd]",
    "[::1%25lo]",
    "[fe80::1%25eth0]",
    "１２７.０.０.２",
    "①②⑦.⓪.⓪.②",
    "127。0。0。2",
    "%31%32%37.0.0.2",
    "127.0.0.%32",
    "%6c%6f%63%61%6c%68%6f%73%74",
    "good.example@127.0.0.2",
    "good.example:80@127.0.0.2",
    "good.example%00@127.0.0.2",
    "127.0.0.2%00.good.example",
    "127.0.0.2%0d%0a",
    "a@b@127.0.0.2",
    "good.example\\@127.0.0.2",
    "127.0.0.2\\@good.example",
    "good.example\t@127.0.0.2",
    "\t127.0.0.2",
    " 127.0.0.2",
    "localhost",
    "LOCALHOST",
    "localhost.",
    "ⓛⓞⓒⓐⓛⓗⓞⓢⓣ",
    "a.localhost",
    "localhost.localdomain",
    "ip6-localhost",
    "127.0.0.2.nip.io",
    "inner.example",
    "INNER.example",
    "inner.example.",
    "mixed.example",
    "metadata.google.internal",
    "169.254.169.254",
    "100.100.100.200",
    "[fd00:ec2::254]",
    "10.0.0.1",
    "192.168.0.1",
    "172.16.0.1",
    "255.255.255.255",
    "224.0.0.1",
    "unknown.example",
    "",
    "-",
    ".",
    "[",
    "[127.0.0.2]",
    "[v1.a]",
]
NAMES = {
    "localhost": [[INSIDE, "::1"]],
    "localhost.": [[INSIDE]],
    "a.localhost": [[INSIDE]],
    "localhost.localdomain": [[INSIDE]],
    "ip6-localhost": [["::1"]],
    "127.0.0.2.nip.io": [[INSIDE]],
    "inner.example.": [[INSIDE]],
    "mixed.example": [[OUTSIDE, INSIDE]],
    "metadata.google.internal": [["169.254.169.254"]],
    "a": [[INSIDE]],
    "good.example": [[INSIDE]],
    "v1.a": [[INSIDE]],
}


@pytest.mark.parametrize("form", FORMS)
async def test_no_notation_reaches_internal_addresses(world: World, form: str) -> None:
    world.names |= NAMES
    await world.rejected(f"http://{form}:{world.port}/cat.png")
    assert not world.requests


@pytest.mark.parametrize("form", FORMS)
async def test_no_notation_reaches_internal_addresses_after_a_redirect(
    world: World, form: str
) -> None:
    world.names |= NAMES
    world.answer = redirects(f"http://{form}:{world.port}/cat.png")
    await world.rejected(world.url())
    assert len(world.requests) == 1


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "file://127.0.0.2/etc/passwd",
        "gopher://127.0.0.2:{port}/_GET",
        "ftp://127.0.0.2:{port}/a.png",
        "dict://127.0.0.2:{port}/a",
        "ws://images.example:{port}/",
        "unix:///var/run/docker.sock",
        "http+unix://%2Fvar%2Frun%2Fdocker.sock/",
        "data:image/png;base64,iVBORw0KGgo=",
        "javascript:alert(1)",
        "HTTP:127.0.0.2:{port}",
        "http:/127.0.0.2:{port}/",
        "http:///127.0.0.2:{port}/",
        "http:\\\\127.0.0.2:{port}\\",
        "///127.0.0.2:{port}/",
        "http://127.0.0.2:{port}#@images.example/",
        "http://127.0.0.2:{port}?@images.example/",
        "http://127.0.0.2:{port};@images.example/",
        "http://images.example:{port}@127.0.0.2:{port}/",
        "http://images.example:{port}:80/",
        "http://images.example:99999/",
        "http://images.example:22/",
        "http://images.example/",
        "http://user:password@images.example:{port}/",
        "http://user@images.example:{port}/",
        "http://@127.0.0.2:{port}/",
        "",
        "http://" + "a" * 9000,
        "http://\ud800.example/",
        "http://" + "a" * 70 + ".example:{port}/",
    ],
)
async def test_other_schemes_ports_and_users_are_rejected(world: World, url: str) -> None:
    await world.rejected(url.replace("{port}", str(world.port)))
    assert not world.requests


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.2:{port}/",
        "//127.0.0.2:{port}/",
        "//inner.example:{port}/",
        "http://[::1]:{port}/",
        "file:///etc/passwd",
        "gopher://127.0.0.2:{port}/",
        "ftp://127.0.0.2:{port}/",
        "data:image/png;base64,iVBORw0KGgo=",
        "http://user:password@images.example:{port}/",
        "//good@127.0.0.2:{port}/",
        "\\\\127.0.0.2:{port}/",
        "/\\127.0.0.2:{port}/",
        "http://images.example:22/",
        "http://[",
    ],
)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_each_redirect_is_checked(world: World, location: str, status: int) -> None:
    world.answer = redirects(location.replace("{port}", str(world.port)), status=status)
    await world.rejected(world.url())
    assert len(world.requests) == 1


async def test_changed_dns_answers_are_ignored(world: World) -> None:
    world.names["rebinding.example"] = [[OUTSIDE], [INSIDE]]
    assert await world.fetcher().fetch(world.url("rebinding.example")) == PIXEL
    assert world.resolved == ["rebinding.example"] and world.intrusions == 0
    await world.rejected(world.url("rebinding.example"))


async def test_redirect_to_the_same_name_is_resolved_again(world: World) -> None:
    world.names["rebinding.example"] = [[OUTSIDE], [INSIDE]]
    world.answer = redirects("/again")
    await world.rejected(world.url("rebinding.example"))
    assert len(world.requests) == 1 and len(world.resolved) == 2


@pytest.mark.parametrize("answer", [[OUTSIDE, INSIDE], [INSIDE, OUTSIDE], [OUTSIDE, "::1"]])
async def test_one_internal_address_rejects_the_host(world: World, answer: list[str]) -> None:
    world.names["mixed.example"] = [answer]
    await world.rejected(world.url("mixed.example"))
    assert not world.requests


async def test_internal_and_unknown_hosts_have_the_same_error(world: World) -> None:
    inside = await world.rejected(world.url("inner.example"))
    assert str(inside) == str(await world.rejected(world.url("unknown.example")))
    assert INSIDE not in str(inside)


@pytest.mark.parametrize("form", ["127.1", "2130706433", "0x7f.1", "0177.0.0.1", "127.0.0.1."])
async def test_only_canonical_addresses_are_accepted(world: World, form: str) -> None:
    """Rejected even for allowed hosts: validator and connector may parse it differently."""
    assert "malformed" in str(await world.rejected(world.url(form)))
    assert not world.requests and not world.resolved
