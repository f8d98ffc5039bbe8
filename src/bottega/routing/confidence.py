"""On to the next model when this one is not sure."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from bottega.protocols import Tier
from bottega.routing.ends import checked, share
from bottega.types import Answer, Query

log = logging.getLogger(__name__)


class Unsure:
    """The next tier where the answer is invalid or its confidence is below `below`; of any number
    of tiers, the cheapest first.

    The confidence is what the parser gives: the one that the model states, or the probability of
    the whole reply, which is small for every long text. For worked answers sample several and let
    the pipeline choose by `most_frequent`: then it is the share of the samples that agree
    (self-consistency). A valid answer without any confidence stays, as nothing speaks against it;
    this is logged once, for such a tier is only escalated for invalid answers.

    A tier that is none of these, one that a client asked for by name, is never escalated.
    """

    def __init__(self, tiers: Sequence[Tier], below: float = 0.7) -> None:
        names = [tier.name for tier in checked(tiers)]
        self._next = dict(zip(names, tiers[1:], strict=False))
        self._below = share("below", below)
        self._silent: set[str] = set()

    async def __call__(self, query: Query, tier: Tier, answer: Answer, /) -> Tier | None:
        better = self._next.get(tier.name)
        if better is None:
            return None
        if answer.valid and answer.confidence is None:
            self._note(tier.name)
            return None
        sure = answer.confidence if answer.valid and answer.confidence is not None else -1.0
        return None if sure >= self._below else better

    def _note(self, name: str) -> None:
        if name not in self._silent:
            self._silent.add(name)
            log.warning(
                "answers of %r come without confidence: they are kept if they are valid; "
                "ask for log-probabilities, or sample several and choose by most_frequent",
                name,
            )
