from __future__ import annotations

from pathlib import Path

import pytest

from bottega.errors import BottegaError, LoadError, SettingError
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.types import Completion
from tests.builders import solid_image
from tests.evaluation.benchmarks.published import write_archive, write_image, write_json


def row(task: str, part: str, number: int, answer: object) -> dict[str, object]:
    return {
        "id": number,
        "image": [f"{task}/{part}/{number}.png"],
        "question": "shape: large",
        "answer": answer,
    }


def cloned(root: Path, task: str = "clevr") -> Path:
    """Write a task folder as `git clone` creates it, with packed archives."""
    for part, numbers in (("support", (1, 2, 3)), ("query", (7, 8))):
        write_json(root / task / f"{part}.json", [row(task, part, n, n % 5) for n in numbers])
        members = {f"{part}/{n}.png": solid_image(n).data for n in numbers}
        write_archive(root / task / f"{part}.zip", members)
    return root / task


def unpacked(folder: Path) -> Path:
    for part, numbers in (("support", (1, 2, 3)), ("query", (7, 8))):
        (folder / f"{part}.zip").unlink()
        for n in numbers:
            write_image(folder / part / f"{n}.png", n)
    return folder


@pytest.mark.parametrize("task", ["clevr", "textocr"])
def test_both_tasks_are_read_packed_and_unpacked(tmp_path: Path, task: str) -> None:
    folder = cloned(tmp_path, task)
    packed = load_benchmark(f"vl-icl:{folder}", seed=0)
    assert (len(packed.knowledge), len(packed.items), packed.labels) == (3, 2, ())
    assert {item.answer: item.query.images for item in packed.items} == {
        "2": (solid_image(7),),
        "3": (solid_image(8),),
    }
    again = load_benchmark(f"vl-icl:{unpacked(folder)}", seed=0)
    assert [item.query for item in again.items] == [item.query for item in packed.items]


def test_full_reply_is_scored(tmp_path: Path) -> None:
    data = load_benchmark(f"vl-icl:{cloned(tmp_path)}", seed=0)
    item = next(item for item in data.items if item.answer == "2")
    replies = ("2\nshape: small", "It is 2", "3")
    answers = [data.parse(item.query, Completion(reply)) for reply in replies]
    exact, contained = ([m.score(item, answer) for answer in answers] for m in data.metrics)
    assert (exact, contained) == ([1, 0, 0], [1, 1, 0])


def test_invalid_rows_are_reported(tmp_path: Path) -> None:
    folder = cloned(tmp_path)
    rows = [row("clevr", "query", 7, 2), row("clevr", "query", 99, 2), {"question": "?"}]
    rows += [row("clevr", "query", 8, [1, 2]), {**row("", "", 0, 1), "image": []}]
    write_json(folder / "query.json", rows)
    bad: list[BottegaError] = []
    assert len(load_benchmark(f"vl-icl:{folder}", seed=0, on_error=bad.append).items) == 1
    assert [str(error).partition(": ")[0][-5:] for error in bad] == [
        f"row {i}" for i in (1, 2, 3, 4)
    ]


@pytest.mark.parametrize("folder", ["ys-zong/VL-ICL", "nowhere/clevr"])
def test_folder_without_a_task_names_the_download(folder: str) -> None:
    with pytest.raises(LoadError) as raised:
        load_benchmark(f"vl-icl:{folder}", seed=0)
    assert "git clone" in raised.value.hint


def test_support_set_can_be_evaluated(tmp_path: Path) -> None:
    folder = cloned(tmp_path)
    data = load_benchmark(f"vl-icl:{folder},split=support", seed=0)
    assert (len(data.knowledge), len(data.items)) == (2, 3)
    with pytest.raises(SettingError, match="split is unknown, got 'test'"):
        load_benchmark(f"vl-icl:{folder},split=test", seed=0)
