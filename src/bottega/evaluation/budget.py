"""What a run may cost."""

from __future__ import annotations

from bottega.errors import SettingError


class Budget:
    """US dollars for a whole run, of which `spent` are gone.

    `starts` refuses a request that could not be paid for if it, and all that are under way, cost as
    much as the dearest so far. So a limit is kept unless prices rise; that is why a limited run
    asks the first item of each method alone.
    """

    def __init__(
        self, usd: float | None = None, *, spent: float = 0.0, dearest: float = 0.0
    ) -> None:
        if usd is not None and not usd > 0:
            raise SettingError(f"the budget is {usd} USD", hint="give a positive number")
        self._limit = usd
        self.spent = spent
        self._dearest = dearest
        self._under_way = 0
        self.is_spent = False

    @property
    def is_limited(self) -> bool:
        return self._limit is not None

    def starts(self) -> bool:
        wanted = self.spent + self._dearest * (self._under_way + 1)
        if self._limit is not None and wanted > self._limit:
            self.is_spent = True
            return False
        self._under_way += 1
        return True

    def ended(self, cost_usd: float | None, at_most_usd: float = 0.0) -> None:
        """What it cost, and what one like it may cost. Raises `SettingError` if there is a limit
        and no price."""
        self._under_way -= 1
        if cost_usd is None and self._limit is not None:
            raise SettingError(
                "the model's price is not known, so a budget cannot be held",
                hint="--price 0.15,0.60 gives US dollars for a million tokens",
            )
        self.spent += cost_usd or 0.0
        self._dearest = max(self._dearest, cost_usd or 0.0, at_most_usd)
