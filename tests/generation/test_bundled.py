from __future__ import annotations

import pytest

from bottega.errors import ModelLoadError
from bottega.generation import bundled
from bottega.types import Sampling
from tests.generation.prompts import shown


async def test_the_bundled_model_loads_as_transformers_generator() -> None:
    model = bundled()
    reply = await model.generate(shown(1, 2, 1), Sampling(max_tokens=8))
    await model.aclose()
    assert reply.model == "bundled:apprentice"
    assert reply.completions[0].finish_reason == "stop"
    assert reply.usage.prompt_tokens > 10


def test_an_unknown_bundled_model_raises() -> None:
    with pytest.raises(ModelLoadError) as caught:
        bundled("journeyman")
    assert "reinstall" in caught.value.hint
