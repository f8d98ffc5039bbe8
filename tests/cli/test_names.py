"""Names that no embedder or model can have are rejected before a request to the hub."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from bottega import naming
from bottega.errors import SettingError
from bottega.evaluation.methods.prompts import open_prompt
from bottega.evaluation.methods.retrieval import open_embedder, open_tokens
from bottega.knowledge.embedders import names
from bottega.knowledge.embedders.flmr import INSTRUCTION
from bottega.naming import ModelSpec, check_embedder, open_model
from tests.cli.conftest import Run

TYPOS = [
    ("pixel", "pixels"),
    ("word", "words"),
    ("duel", "dual"),
    ("Bundled", "bundled"),
    ("bundeld", "bundled"),
    ("photo", "photos"),
    ("fotos", "photos"),
    ("bundled:photos", "photos"),
]
IMPOSSIBLE = ["", "xyz", "./nowhere", "/no/such/folder", "a/b/c", "flmr"]


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, **_: object) -> None:
        raise AssertionError(f"a hub was queried for {name!r}")

    monkeypatch.setattr(names, "SentenceEmbedder", fail)
    monkeypatch.setattr(naming, "TransformersGenerator", fail)


@pytest.mark.parametrize(("typo", "meant"), TYPOS)
def test_a_misspelt_embedder_gets_a_suggestion(typo: str, meant: str) -> None:
    with pytest.raises(SettingError, match=f"embedder is unknown, got '{typo}'") as raised:
        open_embedder(typo)
    assert f"did you mean {meant}?" in raised.value.hint


@pytest.mark.parametrize("spec", [*IMPOSSIBLE, "clip-ViT-B-32", "xyz:text"])
def test_an_impossible_embedder_gets_the_choices(spec: str) -> None:
    with pytest.raises(SettingError, match="embedder is unknown, got") as raised:
        open_embedder(spec)
    for choice in ("dual", "bundled", "words", "pixels", "sentence-transformers/"):
        assert choice in raised.value.hint
    assert "did you mean" not in raised.value.hint


@pytest.mark.parametrize("spec", ["pixels", "words", "dual", "bundled", "owner/name:average"])
def test_valid_embedder_names_are_accepted(spec: str) -> None:
    check_embedder(spec)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("bundeld", "bundled"),
        ("bundled:mastr", "bundled:master"),
        ("bundled:Apprentice", "bundled:apprentice"),
        ("master", "bundled:master"),
        ("photo", "bundled:photos"),
        ("bundled:photo", "bundled:photos"),
        ("openai", "openai:NAME"),
        ("opneai:gpt-4o", "openai:gpt-4o"),
        ("OpenAI:gpt-4o", "openai:gpt-4o"),
    ],
)
def test_a_misspelt_model_gets_a_suggestion(typo: str, meant: str) -> None:
    with pytest.raises(SettingError, match=f"model is unknown, got '{typo}'") as raised:
        open_model(typo)
    assert f"did you mean {meant}?" in raised.value.hint


@pytest.mark.parametrize("spec", [*IMPOSSIBLE, "bundled:xyz"])
def test_an_impossible_model_gets_the_choices(spec: str) -> None:
    with pytest.raises(SettingError, match="model is unknown, got") as raised:
        open_model(spec)
    for choice in ("bundled", "bundled:master", "openai:NAME", "OWNER/NAME"):
        assert choice in raised.value.hint


def test_folders_and_hub_ids_are_looked_up(tmp_path: Path) -> None:
    for spec in (str(tmp_path), "owner/name"):
        with pytest.raises(AssertionError, match="a hub was queried"):
            open_model(spec)
        with pytest.raises(AssertionError, match="a hub was queried"):
            open_embedder(spec)


def test_a_missing_preflmr_folder_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "bottega.evaluation.methods.retrieval.FlmrEmbedder",
        lambda name, **_: pytest.fail(name),
    )
    for spec in ("flmr:", "flmr:nowhere", "flmr:./nowhere"):
        with pytest.raises(SettingError, match="PreFLMR checkpoint is unknown, got"):
            open_tokens(spec)


def test_options_of_preflmr_follow_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[dict[str, object]] = []
    monkeypatch.setattr(
        "bottega.evaluation.methods.retrieval.FlmrEmbedder",
        lambda name, **given: opened.append(given),
    )
    open_tokens(f"flmr:{tmp_path}")
    open_tokens(f"flmr:{tmp_path},query_tokens=512,choices=yes,instruction=Look, then answer:")
    names = ("instruction", "query_tokens", "choices")
    assert [[given[name] for name in names] for given in opened] == [
        [INSTRUCTION, None, False],
        ["Look, then answer:", 512, True],
    ]
    for options, problem in (("tokens=5", "no option 'tokens'"), ("choices=all", "choices is")):
        with pytest.raises(SettingError, match=problem):
            open_tokens(f"flmr:{tmp_path},{options}")


def test_a_misspelt_prompt_gets_a_suggestion() -> None:
    with pytest.raises(SettingError) as raised:
        open_prompt("interleave")
    assert "did you mean interleaved?" in raised.value.hint


@pytest.mark.parametrize(
    "command", [("add", "k.db", "pets", "--embed", "pixel"), ("ask", "?", "--model", "bundeld")]
)
def test_a_misspelt_name_is_wrong_usage(run: Run, pets: Path, command: tuple[str, ...]) -> None:
    failed = run(*command)
    assert failed.code == 2
    assert "did you mean" in failed.err
    assert not Path("k.db").exists()


def test_model_spec_holds_the_endpoint_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://user:password@127.0.0.1:9/v1")
    spec = ModelSpec.of("openai:m", concurrency=3)
    assert "secret" not in repr(spec)
    assert "password" not in repr(spec)
    copy = pickle.loads(pickle.dumps(spec))
    monkeypatch.delenv("OPENAI_API_KEY")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:8/v1")
    assert (copy.name, copy.concurrency) == ("openai:m", 3)
    assert (copy.base_url, copy.api_key) == ("http://user:password@127.0.0.1:9/v1", "sk-secret")
    assert ModelSpec.of("bundled") == ModelSpec("bundled")
    assert [copy.share(workers).concurrency for workers in (1, 2, 5)] == [3, 1, 1]
    assert copy.share(2).api_key == "sk-secret"
