"""Progress in Python: a callback, or a bar on standard error."""

from __future__ import annotations

import pytest

from bottega._util.progress import no_stages, plural, showing_progress, size_of


def test_a_callback_receives_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    received: list[int] = []
    with showing_progress("Adding", 5, received.append) as step:
        step(2)
        step(3)
    assert received == [2, 3]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("total", "shown"), [(5, "4/5"), (None, "4/?")])
def test_a_bar_is_written_to_standard_error(
    total: int | None, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with showing_progress("Adding", total, True) as step:
        step(1)
        step(3)
    written = capsys.readouterr()
    assert (written.out, "Adding" in written.err, shown in written.err) == ("", True, True)


@pytest.mark.parametrize(
    ("count", "noun", "spec", "expected"),
    [
        (1, "row", "", "1 row"),
        (0, "row", "", "0 rows"),
        (2000, "paid request", ",", "2,000 paid requests"),
        (1, "entry", ",", "1 entry"),
        (2, "entry", "", "2 entries"),
        (2, "key", "", "2 keys"),
        (1, "batch", "", "1 batch"),
        (2, "unfinished batch", "", "2 unfinished batches"),
    ],
)
def test_a_count_agrees_with_its_noun(count: int, noun: str, spec: str, expected: str) -> None:
    assert plural(count, noun, spec) == expected


@pytest.mark.parametrize("progress", [False, None])
def test_without_progress_nothing_is_written(
    progress: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with showing_progress("Adding", 5, progress) as step, no_stages("checking", 5) as stage:
        step(5)
        stage(5)
    assert capsys.readouterr() == ("", "")


def test_only_collections_have_a_size() -> None:
    assert size_of([1, 2]) == 2
    assert size_of(iter([1, 2])) is None
