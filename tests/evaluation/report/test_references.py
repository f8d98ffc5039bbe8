from __future__ import annotations

import pytest

from bottega.evaluation.report.references import PUBLISHED, references
from tests.paths import SHARED

PAPERS = SHARED / "papers"
TEXTS = {
    "Visual RAG": "visual_rag.txt",
    "RCTS": "rcts.txt",
    "Cache-of-Thought": "cache_of_thought.txt",
    "RACC": "racc.txt",
}


def values(spec: str, *metrics: str) -> list[float]:
    return [one.value for one in references(spec, metrics)]


def test_benchmarks_in_folders_match_by_folder_name() -> None:
    assert values("manyicl:/data/UC-Merced", "accuracy") == [91.19, 98.57, 99.29, 86.51, 100.0]
    assert values("image-folder:oxford_pets", "accuracy")[0] == 85.29
    assert values("manyicl:CheXpert", "macro_f1")[0] == 22.16
    assert values("image-folder:my_pets", "accuracy") == []


def test_references_match_only_their_metric() -> None:
    assert values("manyicl:CheXpert", "accuracy") == []
    assert values("okvqa:x", "containment") == []
    assert 7.5 in values("vl-icl:data/clevr", "exact_match", "containment")


def test_references_match_only_their_options() -> None:
    all_images, one_image = (
        values("mmmu:x", "mmmu_accuracy"),
        values("mmmu:x,images=one", "mmmu_accuracy"),
    )
    assert 51.33 in all_images and 58.9 not in all_images
    assert 58.9 in one_image and 51.33 not in one_image and 64.87 not in one_image
    assert 64.87 in values("mmmu:x,split=validation,images=one", "mmmu_accuracy")
    assert values("mmmu:x,split=validation", "mmmu_accuracy") == []


@pytest.mark.skipif(not PAPERS.exists(), reason="the papers' texts are absent")
@pytest.mark.parametrize("paper", TEXTS)
def test_reference_values_match_the_papers(paper: str) -> None:
    text = (PAPERS / TEXTS[paper]).read_text("utf-8")
    references_of_paper = [one for one in PUBLISHED if one.paper == paper]
    assert len(references_of_paper) > 5
    assert [
        one for one in references_of_paper if f"{one.value:.2f}".removesuffix("0") not in text
    ] == []
