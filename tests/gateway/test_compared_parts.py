"""Similarity chooses tiers and demonstrations only by parts of a question that the search reads."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from bottega.errors import EmbeddingError, MissingDependencyError, SettingError, StoreError
from bottega.gateway.config.config_file import parse_config
from bottega.gateway.running.build import build
from bottega.generation import ScriptedGenerator
from bottega.types import Query
from tests.gateway.gateways import ENVIRONMENT, ask, gateway_config, run_gateway
from tests.gateway.harness import harness, raw, user_messages
from tests.server import Server

COVERAGE = 'router = "coverage"\nmin_similarity = 0.8'
BY_RATE = 'router = "coverage"\nmaster_rate = 0.2'
QUESTION, OTHER = "Which metal is liquid?", "How tall is the tower?"


def routed(route: str = COVERAGE, cache: str = "", more: str = "", images: str = "") -> str:
    return textwrap.dedent(f"""
        [tiers.small]
        model = "openai:qwen"
        {images}
        [tiers.large]
        model = "openai:huge"
        [route]
        {route.replace(chr(10), chr(10) + "        ")}
        [cache]
        {cache.replace(chr(10), chr(10) + "        ")}
        {more.replace(chr(10), chr(10) + "        ")}
    """)


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        (routed(cache='embed = "words"'), "cache.embed"),
        (routed(BY_RATE, 'embed = "words"'), "cache.embed"),
        (routed(cache='embed = "minilm"'), "cache.embed"),
        (routed(cache='embed = "owner/clip:text"'), "cache.embed"),
        (routed(cache='retrieve = "text"'), "cache.retrieve"),
        (routed(BY_RATE, 'retrieve = "bm25"'), "cache.retrieve"),
        (routed(cache='embed = "words"\nretrieve = "image"'), "cache.retrieve"),
        (routed(cache='embed = "words"\nretrieve = "dual"'), "cache.retrieve"),
        (
            routed(
                'router = "random"',
                'embed = "words"',
                f'[experiment]\nname = "x"\n[experiment.b.route]\n{COVERAGE}',
            ),
            "experiment.b.cache.embed",
        ),
        (routed(cache="", more='[experiment]\nname = "x"\nb.cache = { retrieve = "text" }'), "b."),
    ],
)
def test_a_router_by_similarity_needs_a_search_that_reads_images(text: str, setting: str) -> None:
    with pytest.raises(SettingError, match="must read images for the router 'coverage'") as error:
        parse_config(text)
    assert setting in str(error.value) and "images = 0" in error.value.hint


@pytest.mark.parametrize(
    "text",
    [
        routed('router = "random"', 'embed = "words"'),
        routed(cache='embed = "words"', more="[limits]\nimages = 0"),
        routed(cache='embed = "words"', images="images = 0"),
        routed(BY_RATE, 'retrieve = "hybrid"'),
        routed(cache='retrieve = "dual"'),
        *(
            routed(cache=f'embed = "{name}"')
            for name in ("dual", "by-kind", "photos", "pixels", "photos+pixels:0.3", "a/b:average")
        ),
    ],
)
def test_searches_that_read_images_may_route(text: str) -> None:
    parse_config(text)


def turn(shade: int | None, text: str = QUESTION) -> list[Any]:
    return user_messages(*([] if shade is None else [shade]), text=text)


# The stored question has image 0; each case is another question, its tier and its demonstrations.
CASES = {
    # (embedder, router): [(shade, text, tier, demonstrations)]
    ("pixels", "coverage"): [
        (1, QUESTION, "small", "1"),  # the same question about a similar image
        (1, OTHER, "large", "0"),  # images alone do not tell questions apart
        (0, OTHER, "large", "0"),
        (None, QUESTION, "large", "0"),  # the embedder cannot read it
    ],
    ("dual", "coverage"): [
        (1, QUESTION, "small", "1"),
        (0, OTHER, "large", "0"),
        (None, OTHER, "large", "0"),
    ],
    ("words", "fixed"): [
        (1, QUESTION, "small", "0"),  # similarity 1 of an image that was not read
        (None, QUESTION, "small", "0"),
    ],
    ("pixels", "fixed"): [
        (1, OTHER, "small", "1"),  # demonstrations may be other questions about similar images
        (None, QUESTION, "small", "0"),
    ],
}


@pytest.mark.parametrize(("embed", "router"), CASES)
def test_what_is_not_read_is_not_similar(
    endpoint: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, embed: str, router: Any
) -> None:
    config = gateway_config(tmp_path, endpoint.url, embed=embed)
    least = 0.8 if router == "coverage" else None
    route = replace(config.route, router=router, min_similarity=least, cold_start=0)
    server = build(replace(config, route=route), ENVIRONMENT)
    with run_gateway(server) as url:
        ask(url, "", messages=turn(0), model="bottega/large")
        for shade, text, tier, shown in CASES[embed, router]:
            model = "bottega:no-store,no-replay"
            _, headers = ask(url, "", messages=turn(shade, text), model=model)
            found = headers["x-bottega-route"], headers["x-bottega-demonstrations"]
            assert found == (tier, shown), (shade, text)
    assert "logged once" not in caplog.text  # such questions are no failures


@pytest.mark.parametrize(
    ("error", "tier"),
    [
        (EmbeddingError("this embedder requires an image", hint="add an image"), "master"),
        (StoreError("the cache is down", hint="start it"), "apprentice"),
    ],
)
def test_unreadable_questions_go_to_the_master_and_outages_to_the_cheapest_tier(
    tmp_path: Path, error: Exception, tier: str
) -> None:
    async def fail(query: Query, /) -> Any:
        raise error

    middle = {"middle": ScriptedGenerator(lambda prompt: "no")}
    with harness(tmp_path, route=lambda tiers: fail, middle=middle) as server:
        assert raw(server, user_messages(1)).headers["x-bottega-route"] == tier
        assert server.wait(1).degraded


@pytest.mark.parametrize("embed", ["by-kind", "photos-lite2", "photos-both"])
def test_missing_weights_prevent_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embed: str
) -> None:
    """Otherwise the gateway would start, and never be ready."""
    monkeypatch.setattr(
        import_module("bottega.bundled.efficientnet"), "find_spec", lambda name: None
    )
    config = gateway_config(tmp_path, "http://localhost:9/v1", embed=embed)
    with pytest.raises(MissingDependencyError, match="is required") as error:
        build(config, ENVIRONMENT)
    assert "bottega-vlm[photos]" in error.value.hint


@pytest.mark.parametrize("retrieve", ["nearest", "bm25"])
@pytest.mark.parametrize("shades", [(), (1,)])
def test_answers_that_the_embedder_cannot_read_are_not_stored(
    endpoint: Server,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    retrieve: str,
    shades: tuple[int, ...],
) -> None:
    config = gateway_config(tmp_path, endpoint.url, embed="pixels")
    config = replace(config, cache=replace(config.cache, retrieve=retrieve))  # type: ignore[arg-type]
    server = build(config, ENVIRONMENT)
    with run_gateway(server) as url:
        [message] = user_messages(*shades, text=QUESTION)
        _, headers = ask(url, message["content"], model="bottega:route=large")
        counted = server.metrics.exposition().decode()
    assert ("x-bottega-stored" in headers) == bool(shades)
    assert "not stored" not in caplog.text
    assert "bottega_warnings_total{" not in counted
