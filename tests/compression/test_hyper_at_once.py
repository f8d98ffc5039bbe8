from typing import Any

import pytest
import torch

from bottega.compression.hyper_model import HyperModel
from tests.kv_prefix.tiny_models import PICTURE, tiny

TEXTS = ([PICTURE, 20, 31], [PICTURE, 44, 52, 61, 70])


@pytest.mark.parametrize("layer", [-1, 1])
@pytest.mark.parametrize("pictured", [True, False])
@pytest.mark.parametrize("name", ["llava", "fast_vlm", "qwen2_vl"])
def test_without_gradients_text_and_prompts_go_through_together_and_say_the_same(
    name: str, pictured: bool, layer: int
) -> None:
    shown = tiny(name)
    hyper = HyperModel(shown.model, layer=layer)
    inputs = shown.inputs(*(text if pictured else text[1:] for text in TEXTS))
    prompts = hyper.embed(torch.tensor([21, 22, 23]))

    apart = hyper.read(inputs, prompts)
    with torch.inference_mode(), Passes(shown.model) as passes:
        together = hyper.read(inputs, prompts)

    assert passes.counted == 1
    assert apart.prompted is not None and together.prompted is not None
    torch.testing.assert_close(together.prompted, apart.prompted, atol=1e-4, rtol=1e-4)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(together.hidden[real], apart.hidden[real], atol=1e-4, rtol=1e-4)


class Passes:
    """Counts what goes through a model's decoder."""

    def __init__(self, model: Any) -> None:
        self._decoder = model.model.language_model
        self.counted = 0

    def __enter__(self) -> "Passes":
        self._hook = self._decoder.register_forward_hook(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _count(self, *_: object) -> None:
        self.counted += 1
