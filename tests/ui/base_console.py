"""Pages of knowledge bases alone, without a gateway, and a reader of their HTML."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import aiohttp
from starlette.applications import Starlette

from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger_schema import Account
from bottega.knowledge import KnowledgeBase
from bottega.protocols import Embedder
from bottega.ui.application import common_routes
from bottega.ui.cache import CachePages, cache_routes
from bottega.ui.knowledge_pages import KnowledgePages, knowledge_routes
from bottega.ui.pages import Link, Renderer
from bottega.ui.sessions import Sessions
from tests.gateway.harness import running
from tests.knowledge.doubles import SeededEmbedder

SAME = {"Sec-Fetch-Site": "same-origin"}
Fields = Mapping[str, object] | aiohttp.FormData | None
TOKEN = "token-of-the-link"
LINKS = (Link("/cache", "Cache"), Link("/knowledge", "Knowledge base"))


@dataclass
class BaseConsole:
    """Running pages of the cache and the knowledge base. `forgotten` are the namespaces whose
    replies were forgotten."""

    location: str
    accounts: Accounts
    embed: Embedder = field(default_factory=SeededEmbedder)
    url: str = ""
    bases: dict[str, KnowledgeBase] = field(default_factory=dict)
    forgotten: list[str] = field(default_factory=list)

    def base(self, namespace: str = "") -> KnowledgeBase:
        if namespace not in self.bases:
            self.bases[namespace] = KnowledgeBase.open(
                self.location, self.embed, namespace=namespace
            )
        return self.bases[namespace]

    def app(self) -> Starlette:
        renderer = Renderer(LINKS, Sessions(self.accounts, token=TOKEN))
        cache = CachePages(self.base, self.forgotten.append, 2)
        knowledge = KnowledgePages(self.base, self.forgotten.append)
        return Starlette(
            routes=[
                *common_routes(renderer),
                *cache_routes(renderer, cache),
                *knowledge_routes(renderer, knowledge),
            ]
        )

    def key(self, account: Account) -> str:
        _, key = self.accounts.add(
            account.name,
            namespace=account.namespace,
            admin=account.admin,
            viewer=account.viewer,
            can_store=account.can_store,
        )
        return key

    def send(
        self,
        key: str,
        requests: Sequence[tuple[str, str, Fields]],
        *,
        read_only: bool = False,
    ) -> list[tuple[int, str]]:
        """Log in, send a GET or POST for each method, path and form, and return status and text."""

        async def work() -> list[tuple[int, str]]:
            cookies, replies = aiohttp.CookieJar(unsafe=True), []
            async with aiohttp.ClientSession(cookie_jar=cookies, headers=SAME) as session:
                form = {"key": key, **({"read_only": "yes"} if read_only else {})}
                async with session.post(
                    f"{self.url}/login", data=form, allow_redirects=False
                ) as reply:
                    assert reply.status == 303
                for method, path, fields in requests:
                    async with session.request(method, self.url + path, data=fields) as reply:
                        replies.append((reply.status, await reply.text()))
            return replies

        return asyncio.run(work())


@contextmanager
def base_console(folder: Path, location: str | None = None) -> Iterator[BaseConsole]:
    accounts = Accounts(folder / "gateway.db")
    served = BaseConsole(location or str(folder / "cache.db"), accounts)
    with running(served.app()) as url:
        served.url = url.removesuffix("/v1") + "/ui"
        yield served
    for base in served.bases.values():
        base.close()
    accounts.close()


class Elements(HTMLParser):
    """Names of the elements and attributes of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.targets: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes.update(name for name, _ in attrs)
        self.targets += [value or "" for name, value in attrs if name in ("href", "src", "action")]

    def handle_data(self, data: str) -> None:
        self.text += data
