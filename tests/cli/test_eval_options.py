"""Checks of the options of `bottega eval`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.server import Server, ok


def test_a_question_for_a_benchmark_with_its_own_is_rejected(run: Run) -> None:
    done = run("eval", "digits", "--question", "Which class?")
    assert done.code == 2
    assert "--question" in done.err and "image-folder" in done.err


def test_options_that_would_change_the_question_are_rejected(run: Run, pets: Path) -> None:
    benchmark = f"image-folder:{pets}"
    done = run("eval", benchmark, "--question", "Cat?", "--unparsable", "random")
    assert done.code == 2
    assert "--unparsable" in done.err and "mmmu" in done.err
    done = run("eval", f"{benchmark},question=Cat?", "--unparsable", "random")
    assert done.code == 2
    done = run("eval", f"{benchmark},question=Cat?", "--question", "Dog?")
    assert done.code == 2
    assert "question" in done.err and "Dog?" in done.err


@pytest.mark.parametrize("path", [".", "nowhere/f.json"])
def test_unwritable_outputs_are_rejected_before_the_run(run: Run, path: str) -> None:
    assert run("eval", "digits", "--json", path).code == 2
    assert run("demo", "--out", path).code == 2


def test_demo_needs_two_classes(run: Run, tmp_path: Path, pets: Path) -> None:
    (tmp_path / "one").mkdir()
    (pets / "leaf").rename(tmp_path / "one" / "leaf")
    done = run("demo", "--folder", tmp_path / "one")
    assert done.code == 1
    assert "has the label 'leaf' only" in done.err


def test_json_needs_a_file_name(run: Run) -> None:
    done = run("eval", "digits", "--json", "--limit", "5")
    assert (done.code, "--json needs a file name, got '--limit'" in done.err) == (2, True)


@pytest.mark.parametrize(
    "wrong",
    [
        ("glyphs:way=3",),
        ("rules", "--retrieve", "sound"),
        ("rules", "--retrieve", "hybrid", "--embed", "pixels"),
        ("rules", "--label-noise", "2"),
        ("facts:episodes=1", "--label-noise", "0.2"),
        ("glyphs:",),
        ("glyphs:ways=5,ways=10",),
        ("glyphs:ways=100,shots=50",),
        ("facts:episodes=1", "--methods", "visual-rag"),
        ("facts:episodes=1", "--methods", "vote"),
        ("digits", "--methods", "oracle"),
    ],
)
def test_eval_rejects_invalid_requests(run: Run, wrong: tuple[str, ...]) -> None:
    assert run("eval", *wrong).code == 2


def test_a_similar_benchmark_is_suggested(run: Run) -> None:
    done = run("eval", "imagefolder:pets")
    assert done.code == 2 and "did you mean image-folder:pets?" in done.err


def test_a_folder_with_one_split_gets_a_hint(run: Run, pets: Path) -> None:
    half = pets.parent / "half"
    half.mkdir()
    pets.rename(half / "train")
    done = run("eval", f"image-folder:{half}")
    assert done.code == 1 and f"run bottega eval image-folder:{half / 'train'}" in done.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shots", "2,101"), "a search must select at most 100 demonstrations, got 101"),
        (("--exploration", "inf"), "exploration must be finite and at least 0, got inf"),
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_searches_are_checked_before_any_request(
    run: Run, served: Server, options: tuple[str, ...], message: str, dry: tuple[str, ...]
) -> None:
    common = ("--limit", 2, "--methods", "top-k,rcts", "--model", "openai:m")
    refused = run("eval", "codes:notebooks=5", *common, *options, *dry)
    assert (refused.code, message in refused.err) == (2, True), refused.err
    assert not served.bodies and "top-k" not in refused.out


def test_a_compressor_of_another_model_is_refused_before_any_answer(run: Run) -> None:
    refused = run(
        *("eval", "facts:episodes=1", "--limit", 2, "--methods", "concat,racc", "--shots", 2),
        *("--model", "bundled:master", "--retrieve", "text"),
    )
    assert "this compressor was trained with another model" in refused.err
    assert refused.code == 1 and "concat" not in refused.out


def test_another_setting_of_the_search_is_named(run: Run, served: Server) -> None:
    served.answers = [ok("Answer Choice: A")]
    common = (
        *("eval", "codes:notebooks=5", "--limit", 1, "--methods", "top-k,rcts", "--shots", 2),
        *("--model", "openai:m", "--out", "kept"),
    )
    assert run(*common).code == 0
    refused = run(*common, "--alpha", 0.9)
    assert "kept holds a run with --alpha unset, got 0.9" in refused.err


def test_alpha_without_two_rewards_is_refused(run: Run) -> None:
    task = "rules:episodes=1,examples=4,queries=2"
    command = ("eval", task, "--methods", "rcts", "--alpha", "0.5", "--dry-run")
    for reward in ((), ("--reward", "mutual")):
        refused = run(*command, *reward)
        assert (refused.code, "set --reward both" in refused.err) == (2, True)
    assert run(*command, "--reward", "both").code == 0


@pytest.mark.parametrize(
    ("methods", "options", "message"),
    [
        ("top-k", "--children 20", "--children needs rcts, got top-k"),
        ("rcts-flat", "--no-early-stop", "--no-early-stop needs rcts, got rcts-flat"),
        ("top-k,majority", "--fetch 30", "--fetch needs rcts or rcts-flat or"),
        ("zero-shot", "--preset released", "remove --preset, or add rcts to --methods"),
        ("rcts", "--samples 9", "--samples needs majority or best-of-n, got rcts"),
        (
            "rcts",
            "--reward self",
            "after demonstrations with rationales; those of codes:notebooks=5 show none",
        ),
        ("rcts", "--reward both --alpha 0.3", "set --reward ensemble or mutual"),
        ("rcts-flat", "--variant released", "got rcts-flat with the reward ensemble"),
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_options_without_effect_are_refused(
    run: Run, methods: str, options: str, message: str, dry: tuple[str, ...]
) -> None:
    refused = run(
        "eval", "codes:notebooks=5", "--limit", 1, "--methods", methods, *options.split(), *dry
    )
    assert (refused.code, message in refused.err) == (2, True), refused.err
    assert not refused.out


@pytest.mark.parametrize(
    ("task", "methods", "options"),
    [
        (
            "codes:notebooks=5",
            "rcts,majority",
            "--children 20 --no-early-stop --fetch 30 --samples 9",
        ),
        ("codes:notebooks=5", "rcts", "--variant released"),
        ("codes:notebooks=5", "rcts-flat", "--variant released --reward mutual"),
        ("rules:episodes=1", "rcts-random", "--reward self"),  # its examples have rationales
    ],
)
def test_options_with_an_effect_are_accepted(
    run: Run, task: str, methods: str, options: str
) -> None:
    planned = run("eval", task, "--limit", 1, "--methods", methods, *options.split(), "--dry-run")
    assert planned.code == 0, planned.err
