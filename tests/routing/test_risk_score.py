from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import SettingError
from bottega.routing.risk_score import RiskScore, ScoreInputs, inputs_after, inputs_before
from bottega.types import Answer, Candidate, Example, Query
from tests.builders import solid_image


def samples(n: int, seed: int = 0) -> tuple[list[ScoreInputs], list[bool]]:
    """Return requests that agree more often where the nearest example is near; the other inputs
    are noise."""
    rng = random.Random(seed)
    inputs, agrees = [], []
    for _ in range(n):
        nearest = rng.random()
        kind = rng.choice(["text who", "text what"])
        inputs.append(ScoreInputs(nearest, rng.random(), None, kind, True, rng.random(), None))
        agrees.append(rng.random() < 0.2 + 0.75 * nearest)
    return inputs, agrees


def test_requests_that_agree_more_often_score_higher() -> None:
    score = RiskScore.fit(*samples(300))
    low, high = (ScoreInputs(nearest, 0.5, None, "text who") for nearest in (0.1, 0.9))
    assert score(low) < 0.3 < 0.7 < score(high)


def test_scores_are_ranks_among_the_samples() -> None:
    score = RiskScore.fit(*samples(300))
    later = sorted(score(one) for one in samples(1000, seed=1)[0])
    assert later[100] == pytest.approx(0.1, abs=0.08)
    assert later[900] == pytest.approx(0.9, abs=0.08)
    assert 0 <= later[0] <= later[-1] < 1


@given(st.integers(0, 20), st.integers(0, 4), st.floats(0, 0.5))
def test_a_higher_input_never_lowers_the_score(seed: int, index: int, more: float) -> None:
    inputs, agrees = samples(60, seed)
    score = RiskScore.fit(inputs, [not one for one in agrees] if seed % 2 else agrees)
    fields = [0, 1, 2, 5, 6]  # all numbers

    def scored(value: float) -> float:
        changed: list[Any] = list(inputs[0])
        changed[fields[index]] = value
        return score(ScoreInputs(*changed))

    assert scored(0.4 + more) >= scored(0.4)


def test_an_invalid_answer_scores_zero() -> None:
    inputs, agrees = samples(100)
    assert RiskScore.fit(inputs, agrees)(inputs[0]._replace(valid=False)) == 0


def test_unknown_inputs_count_as_average() -> None:
    score = RiskScore.fit(*samples(300))
    nothing = ScoreInputs(None, None, None, "another kind")
    assert score(nothing) == pytest.approx(0.5, abs=0.15)


@pytest.mark.parametrize("agreed", [True, False])
def test_samples_of_one_outcome_rank_by_all_inputs(agreed: bool) -> None:
    inputs, _ = samples(100)
    score = RiskScore.fit(inputs, [agreed] * 100)
    assert score(inputs[0]._replace(nearest=1.0)) > score(inputs[0]._replace(nearest=0.0))


def test_kinds_of_questions_have_their_own_rate() -> None:
    kinds = ["text who", "text how"] * 100
    inputs = [ScoreInputs(None, None, None, kind) for kind in kinds]
    score = RiskScore.fit(inputs, [kind == "text who" for kind in kinds])
    assert score(inputs[0]) > score(inputs[1])


def test_a_stored_score_is_the_same() -> None:
    score = RiskScore.fit(*samples(100))
    restored = RiskScore.restore(score.state())
    assert restored == score
    assert restored.version == score.version
    assert RiskScore.fit(*samples(100, seed=1)).version != score.version


@pytest.mark.parametrize("state", [{}, {"kinds": 3}, {"means": ["a"]}])
def test_another_state_is_an_error(state: dict[str, object]) -> None:
    with pytest.raises(SettingError, match="not that of a risk score"):
        RiskScore.restore(state)


def test_no_samples_are_an_error() -> None:
    with pytest.raises(SettingError, match="got 0 and 0"):
        RiskScore.fit([], [])


def test_inputs_before_and_after_the_answer() -> None:
    query = Query("What is it?", (solid_image(1),))
    found = [
        Candidate(Example(query, answer), score)
        for answer, score in (("cat", 0.9), ("dog", 0.7), ("cat", 0.6))
    ]
    before = inputs_before(query, found)
    assert before == ScoreInputs(0.9, 0.6, 2 / 3, "image what")
    after = inputs_after(before, Answer("dog", valid=True, confidence=0.4), found)
    assert after == before._replace(confidence=0.4, repeated=1 / 3)
    assert inputs_before(Query("How many?", choices=("1", "2")), []) == ScoreInputs(
        None, None, None, "choices how"
    )
