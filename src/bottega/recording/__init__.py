"""What is kept: traces, costs, and what a master answered."""

from bottega.recording.costs import PriceTable, TokenPrice
from bottega.recording.recorders import CacheRecorder, CompositeRecorder, UseCountRecorder
from bottega.recording.stored_trace import (
    Considered,
    Demonstration,
    StoredMessage,
    StoredNode,
    StoredPart,
    StoredTrace,
    StoredTree,
    from_json,
    json_text,
    stored,
    to_json,
)
from bottega.recording.traces import Summary, TraceStore

__all__ = [
    "CacheRecorder",
    "CompositeRecorder",
    "Considered",
    "Demonstration",
    "PriceTable",
    "StoredMessage",
    "StoredNode",
    "StoredPart",
    "StoredTrace",
    "StoredTree",
    "Summary",
    "TokenPrice",
    "TraceStore",
    "UseCountRecorder",
    "from_json",
    "json_text",
    "stored",
    "to_json",
]
