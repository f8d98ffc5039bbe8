"""Requirements of the start-up benchmark."""

from __future__ import annotations

import sys

import pytest

from benchmarks import startup
from benchmarks.startup import CLASSIFY, REQUIRED, judged
from tests.paths import ROOT


def test_the_median_is_judged() -> None:
    assert judged(CLASSIFY, [2.4, 2.5, 9.0]) == ("2.5", "met")
    assert judged(CLASSIFY, [2.4, 2.6, 9.0]) == ("2.5", "MISSED")
    assert judged("Python", [9.0]) == ("", "")


@pytest.mark.parametrize("name", REQUIRED)
def test_the_page_has_the_same_rows_and_requirements(name: str) -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    [row] = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
    assert row.split("|")[3].strip() == f"{REQUIRED[name]:g}"


@pytest.mark.parametrize(("seconds", "verdict", "code"), [(2.0, "met", 0), (3.0, "MISSED", 1)])
def test_a_missed_requirement_exits_with_1(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: float,
    verdict: str,
    code: int,
) -> None:
    for variable in ("BOTTEGA_TRACES", "TMPDIR"):  # `main` sets them
        monkeypatch.setenv(variable, "")
    monkeypatch.setattr(sys, "argv", ["startup.py", "--rounds", "1"])
    cases = {CLASSIFY: lambda: (seconds, seconds)}
    monkeypatch.setattr(startup, "prepared_cases", lambda folder: cases)
    with pytest.raises(SystemExit) as ended:
        startup.main()
    assert ended.value.code == code
    first, *_, row = capsys.readouterr().out.splitlines()
    assert first.startswith("2 rounds of ")
    assert row.endswith(f"| 2.5 | {verdict} |")
