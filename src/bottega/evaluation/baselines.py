"""What RACC is compared with, beside showing passages one after the other (`concat`)."""

from __future__ import annotations

from dataclasses import replace

from bottega.generation import OpenAICompatible
from bottega.pipeline import Pipeline
from bottega.protocols import Generator
from bottega.reranking import JointChoice

CANDIDATES = "candidates"
BASELINES = (CANDIDATES,)


def baseline(name: str, pipeline: Pipeline, generator: Generator) -> Pipeline:
    """The pipeline with one of `BASELINES` in place of showing passages together."""
    if isinstance(generator, OpenAICompatible):
        generator = generator.asking({"logprobs": True})  # which is off unless asked for
    search = JointChoice(
        generator, prompt=pipeline.prompt, parse=pipeline.parse, sampling=pipeline.sampling
    )
    return replace(pipeline, search=search)
