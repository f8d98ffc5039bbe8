"""Who answers: HTTP endpoints, models in this process, the bundled model, test doubles."""

from bottega.generation.bundled import bundled
from bottega.generation.http_client import Retrying
from bottega.generation.local import TransformersGenerator
from bottega.generation.openai_compatible import OpenAIGenerator
from bottega.generation.replay import ReplayGenerator, request_key
from bottega.generation.scripted import Call, ScriptedGenerator

__all__ = [
    "Call",
    "OpenAIGenerator",
    "ReplayGenerator",
    "Retrying",
    "ScriptedGenerator",
    "TransformersGenerator",
    "bundled",
    "request_key",
]
