"""Recorders: traces, costs, use counts and cached answers of the master."""

from bottega.recording.recorders import (
    ABSTENTION,
    CacheRecorder,
    CompositeRecorder,
    PriceTable,
    TokenPrice,
    UseCountRecorder,
    cached_example,
    is_abstention,
    is_unanswered,
)
from bottega.recording.stored_traces import (
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
)
from bottega.recording.traces import TraceStore, TraceSummary

__all__ = [
    "ABSTENTION",
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
    "cached_example",
    "from_json",
    "is_abstention",
    "is_unanswered",
    "json_text",
    "stored_trace",
]
