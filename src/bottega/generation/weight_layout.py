"""Memory layout of a decoder's weights on a CPU (needs torch)."""

from __future__ import annotations

from torch import nn

# The matrices of a smaller model stay in the processor's cache, where the layout matters little.
LEAST_BYTES = 64 * 1024 * 1024


def store_by_column(model: nn.Module, least_bytes: int = LEAST_BYTES) -> None:
    """Store the weights of linear layers column by column, in place, if they take `least_bytes`.

    Shapes and values stay the same, and no memory is added. MKL multiplies a matrix stored by rows
    with one token at half of the memory's bandwidth. Layers with fewer outputs than inputs are
    left as they are: they are faster by rows. A tied embedding follows its linear layer.
    `save_pretrained` refuses such weights until they are made contiguous.
    """
    linears = [
        one
        for one in model.modules()
        if isinstance(one, nn.Linear) and one.out_features >= one.in_features
    ]
    weights = {id(one.weight): one.weight for one in linears}.values()
    if sum(weight.nbytes for weight in weights) < least_bytes:
        return
    for weight in weights:
        weight.data = weight.data.t().contiguous().t()
