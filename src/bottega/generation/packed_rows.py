"""Rows of tree nodes as tensors: which nodes attend to which (needs torch)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Nodes of a path, and drafts that may follow it: lists of nodes.
PathWithDrafts: TypeAlias = tuple[Sequence[int], Sequence[Sequence[int]]]


class PackedRows:
    """Paths with their drafts, one path per row, padded on the right."""

    def __init__(self, rows: Sequence[PathWithDrafts]) -> None:
        packed = [[*path, *chain.from_iterable(drafts)] for path, drafts in rows]
        shape = len(rows), max(map(len, packed))
        self.index = np.zeros(shape, np.int64)
        self.lengths = np.array([[len(path)] for path, _ in rows])
        # Where the path or draft of each node begins.
        self.begins = np.zeros(shape, np.int64)
        requested = np.zeros(shape, bool)
        for number, ((path, drafts), nodes) in enumerate(zip(rows, packed, strict=True)):
            self.index[number, : len(nodes)] = nodes
            requested[number, len(path) - 1 : len(nodes)] = True
            begin = len(path)
            for draft in drafts:
                self.begins[number, begin : begin + len(draft)] = begin
                begin += len(draft)
        self._is_node = np.arange(shape[1]) < np.array([[len(nodes)] for nodes in packed])
        self.requested = QueryNodes(self, requested)

    def from_node(self, start: int) -> QueryNodes:
        """Return the nodes from number `start` on, each once and in order."""
        found = np.flatnonzero(self._is_node & (self.index >= start))
        _, first = np.unique(self.index.flat[found], return_index=True)
        chosen = np.zeros(self.index.shape, bool)
        chosen.flat[found[first]] = True
        return QueryNodes(self, chosen)


class QueryNodes:
    """Queries of packed rows, in order: their `nodes`, the `depths` of these, and `mask`,
    (rows, 1, queries, nodes), which is True where a query may attend: at its path and draft. Rows
    without a query are left out: samples of one prompt read its nodes once, in the first row."""

    def __init__(self, packed: PackedRows, chosen: npt.NDArray[np.bool_]) -> None:
        self._chosen = chosen
        used = chosen.any(axis=1)
        index, begins_of = packed.index[used], packed.begins[used]
        lengths, chosen = packed.lengths[used], chosen[used]
        rows, columns = np.nonzero(chosen)
        counts = chosen.sum(axis=1)
        slots = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
        shape = len(counts), int(counts.max())
        positions, numbers = np.zeros((2, *shape), np.int64)
        positions[rows, slots] = columns
        numbers[rows, slots] = np.arange(len(rows))
        self._shape, self._is_full = shape, len(rows) == numbers.size
        self._numbers = torch.from_numpy(numbers.ravel())
        self._valid = torch.from_numpy(rows * shape[1] + slots)
        self._index, self._path_shape = torch.from_numpy(index.ravel()), index.shape

        begins = begins_of[rows, columns]
        depths = np.where(begins, lengths[rows, 0] + columns - begins, columns)
        self.depths = torch.from_numpy(depths.astype(np.float32))
        self.nodes = torch.from_numpy(index[rows, columns])
        at, own = positions[..., None], np.take_along_axis(begins_of, positions, 1)[..., None]
        nodes = np.arange(index.shape[1])
        mask = (nodes <= at) & ((nodes < lengths[..., None]) | (nodes >= own))
        self.mask = torch.from_numpy(mask)[:, None]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QueryNodes) and np.array_equal(self._chosen, other._chosen)

    def padded(self, queries: Tensor) -> Tensor:
        """Return (rows, longest count, width) of the queries."""
        found = queries if self._is_full else queries.index_select(0, self._numbers)
        return found.reshape(*self._shape, -1)

    def path_states(self, states: Tensor) -> Tensor:
        """Return (rows, nodes, width), the states of all nodes of the rows."""
        return states.index_select(0, self._index).view(*self._path_shape, -1)

    def flat(self, padded: Tensor) -> Tensor:
        """Return (queries, heads * width) of (rows, longest count, heads, width)."""
        found = padded.flatten(0, 1).flatten(1)
        return found if self._is_full else found.index_select(0, self._valid)
