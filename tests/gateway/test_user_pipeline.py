"""User pipelines, named as `module:pipeline`."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bottega.errors import SettingError
from bottega.gateway.running.build import build_for_pipeline
from bottega.gateway.running.tiers import config_of, load_pipeline
from bottega.pipeline import Pipeline
from bottega.types import Query
from tests.builders import solid_image
from tests.gateway.gateways import ask, run_gateway


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    Path("broken.py").write_text("import nothing_of_that_name\n")
    Path("shop.py").write_text(
        textwrap.dedent("""
        from bottega import Pipeline, Prompt, Tier
        from bottega.generation import ScriptedGenerator
        from bottega.parsing import plain_text
        from bottega.prompting import InterleavedPrompter
        from bottega.pipeline import FixedRouter
        from bottega.routing import BudgetRouter, CoverageRouter

        tier = Tier("only", ScriptedGenerator(lambda prompt: "of the shop"))
        pipeline = Pipeline(FixedRouter(tier), InterleavedPrompter(), plain_text, tiers=(tier,))
        untold = Pipeline(FixedRouter(tier), InterleavedPrompter(), plain_text)
        number = 3

        def make():
            return pipeline
        """)
    )
    yield
    for name in ("shop", "broken"):
        sys.modules.pop(name, None)


def test_pipeline_is_loaded_by_name(shop: None) -> None:
    assert load_pipeline("shop:make") is load_pipeline("shop:pipeline")


@pytest.mark.parametrize(
    ("target", "error_text"),
    [
        ("shop", "path is incomplete"),
        ("shop:", "path is incomplete"),
        ("shopp:pipeline", "module 'shopp' does not exist"),
        ("shop:pipelin", "has no attribute 'pipelin'"),
        ("shop:number", "must be a Pipeline, got int"),
        ("shop:untold", "has no tiers"),
    ],
)
def test_invalid_pipeline_names_are_reported(shop: None, target: str, error_text: str) -> None:
    with pytest.raises(SettingError, match=error_text) as error:
        load_pipeline(target)
    assert error.value.hint


def test_errors_of_the_module_propagate(shop: None) -> None:
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
        load_pipeline("broken:pipeline")


def test_user_pipeline_has_no_namespaces(shop: None, tmp_path: Path) -> None:
    pipeline: Pipeline = load_pipeline("shop:pipeline")
    config = config_of(pipeline, "shop:pipeline").override(
        host=None, port=None, data=tmp_path / "d"
    )
    with run_gateway(build_for_pipeline(pipeline, config)) as url:
        reply, headers = ask(url, "hello")
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(url, "hello", model="bottega:namespace=team")
    assert reply["choices"][0]["message"]["content"] == "of the shop"
    assert headers["x-bottega-route"] == "only"
    assert refused.value.code == 403
    refused.value.close()


@pytest.fixture
def served(shop: None, tmp_path: Path) -> Iterator[tuple[Any, str]]:
    """Return a module whose tiers have their own prompts and sampling, and its address."""
    Path("shop.py").write_text(
        textwrap.dedent("""
        from bottega import Pipeline, Sampling, Tier
        from bottega.generation import ScriptedGenerator
        from bottega.parsing import plain_text
        from bottega.prompting import InterleavedPrompter, ReasoningPrompter, PromptTemplate
        from bottega.pipeline import FixedRouter
        from bottega.types import Candidate, Example, Query

        brief = ScriptedGenerator(lambda prompt: "cat", name="brief")
        wise = ScriptedGenerator(lambda prompt: "Fur. Answer: cat", name="wise")
        tiers = (
            Tier("brief", brief, 2, PromptTemplate(system="One word.", instruction="Name it.")),
            Tier("wise", wise, 0, ReasoningPrompter(), Sampling(max_tokens=300, temperature=0.5)),
        )
        shown = Example(Query("What is this animal?"), "dog", id="a")

        async def retrieve(query, k):
            return [Candidate(shown, 0.9)]

        async def record(trace):
            traces.append(trace)

        traces = []
        pipeline = Pipeline(
            FixedRouter(tiers[0]), InterleavedPrompter(), plain_text,
            retrieve=retrieve, tiers=tiers,
            sampling=Sampling(max_tokens=77), choices=("cat", "dog"), record=record,
        )
        """)
    )
    pipeline = load_pipeline("shop:pipeline")
    config = config_of(pipeline, "shop:pipeline").override(
        host=None, port=None, data=tmp_path / "d"
    )
    with run_gateway(build_for_pipeline(pipeline, config)) as url:
        yield sys.modules["shop"], url


QUERY = Query("What is this?", (solid_image(3),))


def content(query: Query) -> list[dict[str, Any]]:
    images = [{"type": "image_url", "image_url": {"url": one.data_url}} for one in query.images]
    return [*images, {"type": "text", "text": query.text}]


@pytest.mark.parametrize("more", [{}, {"model": "bottega:no-store"}])
def test_the_pipelines_own_prompt_and_sampling_are_served(
    served: tuple[Any, str], more: dict[str, Any]
) -> None:
    shop, url = served
    asyncio.run(shop.pipeline.answer(QUERY))
    reply, headers = ask(url, "", messages=[{"role": "user", "content": content(QUERY)}], **more)
    own, over_http = shop.brief.calls
    assert over_http.prompt == own.prompt
    assert over_http.sampling == own.sampling
    assert "Name it." in str(own.prompt) and own.sampling.max_tokens == 77
    assert reply["choices"][0]["message"]["content"] == "cat"
    assert headers["x-bottega-demonstrations"] == "1"
    first, second = shop.traces
    assert first.prompt == second.prompt


@pytest.mark.parametrize("model", ["bottega/wise", "bottega/wise:no-store,no-retrieve,no-replay"])
def test_each_tier_uses_its_own_prompt(served: tuple[Any, str], model: str) -> None:
    shop, url = served
    ask(url, "What is this?", model=model)
    ask(url, "What is this?", model=model, temperature=0, max_tokens=20)
    first, second = shop.wise.calls
    assert "step by step" in str(first.prompt)
    assert (first.sampling.max_tokens, first.sampling.temperature) == (300, 0.5)
    assert (second.sampling.max_tokens, second.sampling.temperature) == (20, 0.0)


def test_instructions_and_earlier_turns_surround_the_prompt(served: tuple[Any, str]) -> None:
    shop, url = served
    turns = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": content(Query("Hello", (solid_image(1),)))},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "What is this?"},
    ]
    ask(url, "", messages=turns)
    (call,) = shop.brief.calls
    roles = [message.role for message in call.prompt.messages]
    texts = [message.parts[-1] for message in call.prompt.messages]
    assert roles == ["system", "system", "user", "assistant", "user", "assistant", "user"]
    assert texts[0:2] == ["Be kind.", "One word."]
    assert texts[4:6] == ["Hello", "Hi"]
    assert [len(message.parts) for message in call.prompt.messages] == [1, 1, 1, 1, 2, 1, 1]
    assert texts[6] == "What is this?\n(A) cat\n(B) dog\nName it."


def test_a_request_without_a_question_is_rejected(served: tuple[Any, str]) -> None:
    shop, url = served
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(url, "", messages=turns)
    error_text = json.load(refused.value)["error"]
    assert (refused.value.code, error_text["code"]) == (400, "unsupported")
    assert "pipeline" in error_text["message"]
    assert not shop.brief.calls


def test_pipeline_with_a_search_is_rejected(shop: None) -> None:
    Path("shop.py").write_text(
        Path("shop.py").read_text()
        + "searching = Pipeline(FixedRouter(tier), InterleavedPrompter(), plain_text,"
        + " tiers=(tier,), search=1)\n"
    )
    with pytest.raises(SettingError, match="search"):
        load_pipeline("shop:searching")
