from __future__ import annotations

import torch
from torch import nn

from bottega.compression.persistence import fingerprint
from bottega.generation.loaded import make_column_major


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.wide, self.narrow = nn.Linear(8, 20), nn.Linear(20, 8)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.narrow(self.wide(self.embedding(ids))))
        return output


def test_layout_changes_neither_weights_nor_outputs() -> None:
    torch.manual_seed(0)
    model, ids = Tied(), torch.arange(30)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    expected = model(ids)
    make_column_major(model, min_bytes=0)

    assert [one.weight.stride() for one in (model.wide, model.narrow)] == [(1, 20), (20, 1)]
    assert model.head.weight is model.embedding.weight
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-5)


def test_layout_does_not_change_the_fingerprint() -> None:
    model = Tied()
    model.wide = nn.Linear(8, 600)  # more weights than the fingerprint reads
    before = fingerprint(model)
    make_column_major(model, min_bytes=0)

    assert not model.wide.weight.is_contiguous()
    assert fingerprint(model) == before


def test_small_models_keep_their_layout() -> None:
    model = Tied()
    make_column_major(model)

    assert all(one.weight.is_contiguous() for one in (model.wide, model.narrow, model.head))
