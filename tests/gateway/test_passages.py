"""Local tier that reads compressed passages."""

from __future__ import annotations

import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pytest

from bottega.bundled import bundled_compressor, bundled_folder
from bottega.compression import PassageStore, StoreManifest, load
from bottega.errors import SettingError
from bottega.gateway.config.config_file import parse_config
from bottega.gateway.running.build import build
from bottega.gateway.running.tiers import StoredPassages, build_tiers
from bottega.generation import bundled
from bottega.generation.loaded import LoadedModel
from bottega.knowledge import KnowledgeBase, TokenEmbedder
from bottega.naming import open_model
from bottega.openai_api.errors import ApiError
from bottega.recipes.racc import compressor_loader
from bottega.recording import StoredTrace, TraceStore
from bottega.tasks.glyphs import FactTask
from bottega.types import Compression, Example, Query
from tests.gateway.gateways import ENVIRONMENT, run_gateway

TASK = FactTask(queries=1, episodes=1).generate(5)
[ITEM] = TASK.items
READ = [
    *[one for one in TASK.knowledge if one.id == ITEM.tags["passage"]],
    *[one for one in TASK.knowledge if one.id != ITEM.tags["passage"]][:3],
]
CONFIG = """
[gateway]
data = "{folder}"
[tiers.small]
model = "{model}"
passages = "{store}"
shots = 5
{more}
[tiers.large]
model = "openai:huge"
base_url = "http://127.0.0.1:9/v1"
[route]
router = "fixed"
[cache]
embed = "words"
min_similarity = -1
[traces]
store = "texts"
"""


@pytest.fixture(scope="module")
def apprentice() -> LoadedModel:
    return LoadedModel.load(str(bundled_folder()), "cpu", "float32")


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch: pytest.MonkeyPatch, apprentice: LoadedModel) -> None:
    real = LoadedModel.load

    def load_model(source: str, *more: Any) -> LoadedModel:
        return apprentice if source == str(bundled_folder()) else real(source, *more)

    monkeypatch.setattr(LoadedModel, "load", load_model)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, apprentice: LoadedModel) -> Path:
    """Return a store of all passages in `READ`."""
    folder = tmp_path_factory.mktemp("passages") / "store"
    loader = compressor_loader(bundled_compressor(), bundled())
    loader.base._loaded = apprentice
    compressor, saved = loader.load(apprentice), load(bundled_compressor())
    config = saved.racc.config
    passages = PassageStore(
        folder, StoreManifest(saved.digest, config.document_prompts, config.width)
    )
    with KnowledgeBase.open(":memory:", embed=TokenEmbedder.bundled()) as opened:
        opened.add(READ)
        passages.add([(str(one.id), one) for one in opened], compressor.compress)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[KnowledgeBase]:
    """Yield the gateway's cache with the passages, and an answer that is not in the store."""
    with KnowledgeBase.open(str(tmp_path / "cache.db"), embed=TokenEmbedder.bundled()) as opened:
        opened.add([*READ, Example(Query(ITEM.query.text), "an earlier answer")])
        yield opened


def config_text(folder: Path, store: Path, *, model: str = "bundled", more: str = "") -> str:
    return CONFIG.format(folder=folder, store=store, model=model, more=more)


def post(url: str, **more: Any) -> tuple[str, dict[str, str]]:
    """Ask for the fact and return the body of the reply with its headers."""
    [image] = ITEM.query.images
    data = f"data:image/png;base64,{b64encode(image.data).decode()}"
    parts = [
        {"type": "image_url", "image_url": {"url": data}},
        {"type": "text", "text": ITEM.query.text},
    ]
    body = {"model": "bottega", "messages": [{"role": "user", "content": parts}], **more}
    request = urllib.request.Request(
        f"{url}/chat/completions", orjson.dumps(body), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as reply:
        return reply.read().decode(), {name.lower(): one for name, one in reply.headers.items()}


def newest_trace(folder: Path) -> StoredTrace:
    store = TraceStore.open(folder / "traces.db")
    [trace] = store.list(1)
    store.close()
    return trace


def test_the_tier_answers_from_its_stored_passages(
    cache: KnowledgeBase, tmp_path: Path, store: Path
) -> None:
    config = parse_config(config_text(tmp_path, store))
    with run_gateway(build(config, ENVIRONMENT)) as url:
        text, headers = post(url)
        streamed, _ = post(url, stream=True, temperature=0.0)
        without, bare = post(url, model="bottega:no-retrieve")
    content = orjson.loads(text)["choices"][0]["message"]["content"]
    assert content == ITEM.answer
    assert ITEM.answer in streamed
    assert headers["x-bottega-demonstrations"] == "4"
    assert bare["x-bottega-demonstrations"] == "0"
    assert orjson.loads(without)["choices"][0]["message"]["content"] != ITEM.answer
    found = TraceStore.open(tmp_path / "traces.db")
    traces = {len(one.demonstrations): one for one in found.list()}
    found.close()
    trace = traces[4]
    assert trace.compression == Compression("bundled", str(store), 8)
    assert {one.text for one in trace.demonstrations} == {one.query.text for one in READ}
    assert [one.role for one in trace.messages] == ["user"]  # the passages are not in the prompt
    assert traces[0].compression is None


@pytest.mark.parametrize("damage", ["empty", "damaged"])
def test_unreadable_passages_are_left_out(
    cache: KnowledgeBase, tmp_path: Path, store: Path, damage: str
) -> None:
    own = tmp_path / "own"
    saved = load(bundled_compressor())
    config = saved.racc.config
    manifest = StoreManifest(saved.digest, config.document_prompts, config.width)
    own.mkdir()
    (own / "manifest.json").write_bytes(orjson.dumps(asdict(manifest)))
    if damage == "damaged":
        for name in ("entries.jsonl", "rows.bin"):
            (own / name).write_bytes((store / name).read_bytes())
    gateway_server = build(parse_config(config_text(tmp_path, own)), ENVIRONMENT)
    if damage == "damaged":
        (own / "rows.bin").write_bytes(b"short")
    with run_gateway(gateway_server) as url:
        _, headers = post(url)
        exposition = gateway_server.metrics.exposition().decode()
    assert headers["x-bottega-demonstrations"] == "0"
    assert ('warnings_total{reason="no passages"} 1.0' in exposition) is (damage == "damaged")
    assert newest_trace(tmp_path).compression is None


def test_an_error_of_the_client_is_not_a_missing_passage(
    cache: KnowledgeBase, tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget that is spent during the retrieval refuses the request."""

    async def read(*given: object) -> None:
        raise ApiError("the budget is spent", status=429, code="insufficient_quota", hint="wait")

    monkeypatch.setattr(StoredPassages, "read", read)
    with run_gateway(build(parse_config(config_text(tmp_path, store)), ENVIRONMENT)) as url:
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(url)
        with refused.value as error:
            assert error.code == 429 and b"the budget is spent" in error.read()


def refused(text: str) -> tuple[str, str]:
    with pytest.raises(SettingError) as error:
        build_tiers(parse_config(text, "b.toml"), {"OPENAI_API_KEY": "sk"})
    return str(error.value), error.value.hint


def test_missing_folders_are_refused_at_start(tmp_path: Path, store: Path) -> None:
    message, hint = refused(config_text(tmp_path, tmp_path / "nowhere"))
    assert message.startswith("b.toml: tiers.small.passages: there are no compressed passages in")
    assert "compress build" in hint
    more = f'compressor = "{tmp_path / "nowhere"}"'
    message, hint = refused(config_text(tmp_path, store, more=more))
    assert "there is no compressor in" in message and "compress train" in hint


def test_a_store_of_another_compressor_is_refused_at_start(tmp_path: Path) -> None:
    config = load(bundled_compressor()).racc.config
    manifest = StoreManifest("0123456789abcdef", config.document_prompts, config.width)
    (tmp_path / "manifest.json").write_bytes(orjson.dumps(asdict(manifest)))
    message, _ = refused(config_text(tmp_path, tmp_path))
    assert "was built with compressor 0123456789abcdef, not " in message


def test_a_compressor_of_another_model_is_refused_at_start(tmp_path: Path, store: Path) -> None:
    message, hint = refused(config_text(tmp_path, store, model="bundled:master"))
    assert "this compressor was trained with another model" in message and hint


@pytest.mark.parametrize(
    ("model", "more", "problem"),
    [
        ("openai:qwen", "", "passages needs a model in this process"),
        ("bundled", 'search = "rcts"', "passages must not be set together with a search"),
        ("bundled", "shots = 0", "passages are not read, since the tier has 0 shots"),
    ],
)
def test_settings_that_exclude_passages_are_refused(
    tmp_path: Path, store: Path, model: str, more: str, problem: str
) -> None:
    text = config_text(tmp_path, store, model=model, more=more)
    if "shots" in more:
        text = text.replace("shots = 5\n", "")
    message, hint = refused(text)
    assert problem in message and hint


def test_a_compressor_without_passages_is_refused(tmp_path: Path) -> None:
    text = config_text(tmp_path, tmp_path, more='compressor = "c"')
    text = text.replace(f'passages = "{tmp_path}"\n', "")
    assert "compressor has no effect without passages" in refused(text)[0]


def test_a_dispatched_model_has_no_prefix(tmp_path: Path, store: Path) -> None:
    with pytest.raises(SettingError, match="cannot use a KV prefix"):
        compressor_loader(bundled_compressor(), open_model("openai:m"), store=store)
