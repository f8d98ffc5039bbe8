"""What is kept: traces, costs, and what a master answered."""

from bottega.recording.costs import Price, Prices
from bottega.recording.recorders import CountUses, Remember, Several
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
from bottega.recording.traces import Summary, Traces

__all__ = [
    "Considered",
    "CountUses",
    "Demonstration",
    "Price",
    "Prices",
    "Remember",
    "Several",
    "StoredMessage",
    "StoredNode",
    "StoredPart",
    "StoredTrace",
    "StoredTree",
    "Summary",
    "Traces",
    "from_json",
    "json_text",
    "stored",
    "to_json",
]
