from __future__ import annotations

import random

import pytest

from bottega.errors import SettingError
from bottega.protocols import Tier
from bottega.routing import AgreementBound, AgreementEscalation, AgreementPolicy, AgreementRouter
from bottega.routing import agreement_router as module
from bottega.routing.agreement_router import FIRST_SAMPLES, AgreementComparison
from bottega.routing.risk_score import ScoreInputs
from bottega.types import Answer, Candidate, Query
from tests.routing.builders import TIERS, TWO, near

SMALL, LARGE = TWO


def inputs(nearest: float) -> ScoreInputs:
    return ScoreInputs(nearest, None, None, "text")


def begun(policy: AgreementPolicy, rng: random.Random) -> AgreementComparison:
    return policy.begin(Query(str(rng.random())), inputs(rng.random()))


def fill(policy: AgreementPolicy, n: int, seed: int = 0) -> list[AgreementComparison]:
    """Pass n requests whose answers agree where the nearest example is near."""
    rng, comparisons = random.Random(seed), []
    for _ in range(n):
        comparison = begun(policy, rng)
        agrees = (comparison.inputs.nearest or 0) > 0.3 or rng.random() < 0.4
        policy.end(comparison, not agrees if comparison.compared else None)
        comparisons.append(comparison)
    return comparisons


def test_a_score_is_fitted_to_the_first_samples_and_the_evidence_begins_after_them() -> None:
    policy = AgreementPolicy()
    first = fill(policy, FIRST_SAMPLES)
    assert all(one.draw is None and one.compared and not one.served for one in first)
    assert policy.score is not None
    assert policy.bound.requests == 0
    later = fill(policy, 3000, seed=1)
    served = [one.inputs.nearest or 0 for one in later if one.served]
    assert len(served) > 1000
    assert min(served) > 0.2


def test_outcomes_are_added_in_the_order_of_the_decisions() -> None:
    policy, rng = AgreementPolicy(), random.Random(0)
    fill(policy, FIRST_SAMPLES)
    first, second, third = (begun(policy, rng) for _ in range(3))
    policy.end(third, False)
    policy.end(second, True)
    assert policy.bound.requests == 0
    policy.end(first, False)
    assert policy.bound.requests == 3
    policy.end(first, True)  # a second outcome is ignored
    assert policy.bound.requests == 3


def test_a_request_without_an_outcome_counts_as_failed_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 10)
    policy, rng = AgreementPolicy(), random.Random(0)
    fill(policy, FIRST_SAMPLES)
    lost = begun(policy, rng)
    for one in [begun(policy, rng) for _ in range(9)]:
        policy.end(one, False)
    assert policy.bound.requests == 0
    begun(policy, rng)
    assert policy.bound.requests == 10
    assert lost.different is True


async def test_the_router_serves_what_is_certified() -> None:
    async def retrieve(query: Query, k: int, /) -> list[Candidate]:
        return near(float(query.text))[-k:]

    policy = AgreementPolicy()
    router = AgreementRouter(TWO, retrieve, policy)
    rng, tiers = random.Random(0), []
    for _ in range(1500):
        nearest = rng.random()
        query = Query(str(nearest))
        tier = await router(query)
        comparison = policy.pending(query)
        assert comparison is not None
        policy.end(comparison, nearest < 0.2 if comparison.compared else None)
        tiers.append((tier, nearest))
    assert {tier.name for tier, _ in tiers[:FIRST_SAMPLES]} == {LARGE.name}
    assert tiers[0][0].reason == "agreement: 200 comparisons are needed to fit the score"
    assert tiers[FIRST_SAMPLES][0].reason == "agreement: not certified yet"
    late = tiers[1000:]
    share = sum(tier.name == SMALL.name for tier, _ in late) / len(late)
    assert share > 0.6
    wrong = sum(tier.name == SMALL.name and nearest < 0.2 for tier, nearest in late)
    assert wrong / len(late) < 0.05
    reasons = {tier.reason for tier, _ in late}
    assert "agreement: score below the certified threshold" in reasons
    assert "agreement: score at or above the certified threshold" in reasons


async def test_the_escalation_reads_the_answer() -> None:
    async def retrieve(query: Query, k: int, /) -> list[Candidate]:
        return near(0.5)[-k:]

    policy = AgreementPolicy()
    escalate = AgreementEscalation(TWO, retrieve, policy)
    rng, kept = random.Random(0), []
    for _ in range(2000):
        confidence = rng.random()
        query = Query("q")
        better = await escalate(query, SMALL, Answer("a", confidence=confidence))
        comparison = policy.pending(query)
        assert comparison is not None
        different = confidence < 0.3
        policy.end(comparison, different if comparison.compared else None)
        kept.append((better is None, confidence))
    assert not any(is_kept for is_kept, _ in kept[:FIRST_SAMPLES])
    assert min(confidence for is_kept, confidence in kept if is_kept) > 0.2
    assert sum(is_kept for is_kept, _ in kept[1000:]) > 500


async def test_another_tier_than_the_apprentice_is_kept() -> None:
    async def retrieve(query: Query, k: int, /) -> list[Candidate]:
        return []

    policy = AgreementPolicy()
    escalate = AgreementEscalation(TWO, retrieve, policy)
    assert await escalate(Query("q"), LARGE, Answer("a")) is None
    assert policy.pending(Query("q")) is None


@pytest.mark.parametrize("tiers", [TIERS, TIERS[:1]])
def test_two_tiers_are_needed(tiers: tuple[Tier, ...]) -> None:
    async def retrieve(query: Query, k: int, /) -> list[Candidate]:
        return []

    with pytest.raises(SettingError, match=f"got {len(tiers)} tiers"):
        AgreementRouter(tiers, retrieve, AgreementPolicy())


def test_a_restored_score_begins_without_evidence() -> None:
    policy = AgreementPolicy()
    fill(policy, 2000)
    assert policy.bound.certified is not None
    restarted = AgreementPolicy(AgreementBound())
    restarted.restore(policy.state())
    assert restarted.score == policy.score
    assert restarted.bound.certified is None
    empty = AgreementPolicy()
    empty.restore(AgreementPolicy().state())
    assert empty.score is None
