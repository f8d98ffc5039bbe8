"""Generators: HTTP endpoints, in-process models, the bundled models, and test doubles."""

from bottega._util.identity import request_key
from bottega.generation.bundled_models import bundled
from bottega.generation.local import TransformersGenerator
from bottega.generation.offline import Call, ReplayGenerator, ScriptedGenerator
from bottega.generation.openai_compatible import OpenAICompletionsGenerator, OpenAIGenerator
from bottega.openai_api.client import RetryPolicy

__all__ = [
    "Call",
    "OpenAICompletionsGenerator",
    "OpenAIGenerator",
    "ReplayGenerator",
    "RetryPolicy",
    "ScriptedGenerator",
    "TransformersGenerator",
    "bundled",
    "request_key",
]
