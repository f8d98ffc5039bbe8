"""Benefit gates that learn from the shadow samples of all gateways."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from bottega._util.batch_writer import OutageLog
from bottega._util.sql_tables import SqlRow
from bottega.errors import BottegaError, StoreError
from bottega.gateway.accounting.ledger import Ledger
from bottega.routing import BenefitGate
from bottega.routing.benefit_gate import PairedSample
from bottega.types import Candidate

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
BATCH = 200
GateKey = tuple[str, str]  # namespace and retrieval method
Cursor = tuple[int, int]
START: Cursor = (0, 0)


class ReplicatedGate(BenefitGate):
    """Gate that learns only from the ledger, in the same order in all gateways. It ignores samples
    that its own gateway passes to `learn`."""

    def learn(
        self, candidates: Sequence[Candidate], with_score: float, without_score: float
    ) -> None:
        pass


@dataclass
class _TrackedGate:
    gate: ReplicatedGate
    cursor: Cursor = START


class SharedGates:
    """Gates of all open namespaces, by retrieval method. Each has read the ledger's samples up to a
    cursor. State and cursor are stored, so a gateway that starts reads only newer samples."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._outage = OutageLog(log)
        self._tracked: dict[GateKey, _TrackedGate] = {}

    def open(self, namespace: str, retrieve: str) -> BenefitGate:
        """Return the gate of a namespace with all samples so far; `retrieve` is the retrieval
        method of a `ShadowSample`. Blocks. Raises `StoreError`."""
        key = namespace, retrieve
        if key not in self._tracked:
            tracked = self._stored(key)
            while self._apply(tracked, self._read(key, tracked.cursor)):
                pass
            self._tracked[key] = tracked
        return self._tracked[key].gate

    async def run(self) -> None:
        """Read new samples until cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                await self.update()
            except StoreError as error:
                self._outage.failed(
                    "benefit gates cannot read new samples and keep their states: %s", error
                )
            else:
                self._outage.ended("benefit gates read new samples again")

    async def update(self) -> None:
        """Read new samples of all open namespaces once. Raises `StoreError`."""
        for key, tracked in list(self._tracked.items()):
            rows = await asyncio.to_thread(self._read, key, tracked.cursor)
            # In the event loop, where requests use the gate.
            if self._apply(tracked, rows):
                state = {**tracked.gate.state(), "cursor": tracked.cursor}
                namespace, retrieve = key
                self._ledger.set_gate(namespace, retrieve, orjson.dumps(state).decode())

    def _read(self, key: GateKey, cursor: Cursor) -> Sequence[SqlRow]:
        assert self._ledger.shared is not None
        namespace, retrieve = key
        return self._ledger.shared.shadows_after(namespace, cursor, BATCH, retrieve)

    def _apply(self, tracked: _TrackedGate, rows: Sequence[SqlRow]) -> bool:
        for transaction, number, *sample in rows:
            tracked.gate.add(PairedSample(*sample))
            tracked.cursor = (transaction, number)
        return bool(rows)

    def _stored(self, key: GateKey) -> _TrackedGate:
        state = self._ledger.gate(*key)
        tracked = _TrackedGate(ReplicatedGate())
        if state is None:
            return tracked
        try:
            found = orjson.loads(state)
            transaction, number = found["cursor"]
            tracked.gate.restore(found)
            tracked.cursor = (int(transaction), int(number))
        except (BottegaError, ValueError, TypeError, KeyError) as error:
            log.warning(
                "the stored benefit gate %r is invalid, its samples are read again: %s",
                key[0],
                error,
            )
            return _TrackedGate(ReplicatedGate())
        return tracked
