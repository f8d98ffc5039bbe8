"""BLIP-2 and InstructBLIP by the name of their folder: training, store, figures and answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders import solid_image
from tests.cli.conftest import Run
from tests.generation import tiny_blip
from tests.generation.tiny_blip import blip2_opt, byte_tokenizer

CONFIG = """
benchmark = "jsonl:data"
passages = "corpus.csv"
retrieve = "bm25"
preset = "paper"
shots = 2
out = "made"
[compressor]
document_prompts = 3
query_prompts = 2
[training]
steps = 2
warmup_steps = 1
"""
CITIES = ("Oslo", "Rome", "Lima", "Bonn")
EVAL = (
    *("eval", "jsonl:data", "--passages", "corpus.csv", "--retrieve", "bm25", "--shots", 2),
    *("--prompt", "interleaved", "--max-tokens", 3, "--json", "out.json"),
)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use one thread: several threads wait for each other on a busy machine."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    kinds = ("blip2_opt", "blip2_t5", "instructblip_t5", "instructblip_llama")
    return {name: getattr(tiny_blip, name)(root / name) for name in kinds}


@pytest.fixture(autouse=True)
def data(tmp_path: Path) -> None:
    """Write questions about an image, and passages: text alone, or one with an image."""
    folder = tmp_path / "data"
    folder.mkdir()
    for shade in range(len(CITIES)):
        (folder / f"{shade}.png").write_bytes(solid_image(shade * 40).data)
    rows = [
        {"question": f"Where is it, {city}?", "answer": city, "images": [f"{shade}.png"]}
        for shade, city in enumerate(CITIES)
    ]
    for name, part in (("train", rows[:3]), ("test", rows[3:])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    texts = [f"The house with number {i} stands in {city}." for i, city in enumerate(CITIES)]
    (tmp_path / "corpus.csv").write_text(
        "\n".join(["kid,text", *(f"{i},{text}" for i, text in enumerate(texts))])
    )
    (tmp_path / "c.toml").write_text(CONFIG)
    shown = [{"id": str(i), "text": text} for i, text in enumerate(texts)]
    shown[0]["image"] = shown[1]["image"] = "data/0.png"
    (tmp_path / "wit.jsonl").write_text("\n".join(map(json.dumps, shown)))


def figures(run: Run, *arguments: object) -> dict[str, dict[str, Any]]:
    done = run(*EVAL, *arguments)
    assert done.code == 0, done.err
    return {row["method"]: row for row in json.loads(Path("out.json").read_text())["results"]}


@pytest.mark.parametrize(
    ("base", "hyper"),
    [
        ("blip2_opt", None),
        ("blip2_t5", None),
        ("instructblip_t5", None),
        ("instructblip_llama", None),
        pytest.param("instructblip_llama", "instructblip_t5", marks=pytest.mark.slow),
        pytest.param("instructblip_t5", "blip2_opt", marks=pytest.mark.slow),
    ],
)
def test_models_train_build_and_evaluate_by_name(
    run: Run, models: dict[str, Path], base: str, hyper: str | None
) -> None:
    names = ["--model", models[base], *(["--hyper", models[hyper]] if hyper else [])]
    distilled = f"training.distill={str(bool(hyper)).lower()}"
    trained = run("compress", "train", "c.toml", *names, "--set", distilled)
    assert trained.code == 0, trained.err
    assert "3 training questions, 0 validation questions, 4 passages" in trained.out
    assert "step 2: loss" in trained.err
    assert run("add", "kb.db", "corpus.csv", "--passages", "--embed", "words").code == 0
    built = run(
        *("compress", "build", "kb.db", "--compressor", "made", "--store", "store"),
        *("--model", models[hyper or base]),
    )
    assert (built.code, "4 passages, 4 compressed now" in built.out) == (0, True), built.err
    racc = (*names, "--compressor", "made")
    rows = figures(run, "--methods", "concat,candidates,racc", *racc)
    assert [(row["n"], row["failed"]) for row in rows.values()] == [(1, 0)] * 3
    assert [rows[name]["calls"] for name in ("concat", "candidates", "racc")] == [1, 2, 1]
    stored = figures(run, "--methods", "racc", *racc, "--store", "store")
    assert stored["racc"]["value"] == rows["racc"]["value"]


def test_several_images_in_a_prompt_are_refused_before_the_work(
    run: Run, models: dict[str, Path]
) -> None:
    name = ("--model", models["blip2_opt"])
    wit = (*EVAL[:3], "wit.jsonl", *EVAL[4:], *name)
    for methods, count in (("concat", 3), ("candidates", 2)):
        refused = run(*wit, "--methods", methods)
        assert refused.code == 2
        assert f"reads at most 1 image per prompt, got up to {count}" in refused.err
        assert not Path("out.json").exists()
    # A compressor reads passages one by one.
    passages = ("--set", "passages=wit.jsonl")
    trained = run("compress", "train", "c.toml", *name, *passages)
    assert trained.code == 0, trained.err
    rows = list(map(json.loads, Path("wit.jsonl").read_text().splitlines()))
    text = sum(len(row["text"]) for row in rows) / len(rows)
    image = 2 * Path("data/0.png").stat().st_size / len(rows)  # two of the passages have it
    sizes = f"per passage: {text:.0f} bytes of text and {image:.0f} of images; compressed"
    assert sizes in trained.out
    run("add", "wit.db", "wit.jsonl", "--passages", "--embed", "words")
    build = ("compress", "build", "wit.db", "--compressor", "made", "--store", "store", *name)
    assert sizes in run(*build).out
    summary = run(*build, "--json").json
    assert isinstance(summary, dict)
    assert (summary["text_bytes"], summary["image_bytes"]) == (text, image)
    done = run(*wit, "--methods", "racc", "--compressor", "made")
    assert done.code == 0, done.err
    refused = run("compress", "train", "c.toml", *name, *passages, "--set", "training.distill=true")
    assert (refused.code, "set distill = false" in refused.err) == (2, True)

    images = [part for i in range(2) for part in ("--image", f"data/{i}.png")]
    asked = run("ask", "What is it?", *name, *images)
    assert (asked.code, "reads at most 1 image per prompt, got 2" in asked.err) == (1, True)
    assert run("ask", "What is it?", *name, *images[:2], "--max-tokens", 2).code == 0
    answered = run("answer", "answers.db", "jsonl:data", *name, "--max-tokens", 2)
    assert (answered.code, "answers.db" in answered.out) == (0, True), answered.err


def test_another_tokenizer_is_refused(run: Run, models: dict[str, Path], tmp_path: Path) -> None:
    name = ("--model", models["blip2_opt"])
    assert run("compress", "train", "c.toml", *name).code == 0
    run("add", "kb.db", "corpus.csv", "--passages", "--embed", "words")
    build = ("compress", "build", "kb.db", "--compressor", "made", "--store", "store", "--model")
    other = blip2_opt(tmp_path / "other", tokenizer=byte_tokenizer(reverse=True))
    racc = ("--compressor", "made", "--model", other)
    evaluation = (*EVAL, "--methods", "zero-shot,racc", *racc)
    expected = "another tokenizer of the hyper model"
    for command in ((*build, other), evaluation):
        refused = run(*command)
        assert (refused.code, expected in refused.err) == (1, True)
    assert not Path("store").exists()
    assert run(*build, *name[1:]).code == 0
    asking = ("ask", "Where is Rome?", "--kb", "kb.db", *racc, "--traces", "asked.db")
    for arguments in (evaluation, asking):
        refused = run(*arguments, "--store", "store")
        assert (refused.code, expected in refused.err) == (1, True)
        # Not even another method has answered.
        assert refused.out == "" and not Path("out.json").exists()
    assert not Path("asked.db").exists()


def test_training_continues_with_its_own_settings_only(run: Run, models: dict[str, Path]) -> None:
    train = ("compress", "train", "c.toml", "--model", models["blip2_opt"])
    words = ("--set", "relevance=words")
    assert run(*train, *words).code == 0
    refused = run(*train)
    assert (refused.code, "another relevance" in refused.err) == (1, True)
    assert 'set relevance = "words"' in refused.err
    Path("made/compressor.json").unlink()  # without it, the training is unfinished
    again = run(*train, *words)
    assert (again.code, "resuming from the checkpoint" in again.err) == (0, True)
    refused = run(*train, *words, "--set", "pipe=false")
    assert (refused.code, "another pipe" in refused.err) == (1, True)


def test_long_gold_answers_are_refused(run: Run, models: dict[str, Path]) -> None:
    name = ("--model", models["instructblip_t5"])
    limit = ("--set", "answer_tokens=3")
    refused = run("compress", "train", "c.toml", *name, *limit)
    assert refused.code == 2
    assert "at most 3 tokens, got 5: 'Rome'" in refused.err
    assert "set answer_tokens = 5" in refused.err
    assert not Path("made").exists()


def test_code_of_a_model_runs_only_with_a_flag(
    run: Run, models: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "custom"
    folder.mkdir()
    code = "from pathlib import Path\nPath('ran').touch()\nraise OSError('code ran')\n"
    (folder / "custom.py").write_text(code)
    remote = {"AutoConfig": "custom.Config", "AutoProcessor": "custom.Processor"}
    config = {"model_type": "custom", "auto_map": remote}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "processor_config.json").write_text(json.dumps({"auto_map": remote}))
    ask = ("ask", "What is it?", "--model", folder)
    refused = run(*ask)
    assert (refused.code, "add --trust-remote-code" in refused.err) == (1, True)
    assert not Path("ran").exists()
    run(*ask, "--trust-remote-code")
    assert Path("ran").exists()
