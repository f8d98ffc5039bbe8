"""Tests of labels with other names."""

from __future__ import annotations

import pytest

from bottega.errors import SettingError
from bottega.parsing import SynonymParser
from bottega.types import Completion, Query

NAMES = {"cat": ["tabby", "Persian cat"], "dog": ["pug", "German shepherd"], "ship": []}
QUERY = Query("What is it?", choices=("cat", "dog", "ship"))


@pytest.mark.parametrize(
    ("reply", "label"),
    [
        ("tabby", "cat"),
        ("The animal is a German Shepherd.", "dog"),
        ("Answer: persian cat", "cat"),
        ("Dog", "dog"),
        ("ship", "ship"),
        ("tench", None),
        ("unknown", None),
        ("tabby or pug", None),
    ],
)
def test_names_become_labels(reply: str, label: str | None) -> None:
    answer = SynonymParser(NAMES)(QUERY, Completion(reply))
    assert (answer.valid, answer.labels) == (label is not None, (label,) if label else ())
    if label:
        assert answer.text == label


def test_several_labels_are_named_once() -> None:
    parse = SynonymParser(NAMES, multi_label=True)
    assert parse(QUERY, Completion("tabby, pug, Persian cat")).labels == ("cat", "dog")


def test_a_name_belongs_to_one_label() -> None:
    with pytest.raises(SettingError, match="the name 'Tabby' belongs to 'cat' and 'dog'"):
        SynonymParser({"cat": ["tabby"], "dog": ["Tabby"]})
