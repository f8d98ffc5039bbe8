from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from bottega.errors import BottegaError, LoadError
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.benchmarks.source import Source
from bottega.evaluation.benchmarks.vsr import masked, vsr, vsr_mc
from bottega.prompting import VSR_MC
from bottega.types import Completion
from tests.builders import solid_image
from tests.paths import SHARED

FULL = SHARED / "data" / "vsr"
RELATIONS = ["on", "under", "near", "contains", "facing", "behind", "left of"]


def caption(number: int, label: int = 1) -> dict[str, object]:
    relation = RELATIONS[number % len(RELATIONS)]
    verb = "" if relation == "contains" else "is "
    return {
        "image": f"{number}.png",
        "image_link": f"http://images.cocodataset.org/train2017/{number}.png",
        "caption": f"The person {verb}{relation} the {number}th bench.",
        "label": label,
        "relation": relation,
    }


def published(folder: Path) -> Path:
    """Write a split whose images are in COCO's folders or directly in `images`."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, numbers in (("train", range(7)), ("dev", range(7, 9)), ("test", range(9, 13))):
        rows = [caption(n, label=int(n % 4 != 0)) for n in numbers]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    images = folder.parents[1] / "images"
    (images / "train2017").mkdir(parents=True)
    for n in range(13):
        subfolder = "train2017" if n % 2 else ""
        (images / subfolder / f"{n}.png").write_bytes(solid_image(n).data)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Write the upstream layout: splits two levels below the image folder."""
    return published(tmp_path / "splits" / "random")


def test_captions_become_true_or_false_questions(root: Path) -> None:
    data = load_benchmark(f"vsr:{root}", seed=0)
    assert (len(data.knowledge), len(data.items)) == (9, 4)
    assert set(data.labels) == {"true", "false"}
    first = vsr(Source(f"vsr:{root}", 0)).items[0]
    assert first.query.text == 'Is this true of the image? "The person is near the 9th bench."'
    assert (first.answer, first.query.images, first.tags) == (
        "true",
        (solid_image(9),),
        {"relation": "near"},
    )


def test_true_captions_become_multiple_choice(root: Path) -> None:
    data = vsr_mc(Source(f"vsr-mc:{root}", 0))
    assert [e.query.images for e in data.items] == [(solid_image(n),) for n in (9, 10, 11)]
    assert len(data.knowledge) == 6
    for example in (*data.items, *data.knowledge):
        choices = example.query.choices
        assert example.answer in choices
        assert len(set(choices)) == 6
        assert set(choices) <= set(RELATIONS)
    contains = data.items[1]
    assert contains.query.text == "What belongs in the gap? The person (is) ___ the 10th bench."
    letter = "ABCDEF"[contains.query.choices.index("contains")]
    answer = data.parse(contains.query, Completion(f"({letter})"))
    assert data.metrics[0].score(contains, answer) == 1.0
    assert (data.prompt, data.rationale_prompt) == (VSR_MC, None)
    answer = data.parse(contains.query, Completion("The answer is A. BECAUSE: So it looks."))
    assert (answer.text, answer.rationale) == (contains.query.choices[0], "So it looks.")


def test_choices_depend_on_the_seed_only(root: Path, tmp_path: Path) -> None:
    moved = tmp_path / "splits" / "zeroshot"
    first = vsr_mc(Source(f"vsr-mc:{root}", 0)).items
    other = vsr_mc(Source(f"vsr-mc:{root}", 1)).items
    root.rename(moved)
    again = vsr_mc(Source(f"vsr-mc:{moved}", 0)).items
    assert [e.query for e in first] == [e.query for e in again]
    assert [e.query.choices for e in first] != [e.query.choices for e in other]


def test_missing_images_name_the_next_step(root: Path) -> None:
    (root.parents[1] / "images").rename(root.parents[1] / "elsewhere")
    for load in (vsr, vsr_mc):
        with pytest.raises(LoadError, match="no folder images/") as raised:
            load(Source(f"x:{root}", 0))
        assert "images=none" in raised.value.hint
        data = load(Source(f"x:{root},images=none", 0))
        assert not any(e.query.images for e in (*data.items, *data.knowledge))


def test_invalid_lines_are_reported(root: Path) -> None:
    rows = [
        caption(9),
        caption(10) | {"label": 2},
        caption(11) | {"caption": "The person stands."},
        caption(12) | {"image": "../../splits/random/dev.jsonl", "image_link": None},
    ]
    (root / "test.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    errors: list[BottegaError] = []
    data = vsr_mc(Source(f"vsr-mc:{root}", 0, errors.append))
    assert len(data.items) == 1
    assert [str(error).partition("row ")[2][:2] for error in errors] == ["1:", "2:", "3:"]
    rows = [caption(0)]
    for split in ("train", "dev", "test"):
        (root / f"{split}.jsonl").write_text(json.dumps(caption(0)), "utf-8")
    with pytest.raises(LoadError, match="got 1"):
        vsr_mc(Source(f"vsr-mc:{root}", 0))


@pytest.mark.parametrize(
    ("caption", "relation", "cloze"),
    [
        ("The cat is on the person.", "on", "The cat (is) ___ the person."),
        ("The person is on the bench.", "on", "The person (is) ___ the bench."),
        ("The cat is in the sink.", "in", "The cat (is) ___ the sink."),
        ("The bowl contains the cat.", "contains", "The bowl (is) ___ the cat."),
        ("The dog is at the edge of the bed.", "at the edge of", "The dog (is) ___ the bed."),
        ("The iris has as a part the leaf.", "has as a part", "The iris (is) ___ the leaf."),
    ],
)
def test_relation_is_masked_in_the_caption(caption: str, relation: str, cloze: str) -> None:
    assert masked(caption, relation) == cloze


def full() -> str:
    if not FULL.is_dir():
        pytest.skip("needs ../shared/data/vsr")
    return f"{FULL},images=none"


def test_published_split_has_published_sizes() -> None:
    data = vsr(Source(f"vsr:{full()}", 0))
    assert (len(data.knowledge), len(data.items)) == (7680 + 1097, 2195)


def test_vsr_mc_has_the_rcts_sizes() -> None:
    data = vsr_mc(Source(f"vsr-mc:{full()}", 0))
    assert (len(data.knowledge), len(data.items)) == (3876 + 564, 1181)
    everything = (*data.knowledge, *data.items)
    assert len({choice for e in everything for choice in e.query.choices}) == 66
    assert all(len(set(e.query.choices)) == 6 for e in everything)
    positions = Counter(e.query.choices.index(e.answer) for e in everything)
    assert min(positions.values()) > 0.8 * len(everything) / 6
    assert all(e.query.text.count("(is) ___") == 1 for e in everything)
