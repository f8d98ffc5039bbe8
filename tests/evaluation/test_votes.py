"""Tests of baselines without a model: ties, order, weights."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.evaluation.methods.votes import VOTES, knn, nearest_label, strict_vote, vote
from bottega.evaluation.metrics.open_answers import Containment, vqa_accuracy
from bottega.types import Candidate, Example, Query
from tests.builders import candidates

SCORES = st.floats(-1, 1)
RETRIEVED = st.lists(st.tuples(st.sampled_from("abc"), SCORES), min_size=1, max_size=12)


def retrieved(*scored: tuple[str, float]) -> list[Candidate]:
    return [Candidate(Example(Query("?"), label), score) for label, score in scored]


@pytest.mark.parametrize(
    ("votes", "label"), [("aab", "a"), ("a", "a"), ("ab", None), ("aabb", None), ("abb", "b")]
)
def test_strict_vote_rejects_ties(votes: str, label: str | None) -> None:
    assert strict_vote(candidates(*votes)).labels == ((label,) if label else ())


def test_ties_go_to_the_nearer_examples() -> None:
    assert vote(retrieved(("b", 0.9), ("a", 0.8), ("a", 0.7), ("b", 0.6))).labels == ("b",)
    assert vote(retrieved(("a", 0.6), ("b", 0.9))).labels == ("b",)
    assert vote(retrieved(("c", 0.9), ("a", 0.8), ("b", 0.7), ("b", 0.6), ("a", 0.5))).labels == (
        "a",
    )


def test_equally_similar_examples_keep_their_order() -> None:
    assert vote(retrieved(("b", 0.5), ("a", 0.5))).labels == ("b",)
    assert nearest_label(retrieved(("b", 0.5), ("a", 0.5))).labels == ("b",)


def test_similar_examples_have_more_weight() -> None:
    one_similar = retrieved(("a", 0.9), ("b", 0.4), ("b", 0.3))
    assert (vote(one_similar).labels, knn(one_similar).labels) == (("b",), ("a",))
    similar = retrieved(("a", 0.90), ("b", 0.89), ("b", 0.88))
    assert (nearest_label(similar).labels, knn(similar).labels) == (("a",), ("b",))


def test_tie_is_wrong_under_every_metric() -> None:
    """In VQA, "tie" is also a regular answer."""
    item = Example(Query("What is he wearing?", id="7"), "tie")
    golds = {"7": ["tie"] * 9 + ["bow tie"]}
    tied = strict_vote(candidates(*"ab"))
    for metric in (vqa_accuracy(golds), vqa_accuracy(golds, "always-normalised"), Containment()):
        assert metric.score(item, tied) == 0


@pytest.mark.parametrize("name", VOTES)
def test_no_candidates_give_no_label(name: str) -> None:
    answer = VOTES[name]([])
    assert (answer.valid, answer.labels) == (False, ())


def test_multi_label_votes_need_a_majority() -> None:
    shown = [("a", "b"), ("a",), ("b",), ("a", "c")]
    multi_label = [Candidate(Example(Query("?"), ", ".join(s), labels=s), 1.0) for s in shown]
    for rule in (vote, strict_vote, knn):
        assert rule(multi_label, multi_label=True).labels == ("a",)
    assert nearest_label(multi_label, multi_label=True).labels == ("a", "b")


@given(RETRIEVED)
def test_every_rule_returns_a_candidate_label(scored: list[tuple[str, float]]) -> None:
    for name in ("vote", "nearest", "knn"):
        answer = VOTES[name](retrieved(*scored))
        assert answer.valid
        assert answer.labels[0] in {label for label, _ in scored}
        assert answer.confidence is None or 0 < answer.confidence <= 1


@given(RETRIEVED)
def test_vote_rules_differ_only_on_ties(scored: list[tuple[str, float]]) -> None:
    strict = strict_vote(retrieved(*scored))
    counts = sorted(([label for label, _ in scored].count(x) for x in "abc"), reverse=True)
    assert strict.valid == (counts[0] > counts[1])
    assert not strict.valid or strict.labels == vote(retrieved(*scored)).labels


@given(RETRIEVED)
def test_candidate_order_does_not_matter_for_distinct_scores(
    scored: list[tuple[str, float]],
) -> None:
    distinct = list({score: (label, score) for label, score in scored}.values())
    for rule in VOTES.values():
        assert rule(retrieved(*distinct)).labels == rule(retrieved(*sorted(distinct))).labels


@given(RETRIEVED)
def test_knn_returns_a_dominant_nearest_label(
    scored: list[tuple[str, float]],
) -> None:
    close = [("a", 1.5), *((label, score - 1.0) for label, score in scored)]
    assert knn(retrieved(*close)).labels == nearest_label(retrieved(*close)).labels == ("a",)


@given(RETRIEVED, st.integers(0, 11))
def test_duplicate_never_lowers_the_share_of_its_label(
    scored: list[tuple[str, float]], index: int
) -> None:
    label, score = scored[index % len(scored)]
    for rule in (vote, knn):
        before, after = rule(retrieved(*scored)), rule(retrieved(*scored, (label, score)))
        if before.labels == (label,):
            assert after.labels == (label,)
            assert (after.confidence or 0) >= (before.confidence or 0) - 1e-12
        elif after.labels == before.labels:
            assert (after.confidence or 0) <= (before.confidence or 0) + 1e-12
        else:
            assert after.labels == (label,)


def test_single_example_decides_every_rule() -> None:
    for rule in VOTES.values():
        assert rule(retrieved(("a", 0.3))).labels == ("a",)
