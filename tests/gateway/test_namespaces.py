from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from bottega.errors import StoreError
from bottega.gateway.ports import Tenant
from bottega.gateway.running.namespace_pool import NamespacePool
from bottega.generation import ScriptedGenerator
from bottega.knowledge import KnowledgeBase, PixelEmbedder
from bottega.pipeline import FixedRouter
from bottega.protocols import Tier
from bottega.recipes import cache_of_thought


async def test_namespaces_are_opened_once_and_the_oldest_is_closed(tmp_path: Path) -> None:
    opened: list[str] = []
    bases: dict[str, KnowledgeBase] = {}

    def open_one(name: str) -> tuple[Tenant, KnowledgeBase]:
        time.sleep(0.02)
        opened.append(name)
        base = KnowledgeBase.open(tmp_path / "k.db", PixelEmbedder(), namespace=name)
        bases[name] = base
        tier = Tier("one", ScriptedGenerator(lambda prompt: "x"))
        pipeline = cache_of_thought(base, tiers=[tier], route=FixedRouter(tier), remember=False)
        return Tenant(pipeline), base

    tenants = NamespacePool(open_one, 2)
    first, again = await asyncio.gather(tenants.open("a"), tenants.open("a"))
    assert first is again
    del again
    await tenants.open("b")
    await tenants.open("c")
    assert opened == ["a", "b", "c"]
    assert tenants.counts() == {"b": 0, "c": 0}
    assert await _is_open(bases["a"])  # a request holds it
    del first
    end = time.monotonic() + 30
    while await _is_open(bases["a"]):
        assert time.monotonic() < end
    assert len(await asyncio.to_thread(tenants.base, "a")) == 0
    assert opened == ["a", "b", "c", "a"]
    await tenants.aclose()
    for base in bases.values():
        assert not await _is_open(base)


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
