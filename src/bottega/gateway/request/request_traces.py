"""Traces of requests, written in the background for the console and `bottega log`."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

from bottega._util.batch_writer import BatchWriter
from bottega.errors import StoreError
from bottega.protocols import Recorder
from bottega.recording import TraceStore
from bottega.types import Query, Trace

log = logging.getLogger(__name__)

DAY = 86_400.0
PRUNE_SECONDS = 60.0
BATCH_SECONDS = 0.2
MAX_PENDING = 1000
# Images of requests that wait to be written. Above it, traces are written without images.
MAX_PENDING_BYTES = 64 << 20


class _PendingTrace(NamedTuple):
    namespace: str
    trace: Trace
    image_bytes: int  # 0 if the images are not stored


class RequestTraces:
    """Traces of requests in `store`, which `close` closes. With `images`, the images of the
    questions are stored too. Recording takes microseconds and never fails: traces that cannot be
    written are counted in `lost` and logged. Traces older than `keep_days` are deleted, and the
    oldest images beyond `image_bytes` in total."""

    def __init__(
        self, store: TraceStore, *, images: bool, keep_days: float, image_bytes: int = 2 << 30
    ) -> None:
        self.store = store
        self._images, self._keep_days, self._image_bytes = images, keep_days, image_bytes
        self._pending_bytes, self._lock = 0, threading.Lock()
        self._pruned_at = -math.inf
        self._writer = BatchWriter(
            self._write,
            name="bottega-request-traces",
            max_waiting=MAX_PENDING,
            seconds=BATCH_SECONDS,
        )

    @property
    def lost(self) -> int:
        return self._writer.lost

    def recorder(self, namespace: str) -> Recorder:
        """Return the recorder of a namespace."""
        return partial(self._record, namespace)

    def find_query(self, id: str) -> Query | None:
        """Return the question of a request with its images, None if it or an image is not stored,
        or if it depends on earlier turns. Blocks."""
        trace = self.store.find([id]).get(id)
        if trace is None:
            return None
        turns = sum(message.role == "user" for message in trace.messages)
        if turns != len(trace.demonstrations) + 1:
            return None
        images = [self.store.image(sha256) for sha256 in trace.images]
        kept = tuple(image for image in images if image is not None)
        if len(kept) < len(images):
            return None
        return Query(trace.question, kept, trace.choices, context=trace.context)

    async def _record(self, namespace: str, trace: Trace, /) -> None:
        length = sum(len(image.data) for image in trace.query.images) if self._images else 0
        with self._lock:
            if self._pending_bytes + length > MAX_PENDING_BYTES:
                length = 0
            self._pending_bytes += length
        self._writer.put(_PendingTrace(namespace, trace, length))

    def close(self) -> None:
        self._writer.close()
        self.store.close()

    def _write(self, batch: list[_PendingTrace]) -> Sequence[None]:
        try:
            # One transaction per run of equal kinds keeps the order of the traces.
            for (namespace, images), group in groupby(batch, _kind):
                traces = [one.trace for one in group]
                self.store.write(traces, namespace=namespace, images=images)
        finally:
            with self._lock:
                self._pending_bytes -= sum(one.image_bytes for one in batch)
        self._prune()
        return [None] * len(batch)

    def _prune(self) -> None:
        if time.monotonic() - self._pruned_at < PRUNE_SECONDS:
            return
        self._pruned_at = time.monotonic()
        try:
            before = time.time() - self._keep_days * DAY
            self.store.prune(before, image_bytes=self._image_bytes)
        except StoreError as error:
            log.warning("old traces are not deleted: %s", error)


def _kind(one: _PendingTrace) -> tuple[str, bool]:
    return one.namespace, one.image_bytes > 0
