"""Retrieval of a question in the playground: as configured, or as a variant of the experiment."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from tests.gateway.gateways import ask
from tests.server import Server
from tests.ui.conftest import TOKEN, Console, console
from tests.ui.test_sessions import SAME, jar

EXPERIMENT = """
[experiment]
name = "try"
a = "shots=2"
b = { cache = { retrieve = "bm25" }, route = { router = "fixed", tier = "large" } }
"""


async def answered(served: Console, retrieve: str) -> tuple[str, str]:
    """Return the empty page and the page with the answer to a question."""
    async with aiohttp.ClientSession(cookie_jar=jar(), headers=SAME) as session:
        async with session.get(f"{served.url}/login?token={TOKEN}"):
            pass
        async with session.get(f"{served.url}/playground") as reply:
            empty = await reply.text()
        fields = {"action": "ask", "question": "Which metal?", "retrieve_a": retrieve}
        async with session.post(f"{served.url}/playground", data=fields) as reply:
            return empty, await reply.text()


def test_playground_asks_as_a_variant(endpoint: Server, tmp_path: Path) -> None:
    with console(tmp_path, endpoint, more=EXPERIMENT) as served:
        ask(served.api, "the cold start")
        models = {}
        for retrieve in ("yes", "try:b", "no"):
            endpoint.bodies.clear()
            empty, page = asyncio.run(answered(served, retrieve))
            [body] = endpoint.bodies
            models[retrieve] = body["model"]
            selected = f'<option value="{retrieve}" selected>'
            assert (selected in page) == (retrieve != "yes")
        served.server.ledger.flush()
        rows = served.server.ledger.read("SELECT variant FROM gateway_entries")
    assert models == {"yes": "qwen", "try:b": "huge", "no": "qwen"}
    # A variant that only has options is not in the list: the form has fields for them.
    assert "variant try:b: bm25, router fixed" in empty and "try:a" not in empty
    # The second setting differs, and an empty namespace is that of the key, not all of them.
    second = empty.partition('name="model_b"')[2].partition("</select>")[0]
    assert "<option selected>bottega/" in second and empty.count("<option selected>") == 1
    assert 'name="namespace" value="" placeholder="(unnamed)"' in empty
    assert {variant for (variant,) in rows} <= {"", "try:a", "try:b"}
    assert [variant for (variant,) in rows].count("") == 3  # the questions of the playground
