from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import SettingError
from bottega.knowledge import KnowledgeBase, PixelEmbedder
from bottega.naming import SIMULATED, open_model
from bottega.prompting import InterleavedPrompter
from bottega.tasks.codes import DIGITS, LETTERS, USUAL, CodeTask, Key, read
from bottega.tasks.task import TaskData
from bottega.types import Candidate, Example, Query, Sampling

KEYS = st.builds(Key, st.integers(0, 25), st.integers(0, 9))
PROMPT = InterleavedPrompter(show_choices=False, repeat_question=False, show_own_choices=False)


@pytest.fixture(scope="module")
def task() -> TaskData:
    return CodeTask().generate(7)


def shown(key: Key, *codes: str) -> list[tuple[str, str]]:
    pairs = [(code, "") if code in LETTERS else ("", code) for code in codes]
    return [(f"Decode {letter}{digit}.", key.decode(letter, digit)) for letter, digit in pairs]


def in_order(examples: list[Example]) -> list[tuple[str, str]]:
    return [(one.query.text, one.answer) for one in examples]


@given(key=KEYS, letter=st.sampled_from(LETTERS), digit=st.sampled_from(DIGITS))
def test_a_letter_and_then_a_digit_show_the_key(key: Key, letter: str, digit: str) -> None:
    question, answer = f"Decode {letter}{digit}.", key.decode(letter, digit)
    assert read(shown(key, "K", "7"), question) == answer
    assert read(shown(key, "K", "Q", "7"), question) == answer
    assert read(shown(key, "7", "K"), question) == USUAL.decode(letter, digit)
    assert read([], question) == USUAL.decode(letter, digit)
    # One demonstration with both parts shows both keys, as in the mutual reward.
    assert read([(f"Decode {letter}{digit}.", answer)], "Decode B3.") == key.decode("B", "3")


def test_examples_of_the_right_notebook_decode_each_query(task: TaskData) -> None:
    assert (len(task.knowledge), len(task.items), task.labels) == (360, 600, ())
    for item in task.items:
        own = [one for one in task.knowledge if one.tags == item.tags]
        assert read(in_order(own[1:3]), item.query.text) == item.answer


def test_random_sequences_rarely_contain_the_answer(task: TaskData) -> None:
    """Ten random sequences of three of the twenty nearest pages contain it for at most 40 %."""
    rng, covered, known = random.Random(0), 0, 0
    with KnowledgeBase.open(":memory:", PixelEmbedder()) as knowledge:
        knowledge.add(task.knowledge)
        for item in task.items[:100]:
            near = [one.example for one in knowledge.search(item.query, 20)]
            drawn = [in_order(rng.sample(near, 3)) for _ in range(10)]
            covered += any(read(one, item.query.text) == item.answer for one in drawn)
            known += read([], item.query.text) == item.answer
    assert covered <= 40
    assert 0 < known < covered  # so a search may stop early


def test_the_reader_answers_prompts_and_slips_at_a_temperature() -> None:
    reader = open_model(SIMULATED)
    key = Key(5, 2)
    pages = [Candidate(Example(Query(asked), given), 1.0) for asked, given in shown(key, "K", "7")]
    prompt = PROMPT(Query("Decode B3."), pages)
    [greedy] = asyncio.run(reader.generate(prompt, Sampling())).completions
    assert (greedy.text, greedy.logprob) == ("G5", 0.0)
    warm = Sampling(temperature=1.0, n=200, seed=1)
    samples = asyncio.run(reader.generate(prompt, warm)).completions
    right = [one.text == "G5" for one in samples]
    assert 0.7 < sum(right) / len(right) < 0.95
    assert samples == asyncio.run(reader.generate(prompt, warm)).completions


def test_invalid_options_are_reported() -> None:
    with pytest.raises(SettingError, match="examples must be 2 to 200, got 1"):
        CodeTask(examples=1)
