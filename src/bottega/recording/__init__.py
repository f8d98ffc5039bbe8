"""What is kept: traces and costs."""

from bottega.recording.costs import Price, Prices
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
from bottega.recording.traces import Summary, Traces

__all__ = [
    "Demonstration",
    "Price",
    "Prices",
    "StoredMessage",
    "StoredPart",
    "StoredTrace",
    "Summary",
    "Traces",
    "from_json",
    "json_text",
    "stored",
    "to_json",
]
