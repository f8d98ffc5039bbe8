from __future__ import annotations

import json
import math
from collections import Counter
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.evaluation.metrics.official_choices import OfficialMMMUParser, OneStatementParser
from bottega.parsing import ChoiceParser, LabelParser, RationaleParser, open_candidates
from bottega.protocols import Parser
from bottega.types import Answer, Completion, Query
from tests.paths import SHARED

REPLIES = SHARED / "data" / "mmmu"
CITIES = Query("Which?", choices=("Rome", "Paris", "New York"), id="q1")
POINTS = Query("How much?", choices=("5", "0.5"))
parse = OfficialMMMUParser()


def said(reply: str, query: Query = CITIES, parser: Parser = parse) -> str | None:
    answer = parser(query, Completion(reply))
    assert answer.labels == ((answer.text,) if answer.valid else ())
    return answer.text if answer.valid else None


@pytest.mark.parametrize(
    ("reply", "option"),
    [
        ("(B)", "Paris"),
        ("B", "Paris"),
        ("B.", "Paris"),
        ("(A) or rather (C)", "New York"),
        ("(C) it is, and not B at all", "New York"),
        ("I say A or B , I am not sure", "Paris"),
        ("A or B , or C , or A after all", "Rome"),
        ("It is the city of new york, I am sure", "New York"),
        ("It is either Rome or Paris for all I know", "Paris"),
        # An option counts inside a reply of 6 words or more, as in the official code.
        ("It is the beautiful city Paris", "Paris"),
        ("It is the city Paris", None),
        ("Answer: (B)\nConfidence Score: 0.7", "Paris"),
        ("(A) is too small.\n**Answer:** C", "New York"),
        ("Answer: I cannot say", None),
        ("not (A), not (B)\nAnswer: **c**", "New York"),
        ("<think>(A) or (B)</think>(C)", "New York"),
        # Beyond the official parse: a reply that is only a choice.
        ("b", "Paris"),
        ("**B**", "Paris"),
        ("B. Paris", "Paris"),
        ("paris", "Paris"),
        ("", None),
        ("D", None),
        ("(b) maybe", None),
        ("Rome it is", None),
        ("<think>(B)", None),
    ],
)
def test_official_rules(reply: str, option: str | None) -> None:
    assert said(reply) == option


def test_words_that_look_like_letters_are_not_letters() -> None:
    query = Query("?", choices=("B", "A"))
    assert said("A", query) == "B"
    assert said("(B)", query) == "A"


def test_options_with_equal_texts_are_one_answer() -> None:
    query = Query("?", choices=("1", "2", "2"))
    assert said("(B)", query) == said("(C)", query) == said("2", query) == "2"


def test_confidence_and_rationale_are_kept() -> None:
    reply = "It has a tower.\nAnswer: B\nConfidence Score: 70%"
    assert parse(CITIES, Completion(reply)) == Answer(
        "Paris", labels=("Paris",), confidence=0.7, rationale="It has a tower."
    )
    assert parse(CITIES, Completion("B", logprob=math.log(0.25))).confidence == pytest.approx(0.25)


@pytest.mark.parametrize("parser", [ChoiceParser, OfficialMMMUParser])
def test_unparsable_replies_may_become_random_without_confidence(
    parser: type[ChoiceParser],
) -> None:
    draw = parser(unparsable="random", seed=3)
    silent = Completion("no idea\nConfidence: 1", logprob=0.0)
    sampled = [draw(Query("?", choices=CITIES.choices, id=str(i)), silent) for i in range(300)]
    assert set(Counter(a.text for a in sampled)) == set(CITIES.choices)
    assert min(Counter(a.text for a in sampled).values()) > 60
    assert {a.confidence for a in sampled} == {None}
    assert draw(CITIES, silent) == parser(unparsable="random", seed=3)(CITIES, silent)
    others = {parser(unparsable="random", seed=s)(CITIES, silent).text for s in range(20)}
    assert len(others) > 1
    assert draw(CITIES, Completion("(B)", logprob=0.0)).confidence == 1.0


def test_without_choices_the_stated_answer_counts() -> None:
    reply = "So it is 3 + 4.\nAnswer: 7\nConfidence: 0.5"
    query = Query("?")
    assert parse(query, Completion(reply)) == Answer("7", True, ("7",), 0.5, "So it is 3 + 4.")
    assert parse(query, Completion("It is 7.")).text == "It is 7."
    assert not parse(query, Completion(" ")).valid


@pytest.mark.parametrize(
    ("reply", "candidates"),
    [
        ("30", [30.0]),
        ("The total is $1,234.567.", ["$1,234.567", 1234.0, 234.57]),
        ("x = 1e3", [1000.0]),
        ("so 5\nthe answer is B", [5.0, " b", "b "]),
        ("12-20 weeks", ["12-20 weeks", 12.0, -20.0]),
        ("a = 5\nb = 6", [6.0]),
        ("the answer is :", ["the answer is :"]),
        ("", [""]),
    ],
)
def test_open_candidates(reply: str, candidates: list[str | float]) -> None:
    found = open_candidates(reply)
    assert set(candidates) <= set(found)
    assert len(found) == len(set(found))


@given(st.text(max_size=80), st.lists(st.text(max_size=8), max_size=30))
def test_no_text_raises_and_answers_are_choices(reply: str, choices: list[str]) -> None:
    query = Query("?", choices=tuple(choices))
    for parser in (parse, ChoiceParser(), ChoiceParser(whole_words=True)):
        answer = parser(query, Completion(reply))
        if choices and answer.valid:
            assert answer.text in choices
    assert open_candidates(reply)


@given(st.lists(st.text(max_size=8), min_size=1, max_size=26), st.data())
def test_a_letter_in_brackets_is_its_option(choices: list[str], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(choices) - 1))
    query, letter = Query("?", choices=tuple(choices)), chr(ord("A") + place)
    assert (
        said(f"({letter})", query) == said(f"({letter})", query, ChoiceParser()) == choices[place]
    )


def test_a_long_row_of_digits_takes_little_time() -> None:
    assert open_candidates("7" * 200_000)


@cache
def stored() -> list[dict[str, Any]]:
    """Real replies of one model to all of MMMU val, each with what the official code made of it."""
    if not REPLIES.is_dir():
        pytest.skip("needs ../shared/data/mmmu")
    made = json.loads((REPLIES / "qwen_vl" / "qwen_vl.json").read_bytes())
    files = sorted(REPLIES.glob("qwen_vl/[A-Z]*.json"))
    rows = [row for file in files for row in json.loads(file.read_bytes())]
    return [row | {"parsed": made[row["id"]]} for row in rows]


def test_stored_replies_match_the_official_parse() -> None:
    rows = [row for row in stored() if row["question_type"] == "multiple-choice"]
    assert len(rows) == 847
    unlike: list[str] = []
    sampled = alone = 0
    for row in rows:
        options: dict[str, str] = row["index2ans"]
        answer = said(row["response"], Query("?", choices=tuple(options.values())))
        if drew(row["response"], options):
            sampled += 1
            alone += answer is not None
            continue
        official = options[row["parsed"]]
        right = row["parsed"] == row["answer"]
        if answer != official or (answer == options[row["answer"]]) != right:
            unlike.append(row["id"])
    assert unlike == []
    # The official code drew a letter for 48; five of these say nothing but a choice.
    assert (sampled, alone) == (48, 5)


def drew(reply: str, options: dict[str, str]) -> bool:
    """Return whether the reply contains no choice for the official code."""
    words = f" {reply.strip(',.!?;:' + chr(39))} "
    letters = any(f"({letter})" in words or f" {letter} " in words for letter in options)
    texts = len(words.split()) > 5 and any(o.lower() in words.lower() for o in options.values())
    return not (letters or texts)


def test_stored_open_replies_match_the_official_candidates() -> None:
    rows = [row for row in stored() if row["question_type"] != "multiple-choice"]
    assert len(rows) == 53
    # One of several candidates was stored, numbers as texts.
    assert [
        r["id"] for r in rows if r["parsed"] not in map(str, open_candidates(r["response"]))
    ] == []


@pytest.mark.parametrize(
    ("reply", "choices", "read"),
    [
        ("I think that it is a caterpillar.", ("cat", "caterpillar"), "caterpillar"),
        ("The dog is standing in front of the house.", ("in", "in front of"), "in front of"),
        ("One can say that the man is in the painting.", ("in", "at"), "in"),
        ("It is neither one of these animals here.", ("cat", "dog"), None),
        ("At first a cat, but it must be the dog.", ("cat", "dog"), None),
    ],
)
def test_options_may_require_whole_words(
    reply: str, choices: tuple[str, ...], read: str | None
) -> None:
    answer = ChoiceParser(whole_words=True)(Query("q", choices=choices), Completion(reply))
    assert (answer.text if answer.valid else None) == read


@pytest.mark.parametrize("parser", [ChoiceParser(whole_words=True), LabelParser(), parse])
@pytest.mark.parametrize("reply", [".5", "Answer: .5", "(.5)"])
def test_a_leading_decimal_point_is_kept(parser: Parser, reply: str) -> None:
    assert parser(POINTS, Completion(reply)).text == "0.5"


@pytest.mark.parametrize("amount", [".5", "3.5", "5.3"])
def test_part_of_a_number_is_not_a_word(amount: str) -> None:
    reply = Completion(f"I weighed it and it was {amount} in all")
    assert not ChoiceParser(whole_words=True)(POINTS, reply).valid


def test_only_the_official_rules_read_a_dialogue_that_continues() -> None:
    reply = Completion("(B)\n\nQuestion: Which city is in Italy?\nAnswer: (A)")
    assert parse(CITIES, reply).text == "Rome"
    assert ChoiceParser(whole_words=True)(CITIES, reply).text == "Paris"


@pytest.mark.parametrize(
    "part",
    [
        "*",
        "\n",
        "A ",
        "(A) ",
        "Rome ",
        "Answer: x\n",
        "the answer is ",
        "\\boxed{",
        "no ",
        ". Wait",
        "不",
        "- ",
    ],
)
def test_long_replies_take_little_time(part: str) -> None:
    parser = ChoiceParser(whole_words=True)
    assert parser(CITIES, Completion(part * (20_000 // len(part)))) is not None


@pytest.mark.parametrize(
    ("reply", "read"),
    [
        ("The answer is B. BECAUSE: Rome has the Colosseum.", "Paris"),
        ("The answer is A. No, The answer is B.", None),
        ("The answer is D.", None),
        ("The answer is Paris.", None),
        ("B", None),
    ],
)
def test_scienceqa_reads_exactly_one_statement(reply: str, read: str | None) -> None:
    official = OneStatementParser(RationaleParser(ChoiceParser(whole_words=True)))
    assert said(reply, parser=official) == read
