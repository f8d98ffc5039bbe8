"""Comparison of benchmarks with recorded ratios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import regression
from benchmarks.regression import BENCHMARKS, RECORD, Ratio, Recorded, compared


def test_only_ratios_beyond_the_recorded_noise_are_worse() -> None:
    lower = Recorded.of([Ratio("a", value, False) for value in (1.2, 1.0, 1.1)])
    assert lower.limit() == pytest.approx(1.4)
    assert [lower.is_worse(value) for value in (0.1, 1.39, 1.41)] == [False, False, True]
    higher = Recorded.of([Ratio("a", value, True) for value in (4.0, 4.0)])
    assert higher.limit() == pytest.approx(3.8)  # at least 5 % noise
    assert [higher.is_worse(value) for value in (9.0, 3.81, 3.79)] == [False, False, True]


def test_worse_and_new_ratios_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    measured = {
        name: Recorded.of([Ratio(name, 2.0, False)]) for name in ("slow / fast", "new / old")
    }
    recorded = {"slow / fast": {"low": 1.0, "median": 1.0, "high": 1.0, "at_least": False}}
    [line] = compared("stores", measured, recorded)
    assert line.startswith("WORSE stores: slow / fast: 2, recorded 1 ")
    assert "new / old: 2, not recorded" in capsys.readouterr().out


def test_recorded_ratios_are_of_known_benchmarks() -> None:
    for machine in json.loads(RECORD.read_text()).values():
        assert machine.keys() <= BENCHMARKS.keys()
        for ratios in machine.values():
            assert ratios
            for ratio in ratios.values():
                one = Recorded(**ratio)
                assert one.low <= one.median <= one.high


def test_failure_of_a_benchmark_shows_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "racc.py").write_text("raise SystemExit('no such model')")
    monkeypatch.setattr(regression, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"racc failed:\n.*no such model"):
        regression.measure("racc", 1)


def test_a_benchmark_without_ratios_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "benchmarks").mkdir()
    script = "import sys, pathlib; pathlib.Path(sys.argv[-1]).write_text('{\"lines\": []}')"
    (tmp_path / "benchmarks" / "racc.py").write_text(script)
    monkeypatch.setattr(regression, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="racc gave no ratios"):
        regression.measure("racc", 1)
