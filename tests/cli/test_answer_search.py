"""`bottega ask` with a tree search, and with compressed passages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from bottega.bundled import bundled_compressor, bundled_folder
from bottega.generation.loaded import LoadedModel
from bottega.knowledge import KnowledgeBase, TokenEmbedder
from bottega.prompting.turns import ASK_REASONING
from bottega.recording import StoredNode, StoredTrace, TraceStore
from bottega.tasks.glyphs import FactTask
from bottega.types import Compression, Example, Query, Usage
from tests.cli.conftest import Run
from tests.server import Server, ok

TASK = FactTask(queries=1, episodes=1).generate(5)
[ITEM] = TASK.items
COLOURS = ("red", "blue", "blue", "blue", "red")
QUESTION = "Which colour has ball 9?"
SEARCH = ("ask", QUESTION, "--kb", "k.db", "--model", "openai:m", "--search", "rcts")


@pytest.fixture
def balls(tmp_path: Path) -> None:
    """Write labelled questions into k.db."""
    with KnowledgeBase.open(str(tmp_path / "k.db"), embed=TokenEmbedder.bundled()) as knowledge:
        questions = (Query(f"Which colour has ball {i}?") for i in range(len(COLOURS)))
        knowledge.add(map(Example, questions, COLOURS))


@pytest.fixture(scope="module")
def apprentice() -> LoadedModel:
    return LoadedModel.load(str(bundled_folder()), "cpu", "float32")


@pytest.fixture
def facts(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apprentice: LoadedModel
) -> None:
    """Write passages into k.db, their compressed form into the folder store, and the image of a
    question about them into query.png."""
    monkeypatch.setattr(LoadedModel, "load", lambda source, *more: apprentice)
    right = [one for one in TASK.knowledge if one.id == ITEM.tags["passage"]]
    others = [one for one in TASK.knowledge if one.id != ITEM.tags["passage"]][:3]
    with KnowledgeBase.open(str(tmp_path / "k.db"), embed=TokenEmbedder.bundled()) as knowledge:
        knowledge.add([*right, *others])
    (tmp_path / "query.png").write_bytes(ITEM.query.images[0].data)
    assert run("compress", "build", "k.db", "--store", "store").code == 0


async def copying(request: web.Request) -> web.StreamResponse:
    """Answer like the last demonstration, else "pink", with reasons if the question asks for
    them."""
    body = orjson.loads(await request.read())
    shown = [turn["content"] for turn in body["messages"] if turn["role"] == "assistant"]
    reply = shown[-1] if shown else "pink"
    if ASK_REASONING in str(body["messages"][-1]["content"]):
        reply = f"It looks like that.\nAnswer: {reply.rpartition('Answer: ')[2]}"
    return await ok(*[reply] * body.get("n", 1))(request)


def leaves(node: StoredNode) -> list[StoredNode]:
    return [leaf for child in node.children for leaf in leaves(child)] or [node]


async def never_rewarding(request: web.Request) -> web.StreamResponse:
    """Answer like `copying`, but not at a temperature."""
    if orjson.loads(await request.read()).get("temperature"):
        await asyncio.sleep(30)
    return await copying(request)


def newest_trace() -> StoredTrace:
    store = TraceStore.open("traces.db")
    [trace] = store.list(1)
    store.close()
    return trace


def test_ask_searches_for_demonstrations(run: Run, balls: None, served: Server) -> None:
    served.answers = [copying]
    done = run(*SEARCH, "--price", "1,1", "--json")
    assert done.code == 0
    answer: Any = done.json
    requests = served.bodies
    assert answer["answer"] in COLOURS and len(answer["demonstrations"]) == 3
    calls = sum(body.get("n", 1) for body in requests)
    assert answer["calls"] == calls > 10
    spent = Usage(10 * len(requests), 2 * calls)
    assert answer["cost_usd"] == pytest.approx(1e-6 * (spent.prompt_tokens + 2 * calls))
    trace = newest_trace()
    assert trace.tree is not None and trace.usage == spent
    scored = leaves(trace.tree.root)
    assert len(scored) == 10 and all({"self", "mutual"} == set(one.rewards) for one in scored)
    again = run(*SEARCH, "--search-calls", 13)
    assert again.out.strip() in COLOURS
    assert "show the search with bottega explain" in again.err
    assert newest_trace().tree.calls <= 13  # type: ignore[union-attr]
    assert "● " in run("explain", newest_trace().id).out


def test_after_the_time_limit_the_nearest_examples_are_shown(
    run: Run, balls: None, served: Server
) -> None:
    served.answers = [never_rewarding]
    done = run(*SEARCH, "--search-seconds", 0.2)
    assert done.code == 0 and done.out.strip() in COLOURS
    assert "the search did not end within 0.2 s; the nearest examples are shown" in done.err
    trace = newest_trace()
    assert trace.tree is None and len(trace.demonstrations) == 3
    # The completions of the search that were answered are counted.
    answered = [body for body in served.bodies if not body.get("temperature")]
    assert trace.usage.prompt_tokens == 10 * len(answered) > 10


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--search-calls", 12), "--search-calls is a budget smaller than one rollout, got 12"),
        (("--search-tokens", 100), "--search-tokens is a budget smaller than one rollout, got 100"),
        (("--search-seconds", 0), "--search-seconds must be above 0, got 0"),
        (("--shots", 101), "a search must select at most 100 demonstrations, got 101"),
        (("--compressor", "c"), "--search cannot be used with --compressor or --store"),
    ],
)
def test_invalid_searches_are_refused(
    run: Run, balls: None, served: Server, options: tuple[object, ...], problem: str
) -> None:
    done = run(*SEARCH, *options)
    assert (done.code, problem in done.err, served.bodies) == (2, True, []), done.err
    assert ("or --max-tokens" in done.err) == ("--search-tokens" in options)


def test_options_that_need_others_are_refused(run: Run) -> None:
    for options, problem in (
        (("--search", "rcts"), "--search needs a knowledge base"),
        (("--store", "s"), "--compressor and --store need a knowledge base"),
        (("--search-calls", 40), "--search-calls needs a search"),
    ):
        done = run("ask", QUESTION, *options)
        assert (done.code, problem in done.err) == (2, True), done.err


def test_ask_answers_from_compressed_passages(run: Run, facts: None) -> None:
    ask = ("ask", ITEM.query.text, "-i", "query.png", "--kb", "k.db", "--shots", 4)
    for options, store in (
        (("--store", "store"), "store"),
        (("--compressor", bundled_compressor()), None),  # compressed on demand
    ):
        done = run(*ask, *options)
        assert (done.code, done.out.strip()) == (0, ITEM.answer), done.err
        trace = newest_trace()
        assert trace.compression == Compression("bundled", store, 8)
        assert len(trace.demonstrations) == 4 and len(trace.messages) == 1
        line = "8 tokens by the compressor bundled" + (f", store {store}" if store else "")
        log = run("log", trace.id).out
        assert f"{line}\n" in log
        assert log.count(trace.demonstrations[0].text) == 1  # passages have no answer
    done = run(*ask, "--json")
    assert isinstance(done.json, dict)
    texts = {one["text"] for one in done.json["demonstrations"]}
    assert texts == {one.text for one in trace.demonstrations}


def test_folders_that_do_not_belong_together_are_refused(run: Run, facts: None) -> None:
    ask = ("ask", ITEM.query.text, "-i", "query.png", "--kb", "k.db")
    manifest = Path("store/manifest.json")
    document = orjson.loads(manifest.read_bytes())
    manifest.write_bytes(orjson.dumps(document | {"compressor": "0123456789abcdef"}))
    done = run(*ask, "--store", "store")
    assert done.code == 1 and "was built with compressor 0123456789abcdef, not" in done.err
    assert "no compressed passages in nowhere" in run(*ask, "--store", "nowhere").err
    assert "no compressor in nowhere" in run(*ask, "--compressor", "nowhere").err
    remote = run(*ask, "--store", "store", "--model", "openai:m")
    assert remote.code == 2 and "cannot use a KV prefix" in remote.err
    assert not Path("traces.db").exists()
