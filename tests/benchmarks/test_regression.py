"""Comparison of benchmarks with recorded ratios."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import regression
from benchmarks.late_interaction import line
from benchmarks.regression import (
    BENCHMARKS,
    RECORD,
    Ratio,
    Recorded,
    compared,
    missed,
    of_late_interaction,
    of_racc,
    processor,
)


def recorded(*values: float, at_least: bool = True) -> Recorded:
    return Recorded.of([Ratio("a", value, at_least) for value in values])


def test_only_ratios_beyond_the_recorded_noise_are_worse() -> None:
    lower = recorded(1.2, 1.0, 1.1, at_least=False)
    assert lower.limit("a") == pytest.approx(1.4)
    assert [lower.is_worse("a", value) for value in (0.1, 1.39, 1.41)] == [False, False, True]
    higher = recorded(4.0, 4.0)
    assert higher.limit("a") == pytest.approx(3.8)  # at least 5 % noise
    assert [higher.is_worse("a", value) for value in (9.0, 3.81, 3.79)] == [False, False, True]


def test_recall_has_no_relative_noise() -> None:
    assert recorded(0.98, 0.99, 1.0).limit("HNSW recall") == pytest.approx(0.975)
    # A ratio of two recalls may exceed 1.
    assert recorded(1.1, 1.1).limit("recall over that") == pytest.approx(1.045)


@pytest.mark.parametrize(
    ("name", "values", "exemption"),
    [
        ("a", (4.0, 4.4, 5.0), ""),
        ("a", (2.5, 5.7, 5.8), "too noisy to judge"),
        ("HNSW recall", (0.1, 0.5, 0.9), ""),
        ("acknowledged rows missing", (0.0, 0.0, 0.0), ""),
        ("exact repeat: p99 / p50, text, 1 at once", (6.0, 6.1, 6.2), "information only"),
        ("longest search while rebuilding / rebuilding", (0.1, 0.1), "information only"),
    ],
)
def test_noisy_and_informational_ratios_are_exempt(
    name: str, values: tuple[float, ...], exemption: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = recorded(*values)
    assert before.exemption(name) == exemption
    worse = list(compared("stores", {name: recorded(-1.0)}, {name: vars(before)}))
    assert bool(worse) is not bool(exemption)
    assert capsys.readouterr().out.rstrip().endswith(exemption)


def test_worse_new_and_missing_ratios_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    measured = {name: recorded(2.0, at_least=False) for name in ("slow / fast", "new / old")}
    before = {name: vars(recorded(1.0, at_least=False)) for name in ("slow / fast", "gone / old")}
    worse, gone = compared("stores", measured, before)
    assert worse.startswith("WORSE stores: slow / fast: 2, recorded 1 ")
    assert gone.startswith("NOT MEASURED stores: gone / old: ")
    assert "new / old: 2, not recorded" in capsys.readouterr().out


def test_missed_requirements_are_named() -> None:
    ratios = {
        "fast": [Ratio("fast", value, True, 3.3) for value in (3.0, 3.2, 3.4)],
        "small": [Ratio("small", value, False, 1.1) for value in (1.0, 1.05, 1.2)],
        "free": [Ratio("free", 0.0, True)],
    }
    expected = "missed requirement: racc: fast: 3.2, required at least 3.3"
    assert list(missed("racc", ratios)) == [expected]


def test_requirements_of_late_interaction_and_racc_are_read() -> None:
    late = [line("fast", 3.0, 3.3), line("free", 1.0, None), {"name": "peer", "skipped": "no"}]
    assert list(of_late_interaction({"lines": late})) == [
        Ratio("fast", 3.0, True, 3.3),
        Ratio("free", 1.0, True, None),
    ]
    bars = [
        {"name": "concatenation / stored", "value": 5.0, "bar": 4.3, "met": True},
        {"name": "candidates / stored", "value": 3.0, "bar": 4.0, "met": False},
    ]
    assert list(of_racc({"lines": [{"name": "stored", "faster": 5.0}], "bars": bars})) == [
        Ratio("concatenation / stored", 5.0, True, 4.3),
        Ratio("candidates / stored", 3.0, True, 4.0),
    ]


def test_recorded_ratios_are_of_known_benchmarks() -> None:
    for machine in json.loads(RECORD.read_text()).values():
        assert machine.keys() <= BENCHMARKS.keys()
        for ratios in machine.values():
            assert ratios
            for ratio in ratios.values():
                one = Recorded(**ratio)
                assert one.low <= one.median <= one.high


def prepare(
    monkeypatch: pytest.MonkeyPatch, folder: Path, script: str, record: Mapping[str, Any]
) -> None:
    """Replace racc.py and the recorded ratios, and compare racc only."""
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "racc.py").write_text(script)
    (folder / "record.json").write_text(json.dumps(record))
    monkeypatch.setattr(regression, "ROOT", folder)
    monkeypatch.setattr(regression, "RECORD", folder / "record.json")
    monkeypatch.setattr(sys, "argv", ["regression.py", "--only", "racc"])


# Reports a speed-up of 3 on one thread and misses a requirement of 4.
MISSING = """
import json, os, pathlib, sys
bar = {"name": "concatenation / stored", "value": 3.0, "bar": 4.0, "met": False}
if os.environ["OMP_NUM_THREADS"] == "1":
    document = {"lines": [{"name": "stored", "faster": 3.0}], "bars": [bar]}
    pathlib.Path(sys.argv[-1]).write_text(json.dumps(document))
sys.exit(1)
"""


@pytest.mark.parametrize(("before", "status"), [(3.0, 0), (6.0, 1)])
def test_only_a_worse_ratio_sets_the_exit_status(
    before: float,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ratios = {"concatenation / stored": vars(recorded(before))}
    prepare(monkeypatch, tmp_path, MISSING, {processor(): {"racc": ratios}})

    with pytest.raises(SystemExit) as left:
        regression.main()

    assert left.value.code == status
    shown = capsys.readouterr().out.splitlines()
    requirement = "missed requirement: racc: concatenation / stored: 3, required at least 4"
    assert requirement in shown
    assert sum(one.startswith("load average") for one in shown) == 2
    advice = "repeat with --only racc --runs 3 on a quiet machine"
    assert shown[-1] == (advice if status else "no ratio is worse than recorded")


def test_missing_records_are_found_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(monkeypatch, tmp_path, MISSING, {"another processor": {"racc": {}}})
    with pytest.raises(SystemExit, match=r"no ratios of racc are recorded for .*--record"):
        regression.main()
    assert capsys.readouterr().out == ""


def test_failure_of_a_benchmark_shows_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(monkeypatch, tmp_path, "raise SystemExit('no such model')", {})
    with pytest.raises(SystemExit, match=r"racc failed:\n.*no such model"):
        regression.measure("racc", 1)


def test_a_benchmark_without_ratios_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = '{"lines": [], "bars": []}'
    script = f"import sys, pathlib; pathlib.Path(sys.argv[-1]).write_text({document!r})"
    prepare(monkeypatch, tmp_path, script, {})
    with pytest.raises(SystemExit, match="racc reported no ratios"):
        regression.measure("racc", 1)
