from __future__ import annotations

import pytest

from bottega.evaluation.metrics.official_choices import OfficialMMMUParser
from bottega.types import Completion, Query


@pytest.mark.parametrize(
    ("reply", "labels"),
    [
        ("I can see a small dog", ("dog",)),
        ("I see a small dog", ()),
    ],
)
def test_the_text_of_an_option_counts_from_six_words_on(
    reply: str, labels: tuple[str, ...]
) -> None:
    query = Query("Which animal?", choices=("dog", "cat"))
    assert OfficialMMMUParser()(query, Completion(reply)).labels == labels
