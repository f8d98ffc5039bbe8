"""Router and escalation that keep the agreement with the master above a target."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bottega.errors import SettingError
from bottega.protocols import Retriever, Tier
from bottega.routing.agreement_bound import AgreementBound, Draw
from bottega.routing.risk_score import RiskScore, ScoreInputs, inputs_after, inputs_before
from bottega.routing.routers import apprentice_and_master
from bottega.types import Answer, Candidate, Query

FIRST_SAMPLES = 200  # comparisons to which the score is fitted
COMPARED_EXAMPLES = 10  # nearest examples that the score reads
MAX_PENDING = 1000  # later requests until one without an outcome counts as failed


@dataclass
class AgreementComparison:
    """Request whose answers may be `compared`, with the examples `found` before its answer was
    stored. `served` says whether the apprentice answers it."""

    query: Query
    inputs: ScoreInputs
    found: Sequence[Candidate]
    draw: Draw | None = None  # None while samples for the score are collected
    is_ended: bool = False
    different: bool | None = None

    @property
    def served(self) -> bool:
        return self.draw is not None and self.draw.served

    @property
    def compared(self) -> bool:
        return self.draw is None or self.draw.compared


@dataclass
class AgreementPolicy:
    """Decisions between an apprentice and the master: the master answers and is compared until a
    `RiskScore` is fitted to the first samples, and then where `AgreementBound` does not serve the
    apprentice's answer.

    `begin` and `end` belong together: the outcomes are added in the order of the decisions, so one
    that is still missing delays later ones, until `MAX_PENDING` later requests have begun and it
    counts as failed. `state` and `restore` keep score and samples over a restart; the certificate
    is earned again.
    """

    bound: AgreementBound = field(default_factory=AgreementBound)
    seed: int = 0
    score: RiskScore | None = None

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._samples: list[tuple[ScoreInputs, bool]] = []
        self._pending: deque[AgreementComparison] = deque()
        self._by_query: dict[int, AgreementComparison] = {}

    def begin(
        self, query: Query, inputs: ScoreInputs, found: Sequence[Candidate] = ()
    ) -> AgreementComparison:
        """Decide on a request."""
        comparison = AgreementComparison(query, inputs, found)
        if self.score is not None:
            comparison.draw = self.bound.draw(self.score(inputs), self._random.random())
        self._pending.append(comparison)
        self._by_query[id(query)] = comparison
        if len(self._pending) > MAX_PENDING:
            oldest = self._pending[0]
            self.end(oldest, different=True if oldest.compared else None)
        return comparison

    def pending(self, query: Query) -> AgreementComparison | None:
        """Return the comparison that began with this query object, None without one."""
        return self._by_query.get(id(query))

    def end(self, comparison: AgreementComparison, different: bool | None) -> None:
        """Set the outcome: whether the answers differ, None if they were not compared. A comparison
        that failed, or that no rule can decide, is different."""
        if comparison.is_ended:
            return
        self._by_query.pop(id(comparison.query), None)
        comparison.is_ended, comparison.different = True, different
        while self._pending and self._pending[0].is_ended:
            self._add(self._pending.popleft())

    def _add(self, comparison: AgreementComparison) -> None:
        if comparison.draw is not None:
            self.bound.add(comparison.draw, comparison.different)
        elif comparison.different is not None and self.score is None:
            self._samples.append((comparison.inputs, not comparison.different))
            if len(self._samples) >= FIRST_SAMPLES:
                inputs, agrees = zip(*self._samples, strict=True)
                self.score = RiskScore.fit(inputs, agrees)

    def reason(self, comparison: AgreementComparison) -> str:
        """Return the reason of a decision, for the log."""
        if comparison.draw is None:
            left = FIRST_SAMPLES - len(self._samples)
            return f"agreement: {left} comparisons are needed to fit the score"
        if self.bound.certified is None:
            return "agreement: not certified yet"
        threshold, bin = self.bound.threshold, comparison.draw.bin
        relation = "at or above" if bin >= threshold else "below"
        limited = "" if comparison.served or bin < threshold else ", and too few samples"
        return f"agreement: score {relation} the certified threshold{limited}"

    def state(self) -> dict[str, Any]:
        """Return the fitted score as JSON values, for `restore`."""
        return {"score": None if self.score is None else self.score.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Use a score of an earlier run. Raises `SettingError`."""
        self.score = None if state.get("score") is None else RiskScore.restore(state["score"])


class AgreementRouter:
    """Router to the apprentice where its answers agree with the master's often enough, decided
    before the answer.

    `tiers` are the apprentice and the master. The guarantee is that of `AgreementBound`. Pass the
    policy to a `shadowing.AgreementRecorder` too, which compares the answers; until it has compared
    enough, the master answers. `retrieve` is the retriever of the demonstrations, in a
    `SharedRetriever` to search only once.
    """

    def __init__(self, tiers: Sequence[Tier], retrieve: Retriever, policy: AgreementPolicy) -> None:
        self._apprentice, self._master = _two(tiers)
        self._retrieve = retrieve
        self._policy = policy

    async def __call__(self, query: Query, /) -> Tier:
        found = await self._retrieve(query, max(self._apprentice.shots, COMPARED_EXAMPLES))
        comparison = self._policy.begin(query, inputs_before(query, found), found)
        tier = self._apprentice if comparison.served else self._master
        return replace(tier, reason=self._policy.reason(comparison))


class AgreementEscalation:
    """Escalation to the master where the apprentice's answers do not agree with its answers often
    enough, decided after the apprentice's answer.

    As `AgreementRouter`, with a better score, since it also reads the answer and its confidence;
    but each query waits for the apprentice first. Use it with a router to the apprentice.
    """

    def __init__(self, tiers: Sequence[Tier], retrieve: Retriever, policy: AgreementPolicy) -> None:
        self._apprentice, self._master = _two(tiers)
        self._retrieve = retrieve
        self._policy = policy

    async def __call__(self, query: Query, tier: Tier, answer: Answer, /) -> Tier | None:
        if tier.name != self._apprentice.name:
            return None
        found = await self._retrieve(query, max(self._apprentice.shots, COMPARED_EXAMPLES))
        inputs = inputs_after(inputs_before(query, found), answer, found)
        comparison = self._policy.begin(query, inputs, found)
        if comparison.served:
            return None
        return replace(self._master, reason=self._policy.reason(comparison))


def _two(tiers: Sequence[Tier]) -> tuple[Tier, Tier]:
    if len(tiers) != 2:
        raise SettingError(
            f"the policy decides between an apprentice and a master, got {len(tiers)} tiers",
            hint="pass tiers=(apprentice, master)",
        )
    return apprentice_and_master(tiers)
