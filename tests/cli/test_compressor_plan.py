"""Settings of `bottega compress train`: the preset, and changes on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from bottega.errors import SettingError
from bottega.evaluation.compressor_plan import load_plan
from tests.cli.conftest import Run

CONFIG = """
preset = "paper"
benchmark = "facts:queries=2,episodes=1"
seed = 20000
out = "made"
[training]
steps = 2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(CONFIG)
    return path


def test_paper_preset_replaces_the_defaults(file: Path) -> None:
    plan = load_plan(file)
    top, compressor, training = plan.settings, plan.compressor, plan.training
    assert (top.layer, top.shots, top.batch, top.calibrate, top.pipe) == (-1, 5, 2, 0, True)
    assert (compressor.document_prompts, compressor.query_prompts) == (16, 12)
    assert (compressor.prompting, compressor.start, compressor.blocks) == ("appended", "random", 3)
    assert (training.initial_rate, training.learning_rate) == (1e-5, 1e-4)
    assert (training.warmup_steps, training.distill, training.cache_weight) == (1000, False, 0)
    file.write_text(CONFIG.replace('preset = "paper"\n', ""))
    assert load_plan(file).compressor.start == "similar"


@pytest.mark.parametrize("pipe", [True, False])
@pytest.mark.parametrize("switches", [(False, False, True), (True, True, False)])
def test_rows_of_the_ablation_are_changes(
    file: Path, pipe: bool, switches: tuple[bool, ...]
) -> None:
    names = ("pipe", "compressor.dcvq", "compressor.rgca", "training.prdb")
    values = (pipe, *switches)
    changes = [f"{name}={str(one).lower()}" for name, one in zip(names, values, strict=True)]
    plan = load_plan(file, [*changes, "compressor.query_prompts = 8"])
    parts = plan.compressor
    assert (plan.settings.pipe, parts.dcvq, parts.rgca, plan.training.prdb) == values
    assert (parts.query_prompts, parts.document_prompts, plan.training.steps) == (8, 16, 2)


def test_options_override_changes_and_text_needs_no_quotes(file: Path) -> None:
    changes = ["model=OWNER/one", "benchmark=okvqa:a b", "passages='x.csv'", "out=o"]
    settings = load_plan(file, changes, {"model": "OWNER/two", "hyper": None}).settings
    assert (settings.model, settings.hyper, settings.out) == ("OWNER/two", None, Path("o"))
    assert (settings.benchmark, settings.passages) == ("okvqa:a b", "x.csv")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["training.stepz=3"], "training.stepz is not a setting"),
        (["training.steps=many"], "training.steps must be a whole number, got text"),
        (["steps"], "--set must be NAME=VALUE, got 'steps'"),
        (["=3"], "--set must be NAME=VALUE"),
        (["a b=3"], "--set a b=3 is not valid TOML"),
        (["training=3"], "training must be a table, got 3"),
        (["preset=papers"], "preset must be one of paper, got 'papers'"),
        (["relevance=word"], "relevance must be one of contains, stems, words, got 'word'"),
        (["answer_tokens=0"], "answer_tokens must be at least 1, got 0"),
        (["pipe=false", "compressor.prompting=reading"], "pipe applies to appended prompts"),
    ],
)
def test_wrong_changes_are_reported(file: Path, changes: list[str], expected: str) -> None:
    with pytest.raises(SettingError) as caught:
        load_plan(file, changes)
    assert expected in str(caught.value)
    assert caught.value.hint


def test_dry_run_reads_the_data_and_trains_nothing(run: Run, file: Path) -> None:
    done = run("compress", "train", file, "--dry-run", "--set", "shots=3")
    assert done.code == 0, done.err
    assert "2 training questions, 0 validation questions" in done.out
    assert "bundled compresses a passage into 16 prompts, and 3 passages" in done.out
    assert "2 steps of 2 examples" in done.out
    assert not Path("made").exists()
    refused = run("compress", "train", file, "--dry-run", "--model", "openai:gpt")
    assert (refused.code, "local model, got openai:gpt" in refused.err) == (2, True)
