"""Tests of report files without a browser."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import orjson
import pytest
from PIL import Image as Pillow

from bottega.errors import SettingError
from bottega.evaluation.outcomes import Method
from bottega.evaluation.report.payload import payload
from bottega.evaluation.report.render import write_report
from bottega.evaluation.report.result_tables import as_csv, as_markdown
from bottega.evaluation.report.runs import read_run
from bottega.evaluation.report.sections import sections
from tests.evaluation.report.builders import (
    HOSTILE,
    benchmark,
    simulated_answers,
    store_run,
    three_methods,
)

DATA = benchmark(40, examples=6, side=8)
FILES = [
    *("index.html", "results.csv", "results.md", "items.csv"),
    *("accuracy-shots.png", "cost-quality.png"),
]


class Addresses(HTMLParser):
    """Parser that collects every URL of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = ("src", "href", "action", "data", "poster", "srcset")
        self.loaded += [value or "" for name, value in attrs if name in names]


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    return await store_run(tmp_path / "run", DATA, three_methods(DATA))


def test_report_contains_all_files(folder: Path, tmp_path: Path) -> None:
    report = write_report([folder], tmp_path / "a" / "b")
    assert [file.name for file in report.files] == FILES
    for file in report.files[4:]:
        with Pillow.open(file) as plot:
            assert plot.width > 800
    page = report.files[0].read_text("utf-8")
    assert "random 3: 39 of 40 answered, 1 failed" in page
    assert HOSTILE not in page
    addresses = Addresses()
    addresses.feed(page)
    assert {address[:1] for address in addresses.loaded} == {"#"}
    assert "url(" not in page and "@import" not in page


def test_missing_matplotlib_skips_only_plots(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "bottega.errors.find_spec", lambda name: None if name == "matplotlib" else find_spec(name)
    )
    report = write_report([folder], tmp_path / "out")
    assert [file.name for file in report.files] == FILES[:4]
    assert "bottega-vlm[eval]" in str(report.unplotted and report.unplotted.hint)


async def test_each_benchmark_has_a_section_and_plots(folder: Path, tmp_path: Path) -> None:
    other = benchmark(9, examples=6, side=8)
    second = await store_run(
        tmp_path / "second", other, three_methods(other), benchmark="manyicl:FIVES"
    )
    report = write_report([folder, second], tmp_path / "out")
    assert [section.benchmark for section in report.sections] == ["animals", "manyicl:FIVES"]
    assert [file.name for file in report.files[4:]] == [
        f"{stem}-{name}" for stem in ("1-animals", "2-manyicl") for name in FILES[4:]
    ]
    page = report.files[0].read_text("utf-8")
    assert "Gemini 1.5 Pro (Visual RAG, Table 2)" in page
    published = re.findall(r'<td class="n paper">(0\.\d+)</td>', page)
    # FIVES: zero-shot, then the best over shots for random and top-k.
    assert published == ["0.258", "0.550", "0.642"]


async def test_published_results_match_the_number_of_shots(tmp_path: Path) -> None:
    methods = [Method("top-k", shots, simulated_answers(DATA, 0.5, shots)) for shots in (3, 5)]
    run = await store_run(tmp_path / "run", DATA, methods, benchmark="scienceqa:here")
    page = write_report([run], tmp_path / "out").files[0].read_text("utf-8")
    published = re.findall(r'<td class="n paper">([\d.]*)</td>', page)
    assert published == ["0.719", "0.867", "0.928", "", "", ""]


async def test_folders_with_equal_names_are_distinguished(tmp_path: Path) -> None:
    runs = [await store_run(tmp_path / x / "run", DATA, three_methods(DATA)[:1]) for x in "ab"]
    report = write_report(runs, tmp_path / "out")
    assert [row.run for row in report.sections[0].rows] == ["a/run", "b/run"]
    with pytest.raises(SettingError, match="twice"):
        write_report([runs[0], tmp_path / "a" / ".." / "a" / "run"], tmp_path / "out")


def test_csv_has_a_row_for_each_value(folder: Path) -> None:
    loaded = sections({"run": read_run(folder)})
    rows = list(csv.DictReader(io.StringIO(as_csv(loaded))))
    assert [(row["method"], row["shots"], row["metric"]) for row in rows] == [
        (method, shots, metric)
        for method, shots in (("zero-shot", "0"), ("random", "3"), ("top-k", "3"))
        for metric in ("accuracy", "ece_10_equal_width_bins")
    ]
    of_top_k, expected = rows[4], loaded[0].rows[-1].result
    assert (float(of_top_k["value"]), float(of_top_k["low"])) == (expected.value, expected.low)
    assert float(rows[5]["value"]) == expected.also[0].value
    assert rows[0]["run"] == "run"
    assert (rows[2]["n"], rows[2]["failed"], rows[0]["invalid"]) == ("39", "1", "2")
    assert float(of_top_k["cost_usd"]) == pytest.approx(40 * 0.004)


async def test_items_name_their_files_and_hold_no_formulas(tmp_path: Path) -> None:
    texts = ["=1+1", "+cmd", "@SUM(A1)", "-5", "+3 %", "- a list", "plain", "\tx"]
    items = [replace(one, answer=text) for one, text in zip(DATA.items, texts, strict=False)]
    [image] = items[0].query.images
    named = replace(items[0].query, images=(replace(image, source="pets/pug/1.jpg"),))
    data = replace(DATA, items=(replace(items[0], query=named), *items[1:]))
    folder = await store_run(tmp_path / "run", data, three_methods(data)[:1])
    with write_report([folder], tmp_path / "out").files[3].open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert rows[0]["files"] == "pets/pug/1.jpg"
    assert [row["truth"] for row in rows] == [
        *("'=1+1", "'+cmd", "'@SUM(A1)", "-5", "'+3 %", "'- a list", "plain", "'\tx")
    ]


async def test_each_method_and_item_is_a_line(tmp_path: Path) -> None:
    items = (replace(DATA.items[0], answer='a "b",\nc'), *DATA.items[1:])
    data = replace(DATA, items=items)
    runs = [await store_run(tmp_path / name, data, three_methods(data)) for name in ("one", "two")]
    report = write_report(runs, tmp_path / "out")
    with report.files[3].open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 2 * 3 * len(items)
    assert [rows[0][name] for name in ("run", "method", "shots", "item")] == [
        *("one", "zero-shot", "0", "0")
    ]
    assert (rows[0]["truth"], rows[0]["question"]) == ('a "b",\nc', items[0].query.text)
    for row in rows:
        assert row["truth"] == items[int(row["item"])].answer
        if row["method"] == "random" and row["item"] == "2":
            assert row["error"] and not row["answer"] and not row["score"]
            continue
        assert row["error"] == ""
        is_valid = row["method"] != "zero-shot" or row["item"] not in ("4", "5")
        is_right = is_valid and row["answer"] == row["truth"]
        assert (row["valid"], float(row["score"])) == (str(is_valid), is_right)
    top_k = [row for row in rows if (row["run"], row["method"]) == ("two", "top-k")]
    assert sum(float(row["cost_usd"]) for row in top_k) == pytest.approx(40 * 0.004)


async def test_markdown_cells_cannot_break_the_table(tmp_path: Path) -> None:
    methods = three_methods(DATA)
    run = read_run(await store_run(tmp_path, DATA, methods, benchmark="a|b\n<i>"))
    lines = as_markdown(sections({"run": run}), title="t", made="m").splitlines()
    assert "## a\\|b &lt;i>" in lines
    widths = {line.count(" | ") for line in lines[lines.index("40 items.") + 2 :][:5]}
    assert widths == {11}


def test_images_over_the_size_limit_are_omitted_and_counted(folder: Path) -> None:
    loaded = sections({"run": read_run(folder)})
    complete = payload(loaded)
    document = orjson.loads(complete.json)
    assert (len(document["images"]), complete.left_out, complete.absent) == (46, 0, 0)
    room = sum(len(data) for data in loaded[0].runs["run"].thumbnails.values()) // 2
    half = payload(loaded, images=room)
    stored_images = orjson.loads(half.json)["images"]
    assert len(stored_images) + half.left_out == 46
    assert 0 < half.left_out < 46
    # Images of the items come first.
    assert document["images"][: len(stored_images)] == stored_images


def test_text_cannot_close_the_script_element(folder: Path) -> None:
    document = payload(sections({"run": read_run(folder)})).json
    assert b"<" not in document and b">" not in document and b"&" not in document
    assert HOSTILE in orjson.loads(document)["texts"]
