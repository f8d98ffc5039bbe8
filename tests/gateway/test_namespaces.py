from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bottega.errors import StoreError
from bottega.gateway.ports import Tenant
from bottega.gateway.running.caches import NamespacePool
from bottega.generation import ScriptedGenerator
from bottega.knowledge import KnowledgeBase, PixelEmbedder
from bottega.pipeline import FixedRouter
from bottega.protocols import Tier
from bottega.recipes import cache_of_thought


def opener(
    folder: Path, opened: list[str], bases: dict[str, KnowledgeBase]
) -> Callable[[str], tuple[Tenant, KnowledgeBase]]:
    def open_one(name: str) -> tuple[Tenant, KnowledgeBase]:
        time.sleep(0.02)
        opened.append(name)
        base = KnowledgeBase.open(folder / "k.db", PixelEmbedder(), namespace=name)
        bases[name] = base
        tier = Tier("one", ScriptedGenerator(lambda prompt: "x"))
        pipeline = cache_of_thought(base, tiers=[tier], route=FixedRouter(tier), remember=False)
        return Tenant(pipeline), base

    return open_one


async def test_namespaces_are_opened_once_and_the_oldest_is_closed(tmp_path: Path) -> None:
    opened: list[str] = []
    bases: dict[str, KnowledgeBase] = {}
    tenants = NamespacePool(opener(tmp_path, opened, bases), 2)
    first, again = await asyncio.gather(tenants.open("a"), tenants.open("a"))
    assert first is again
    del again
    await tenants.open("b")
    await tenants.open("c")
    assert opened == ["a", "b", "c"]
    assert tenants.counts() == {"b": 0, "c": 0}
    assert await _is_open(bases["a"])  # a request holds it
    del first
    await _closed(bases["a"])
    assert len(await asyncio.to_thread(tenants.base, "a")) == 0
    assert opened == ["a", "b", "c", "a"]
    await tenants.aclose()
    for base in bases.values():
        assert not await _is_open(base)


async def test_base_of_a_closed_namespace_stays_open_while_it_is_held(tmp_path: Path) -> None:
    bases: dict[str, KnowledgeBase] = {}
    tenants = NamespacePool(opener(tmp_path, [], bases), 1)
    await tenants.open("a")
    held = await asyncio.to_thread(tenants.base, "a")
    await tenants.open("b")
    await tenants.open("c")
    await _closed(bases["b"])  # one thread closes all, so it would have closed a before
    assert len(held) == 0
    del held
    await _closed(bases["a"])
    await tenants.aclose()


async def test_tenant_that_ends_within_submit_of_a_thread_pool_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, is_locked = ThreadPoolExecutor.submit, False

    def submit_unless_locked(*given: Any, **named: Any) -> Future[object]:
        assert not is_locked, "the lock of thread pools is not reentrant: a deadlock"
        return submit(*given, **named)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit_unless_locked)
    bases: dict[str, KnowledgeBase] = {}
    tenants = NamespacePool(opener(tmp_path, [], bases), 1)
    held = await tenants.open("a")
    await tenants.open("b")
    is_locked = True  # garbage collection may run within `submit`
    del held
    is_locked = False
    await _closed(bases["a"])
    await tenants.aclose()


async def _closed(base: KnowledgeBase) -> None:
    end = time.monotonic() + 30
    while await _is_open(base):
        assert time.monotonic() < end


async def _is_open(base: KnowledgeBase) -> bool:
    await asyncio.sleep(0.01)
    try:
        len(base)
    except StoreError:
        return False
    return True


async def test_failed_opening_is_retried(tmp_path: Path) -> None:
    calls: list[str] = []

    def open_one(name: str) -> tuple[Tenant, KnowledgeBase]:
        calls.append(name)
        raise StoreError("the disk is gone")

    tenants = NamespacePool(open_one, 2)
    for _ in range(2):
        with pytest.raises(StoreError):
            await tenants.open("a")
    assert calls == ["a", "a"]
    await tenants.aclose()


async def test_openings_that_fail_while_the_gateway_closes_are_no_error(tmp_path: Path) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def open_one(name: str) -> tuple[Tenant, KnowledgeBase]:
        begun.set()
        goes_on.wait(60)
        raise StoreError("the disk is gone")

    tenants = NamespacePool(open_one, 2)
    opening = asyncio.create_task(tenants.open("a"))
    await asyncio.to_thread(begun.wait, 60)
    closing = asyncio.create_task(tenants.aclose())
    await asyncio.sleep(0)
    goes_on.set()
    await closing
    with pytest.raises(StoreError, match="the disk is gone"):
        await opening
