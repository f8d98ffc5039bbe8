"""Exact MaxSim on a GPU, in bfloat16 and in blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bottega.errors import MissingDependencyError, SettingError
from bottega.knowledge.late.maxsim import Positions, Rows
from bottega.protocols import Vectors

if TYPE_CHECKING:
    import torch

DOCUMENTS = 1024


class DeviceTokens:
    """Token rows kept on a device, two bytes a number. Products are bfloat16, their sums float32.

    Scores are those of `exact_scores` to about 1 %, so the best few should be scored again.
    Raises `SettingError` if there is no such device.
    """

    def __init__(self, tokens: Rows, offsets: Positions, *, device: str = "cuda") -> None:
        try:
            import torch
        except ModuleNotFoundError as error:
            raise MissingDependencyError("torch", "local") from error
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise SettingError("no CUDA device was found", hint="leave out device='cuda'")
        self._device = device
        self._offsets = offsets
        self._tokens = torch.from_numpy(np.array(tokens)).to(device, torch.bfloat16)

    def scores(self, query: Vectors) -> Vectors:
        """(documents,) sums of maxima, one for each document."""
        import torch

        count = len(self._offsets) - 1
        columns = torch.from_numpy(query).to(self._device, torch.bfloat16).T
        found = [
            self._block(columns, start, min(start + DOCUMENTS, count))
            for start in range(0, count, DOCUMENTS)
        ]
        scores: Vectors = torch.cat(found).cpu().numpy() if found else np.empty(0, np.float32)
        return scores

    def _block(self, columns: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        import torch

        first, last = self._offsets[start], self._offsets[stop]
        products = self._tokens[first:last] @ columns
        lengths = torch.from_numpy(np.diff(self._offsets[start : stop + 1])).to(self._device)
        owners = torch.repeat_interleave(torch.arange(stop - start, device=self._device), lengths)
        maxima = torch.full(
            (stop - start, columns.shape[1]), -torch.inf, device=self._device, dtype=products.dtype
        )
        maxima.scatter_reduce_(0, owners[:, None].expand_as(products), products, "amax")
        return maxima.float().sum(dim=1)
