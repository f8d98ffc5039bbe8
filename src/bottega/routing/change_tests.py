"""Sequential tests of a change: of the rate of differences, and of the mix of scores."""

from __future__ import annotations

SUSPICION = 1000.0
WARM_UP = 300  # comparisons before the learned rates are tested
MIX_ALARM = 1e6
JUMP = 0.01


class ErrorRateTest:
    """Shiryaev-Roberts test of learned rates of differences, against odds 1.5 and 3 times as high,
    over all comparisons and over those of served bins. The alarm is at `limit`, the mean of the
    four statistics, which grows by one per comparison without a change."""

    ODDS = ((1.5, False), (3.0, False), (1.5, True), (3.0, True))

    def __init__(self, limit: float) -> None:
        self.warm_up = WARM_UP
        self._limit = limit
        self._statistics = [0.0] * 4

    @property
    def is_suspicious(self) -> bool:
        return sum(self._statistics) / 4 >= SUSPICION

    def add(self, different: bool, rate: float, served: bool) -> bool:
        """Add a comparison with its learned rate; return whether there is an alarm."""
        for index, (odds, only_served) in enumerate(self.ODDS):
            if only_served and not served:
                continue
            higher = odds * rate / (1 - rate + odds * rate)
            ratio = higher / rate if different else (1 - higher) / (1 - rate)
            self._statistics[index] = (self._statistics[index] + 1) * ratio
        return sum(self._statistics) / 4 >= self._limit


class MixTest:
    """Conformal test that the bins of the scores stay exchangeable (simple jumper; Vovk, Testing
    randomness online, Statistical Science 36, 2021). It needs no comparison."""

    SLOPES = (-1.0, 0.0, 1.0)

    def __init__(self, bins: int) -> None:
        self._counts = [0] * bins
        self._total = 0
        self._capital = [0.0] * 3

    def add(self, bin: int, tie: float) -> bool:
        """Add the bin of a score; `tie` is uniform in [0, 1). Return whether there is an alarm."""
        counts = self._counts
        counts[bin] += 1
        self._total += 1
        # Uniform if all scores so far, this one included, are exchangeable.
        rank = (sum(counts[:bin]) + tie * counts[bin]) / self._total
        capital = [
            (one + 1 / 3) * (1 + slope * (rank - 0.5))
            for one, slope in zip(self._capital, self.SLOPES, strict=True)
        ]
        mean = sum(capital) / 3
        self._capital = [(1 - JUMP) * one + JUMP * mean for one in capital]
        return sum(self._capital) >= MIX_ALARM
