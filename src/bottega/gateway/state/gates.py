"""Benefit gates that learn from the shadow samples of all gateways."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from bottega._util.outage import OutageLog
from bottega.errors import BottegaError, StoreError
from bottega.gateway.accounting.ledger import Ledger
from bottega.routing import BenefitGate
from bottega.routing.benefit_gate import PairedSample
from bottega.types import Candidate

log = logging.getLogger(__name__)

FOLLOW_SECONDS = 1.0
BATCH = 200
Cursor = tuple[int, int]
SampleRow = tuple[int, int, float, float, float]
START: Cursor = (0, 0)


class FollowingGate(BenefitGate):
    """Gate that ignores the samples of its own gateway until they come back from the ledger, in the
    order that is the same for all gateways."""

    def learn(
        self, candidates: Sequence[Candidate], with_score: float, without_score: float
    ) -> None:
        pass


@dataclass
class _Followed:
    gate: FollowingGate
    cursor: Cursor = START


class SharedGates:
    """Gates of all open namespaces. Each has read the ledger's samples up to a cursor; state and
    cursor are stored: a gateway that starts does not read all of them again."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._outage = OutageLog(log)
        self._followed: dict[str, _Followed] = {}

    def open(self, namespace: str) -> BenefitGate:
        """Return the gate of a namespace with all samples so far. Blocks. Raises `StoreError`."""
        if namespace not in self._followed:
            followed = self._stored(namespace)
            while self._apply(followed, self._read(namespace, followed.cursor)):
                pass
            self._followed[namespace] = followed
        return self._followed[namespace].gate

    async def run(self) -> None:
        """Read new samples, until it is cancelled."""
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            try:
                await self.follow()
            except StoreError as error:
                self._outage.failed("the gates keep their states for now: %s", error)
            else:
                self._outage.ended("the gates read new samples again")

    async def follow(self) -> None:
        """Read new samples of all open namespaces once. Raises `StoreError`."""
        for namespace, followed in list(self._followed.items()):
            rows = await asyncio.to_thread(self._read, namespace, followed.cursor)
            # In the event loop, in which requests use the gate.
            if self._apply(followed, rows):
                state = {**followed.gate.state(), "cursor": followed.cursor}
                self._ledger.set_gate(namespace, orjson.dumps(state).decode())

    def _read(self, namespace: str, cursor: Cursor) -> Sequence[SampleRow]:
        assert self._ledger.tables is not None
        return self._ledger.tables.shadows_after(namespace, cursor, BATCH)

    def _apply(self, followed: _Followed, rows: Sequence[SampleRow]) -> bool:
        for transaction, number, *sample in rows:
            followed.gate.add(PairedSample(*sample))
            followed.cursor = (transaction, number)
        return bool(rows)

    def _stored(self, namespace: str) -> _Followed:
        state = self._ledger.gate(namespace)
        followed = _Followed(FollowingGate())
        if state is None:
            return followed
        try:
            found = orjson.loads(state)
            transaction, number = found["cursor"]
            followed.gate.restore(found)
            followed.cursor = (int(transaction), int(number))
        except (BottegaError, ValueError, TypeError, KeyError) as error:
            log.warning("the gate of %r reads all its samples again: %s", namespace, error)
            return _Followed(FollowingGate())
        return followed
