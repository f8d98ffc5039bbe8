"""Ratios of the benchmark of workers, and the bound of the arrangement without shares of cores."""

from __future__ import annotations

import pytest

from benchmarks.gateway_workers import REQUIRED_RATIO, Run, judged


def test_shared_cores_are_reported_with_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    # CPU ms per request: 0.487 of a gateway, and 0.095 of the others.
    runs = [
        Run(1, None, 2042, 0.487, 0.005, 0.03, 0.06),
        Run(2, None, 2920, 0.480, 0.005, 0.03, 0.06),
        Run(1, 0.25, 500, 0.487, 0.005, 0.03, 0.06),
        Run(2, 0.25, 900, 0.490, 0.005, 0.03, 0.06),
    ]
    shared, bound, _, shares, _ = judged(runs, [None, 0.25])
    assert shared.value.median == pytest.approx(1.43, abs=0.005)
    assert (shared.bar, shared.met) == (REQUIRED_RATIO, False)
    # 2 cores serve at most 2000 / 0.582 = 3,436 requests per second, one worker serves 2,042.
    assert bound.value.median == pytest.approx(1.683, abs=0.001)
    assert "bound" in bound.name and bound.met is None
    assert (shares.value.median, shares.met) == (1.8, True)
