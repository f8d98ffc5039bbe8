from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from bottega.gateway.accounting import savings as savings_module
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import Entry, ShadowSample, State
from bottega.gateway.accounting.reports import buckets
from bottega.gateway.accounting.savings import Savings, SavingsReader, savings
from bottega.parsing import COMPARISON_RULES


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger(tmp_path / "gateway.db")
    yield opened
    opened.close()


def note(
    ledger: Ledger,
    route: str,
    cost: float | None = 0.0,
    *,
    state: State = "answered",
    namespace: str = "a",
    times: int = 1,
    shots: int = 0,
    similarity: float | None = None,
    dismissed: float = 0.0,
    moment: float = 1000.0,
) -> None:
    for number in range(times):
        ledger.record(
            Entry(
                moment + number,
                "r",
                "account",
                namespace,
                route,
                "model",
                state,
                shots,
                similarity,
                prompt_tokens=10,
                completion_tokens=2,
                cost_usd=cost,
                seconds=0.5,
                dismissed_usd=dismissed,
            )
        )


def savings_of(ledger: Ledger, namespace: str | None = None, since: float | None = None) -> Savings:
    ledger.flush()
    return savings(ledger, namespace=namespace, since=since)


def test_empty_ledger_has_no_savings(ledger: Ledger) -> None:
    report = savings_of(ledger)
    assert (report.requests, report.routes, report.master_only, report.agreement) == (
        0,
        (),
        None,
        None,
    )


def test_routes_are_counted(ledger: Ledger) -> None:
    note(ledger, "master", 0.5, times=2)
    note(ledger, "apprentice", 0.1, shots=2, similarity=0.8, times=3)
    note(ledger, "apprentice", None, shots=2, similarity=0.6)
    note(ledger, "apprentice", 0.1)
    note(ledger, "master", None, state="replayed", times=2)
    note(ledger, "master", 0.2, state="passed_through")
    note(ledger, "master", None, state="failed")
    report = savings_of(ledger)
    named = [(r.state, r.tier, r.shots, r.requests, r.unpriced) for r in report.routes]
    assert named == [
        ("replayed", "", 0, 2, 0),
        ("answered", "apprentice", 0, 1, 0),
        ("answered", "apprentice", 2, 4, 1),
        ("answered", "master", 0, 2, 0),
        ("passed_through", "master", 0, 1, 0),
        ("failed", "master", 0, 1, 1),
    ]
    shown = report.routes[2]
    assert (shown.prompt_tokens, shown.completion_tokens, shown.seconds) == (40, 8, 0.5)
    assert shown.similarity == pytest.approx(0.75)
    assert (shown.compared, report.routes[1].similarity) == (4, None)
    assert report.spent_usd == pytest.approx(0.5 * 2 + 0.1 * 3 + 0.1 + 0.2)
    assert (report.requests, report.unpriced) == (11, 2)


def test_master_only_cost_is_estimated(ledger: Ledger) -> None:
    rng = random.Random(0)
    costs = [rng.uniform(0.1, 0.3) for _ in range(50)]
    for cost in costs:
        note(ledger, "master", cost + 0.05, dismissed=0.05)
    note(ledger, "apprentice", 0.01, times=100)
    note(ledger, "master", None, state="replayed", times=20)
    note(ledger, "apprentice", 0.0, state="passed_through", times=5)
    note(ledger, "apprentice", None, state="failed", times=7)
    alone = savings_of(ledger).master_only
    assert alone is not None
    mean = sum(costs) / 50
    assert alone.usd.value == pytest.approx(sum(costs) + 125 * mean)
    assert alone.saved.value == pytest.approx(125 * mean - 100 * 0.01 - 50 * 0.05)
    assert (alone.usd.n, alone.estimated, alone.pooled) == (50, 125, 0)
    # 125 times the mean's standard error: a uniform's deviation is 0.2 / sqrt(12).
    assert alone.usd.low is not None
    assert alone.usd.high is not None
    error = 125 * 0.2 / 12**0.5 / 50**0.5
    assert (alone.usd.high - alone.usd.low) / 2 / 1.96 == pytest.approx(error, rel=0.2)
    assert alone.saved.low == pytest.approx(alone.usd.low - 50 * 0.05 - sum(costs) - 1.0)


def test_master_costs_are_per_namespace(ledger: Ledger) -> None:
    note(ledger, "master", 1.0, namespace="a", times=20)
    note(ledger, "master", 3.0, namespace="b", times=20)
    note(ledger, "apprentice", namespace="a", times=5)
    note(ledger, "apprentice", namespace="c", times=5)
    alone, in_a, in_c = (savings_of(ledger, name).master_only for name in (None, "a", "c"))
    assert alone is not None
    assert in_a is not None
    assert in_c is not None
    assert (alone.usd.value, alone.pooled, alone.usd.n) == (80 + 5 * 1 + 5 * 2, 5, 40)
    assert (in_a.usd.value, in_a.pooled, in_a.usd.n) == (20 + 5, 0, 20)
    assert (in_c.usd.value, in_c.pooled, in_c.usd.n) == (10, 5, 40)


def test_namespaces_are_resampled_separately(ledger: Ledger) -> None:
    """Their errors add up as squares."""
    rng = random.Random(0)
    for namespace in "abcdefgh":
        for _ in range(30):
            note(ledger, "master", rng.uniform(0, 1), namespace=namespace)
        note(ledger, "apprentice", namespace=namespace, times=10)
    alone = savings_of(ledger).master_only
    assert alone is not None
    assert alone.usd.low is not None
    assert alone.usd.high is not None
    error = 8**0.5 * 10 / 12**0.5 / 30**0.5
    assert (alone.usd.high - alone.usd.low) / 2 / 1.96 == pytest.approx(error, rel=0.2)


def test_few_answers_have_no_interval_and_none_no_estimate(ledger: Ledger) -> None:
    note(ledger, "apprentice", times=5)
    assert savings_of(ledger).master_only is None
    note(ledger, "master", None)  # of unknown price
    assert savings_of(ledger).master_only is None
    note(ledger, "master", 0.5, times=9)
    alone = savings_of(ledger).master_only
    assert alone is not None
    assert (alone.usd.n, alone.usd.low, alone.saved.high) == (9, None, None)
    note(ledger, "master", 0.5)
    enough = savings_of(ledger).master_only
    assert enough is not None
    assert enough.usd.low is not None


def test_very_many_answers_are_summarized(ledger: Ledger) -> None:
    rng = random.Random(0)
    for _ in range(10_500):
        note(ledger, "master", rng.uniform(0, 1))
    note(ledger, "apprentice", times=100)
    alone = savings_of(ledger).master_only
    assert alone is not None
    assert alone.usd.low is not None
    assert alone.usd.high is not None
    error = 100 / 12**0.5 / 10_500**0.5
    assert (alone.usd.high - alone.usd.low) / 2 / 1.96 == pytest.approx(error, rel=0.1)


def test_since_excludes_earlier_entries(ledger: Ledger) -> None:
    note(ledger, "master", 1.0, moment=10)
    note(ledger, "master", 2.0, moment=20)
    report = savings_of(ledger, since=15)
    assert (report.requests, report.spent_usd, report.first) == (1, 2.0, 20)


def test_master_can_have_another_name(ledger: Ledger) -> None:
    note(ledger, "big", 1.0, times=3)
    assert savings_of(ledger).master_only is None
    ledger.set_master("big")
    report = savings_of(ledger)
    assert report.master == "big"
    assert report.master_only is not None


def test_quality_is_agreement_in_shadow_samples(ledger: Ledger) -> None:
    for number in range(40):
        ledger.record_shadow(
            ShadowSample(1000.0, "r", "a", 0.9, float(number < 36), float(number < 28))
        )
    # Measured for the gate; compared by other rules.
    other = ShadowSample(1000.0, "r", "a", 0.9, 0.0, 0.0)
    ledger.record_shadow(replace(other, sampled=False))
    ledger.record_shadow(replace(other, rules=COMPARISON_RULES + 1))
    ledger.record_shadow(ShadowSample(1000.0, "r", "b", 0.9, 0.0, 1.0))
    note(ledger, "master")
    agreement = savings_of(ledger, "a").agreement
    assert agreement is not None
    # By hand: Agresti and Coull, (36 + 2) / 44; Bonett and Price, 8 + 1 against 0 + 1 of 42 pairs.
    share, gain = 38 / 44, 8 / 42
    reach = 1.96 * (share * (1 - share) / 44) ** 0.5
    assert (agreement.with_demonstrations.least, agreement.with_demonstrations.n) == (0.9, 40)
    assert agreement.with_demonstrations.low == pytest.approx(share - reach, abs=1e-4)
    assert agreement.with_demonstrations.high == pytest.approx(share + reach, abs=1e-4)
    assert agreement.without.least == 0.7
    reach = 1.96 * ((10 / 42 - gain**2) / 42) ** 0.5
    assert agreement.gain.value == pytest.approx(0.2)
    assert agreement.gain.low == pytest.approx(gain - reach, abs=1e-4)
    assert agreement.gain.high == pytest.approx(gain + reach, abs=1e-4)


@pytest.mark.parametrize("was_shown", [True, False])
def test_agreement_is_that_of_answers_as_served(ledger: Ledger, was_shown: bool) -> None:
    for shown, hidden in ((1.0, 0.0), (1.0, None), (None, 0.0), (1.0, 1.0)):
        ledger.record_shadow(
            ShadowSample(1000.0, "r", "a", 0.9, shown, hidden, was_shown=was_shown)
        )
    found = savings_of(ledger).agreement
    assert found is not None
    served = found.served
    assert (served.least, served.most) == ((0.75, 1.0) if was_shown else (0.25, 0.5))
    assert (served.n, served.undecided) == (4, 1)
    assert found.gain.value == 0.5


def test_one_sample_has_a_wide_interval(ledger: Ledger) -> None:
    ledger.record_shadow(ShadowSample(1000.0, "r", "a", 0.9, 1.0, 1.0))
    agreement = savings_of(ledger).agreement
    assert agreement is not None
    assert agreement.with_demonstrations.low < 0.5
    assert agreement.gain.low < -0.5 < 0.5 < agreement.gain.high


def test_shadow_samples_cost_and_save_nothing(ledger: Ledger) -> None:
    note(ledger, "master", 0.5, times=10)
    note(ledger, "apprentice", 0.1, times=10)
    before = savings_of(ledger)
    note(ledger, "master", 0.5, state="shadow", times=2)
    note(ledger, "apprentice", 0.1, state="shadow", times=2)
    after = savings_of(ledger)
    assert before.requests == after.requests == 20
    assert after.spent_usd == pytest.approx(before.spent_usd + 1.2)
    assert before.master_only is not None and after.master_only is not None
    assert after.master_only.usd.value == pytest.approx(before.master_only.usd.value)
    assert after.master_only.saved.value == pytest.approx(before.master_only.saved.value - 1.2)
    assert after.master_only.usd.n == 12


def test_embeddings_save_nothing(ledger: Ledger) -> None:
    note(ledger, "master", 0.5, times=10)
    note(ledger, "apprentice", 0.1, times=10)
    before = savings_of(ledger).master_only
    note(ledger, "", None, state="passed_through", times=30)
    after = savings_of(ledger).master_only
    assert before is not None and before == after
    assert after.estimated == 10


def test_paid_failure_of_the_master_counts_on_both_sides(ledger: Ledger) -> None:
    note(ledger, "master", 0.5, times=10)
    before = savings_of(ledger)
    note(ledger, "master", 0.3, state="failed", times=3)
    after = savings_of(ledger)
    assert before.master_only is not None and after.master_only is not None
    assert after.spent_usd == pytest.approx(before.spent_usd + 0.9)
    assert after.master_only.usd.value == pytest.approx(5.9)
    assert after.master_only.saved.value == pytest.approx(before.master_only.saved.value) == 0.0
    assert after.master_only.usd.n == 10


def test_rejected_requests_are_listed_separately(ledger: Ledger) -> None:
    note(ledger, "apprentice", times=3)
    note(ledger, "master", None, state="replayed")
    for status in (400, 429, 499, 502):
        ledger.record(Entry(1000.0, "r", "k", "a", "", "", "failed", cost_usd=0.0, status=status))
    report = savings_of(ledger)
    named = {route.state: route.requests for route in report.routes}
    assert named == {"answered": 3, "replayed": 1, "failed": 2, "rejected": 2}
    assert (report.requests, report.answered) == (8, 4)


@pytest.mark.parametrize(
    ("status", "tier", "state"),
    [
        (429, "", "rejected"),  # the key's own limit
        (429, "master", "failed"),  # the tiers' limit
        (400, "", "rejected"),
        (400, "master", "rejected"),
        (499, "master", "failed"),
        (502, "master", "failed"),
    ],
)
def test_a_rate_limit_of_tiers_is_their_failure(
    ledger: Ledger, status: int, tier: str, state: str
) -> None:
    now = time.time()
    ledger.record(Entry(now, "r", "k", "a", tier, "", "failed", cost_usd=0.0, status=status))
    assert [one.state for one in savings_of(ledger).routes] == [state]
    assert [one.state for one in savings_of(ledger, since=now - 60).routes] == [state]
    (bucket,) = buckets(ledger, now - 60, 60, None)
    assert bucket.is_rejected == (state == "rejected")


def test_sums_of_answers_and_of_samples_count_together(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the limit the costs are sums, of the master's answers and of its shadow samples."""
    costs = [1.0, 2.0, 3.0, 6.0]
    for cost, state in zip(costs, ("answered", "answered", "shadow", "shadow"), strict=True):
        note(ledger, "master", cost, state=cast(State, state))
    ledger.flush()
    reader = SavingsReader(ledger, 0.0, None, "master")
    for most, values in ((4, costs), (3, [])):
        monkeypatch.setattr(savings_module, "MAX_EXACT_COSTS", most)
        report = reader.master_costs()["a"]
        assert sorted(report.values) == values
        assert (report.n, report.mean) == (4, 3.0)
        assert report.deviation == pytest.approx(3.5**0.5)


HOUR = 3600.0
SERVERS: dict[str, tuple[dict[str, float], str | None, float | None, bool, float, float]] = {
    # prices an hour, namespace, since, pooled: cost of the servers, saved
    "none": ({}, None, None, True, 0.0, 24.0),
    "the apprentice": ({"apprentice": 1.5}, None, None, True, 6.0, 18.0),
    "more than it saves": ({"apprentice": 10.0}, None, None, True, 40.0, -16.0),
    "the master alone would cost them, too": ({"master": 2.0}, None, None, True, 8.0, 24.0),
    "both": ({"apprentice": 1.5, "master": 2.0}, None, None, True, 14.0, 18.0),
    "an unused tier": ({"middle": 1.0}, None, None, True, 4.0, 20.0),
    "since": ({"apprentice": 1.5}, None, HOUR, True, 4.5, 13.5),
    "a namespace": ({"apprentice": 1.5}, "a", None, True, 1.5, 4.5),
    "a namespace that sees its own alone": ({"apprentice": 1.5}, "a", None, False, 0.0, 6.0),
}


@pytest.mark.parametrize("case", SERVERS)
def test_savings_subtract_the_servers_of_the_period(ledger: Ledger, case: str) -> None:
    """From the first request to the last: four hours, of which namespace a has a quarter of the
    apprentice's requests."""
    prices, namespace, since, pooled, cost, saved = SERVERS[case]
    ledger.set_hourly_prices({"apprentice": 0.0, "master": 0.0, **prices})
    note(ledger, "apprentice", 0.0, namespace="a", times=2, moment=0.5)
    note(ledger, "apprentice", 0.0, namespace="b", moment=HOUR)
    note(ledger, "apprentice", 0.0, namespace="b", times=5, moment=2 * HOUR)
    note(ledger, "master", 3.0, namespace="b", moment=3 * HOUR)
    note(ledger, "master", 3.0, namespace="a", moment=4 * HOUR)
    ledger.flush()
    found = savings(ledger, namespace=namespace, since=since, pooled=pooled)
    assert found.servers_usd == pytest.approx(cost, rel=1e-3)
    assert found.leaves_out_servers == (bool(prices) and not pooled)
    assert found.master_only is not None
    assert found.master_only.saved.value == pytest.approx(saved, rel=1e-3)
    alone = ledger.read("SELECT sum(cost_usd) FROM gateway_entries WHERE time >= ?1", since or 0)
    if namespace is None:  # the cost of requests is unchanged
        assert found.spent_usd == alone[0][0]
        whole = found.spent_usd + found.servers_usd
        assert found.master_only.usd.value - whole == pytest.approx(found.master_only.saved.value)


def test_one_request_has_no_hours(ledger: Ledger) -> None:
    ledger.set_hourly_prices({"apprentice": 1.5})
    note(ledger, "apprentice", 0.0)
    assert (savings_of(ledger).hours, savings_of(ledger).servers_usd) == (0.0, 0.0)
