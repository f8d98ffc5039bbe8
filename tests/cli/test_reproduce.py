"""Every command of docs/reproduce.md parses and plans a run on tiny folders in the published
layouts."""

from __future__ import annotations

import re
import shlex
from itertools import takewhile
from pathlib import Path

import pytest
from PIL import Image

from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.methods.master_answers import MASTER, NOTE, labelled_questions
from bottega.evaluation.runs.run_store import RunStore
from bottega.knowledge import KnowledgeBase, TokenEmbedder
from bottega.recipes.racc import COMPRESSOR, STORE
from bottega.types import Example, Query
from tests.builders import solid_image
from tests.cli.conftest import Run
from tests.evaluation.benchmarks import (
    test_aokvqa,
    test_mathvision,
    test_okvqa,
    test_passages,
    test_scienceqa,
    test_vizwiz,
    test_vsr,
)
from tests.evaluation.benchmarks.published import write_image, write_json
from tests.paths import ROOT

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

PAGE = ROOT / "docs" / "reproduce.md"
COMMANDS = [
    shlex.split(line)[1:]
    for block in re.findall(r"^```bash\n(.*?)^```", PAGE.read_text("utf-8"), re.S | re.M)
    for line in block.splitlines()
]
CONFIGS = dict(re.findall(r"^```toml\n# (\S+)\n(.*?)^```", PAGE.read_text("utf-8"), re.S | re.M))
# The benchmark of each run that a command of the page writes.
EVALUATED = {
    command[command.index("--out") + 1]: command[1]
    for command in COMMANDS
    if command[0] == "eval" and "--out" in command
}
SETS = ("HAM10000", "FIVES", "CheXpert", "TerraIncognita", "UCMerced", "EuroSAT", "Pets", "DTD")


def write_mmmu(root: Path) -> None:
    for number, (split, answer) in enumerate((("dev", "A"), ("validation", "B"), ("test", "?"))):
        rows = [
            {
                "id": f"{split}_Art_{i}",
                "question": f"{split} {i}: what is in <image 1>?",
                "options": "['cat', 'dog']",
                "explanation": "",
                "answer": answer,
                "topic_difficulty": "Easy",
                **{f"image_{n}": None for n in range(2, 8)},
                "image_1": {"bytes": solid_image(10 * number + i).data, "path": "x.png"},
            }
            for i in range(2)
        ]
        (root / "Art").mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist(rows)
        parquet.write_table(table, root / "Art" / f"{split}-00000-of-00001.parquet")


def write_vl_icl(root: Path, task: str) -> None:
    for part, shades in (("support", (1, 2)), ("query", (3, 4))):
        folder = root / task / part
        folder.mkdir(parents=True)
        rows = []
        for shade in shades:
            (folder / f"{shade}.png").write_bytes(solid_image(shade).data)
            image = f'["{task}/{part}/{shade}.png"]'
            rows.append(f'{{"id": {shade}, "image": {image}, "question": "q", "answer": "2"}}')
        (root / task / f"{part}.json").write_text(f"[{','.join(rows)}]")


def write_manyicl(root: Path) -> None:
    (root / "images").mkdir(parents=True)
    for shade in range(4):
        Image.new("RGB", (8, 8), (shade, 0, 0)).save(root / "images" / f"{shade}.png")
    (root / "demo.csv").write_text(",flat,round\n0.png,1,0\n1.png,0,1\n")
    (root / "test.csv").write_text(",flat,round\n2.png,1,0\n3.png,0,1\n")


def write_answers(file: str, benchmark: str, model: str) -> None:
    """Fill a file as `bottega answer` does."""
    questions = labelled_questions(load_benchmark(benchmark, seed=0))
    answers = [
        Example(query, "dog", rationale="Fur.", source=f"{MASTER}:{model}")
        for query in questions.values()
    ]
    with KnowledgeBase.open(file, TokenEmbedder.bundled()) as knowledge:
        knowledge.add(answers)
        knowledge.set_note(NOTE, model)


def write_reasoning_sets(root: Path) -> None:
    """The sets of RCTS other than MMMU."""
    for name in ("ScienceQA", "MathVision", "VizWiz", "VSR"):
        (root / name).mkdir()
    test_scienceqa.published(root / "ScienceQA")
    test_mathvision.published(root / "MathVision")
    test_vizwiz.published(root / "VizWiz")
    test_vsr.published(root / "VSR" / "splits" / "random")


def write_rationales(file: str) -> None:
    with KnowledgeBase.open(file) as knowledge:
        for id in knowledge.ids():
            knowledge.annotate(id, rationale="Fur.")


def write_passages(root: Path) -> None:
    """The sets and passages of RACC, and the settings on the page."""
    (root / "BLIP2-Vicuna7B").mkdir()
    test_okvqa.published(root / "OKVQA", train2014=[1, 2, 3], val2014=[7])
    questions = [test_aokvqa.question(number) for number in (1, 2, 7)]
    test_aokvqa.published(root / "AOKVQA", questions[:2], questions[2:])
    write_json(root / "AOKVQA" / "aokvqa_v1p0_test.json", [questions[2] | {"direct_answers": None}])
    write_image(root / "AOKVQA" / "test2017" / f"{7:012}.jpg", 7)
    texts = [f"Surfers swim in sea {number}." for number in range(5)]
    rows = ["kid,text", *(f"{number},{text}" for number, text in enumerate(texts))]
    (root / "okvqa_full_corpus.csv").write_text("\n".join(rows))
    pages = [
        test_passages.wit(language="en", page_title=text, image_url="https://example.org/7.png")
        for text in texts
    ]
    (root / "WIT" / "images").mkdir(parents=True)
    (root / "WIT" / "images" / "7.png").write_bytes(solid_image(3).data)
    test_passages.write_json(root / "WIT" / "wit.tsv.gz", [test_passages.WIT, *pages], "\t")
    for name, text in CONFIGS.items():
        (root / name).write_text(text)


def compress(run: Run, command: list[str]) -> None:
    """Plan a training or a build; write the names of their files."""
    done = run(*command, "--dry-run")
    assert done.code == 0, (command, done.err)
    if command[1] == "build":
        folder, files = command[command.index("--store") + 1], [STORE]
        assert re.search(rf"^{command[2]}: 5 passages; .*; store {folder}$", done.out), done.out
    else:
        assert re.search(r"\d training questions.*\d steps of 2 examples", done.out, re.S), done.out
        folder, files = command[command.index("--out") + 1], [*COMPRESSOR]
    assert not Path(folder).exists()
    Path(folder).mkdir()
    for name in files:
        Path(folder, name).touch()


def report(run: Run, command: list[str]) -> None:
    """Report runs without items, in the folders that other commands of the page name."""
    folders = [Path(part) for part in takewhile(lambda part: part[:2] != "--", command[1:])]
    for folder in folders:
        benchmark = EVALUATED[str(folder)]
        if not folder.exists():
            item = Example(Query(f"q of {benchmark}", id="q"), "a")
            settings = {"benchmark": benchmark, "model": "m", "seed": 0, "metrics": ["accuracy"]}
            RunStore.open(folder, settings, (item,)).close()
    done = run(*command)
    assert done.code == 0, (command, done.err)
    out = command[command.index("--out") + 1] if "--out" in command else folders[0] / "report"
    page = Path(out, "index.html").read_text("utf-8")
    assert all(EVALUATED[str(folder)] in page for folder in folders)
    if "--predictions" in command:
        assert Path(command[command.index("--predictions") + 1]).read_text() == "{}"


def test_every_command_plans_a_run(run: Run, tmp_path: Path) -> None:
    write_mmmu(tmp_path / "MMMU")
    for task in ("clevr", "textocr"):
        write_vl_icl(tmp_path / "VL-ICL", task)
    for name in SETS:
        write_manyicl(tmp_path / name)
    write_reasoning_sets(tmp_path)
    write_passages(tmp_path)
    planned = 0
    for command in COMMANDS:
        if command[0] == "report":
            report(run, command)
            continue
        if command[0] == "add":
            assert run(*command).code == 0
            continue
        if command[0] == "rationales":
            done = run(*command, "--dry-run")
            assert done.code == 0, (command, done.err)
            # Two examples or more, with ten candidates, ten predictions each and ten new ones.
            count, calls = re.findall(r"\d+(?= example)|\d+(?= calls)", done.out)
            assert int(calls) == int(count) * (10 + 10 * 10 + 10) > 0
            write_rationales(command[1])
            continue
        if command[0] == "compress":
            compress(run, command)
            continue
        done = run(*command, "--dry-run")
        assert done.code == 0, (command, done.err)
        assert re.search(r"\d calls?", done.out), done.out
        assert "--out" not in command or not Path(command[command.index("--out") + 1]).exists()
        if command[0] == "answer":
            write_answers(command[1], command[2], command[command.index("--model") + 1])
        planned += 1
    assert planned >= 94


def test_searches_retrieve_as_the_authors_and_read_the_nearest_first() -> None:
    embed = "flmr:PreFLMR,query_tokens=512,choices=yes,instruction=Question:"
    searches = [command for command in COMMANDS if "--preset" in command]
    assert len(searches) >= 38
    for command in searches:
        assert command[command.index("--embed") + 1] == embed
        assert "--order" not in command


def test_sets_of_the_search_are_shown_nearest_first(tmp_path: Path) -> None:
    write_mmmu(tmp_path / "MMMU")
    write_reasoning_sets(tmp_path)
    for name in ("scienceqa:ScienceQA", "mmmu:MMMU", "mathvision:MathVision", "vizwiz:VizWiz"):
        kind, _, folder = name.partition(":")
        assert load_benchmark(f"{kind}:{tmp_path / folder}", seed=0).order == "nearest-first"
    vsr = load_benchmark(f"vsr-mc:{tmp_path}/VSR/splits/random", seed=0)
    assert vsr.order == "nearest-first"


def test_every_row_of_the_ablations_is_trained_and_evaluated() -> None:
    trained = {one[one.index("--out") + 1] for one in COMMANDS if one[:2] == ["compress", "train"]}
    used = {one[one.index("--compressor") + 1] for one in COMMANDS if "--compressor" in one}
    assert {f"ablation-{row}" for row in range(1, 9)} < trained == used


def test_the_page_names_every_table_and_figure() -> None:
    sections = PAGE.read_text("utf-8").split("## ")
    for title, tables, figures in (("RCTS", 6, 16), ("RACC", 6, 1)):
        [text] = [section for section in sections if section.startswith(f"{title}\n")]
        for kind, count in (("Table", tables), ("Figure", figures)):
            named = _numbers(text, kind)
            assert set(range(1, count + 1)) <= named, (title, kind, named)


def _numbers(text: str, kind: str) -> set[int]:
    """Return the numbers in bold, such as 6 and 11 to 16 in `**Figures 6 and 11 to 16**`."""
    found: set[int] = set()
    for bold in re.findall(rf"(?i)\*\*{kind}s? ([^*]+)\*\*", text):
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", bold):
            found |= set(range(int(first), int(last or first) + 1))
    return found
