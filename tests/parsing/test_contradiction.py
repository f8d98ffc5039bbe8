from __future__ import annotations

import pytest

from bottega.parsing import LabelParser
from bottega.types import Completion, Query

ONE, MANY = LabelParser(), LabelParser(multi_label=True)


@pytest.mark.parametrize(
    ("reply", "choices"),
    [
        ("A\n\nWait, actually the correct option is B.", ("A", "B")),
        ("A\n\nThe correct option is (B)", ("A", "B")),
        ("A\n应该是B。", ("A", "B")),
        ("B\nThe correct option is A.", ("A", "B")),
        ("b\nI choose a because it barks.", ("a", "b")),
        ("1\nThe answer should be 2.", ("1", "2")),
        ("yes\n\nHmm, that is wrong. The answer is not yes.", ("yes", "no")),
        ("cat\n\nOn reflection it isn\u2019t.", ("cat", "dog")),
        ("dog\nIt is a hot dog.", ("dog", "hot dog")),
        ("hot dog\nhot dog: sure, a dog.", ("dog", "hot dog")),
        ("cat\nsalt-and-pepper", ("cat", "salt and pepper")),
        ("C\nThe language is C++.", ("C", "C++")),
        ("C++\nThe language is C.", ("C", "C++")),
        ("猫\n不对，是狗。", ("猫", "狗")),
        ("大猫\n应该是小狗。", ("大猫", "小狗")),
        ("猫\n不对。", ("猫", "狗")),
    ],
)
def test_a_first_line_that_later_text_may_contradict_is_invalid(
    reply: str, choices: tuple[str, ...]
) -> None:
    assert not ONE(Query("?", choices=choices), Completion(reply)).valid


@pytest.mark.parametrize(
    ("reply", "choices"),
    [
        ("B\n\nbecause it is a plant", ("A", "B")),
        ("hot dog\nA hot dog, hot dog", ("dog", "hot dog")),
        ("C++\nC++ C++ it is", ("C", "C++")),
        ("大猫\n这是大猫。", ("猫", "大猫")),
        ("no\nno", ("yes", "no")),
    ],
)
def test_a_first_line_that_later_text_supports_is_read(
    reply: str, choices: tuple[str, ...]
) -> None:
    assert ONE(Query("?", choices=choices), Completion(reply)).labels == (reply.split("\n")[0],)


@pytest.mark.parametrize(
    "reply",
    [
        "Answer: dog\nWait, it is a cat.",
        "Answer: dog\nI changed my mind: cat",
        "Answer: dog\n\nHowever, answer is cat",
        "Answer: dog\nConfidence: 0.9\nThese are clearly cats.",
        "Answer: dog\nOn reflection, that is wrong.",
    ],
)
def test_a_stated_answer_that_later_text_may_contradict_is_invalid(reply: str) -> None:
    query = Query("?", choices=("dog", "cat"))
    assert not ONE(query, Completion(reply)).valid
    assert not MANY(query, Completion(reply)).valid


@pytest.mark.parametrize(
    ("reply", "labels"),
    [
        ("Answer: low\nConfidence: high", ("low",)),
        ("Answer: low\nConfidence Score: 0.9\n---END FORMAT TEMPLATE---", ("low",)),
        ("Answer: low\n\nA low tone, low indeed.", ("low",)),
        ("Answer: high, low\nBoth low and high.", ("high", "low")),
        ("Answer: none\nNeither of them fits.", ()),
    ],
)
def test_a_stated_answer_that_later_text_supports_is_read(
    reply: str, labels: tuple[str, ...]
) -> None:
    answer = MANY(Query("?", choices=("low", "high")), Completion(reply))
    assert (answer.valid, answer.labels) == (True, labels)


@pytest.mark.parametrize(
    ("reply", "choices"),
    [
        ("dog\n\nThese are clearly cats.", ("dog", "cat")),
        ("dog\nTwo foxes.", ("dog", "fox")),
        ("dog\nThese are hot dogs.", ("dog", "hot dog")),
        ("cat\nMany cats.", ("cat", "cats")),
    ],
)
def test_the_plural_of_another_choice_contradicts(reply: str, choices: tuple[str, ...]) -> None:
    assert not ONE(Query("?", choices=choices), Completion(reply)).valid


@pytest.mark.parametrize(
    ("reply", "choices"),
    [
        ("hot dog\nHot dogs are food.", ("dog", "hot dog")),
        ("dog\nDogs bark.", ("dog", "cat")),
        ("cats\nMany cats.", ("cat", "cats")),
        ("B\nAs it is: a plant", ("A", "B", "I")),
    ],
)
def test_the_plural_of_the_label_does_not_contradict(reply: str, choices: tuple[str, ...]) -> None:
    assert ONE(Query("?", choices=choices), Completion(reply)).labels == (reply.split("\n")[0],)
