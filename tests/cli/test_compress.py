"""`bottega compress` with the bundled model: stopped, killed, resumed, refused."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bottega._util.durable_files import lock_file
from bottega.bundled import bundled_folder
from bottega.compression import CompressorConfig, PassageStore, StoreManifest, load, save
from bottega.compression.objective import TrainingObjective
from bottega.errors import StoreError
from bottega.evaluation.compressor_plan import load_plan
from bottega.generation.loaded import LoadedModel
from bottega.knowledge import KnowledgeBase
from bottega.kv_prefix import Geometry
from bottega.recipes import racc_store
from bottega.recipes.racc_training import new_compressor, training_objective
from tests.cli.conftest import Run
from tests.knowledge.doubles import SeededEmbedder, text_example
from tests.paths import ROOT

TOP = """
benchmark = "facts:queries=4,episodes=1"
seed = 20000
layer = 1
shots = 3
batch = 2
calibrate = 8
out = "made"
"""
REST = """
[compressor]
document_prompts = 4
query_prompts = 4
prompting = "reading"
[training]
steps = 4
checkpoint_every = 2
warmup_steps = 2
learning_rate = 1e-3
cache_weight = 1.0
hide_scores = 0.5
"""


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    def write(top: str = "", rest: str = "", out: str = "made") -> Path:
        path = tmp_path / "c.toml"
        path.write_text(TOP.replace("made", out) + top + REST + rest)
        return path

    return write


@pytest.fixture(scope="module")
def apprentice() -> LoadedModel:
    return LoadedModel.load(str(bundled_folder()), "cpu", "float32")


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch: pytest.MonkeyPatch, apprentice: LoadedModel) -> None:
    """Load the bundled model once for all commands."""
    real = LoadedModel.load

    def load(source: str, *more: Any) -> LoadedModel:
        return apprentice if source == str(bundled_folder()) else real(source, *more)

    monkeypatch.setattr(LoadedModel, "load", load)


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


class KilledError(Exception):
    pass


def at_loss_call(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], None]) -> None:
    """Run `action` before the given call of the loss."""
    real, calls = TrainingObjective.loss, 0

    def loss(self: TrainingObjective, *given: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == number:
            action()
        return real(self, *given)

    monkeypatch.setattr(TrainingObjective, "loss", loss)


def raise_killed() -> None:
    raise KilledError


def send_interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_resumed_training_has_the_losses_of_an_uninterrupted_run(
    run: Run, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    done = run("compress", "train", write_config(out="uninterrupted"))
    assert (done.code, "parameters, 4 steps of 2 examples" in done.out) == (0, True)
    assert "8 of the first 8 examples have a relevant passage" in done.err
    assert "step 4: loss" in done.err

    expected, before = losses(tmp_path / "uninterrupted"), signal.getsignal(signal.SIGINT)
    for name, number, action, code, steps in (
        ("stopped", 1, send_interrupt, 130, 1),
        ("killed", 4, raise_killed, 1, 3),  # a step after the checkpoint
    ):
        with pytest.MonkeyPatch.context() as patch:
            at_loss_call(patch, number, action)
            cut = run("compress", "train", write_config(out=name))
        assert (cut.code, len(losses(tmp_path / name))) == (code, steps)
        assert not (tmp_path / name / "compressor.json").exists()
        assert signal.getsignal(signal.SIGINT) == before
        rest = run("compress", "train", write_config(out=name))
        assert (rest.code, "resuming from the checkpoint" in rest.err) == (0, True)
        assert losses(tmp_path / name) == pytest.approx(expected, abs=1e-5)
        one, other = (
            load(tmp_path / folder).racc.state_dict() for folder in (name, "uninterrupted")
        )
        for weight in one:
            torch.testing.assert_close(one[weight], other[weight], atol=1e-3, rtol=1e-2)

    lines = (tmp_path / "uninterrupted" / "losses.jsonl").read_text()
    assert run("compress", "train", write_config(out="uninterrupted")).code == 0
    assert (tmp_path / "uninterrupted" / "losses.jsonl").read_text() == lines  # no steps were left


@pytest.mark.slow
def test_a_finished_compressor_is_not_trained_again(
    run: Run, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    assert run("compress", "train", write_config()).code == 0
    (tmp_path / "made" / "checkpoint.pt").unlink()
    before = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    again = run("compress", "train", write_config())
    assert (again.code, "made holds the finished compressor" in again.err) == (0, True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()} == before


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("file", ["training.json.new", "losses.jsonl", "compressor.json.new"])
def test_a_full_disk_is_reported(
    run: Run, write_config: Callable[..., Path], tmp_path: Path, file: str
) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / file).symlink_to("/dev/full")
    done = run("compress", "train", write_config())
    assert done.code == 1
    assert "made cannot be read or written: No space left on device" in done.err
    assert "free disk space" in done.err


def test_a_folder_with_another_training_is_rejected(
    run: Run, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "compressor.json").write_text("{}")
    done = run("compress", "train", write_config())
    assert (done.code, "from another training" in done.err) == (1, True)
    (tmp_path / "made" / "compressor.json").unlink()
    (tmp_path / "made" / "training.json").write_text('{"batch": 2, "seed": 7}')
    done = run("compress", "train", write_config())
    assert done.code == 1
    assert "another benchmark" in done.err and "another seed" in done.err
    assert "another batch" not in done.err


@pytest.mark.slow
def test_training_reads_retrieved_passages(
    run: Run, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    """Custom questions, passages from a file, appended prompts, answer loss only."""
    cities = ("Oslo", "Rome", "Lima", "Bonn", "Riga", "Kyiv")
    rows = [{"question": f"Where is it, {city}?", "answer": city} for city in cities]
    for name, part in (("train", rows[:5]), ("test", rows[5:])):
        text = "\n".join(json.dumps(row) for row in part)
        (tmp_path / f"{name}.jsonl").write_text(text)
    lines = [f"{i},The house with number {i} stands in {city}." for i, city in enumerate(cities)]
    (tmp_path / "corpus.csv").write_text("\n".join(["kid,text", *lines]))
    config = tmp_path / "own.toml"
    config.write_text(
        f'benchmark = "jsonl:{tmp_path}"\npassages = "corpus.csv"\nretrieve = "bm25"\nout = "own"\n'
        "shots = 2\ncalibrate = 8\nvalidate = 2\n"
        "[compressor]\ndocument_prompts = 3\nquery_prompts = 3\n"
        "[training]\nsteps = 2\nvalidate_every = 1\nwarmup_steps = 1\n"
    )
    done = run("compress", "train", config)
    assert done.code == 0, done.err
    assert "3 training questions, 2 validation questions, 6 passages" in done.out
    assert "8 of the first 8 examples have a relevant passage" in done.err
    assert "validation" in done.err
    assert load(tmp_path / "own").racc.config.prompting == "appended"


def test_one_process_trains_in_a_folder(
    run: Run, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "made").mkdir()
    other = lock_file(tmp_path / "made" / "lock")
    assert other is not None
    with other:
        done = run("compress", "train", write_config())
    assert (done.code, "another process is training the compressor in made" in done.err) == (
        1,
        True,
    )
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["lock"]


def test_an_interruption_before_the_first_step_says_how_to_resume(
    run: Run, write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingObjective, "calibrate", lambda *_: send_interrupt())
    stopped = run("compress", "train", write_config())
    assert stopped.code == 130
    assert stopped.err.endswith(
        "interrupted: made keeps the last checkpoint, if any; repeat the command to resume\n"
    )


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("shots=7", "shots must be at most the number of passages (6), got 7"),
        ("retrieve=image", "retrieval by image needs images, got 11 questions or passages"),
    ],
)
def test_unusable_data_is_rejected_before_a_model_is_loaded(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    expected: str,
    more: tuple[str, ...],
) -> None:
    monkeypatch.setattr(LoadedModel, "load", raise_killed)
    for name, numbers in (("train", range(5)), ("test", range(5, 6))):
        rows = [{"question": f"Where is n{number}?", "answer": "Oslo"} for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    texts = [json.dumps({"text": f"The house n{number} stands in Oslo."}) for number in range(6)]
    (tmp_path / "passages.jsonl").write_text("\n".join(texts))
    (tmp_path / "c.toml").write_text(
        f'benchmark = "jsonl:{tmp_path}"\npassages = "passages.jsonl"\nout = "made"\n'
        "[training]\nsteps = 1\n"
    )
    done = run("compress", "train", "c.toml", "--set", setting, *more)
    assert (done.code, expected in done.err) == (2, True)
    assert ("(retrieve or --retrieve) to text" in done.err) == (setting == "retrieve=image")


def test_training_shows_all_passages_that_the_benchmark_scores(
    run: Run, write_config: Callable[..., Path]
) -> None:
    task = "benchmark=contradictions:queries=2,episodes=1,passages=4"
    done = run("compress", "train", write_config(), "--set", task)
    assert done.code == 2
    assert "shots must be at least the number of scored passages (4), got 3" in done.err


@pytest.mark.parametrize(
    ("top", "rest", "expected", "hint"),
    [
        ("sede = 1", "", "c.toml: sede is not a setting", "did you mean seed?"),
        ("", "stepz = 3", "training.stepz is not a setting", "did you mean steps?"),
        ("", "[compresser]", "compresser is not a setting", "did you mean compressor?"),
        ("validate = 2", "", "validate needs validate_every in [training]", "validate_every = 100"),
        ("", "validate_every = 2", "needs validation questions", "validate = 50"),
        ('retrieve = "bm52"', "", "retrieve must be one of", "did you mean bm25?"),
        ("seed = -1", "", "seed must be at least 0, got -1", "seed = 0"),
        ("seed = 0", "", "has no training questions", "seed = 20000"),
        ('out = ""', "", "out is empty", "name a folder"),
        ("embed = 3", "", "embed must be text, got 3", "embed ="),
        ('model = "openai:gpt"', "", "local model, got openai:gpt", "bundled, a folder"),
        ('hyper = "openai:gpt"', "", "local model, got openai:gpt", "bundled, a folder"),
        ("layer = 99", "", "layer does not exist, got 99", "-1 (the last)"),
    ],
)
def test_invalid_settings_are_reported(
    run: Run, write_config: Callable[..., Path], top: str, rest: str, expected: str, hint: str
) -> None:
    path = write_config(top, rest)
    usual = {"layer": "layer = 1\n", "seed": "seed = 20000\n", "out": 'out = "made"\n'}
    if (given := top.partition(" ")[0]) in usual:
        path.write_text(path.read_text().replace(usual[given], "", 1))
    done = run("compress", "train", path)
    assert done.code == 2
    assert expected in done.err and hint in done.err


def test_documented_files_are_valid(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "compression.md").read_text("utf-8")
    examples = re.findall(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(examples) == 2
    for number, example in enumerate(examples):
        (tmp_path / f"{number}.toml").write_text(example)
    facts, okvqa = (load_plan(tmp_path / f"{number}.toml") for number in range(2))
    assert facts.settings.benchmark.startswith("facts")
    assert (okvqa.compressor.document_prompts, okvqa.compressor.query_prompts) == (16, 12)
    assert (okvqa.settings.shots, okvqa.training.warmup_steps, okvqa.training.prdb) == (
        5,
        1000,
        True,
    )


def test_missing_settings_are_reported(run: Run, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('out = "x"\n[training]\nsteps = 1\n')
    assert "benchmark is missing" in run("compress", "train", "c.toml").err
    (tmp_path / "c.toml").write_text('benchmark = "facts"\nout = "x"\n[compressor]\nstart = "cold"')
    assert "training.steps is missing" in run("compress", "train", "c.toml").err
    (tmp_path / "c.toml").write_text((tmp_path / "c.toml").read_text() + "\n[training]\nsteps = 1")
    assert (
        "compressor.start must be one of similar, random" in run("compress", "train", "c.toml").err
    )
    assert "no.toml cannot be read" in run("compress", "train", "no.toml").err


@pytest.fixture
def compressor(apprentice: LoadedModel, tmp_path: Path) -> Path:
    return saved_compressor(apprentice, tmp_path / "compressor", seed=0)


def saved_compressor(
    model: LoadedModel, folder: Path, seed: int, hyper: LoadedModel | None = None
) -> Path:
    objective = training_objective(model, hyper, layer=1)
    config = CompressorConfig(
        objective.hyper.width, Geometry.of(model.model), 4, 4, prompting="reading"
    )
    save(
        new_compressor(config, objective, seed=seed),
        folder,
        hyper=objective.hyper,
        base=model.model,
    )
    return folder


def test_only_new_passages_are_compressed(
    run: Run, compressor: Path, apprentice: LoadedModel, tmp_path: Path
) -> None:
    with KnowledgeBase.open(tmp_path / "kb.db", SeededEmbedder()) as kb:
        kb.add([text_example(f"The home of n{i} is h{i}.", "") for i in range(70)])
        kb.add([text_example("What is its home?", "h3")])
    command = ("compress", "build", "kb.db", "--compressor", compressor, "--store", "store")
    first = run(*command)
    assert first.code == 0, first.err
    assert "70 passages, 70 compressed now, 70 in store" in first.out
    width = load(compressor).racc.config.width
    text = sum(len(f"The home of n{i} is h{i}.") for i in range(70)) / 70
    assert (
        f"per passage: {text:.0f} bytes of text and 0 of images; compressed {8 * width} as fp16"
        f" ({8 * width / text:.1%}), {4 * width + 16} as int8 ({(4 * width + 16) / text:.1%})"
    ) in first.out
    assert run(*command, "--json").json["compressed"] == 0  # type: ignore[index]
    with KnowledgeBase.open(tmp_path / "kb.db", SeededEmbedder()) as kb:
        kb.delete([kb.ids()[3]])
        kb.add([text_example("The home of n3 is far away.", "")])
        passages = [(str(one.id), one) for one in kb if not one.answer]
    again = run(*command, "--json")
    assert {name: again.json[name] for name in ("passages", "compressed")} == {  # type: ignore[index]
        "passages": 70,
        "compressed": 1,
    }
    assert run(*command, "--all", "--json").json["compressed"] == 1  # type: ignore[index]
    saved = load(compressor)
    store = PassageStore(tmp_path / "store", StoreManifest(saved.digest, 4, width))
    assert store.get(passages).shape == (70, 4, width)
    with KnowledgeBase.open(tmp_path / "kb.db", SeededEmbedder()) as kb:
        [answered] = [example for example in kb if example.answer]
    assert store.get([(str(answered.id), answered)]).shape == (1, 4, width)
    with pytest.raises(StoreError, match="changed"):
        store.get([(str(answered.id), replace(answered, answer="h4"))])

    other = saved_compressor(apprentice, tmp_path / "other", seed=1)
    for wrong in ((*command[:3], "--compressor", other, *command[5:]), (*command, "--int8")):
        for more in ((), ("--dry-run",)):
            refused = run(*wrong, *more)
            assert (refused.code, "store was built with" in refused.err) == (1, True)


def test_an_interrupted_build_says_what_it_keeps(
    run: Run, compressor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KnowledgeBase.open(tmp_path / "kb.db", SeededEmbedder()) as kb:
        kb.add([text_example(f"The home of n{i} is h{i}.", "") for i in range(5)])
    compress, calls = racc_store.StoreBuilder._compress, []

    def interrupted(self: racc_store.StoreBuilder, batch: Any) -> Tensor | None:
        calls.append(batch)
        if len(calls) == 2:
            send_interrupt()
        return compress(self, batch)

    monkeypatch.setattr(racc_store, "BATCH", 2)
    monkeypatch.setattr(racc_store.StoreBuilder, "_compress", interrupted)
    command = ("compress", "build", "kb.db", "--compressor", compressor, "--store", "store")
    stopped = run(*command)
    kept = (
        "interrupted: 2 of 5 examples of kb.db are done, and store keeps their compressed passages;"
        " repeat the command to compress the rest"
    )
    assert (stopped.code, stopped.err) == (130, f"{kept}\n")
    assert "5 passages, 3 compressed now, 5 in store" in run(*command).out


def test_the_int8_error_is_reported(run: Run, compressor: Path, tmp_path: Path) -> None:
    with KnowledgeBase.open(tmp_path / "kb.db", SeededEmbedder()) as kb:
        kb.add([text_example(f"The home of n{i} is h{i}.", "") for i in range(3)])
    command = ("compress", "build", "kb.db", "--compressor", compressor, "--store", "store")
    done = run(*command, "--int8", "--json")
    assert 0.0005 < done.json["int8_error"] < 0.05  # type: ignore[index]
    assert run(*command, "--int8", "--json").json["int8_error"] is None  # type: ignore[index]
    manifest = StoreManifest.for_store(tmp_path / "store", "a", 4, 8)
    assert manifest.precision == "int8"


def test_another_model_is_rejected(run: Run, compressor: Path, tmp_path: Path) -> None:
    with KnowledgeBase.open(tmp_path / "kb.db", SeededEmbedder()) as kb:
        kb.add([text_example("What is its home?", "h3")])
    command = ("compress", "build", "kb.db", "--compressor", compressor, "--store", "store")
    wrong = run(*command, "--model", "bundled:master")
    assert (wrong.code, "another hyper model" in wrong.err) == (1, True)
    assert "local model, got" in run(*command, "--model", "openai:m").err
    none = run(*command)
    assert (none.code, "compress them as demonstrations with --all" in none.err) == (0, True)
    assert run(*command, "--dry-run").err == none.err


def test_eval_requires_the_hyper_model_of_training(
    run: Run, apprentice: LoadedModel, compressor: Path, tmp_path: Path
) -> None:
    master = LoadedModel.load(str(bundled_folder("master")), "cpu", "float32")
    pair = saved_compressor(apprentice, tmp_path / "pair", seed=0, hyper=master)
    command = ("eval", "facts:queries=1,episodes=1", "--shots", 2, "--compressor")
    racc = ("--methods", "racc")

    done = run(*command, pair, *racc, "--hyper", "bundled:master", "--json", "out.json")
    assert done.code == 0, done.err
    document = json.loads((tmp_path / "out.json").read_text())
    assert (document["model"], document["hyper"]) == ("bundled:apprentice", "bundled:master")
    assert [(one["method"], one["calls"]) for one in document["results"]] == [("racc", 1)]

    for wrong, code, expected in (
        ((pair, *racc), 1, "another hyper model"),
        ((compressor, *racc, "--hyper", "bundled:master"), 1, "another hyper model"),
        ((pair, *racc, "--hyper", "openai:m"), 2, "local model, got openai:m"),
        ((pair, "--methods", "concat", "--hyper", "bundled:master"), 2, "--hyper needs a method"),
        ((pair, "--hyper", "bundled:master"), 2, "--hyper needs a method"),
    ):
        refused = run(*command, *wrong)
        assert (refused.code, expected in refused.err) == (code, True), refused.err


def test_a_run_rejects_another_compressor_at_the_same_path(
    run: Run, compressor: Path, apprentice: LoadedModel, tmp_path: Path
) -> None:
    command = ("eval", "facts:queries=1,episodes=1", "--shots", 2, "--methods", "racc")
    kept = (*command, "--compressor", compressor, "--out", "run")
    assert run(*kept).code == 0
    assert run(*kept).code == 0
    saved_compressor(apprentice, compressor, seed=1)
    refused = run(*kept)
    assert (refused.code, "a run with the content of --compressor" in refused.err) == (2, True)

    absent = run(*command, "--compressor", "nowhere")
    assert (absent.code, "there is no compressor in nowhere" in absent.err) == (1, True)
    for_none = run(*command[:-1], "concat", "--compressor", compressor)
    assert (for_none.code, "--compressor needs a method" in for_none.err) == (2, True)
