"""Recorders: traces, costs, use counts and cached answers of the master."""

from bottega.recording.costs import PriceTable, TokenPrice
from bottega.recording.recorders import CacheRecorder, CompositeRecorder, UseCountRecorder
from bottega.recording.stored_trace import (
    StoredCandidate,
    StoredDemonstration,
    StoredMessage,
    StoredNode,
    StoredPart,
    StoredTrace,
    StoredTree,
    from_json,
    json_text,
    stored_trace,
    to_json,
)
from bottega.recording.traces import TraceStore, TraceSummary

__all__ = [
    "CacheRecorder",
    "CompositeRecorder",
    "PriceTable",
    "StoredCandidate",
    "StoredDemonstration",
    "StoredMessage",
    "StoredNode",
    "StoredPart",
    "StoredTrace",
    "StoredTree",
    "TokenPrice",
    "TraceStore",
    "TraceSummary",
    "UseCountRecorder",
    "from_json",
    "json_text",
    "stored_trace",
    "to_json",
]
