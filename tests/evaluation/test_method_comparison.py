"""Comparisons and streams in Python: the same as `bottega eval` and `stream`, without printing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bottega.errors import BottegaError, SettingError
from bottega.evaluation import Display, RunConfig
from bottega.evaluation.method_comparison import MethodComparison
from bottega.evaluation.streams.stream_plan import StreamConfig
from bottega.evaluation.streams.stream_run import StreamRun
from tests.server import Server, ok

CONFIG = RunConfig("digits", methods=("vote", "knn"), shots=(3,), limit=5, embed="pixels")


def test_a_comparison_prints_nothing_and_keeps_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes: list[str] = []
    stages: list[tuple[str, int | None]] = []

    @contextmanager
    def progress(title: str, total: int | None, **_: object) -> Iterator[object]:
        stages.append((title, total))
        yield lambda steps, cost_usd=0.0, /: None

    display = Display(note=notes.append, progress=progress)  # type: ignore[arg-type]
    comparison = MethodComparison(CONFIG, display=display)
    first = comparison.run(out=tmp_path)
    assert [(one.method, one.shots, one.n) for one in first] == [("vote", 3, 5), ("knn", 3, 5)]
    assert [(one.method, one.against) for one in comparison.differences] == [("knn", "vote")]
    assert (comparison.stored, comparison.failures, comparison.skipped) == (10, [], 0)
    assert ("vote 3", 5) in stages and any(note.startswith("knn 3: ") for note in notes)
    again = MethodComparison(CONFIG, display=display)
    assert [one.value for one in again.run(out=tmp_path)] == [one.value for one in first]
    assert f"10 stored answers in {tmp_path} are reused" in notes
    assert capsys.readouterr() == ("", "")


def test_settings_that_are_not_set_are_chosen() -> None:
    chosen = MethodComparison(RunConfig("digits", limit=5)).config
    assert (chosen.shots, chosen.embed, chosen.order) == ((5, 10, 20), "bundled", "nearest-last")
    assert chosen.methods[0] == "zero-shot" and chosen.max_tokens is not None
    with pytest.raises(SettingError, match="needs a function"):
        MethodComparison(RunConfig("digits", methods=("custom",), limit=5))


def test_streams_ask_before_they_pay_and_print_nothing(
    endpoint: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
    endpoint.answers = [ok("Answer: 3")]
    config = StreamConfig(
        "digits",
        tiers=("openai:small", "openai:large"),
        rates=(0.5,),
        controls=(),
        orders=1,
        limit=4,
        embed="pixels",
    )

    class DeclinedError(BottegaError):
        pass

    def decline(requests: int, cost_usd: float | None) -> None:
        assert (requests > 0, cost_usd) == (True, None)
        raise DeclinedError("declined")

    with pytest.raises(DeclinedError):
        StreamRun(config).execute(confirm=decline)
    assert endpoint.bodies == []
    run = StreamRun(config)
    (point,) = run.execute()
    assert (point.n, len(run.results), run.failed) == (4, 1, 0)
    assert len(run.replies) == len(endpoint.bodies)
    assert capsys.readouterr() == ("", "")
