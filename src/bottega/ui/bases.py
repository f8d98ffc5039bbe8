"""Shared parts of the pages of a knowledge base: opening, namespaces, paging, uploaded images."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from starlette.datastructures import UploadFile

from bottega.errors import EmptyKnowledgeBaseError, NotFoundError
from bottega.gateway.accounting.ledger_schema import Account
from bottega.gateway.request.cached_examples import HUMAN, IMPORTED
from bottega.image import MAX_BYTES, Image
from bottega.knowledge import KnowledgeBase
from bottega.openai_api.errors import ApiError
from bottega.types import Example
from bottega.ui.pages import Page, Redirect, Visit

T = TypeVar("T")
Found = TypeVar("Found")
BaseOpener = Callable[[str], KnowledgeBase]
# Raises `ApiError` if the key may use no further namespace. Called in the event loop.
CheckNamespace = Callable[[Account, str], Coroutine[object, object, None]]
MASTER = "master"


async def allow(account: Account, namespace: str) -> None:
    """Allow all namespaces."""


def open_for(visit: Visit, open_base: BaseOpener, check: CheckNamespace) -> KnowledgeBase:
    """Return the knowledge base of the requested namespace. Raises `ApiError`."""
    namespace = visit.namespace
    if not visit.user.sees_all:
        checking = check(visit.user.account, namespace)
        asyncio.run_coroutine_threadsafe(checking, visit.loop).result()
    return open_base(namespace)


@dataclass(frozen=True)
class NamespacePages:
    """Pages of the knowledge base of a namespace. `open_base` blocks; it is None if the gateway
    serves a pipeline of Python code."""

    open_base: BaseOpener | None
    check_namespace: CheckNamespace = field(default=allow, kw_only=True)

    def base(self, visit: Visit) -> KnowledgeBase:
        """Return the knowledge base of the requested namespace. Raises `ApiError`."""
        if self.open_base is None:
            raise ApiError(
                "this gateway serves a pipeline and has no knowledge base of its own",
                status=404,
                hint="start it with a configuration: bottega serve --config FILE",
            )
        return open_for(visit, self.open_base, self.check_namespace)

    def elsewhere(self, visit: Visit, base: KnowledgeBase, path: str) -> Redirect | None:
        """Return a redirection to the namespace with the most examples, for users who see all and
        named none, and whose own is empty."""
        if visit.value("namespace") or not visit.user.sees_all or len(base):
            return None
        counts = {name: count for name, count in base.namespaces().items() if name}
        if not counts:
            return None
        return Redirect(path, params={"namespace": max(counts, key=lambda name: counts[name])})

    def page(
        self, visit: Visit, base: KnowledgeBase, template: str, values: dict[str, object]
    ) -> Page:
        """Return a page whose values include the namespaces that the user may read."""
        names = {one for one in base.namespaces() if visit.user.may_read(one)}
        shared: dict[str, object] = {
            "namespace": visit.namespace,
            "namespaces": sorted(names | {visit.namespace}),
            "can_store": visit.user.can_store,
            "provenance": provenance,
        }
        return Page(template, {**shared, **values})


@dataclass(frozen=True)
class PagedList(Generic[T]):
    """Page of a list: page `number` of `pages`, from 1. `total` is the length of the list."""

    items: Sequence[T]
    number: int
    pages: int
    total: int


def paged(visit: Visit, items: Sequence[T], size: int) -> PagedList[T]:
    """Return the requested page of `size` items, or the last one if there are fewer."""
    pages = max(1, -(-len(items) // size))
    number = min(visit.number("page", 1, least=1), pages)
    return PagedList(items[(number - 1) * size : number * size], number, pages, len(items))


def existing(base: KnowledgeBase, ids: Sequence[str]) -> list[Example]:
    """Return the examples, without those that have been deleted since."""
    return read_existing(base, ids, base.get_many)[1]


def read_existing(
    base: KnowledgeBase, ids: Sequence[str], read: Callable[[Sequence[str]], Found]
) -> tuple[Sequence[str], Found]:
    """Return the ids that still exist, and what `read` returns for them. Others may be deleted or
    evicted at any time."""
    while True:
        try:
            return ids, read(ids)
        except (NotFoundError, EmptyKnowledgeBaseError):
            known = set(base.ids())
            left = [id for id in ids if id in known]
            if len(left) == len(ids):  # another fault, such as a missing vector
                raise
            ids = left


def uploaded_image(file: UploadFile) -> Image:
    """Return the image of a file, with the file's name as its source. Raises `ImageError`."""
    image = Image.from_bytes(file.file.read(MAX_BYTES + 1), source=file.filename)
    image.check()
    return image


def human_tags(visit: Visit) -> dict[str, str]:
    """Return the tags of an example that this user has made."""
    account = visit.user.account.id
    return {"provenance": HUMAN} | ({"account": account} if account else {})


def provenance(example: Example) -> str:
    """Return the origin of the answer: `human`, `imported`, `master`, or "" if not recorded."""
    given = example.tags.get("provenance")
    if given in (HUMAN, IMPORTED):
        return given
    return MASTER if "request" in example.tags else ""
