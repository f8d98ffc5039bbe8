from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import multinomial

from bottega.errors import SettingError
from bottega.evaluation.config import RunConfig
from bottega.evaluation.metrics.metric import (
    PERMUTATIONS,
    _correlation,
    mcnemar,
    paired_difference,
    sign_flips,
)
from bottega.evaluation.outcomes import Method, Outcome, ScoredAnswer
from bottega.evaluation.runs.paired import difference, paired_differences
from bottega.evaluation.runs.runner import MethodResult, evaluate
from bottega.types import Answer, Example, Query
from tests.evaluation.builders import episodic_benchmark

PAIRS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)
DATA = episodic_benchmark()
RIGHT = {item.query: item.answer for item in DATA.items}


def table(both: int, ours: int, theirs: int, neither: int) -> tuple[list[bool], list[bool]]:
    """Return the correctness of two methods for these counts of a 2x2 table."""
    kinds = ((True, True), (True, False), (False, True), (False, False))
    counts = (both, ours, theirs, neither)
    pairs = [kind for kind, n in zip(kinds, counts, strict=True) for _ in range(n)]
    return [a for a, _ in pairs], [b for _, b in pairs]


@given(PAIRS)
def test_paired_interval_contains_the_difference(pairs: list[tuple[bool, bool]]) -> None:
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    gain = paired_difference(ours, theirs)
    assert gain.value == pytest.approx(np.mean(ours) - np.mean(theirs))
    assert -1 - 1e-12 <= gain.low <= gain.value <= gain.high <= 1 + 1e-12
    assert gain.high - gain.low > 0.01


@given(PAIRS)
def test_swapping_methods_flips_the_sign(pairs: list[tuple[bool, bool]]) -> None:
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    gain, loss = paired_difference(ours, theirs), paired_difference(theirs, ours)
    assert (loss.value, loss.low, loss.high) == pytest.approx((-gain.value, -gain.high, -gain.low))
    assert mcnemar(ours, theirs) == pytest.approx(mcnemar(theirs, ours))


@given(PAIRS, st.integers(2, 5))
def test_more_items_narrow_the_interval(pairs: list[tuple[bool, bool]], times: int) -> None:
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    few, many = paired_difference(ours, theirs), paired_difference(ours * times, theirs * times)
    assert many.value == pytest.approx(few.value)
    assert many.high - many.low < few.high - few.low


def test_interval_matches_a_published_table() -> None:
    """Newcombe (1998), method 10, for 36, 12, 2 and 0 of 50."""
    gain = paired_difference(*table(36, 12, 2, 0))
    assert (gain.value, gain.low, gain.high) == pytest.approx((0.2, 0.0569, 0.3404), abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shares", [(0.7, 0.1, 0.1, 0.1), (0.4, 0.3, 0.1, 0.2), (0.9, 0.08, 0, 0.02)]
)
def test_interval_has_its_nominal_coverage(shares: tuple[float, ...]) -> None:
    n, truth, covered = 20, shares[1] - shares[2], 0.0
    for cells in product(range(n + 1), repeat=3):
        if sum(cells) <= n:
            counts = (*cells, n - sum(cells))
            chance = multinomial.pmf(counts, n, shares)
            # The skipped tables have a total probability below 0.002.
            gain = paired_difference(*table(*counts)) if chance > 1e-6 else None
            covered += chance if gain and gain.low <= truth <= gain.high else 0
    assert covered > 0.93


@given(PAIRS)
def test_mcnemar_matches_exhaustive_enumeration(
    pairs: list[tuple[bool, bool]],
) -> None:
    gains = [a - b for a, b in pairs if a != b][:10]
    ways = [abs(sum(signs)) for signs in product((-1, 1), repeat=len(gains))]
    expected = np.mean([way >= abs(sum(gains)) for way in ways])
    ours, theirs = [gain > 0 for gain in gains], [gain < 0 for gain in gains]
    assert mcnemar([*ours, True], [*theirs, True]) == pytest.approx(expected)


def test_equal_answers_have_a_p_value_of_1() -> None:
    answers = [True] * 50
    gain = paired_difference(answers, answers)
    assert gain.low < gain.value == 0 < gain.high
    assert mcnemar(answers, answers) == 1.0


def test_pairing_narrows_the_interval() -> None:
    together = paired_difference(*table(90, 20, 0, 90))
    apart = paired_difference(*table(50, 60, 40, 50))
    assert together.value == apart.value == 0.1
    assert together.high - together.low < (apart.high - apart.low) / 2


async def _run(name: str, shots: int, wrong_count: int) -> tuple[MethodResult, list[ScoredAnswer]]:
    wrong_queries = {item.query for item in DATA.items[:wrong_count]}

    async def answer(query: Query) -> Outcome:
        label = "?" if query in wrong_queries else RIGHT[query]
        return Outcome(Answer(label, labels=(label,)))

    return await evaluate(DATA, Method(name, shots, answer), RunConfig(concurrency=2))


async def test_methods_are_paired_at_equal_shots() -> None:
    runs = [await _run("visual-rag", 5, 0), await _run("vote", 5, 3), await _run("vote", 10, 6)]
    [one] = paired_differences(runs)
    assert (one.method, one.against, one.shots, one.n) == ("visual-rag", "vote", 5, 6)
    assert (one.value, one.p_value) == (0.5, 0.25)
    assert paired_differences([*runs[1:], await _run("vote", 20, 0)]) == []


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        (("mine", 0), ("yours", 5), ("yours", "mine")),
        (("mine", 5), ("mine", 5), ("mine 5", "mine 5")),
        (("vote", 10), ("vote", 5), ("vote 5", "vote 10")),
        (("zero-shot", 0), ("mine", 5), ("mine", "zero-shot")),
        (("vote", 5), ("visual-rag", 5), ("visual-rag", "vote")),
    ],
)
async def test_any_two_runs_are_paired(
    first: tuple[str, int], second: tuple[str, int], names: tuple[str, str]
) -> None:
    runs = [await _run(*first, 3), await _run(*second, 0)]
    [one] = paired_differences(runs)
    assert ((one.method, one.against), one.n, one.value) == (names, 6, 0.5)
    assert one.shots == max(first[1], second[1])


async def test_two_runs_over_other_items_are_rejected() -> None:
    result, scored = await _run("mine", 0, 3)
    moved = [replace(one, index=(one.index + 1) % len(scored)) for one in scored]
    with pytest.raises(SettingError, match="mine and yours have different items"):
        paired_differences([(result, scored), (replace(result, method="yours"), moved)])
    assert paired_differences([(result, scored[:2]), (result, scored[2:])]) == []


async def test_only_items_answered_by_both_are_compared() -> None:
    (result, scored), vote = await _run("visual-rag", 5, 0), await _run("vote", 5, 3)
    [one] = paired_differences([(result, scored[2:]), vote])
    assert (one.n, one.value) == (4, 0.25)
    assert paired_differences([(result, []), vote]) == []


async def test_items_with_equal_queries_are_paired_by_index() -> None:
    items = [Example(Query("q"), answer) for answer in ("a", "b", "a", "c")]
    answer = Answer("x", labels=("x",))
    right = [ScoredAnswer(i, item, answer, (float(i == 0),)) for i, item in enumerate(items)]
    result, _ = await _run("visual-rag", 5, 0)
    [same] = paired_differences([(result, right), (replace(result, method="vote"), right)])
    assert (same.n, same.value, same.p_value) == (4, 0.0, 1.0)
    wrong_count = [replace(one, scores=(0.0,)) for one in right]
    [one] = paired_differences(
        [(result, right), (replace(result, method="vote"), wrong_count[::-1])]
    )
    assert one.value == pytest.approx(1 / 4)


async def test_retrieval_methods_are_compared_with_their_baselines() -> None:
    runs = [await _run("top-k", 5, 0), await _run("random", 5, 3), await _run("zero-shot", 0, 6)]
    assert [(p.method, p.against, p.value) for p in paired_differences(runs)] == [
        ("top-k", "random", 0.5),
        ("top-k", "zero-shot", 1.0),
    ]


async def test_differences_to_knn_come_first() -> None:
    names = {"vote": 3, "visual-rag": 0, "top-k": 1, "knn": 2}
    runs = [await _run(name, k, wrong) for name, wrong in names.items() for k in (5, 10)]
    pairs = paired_differences(runs)
    assert [(p.method, p.shots) for p in pairs if p.against == "knn"] == [
        ("visual-rag", 5),
        ("visual-rag", 10),
        ("top-k", 5),
        ("top-k", 10),
    ]
    assert [p.against for p in pairs[:5]] == ["knn"] * 4 + ["vote"]


async def test_logreg_is_compared_with_knn_at_every_shot_count() -> None:
    runs = [await _run("logreg", 0, 0), await _run("knn", 5, 3), await _run("knn", 10, 6)]
    assert [(p.method, p.against, p.shots, p.value) for p in paired_differences(runs)] == [
        ("logreg", "knn", 5, 0.5),
        ("logreg", "knn", 10, 1.0),
    ]
    pairs = paired_differences([await _run("visual-rag", 5, 0), runs[0]])
    assert [(p.method, p.against, p.shots) for p in pairs] == [("visual-rag", "logreg", 5)]


async def test_compression_is_compared_with_concat_and_its_controls() -> None:
    names = {"concat": 1, "racc": 0, "racc-flat": 2, "racc-swapped": 6, "racc-oracle": 0}
    runs = [await _run(name, 5, wrong_count) for name, wrong_count in names.items()]
    assert [(p.method, p.against) for p in paired_differences(runs)] == [
        ("racc", "concat"),
        ("racc", "racc-flat"),
        ("racc", "racc-swapped"),
    ]


def test_graded_scores_are_compared_by_resampling() -> None:
    rng = np.random.default_rng(0)
    theirs = rng.uniform(0, 0.5, 60)
    gain, p_value = difference([*(theirs + 0.2)], [*theirs], seed=0)
    assert gain.value == pytest.approx(0.2)
    assert gain.low == pytest.approx(0.2)
    assert p_value < 0.001
    gain, p_value = difference([*theirs], [*rng.permutation(theirs)], seed=0)
    assert gain.low < 0 < gain.high
    assert p_value > 0.05


def test_graded_score_interval_is_95_percent() -> None:
    """For many items the interval is close to the normal one: 1.96 standard errors per side."""
    rng = np.random.default_rng(0)
    ours, theirs = rng.uniform(0, 1, 400), rng.uniform(0, 1, 400)
    gain, _ = difference([*ours], [*theirs], seed=0)
    error = (ours - theirs).std() / 20
    assert gain.value == pytest.approx((ours - theirs).mean())
    assert gain.value - gain.low == pytest.approx(1.96 * error, rel=0.08)
    assert gain.high - gain.value == pytest.approx(1.96 * error, rel=0.08)


def test_p_value_is_never_zero() -> None:
    better, worse = [0.9] * 60, [0.1] * 60
    assert sign_flips(better, worse, seed=0) == pytest.approx(1 / (PERMUTATIONS + 1))
    # Of 3 differences in one direction 2 of the 8 ways to assign signs are as extreme.
    assert sign_flips(better[:3], worse[:3], seed=0) == pytest.approx(1 / 4, abs=0.02)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_method_does_not_differ_from_itself(scores: list[float]) -> None:
    gain, p_value = difference(scores, scores, seed=0)
    assert (gain.value, p_value) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("both", "phi"),
    # Each method answers 5 of 10 items correctly; a positive agreement is reduced by n / 2.
    [(5, 20 / 25), (4, 10 / 25), (3, 0.0), (2, -5 / 25), (0, -25 / 25)],
)
def test_correlation_has_newcombes_correction(both: int, phi: float) -> None:
    ours = [True] * 5 + [False] * 5
    theirs = [True] * both + [False] * 5 + [True] * (5 - both)
    assert _correlation(ours, theirs) == pytest.approx(phi)


def test_sign_flips_ignore_ties() -> None:
    ours, theirs = [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]
    # Of the 16 ways to flip four signs, ten are as far from zero: p = 10 / 16.
    assert sign_flips(ours, theirs, seed=0) == pytest.approx(10 / 16, abs=0.02)
    assert sign_flips(theirs, ours, seed=0) == pytest.approx(10 / 16, abs=0.02)
    ties = [0.5] * 10
    assert sign_flips(ours + ties, theirs + ties, seed=0) == sign_flips(ours, theirs, seed=0)
    assert sign_flips(ties, ties, seed=0) == 1.0
