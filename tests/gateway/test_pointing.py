"""`module:pipeline`: a pipeline of the user's own."""

from __future__ import annotations

import sys
import textwrap
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from bottega.errors import SettingError
from bottega.gateway.running.building import build_around
from bottega.gateway.running.pointing import config_of, load_pipeline
from bottega.pipeline import Pipeline
from tests.gateway.houses import ask, serving


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    Path("broken.py").write_text("import nothing_of_that_name\n")
    Path("shop.py").write_text(
        textwrap.dedent("""
        from bottega import Pipeline, Prompt, Tier
        from bottega.generation import Scripted
        from bottega.parsing import plain_text
        from bottega.prompting import Interleaved
        from bottega.routing import Budgeted, Covered, always

        tier = Tier("only", Scripted(lambda prompt: "of the shop"))
        pipeline = Pipeline(always(tier), Interleaved(), plain_text, tiers=(tier,))
        untold = Pipeline(always(tier), Interleaved(), plain_text)
        number = 3

        def make():
            return pipeline
        """)
    )
    yield
    for name in ("shop", "broken"):
        sys.modules.pop(name, None)


def test_a_pipeline_is_found_by_its_name(shop: None) -> None:
    assert load_pipeline("shop:make") is load_pipeline("shop:pipeline")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("shop", "names no pipeline"),
        ("shop:", "names no pipeline"),
        ("shopp:pipeline", "no module 'shopp'"),
        ("shop:pipelin", "has no 'pipelin'"),
        ("shop:number", "is int, not a Pipeline"),
        ("shop:untold", "does not say which tiers"),
    ],
)
def test_what_is_wrong_with_the_name_is_said(shop: None, target: str, said: str) -> None:
    with pytest.raises(SettingError, match=said) as error:
        load_pipeline(target)
    assert error.value.hint


def test_a_module_that_is_broken_says_so_itself(shop: None) -> None:
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
        load_pipeline("broken:pipeline")


def test_somebodys_pipeline_is_served_without_namespaces(shop: None, tmp_path: Path) -> None:
    pipeline: Pipeline = load_pipeline("shop:pipeline")
    config = config_of(pipeline, "shop:pipeline").told(host=None, port=None, data=tmp_path / "d")
    with serving(build_around(pipeline, config)) as url:
        reply, headers = ask(url, "hello")
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(url, "hello", model="bottega:namespace=team")
    assert reply["choices"][0]["message"]["content"] == "of the shop"
    assert headers["x-bottega-route"] == "only"
    assert refused.value.code == 403
    refused.value.close()
