"""Who answers: HTTP endpoints, models in this process, the bundled model, test doubles."""

from bottega.generation.bundled import bundled
from bottega.generation.http_client import Retrying
from bottega.generation.local import Transformers
from bottega.generation.openai_compatible import OpenAICompatible
from bottega.generation.replay import Replay, request_key
from bottega.generation.scripted import Call, Scripted

__all__ = [
    "Call",
    "OpenAICompatible",
    "Replay",
    "Retrying",
    "Scripted",
    "Transformers",
    "bundled",
    "request_key",
]
