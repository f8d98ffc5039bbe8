"""Memory layout of a decoder's weights on a CPU (needs torch)."""

from __future__ import annotations

from torch import nn

# The weights of a smaller model stay in the CPU's cache, where the layout matters little.
MIN_BYTES = 64 * 1024 * 1024


def make_column_major(model: nn.Module, min_bytes: int = MIN_BYTES) -> None:
    """Convert the weights of linear layers to column-major order in place, if they take at least
    `min_bytes` in total.

    Shapes and values stay the same. Weights that transformers maps from a file become private
    memory, which processes do not share and the system cannot drop. For one token, MKL multiplies
    by a row-major matrix at about half of the memory bandwidth. Layers with fewer outputs than
    inputs stay row-major, which is faster for them. A tied embedding changes with its linear layer.
    `save_pretrained` fails for tied weights in this order (transformers 5.23): make them contiguous
    first.
    """
    linears = [
        one
        for one in model.modules()
        if isinstance(one, nn.Linear) and one.out_features >= one.in_features
    ]
    weights = {id(one.weight): one.weight for one in linears}.values()
    if sum(weight.nbytes for weight in weights) < min_bytes:
        return
    for weight in weights:
        weight.data = weight.data.t().contiguous().t()
