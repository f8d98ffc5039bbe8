"""What is kept: traces, costs, and what a master answered."""

from bottega.recording.costs import Price, Prices
from bottega.recording.remember import Remember
from bottega.recording.several import Several
from bottega.recording.stored import (
    Demonstration,
    StoredMessage,
    StoredPart,
    StoredTrace,
    from_json,
    json_text,
    stored,
    to_json,
)
from bottega.recording.stored_tree import Considered, StoredNode, StoredTree
from bottega.recording.traces import Summary, Traces
from bottega.recording.uses import CountUses

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
