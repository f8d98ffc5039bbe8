"""Tests of `same_answer` and `compare_replies`: a table of pairs of replies, and properties.

Half of the pairs in `pairs.jsonl` are near misses: they look alike and differ. A plural is
undecided because a question may count. A null field equals a missing one, since both say that there
is no value; any other extra field is a difference. A repeated item leaves a list undecided.
"""

from __future__ import annotations

import json
import string
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bottega.parsing import Sameness, compare_replies, field_agreement, plain_text, same_answer
from bottega.types import Completion, Query


@dataclass(frozen=True)
class Pair:
    """Two replies to a question, with the outcome and the rule that decides it."""

    rule: str
    question: str
    choices: tuple[str, ...]
    one: str
    other: str
    expected: str

    @property
    def query(self) -> Query:
        return Query(self.question, choices=tuple(self.choices))


LINES = Path(__file__).with_name("pairs.jsonl").read_text("utf-8").splitlines()
PAIRS = [Pair(**json.loads(line)) for line in LINES]
RULES = sorted({pair.rule for pair in PAIRS})
OPEN = Query("What is it?")
CHOICES = Query("Which?", choices=("cat", "dog", "hot dog"))
QUERIES = st.sampled_from([OPEN, CHOICES, Query("How many are there?"), Query("Is it red?")])
PIECES = """a the red blue cat dogs 5 -1/2 1,234 12 cm kg % yes no not B (C) AB-12 \\boxed{ }
Answer: . , and - 2026-11-27 14:30 { } [ ] " : Paris I don't know <think> 1/0 … 不 三"""
REPLIES = st.lists(st.sampled_from(PIECES.split()), max_size=8).map(" ".join) | st.text(max_size=30)
WORDS = st.text(string.ascii_lowercase, min_size=3, max_size=8)
SCALARS = st.none() | st.booleans() | st.integers(-99, 999) | WORDS
JSON = st.dictionaries(WORDS, SCALARS | st.lists(SCALARS, max_size=4), min_size=2, max_size=5)


def compared(pair: Pair) -> str:
    return compare_replies(pair.one, pair.other, pair.query).value


def test_half_of_the_pairs_are_near_misses() -> None:
    counts = Counter(pair.expected for pair in PAIRS)
    assert len(PAIRS) >= 240
    assert 2 * (counts["different"] + counts["undecided"]) >= len(PAIRS)
    assert set(counts) == {outcome.value for outcome in Sameness}


@pytest.mark.parametrize("rule", RULES)
def test_each_pair_has_its_outcome(rule: str) -> None:
    pairs = [pair for pair in PAIRS if pair.rule == rule]
    assert [(pair, found) for pair in pairs if (found := compared(pair)) != pair.expected] == []


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_a_pair_does_not_matter(rule: str) -> None:
    for pair in PAIRS:
        if pair.rule == rule:
            swapped = compare_replies(pair.other, pair.one, pair.query)
            assert (pair, swapped.value) == (pair, pair.expected)


def test_answers_without_thinking_are_compared_like_replies() -> None:
    for pair in PAIRS:
        one, other = (plain_text(pair.query, Completion(text)) for text in (pair.one, pair.other))
        assert (pair, same_answer(one, other, pair.query).value) == (pair, pair.expected)


@given(one=REPLIES, other=REPLIES, query=QUERIES)
def test_comparison_is_symmetric(one: str, other: str, query: Query) -> None:
    assert compare_replies(one, other, query) is compare_replies(other, one, query)


@given(reply=st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=20), query=QUERIES)
def test_a_reply_is_the_same_as_itself(reply: str, query: Query) -> None:
    assume(reply.casefold() not in {"unknown", "unclear", "na"})
    assert compare_replies(reply, reply, query) is Sameness.SAME


@given(reply=REPLIES)
def test_a_reply_is_never_different_from_itself(reply: str) -> None:
    assert compare_replies(reply, reply, OPEN) is not Sameness.DIFFERENT


@given(one=st.integers(-(10**6), 10**6), other=st.integers(-(10**6), 10**6), words=WORDS)
def test_different_numbers_are_never_the_same(one: int, other: int, words: str) -> None:
    assume(one != other)
    for form in (
        "{}",
        "{} {w}",
        "The {w} is {}.",
        "{} cm",
        "{w}-{}",
        '{{"{w}": {}}}',
        "{w} {}, {w}",
    ):
        first, second = (form.format(number, w=words) for number in (one, other))
        found = compare_replies(first, second, Query("How many are there?"))
        assert found is not Sameness.SAME


@given(one=st.decimals(-999, 999, places=2), other=st.decimals(-999, 999, places=2))
def test_decimals_are_the_same_only_if_they_are_equal(one: object, other: object) -> None:
    same = compare_replies(f"{one} kg", f"{other} kg", OPEN) is Sameness.SAME
    assert same == (one == other)


@given(letters=st.text(string.ascii_uppercase, min_size=2, max_size=3), numbers=st.data())
def test_different_codes_are_never_the_same(letters: str, numbers: st.DataObject) -> None:
    digits = st.text(string.digits, min_size=1, max_size=5)
    one, other = numbers.draw(digits), numbers.draw(digits)
    assume(one.lstrip("0") != other.lstrip("0"))
    for mark in ("", "-", " "):
        texts = f"{letters}{mark}{one}", f"{letters}{mark}{other}"
        assert compare_replies(*texts, OPEN) is not Sameness.SAME


@given(
    words=st.lists(WORDS, min_size=1, max_size=5).map(" ".join),
    negation=st.sampled_from(["no", "not", "never"]),
)
def test_a_negation_is_never_the_same(words: str, negation: str) -> None:
    for query in (OPEN, Query("Is it damaged?")):
        assert compare_replies(words, f"{negation} {words}", query) is not Sameness.SAME


@given(words=st.lists(WORDS, min_size=2, max_size=5, unique=True), seed=st.randoms())
def test_another_order_of_words_is_never_the_same(words: list[str], seed: object) -> None:
    assume("and" not in words and "und" not in words)
    shuffled = [*words[1:], words[0]]
    found = compare_replies(" ".join(words), " ".join(shuffled), OPEN)
    assert found is not Sameness.SAME


@pytest.mark.parametrize("rule", RULES)
def test_case_punctuation_and_spacing_do_not_matter(rule: str) -> None:
    cases = (str.upper, str.lower, "  {}\n".format, "{}.".format, "**{}**".format, "“{}”".format)
    for pair in PAIRS:
        if pair.rule != rule or pair.expected != "same" or "{" in pair.one or "\\" in pair.one:
            continue
        for change in cases:
            if change in (str.upper, str.lower) and ("<" in pair.one or rule == "units"):
                continue  # tags, and units such as mW and MW
            found = compare_replies(change(pair.one), pair.other, pair.query)
            assert (change(pair.one), pair, found.value) == (change(pair.one), pair, "same")


@given(fields=JSON, random=st.randoms(use_true_random=False))
def test_the_order_of_json_fields_does_not_matter(
    fields: dict[str, object], random: object
) -> None:
    shuffled = dict(reversed(list(fields.items())))
    one, other = json.dumps(fields), json.dumps(shuffled, indent=2)
    assert compare_replies(one, other, OPEN) is Sameness.SAME
    assert field_agreement(one, other, OPEN) == 1


def test_field_agreement_is_the_share_of_equal_fields() -> None:
    one = '{"label": "cat", "ok": true, "size": {"height": 3, "width": "12 cm"}}'
    other = '{"size": {"width": "120 mm", "height": 4}, "ok": true, "label": "dog"}'
    assert field_agreement(one, other, OPEN) == 0.5
    assert field_agreement(one, "cat", OPEN) is None
    assert field_agreement("{}", "{}", OPEN) == 1
    assert field_agreement('{"a": 1}', '{"a": 1, "b": 2}', OPEN) == 0.5


@pytest.mark.parametrize(
    "long",
    [
        "1" * 50_000, "a " * 25_000, "\\frac{" * 8_000, "A) x\n" * 10_000, "1," * 25_000,
        '{"a":' * 10_000 + "1" + "}" * 10_000, "[" * 25_000 + "]" * 25_000, "." * 50_000,
        "no, " * 12_500, "(" * 50_000, "at most " * 6_000, "x" + " " * 50_000 + "y",
        "sorry " * 8_000, "May 5, " * 7_000, "twenty " * 270, "不" * 1_900,
        json.dumps({f"k{n}": f"the value {n} of it" for n in range(1_500)}),
        json.dumps([f"item {n}" for n in range(3_000)]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("query", [OPEN, CHOICES])
def test_long_replies_take_little_time(long: str, query: Query) -> None:
    started = time.thread_time()
    for other in (f"{long[:-1]}z", long.replace("1", "2"), "dog"):
        compare_replies(long, other, query)
    assert time.thread_time() - started < 1 + 1.5e-4 * len(long)
