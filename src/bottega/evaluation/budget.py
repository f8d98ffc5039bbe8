"""What a run may cost."""

from __future__ import annotations

from bottega.errors import SettingError


class Budget:
    """US dollars for a whole run, of which `spent` are gone, for so many answers that cost any.

    `starts` refuses a request that may no longer be paid for at the mean price of those before, so
    that what is under way when the money is gone overshoots little. Votes cost nothing, and would
    halve the mean.
    """

    def __init__(self, usd: float | None = None, spent: tuple[float, int] = (0.0, 0)) -> None:
        if usd is not None and not usd > 0:
            raise SettingError(f"the budget is {usd} USD", hint="give a positive number")
        self._limit = usd
        self.spent, self._answered = spent
        self._under_way = 0
        self.is_spent = False

    def starts(self) -> bool:
        mean = self.spent / max(self._answered, 1)
        if self._limit is not None and self.spent + mean * (self._under_way + 1) > self._limit:
            self.is_spent = True
            return False
        self._under_way += 1
        return True

    def ended(self, cost_usd: float | None) -> None:
        """Raises `SettingError` if there is a limit and no price."""
        self._under_way -= 1
        self._answered += bool(cost_usd)
        if cost_usd is None and self._limit is not None:
            raise SettingError(
                "the model's price is not known, so a budget cannot be held",
                hint="--price 0.15,0.60 gives US dollars for a million tokens",
            )
        self.spent += cost_usd or 0.0
