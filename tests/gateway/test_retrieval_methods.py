"""Retrieval methods of the gateway by name, and the bills of their drafts."""

from __future__ import annotations

import asyncio
from contextvars import Context, copy_context
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from bottega.errors import GenerationError
from bottega.gateway.ports import ServedTier, UpstreamCall
from bottega.gateway.request.completion import RequestDraftGenerator, send_drafts
from bottega.gateway.request.jobs import ChatResult
from bottega.gateway.running.build import build
from bottega.generation import ScriptedGenerator
from bottega.openai_api.request import data_url_cache
from bottega.protocols import Tier
from bottega.recipes.cache_retrieval import RETRIEVE
from bottega.types import Prompt, Sampling
from tests.builders import solid_image
from tests.gateway.gateways import ENVIRONMENT, ask, gateway_config, run_gateway
from tests.gateway.test_disconnects import LateUpstream
from tests.server import Server, ok


def turn(shade: int, text: str) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": solid_image(shade).data_url}}
    return {"role": "user", "content": [image, {"type": "text", "text": text}]}


async def by_model(request: web.Request) -> web.StreamResponse:
    """Answer as the model in the body: the large one names a metal, the small one guesses."""
    body = orjson.loads(await request.read() or b"{}")
    large = body.get("model") == "huge"
    return await ok("mercury" if large else "It may be mercury.")(request)


@pytest.mark.parametrize("retrieve", ["nearest", *RETRIEVE])
def test_every_method_shows_the_masters_answer(
    endpoint: Server, tmp_path: Path, retrieve: str
) -> None:
    endpoint.answers = [by_model]
    more = f'retrieve = "{retrieve}"\n'
    if retrieve not in ("nearest", "bm25", "hybrid"):
        more += "min_similarity = -1.0\n"
    config = gateway_config(tmp_path, endpoint.url, more)
    config = replace(config, cache=replace(config.cache, embed="pixels"))
    gateway_server = build(config, ENVIRONMENT)
    drafts = retrieve in ("crossed", "probe", "keyword-hashtag")
    with run_gateway(gateway_server) as url:
        endpoint.bodies.clear()
        ask(url, "", messages=[turn(1, "Which metal is liquid?")])
        _, headers = ask(url, "", messages=[turn(2, "Which metal is liquid here?")])
        bodies = [body for body in endpoint.bodies if body]
        gateway_server.ledger.flush()
        [_, row] = gateway_server.ledger.read(
            "SELECT prompt_tokens, cost_usd FROM gateway_entries ORDER BY time"
        )
        base = gateway_server.tenants.base("")  # type: ignore[attr-defined]
        [stored] = base
    assert headers["x-bottega-route"] == "small" and headers["x-bottega-demonstrations"] == "1"
    *_, last = bodies
    assert last["messages"][1] == {"role": "assistant", "content": "mercury"}
    assert len(bodies) == 2 + drafts
    if drafts:
        draft = bodies[1]
        assert (draft["model"], len(draft["messages"])) == ("qwen", 1)
        assert draft["temperature"] == 0
    # The bill has the tokens and the cost of the draft, too.
    assert row == (10 * (1 + drafts), pytest.approx(12e-6 * (1 + drafts)))
    tagged = retrieve in ("probe", "keywords", "keyword-hashtag")
    assert stored.tags.get("keywords") == ("mercury" if tagged else None)


async def unused(call: UpstreamCall) -> ChatResult:
    raise AssertionError("the draft was sent after its request")


def test_draft_outside_a_request_is_an_error() -> None:
    """Before any request, and in a context that began inside one and outlived it."""
    served = ServedTier(Tier("small", ScriptedGenerator(lambda prompt: "")), LateUpstream())
    drafts = RequestDraftGenerator(served, data_url_cache())
    with send_drafts(unused):
        inside = copy_context()
    for context in (Context(), inside):
        with pytest.raises(GenerationError, match="a draft needs a request"):
            context.run(asyncio.run, drafts.generate(Prompt(()), Sampling()))


SWITCHES = (
    ("dual", "probe"),
    *(
        pytest.param(*methods, marks=pytest.mark.slow)
        for methods in (("probe", "dual"), ("dual", "keyword-hashtag"), ("nearest", "probe"))
    ),
)


@pytest.mark.parametrize(("before", "after"), SWITCHES)
def test_another_method_embeds_the_cache_again(
    endpoint: Server, tmp_path: Path, before: str, after: str
) -> None:
    """Equal requests find equal similarities in a switched and in a new cache."""
    endpoint.answers = [by_model]

    def similarity(folder: Path, retrieve: str, *, fill: bool) -> str:
        folder.mkdir(exist_ok=True)
        config = gateway_config(folder, endpoint.url, f'retrieve = "{retrieve}"\n')
        embed = "dual" if retrieve == "nearest" else "bundled"
        config = replace(config, cache=replace(config.cache, embed=embed, min_similarity=-1.0))
        with run_gateway(build(config, ENVIRONMENT)) as url:
            if fill:
                ask(url, "", messages=[turn(1, "Which metal is liquid?")])
            _, headers = ask(url, "", messages=[turn(90, "Which metal is liquid here?")])
        return headers["x-bottega-similarity"]

    similarity(tmp_path / "switched", before, fill=True)
    found = similarity(tmp_path / "switched", after, fill=False)
    assert found == similarity(tmp_path / "new", after, fill=True)


def test_view_that_the_method_does_not_fill(endpoint: Server, tmp_path: Path) -> None:
    """Requests are answered without examples, and the operator's file stays private."""
    endpoint.answers = [by_model]
    config = gateway_config(tmp_path, endpoint.url, 'retrieve = "hashtag"\n')
    with run_gateway(build(config, ENVIRONMENT)) as url:
        ask(url, "", messages=[turn(1, "Which metal is liquid?")])
    other = replace(config, cache=replace(config.cache, retrieve="dual"))
    with run_gateway(build(other, ENVIRONMENT), ready=False) as url:
        _, headers = ask(url, "", messages=[turn(2, "Which metal is liquid here?")])
    assert headers["x-bottega-demonstrations"] == "0"
