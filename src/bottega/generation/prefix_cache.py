"""Radix tree of token sequences with their keys and values (needs torch).

The tensors of the tree are read-only: callers copy them into a cache of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

IntArray: TypeAlias = npt.NDArray[np.int64]
TOKEN_BYTES = 16  # of one token besides its states: its key and its next position


@dataclass(eq=False)
class RadixNode:
    """Tokens that continue those of `parent`.

    `states` are the keys and values of all layers, (2 * layers, heads, tokens, width). `after`
    holds the next position after each token.
    """

    tokens: IntArray
    states: torch.Tensor
    after: IntArray
    parent: RadixNode | None = None
    children: dict[int, RadixNode] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.states.nbytes + self.tokens.nbytes + self.after.nbytes


class PrefixCache:
    """Radix tree of prefixes; `trim` drops the least recently used leaves beyond `max_bytes`.

    A key identifies a token, or a token of one specific image.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._roots: dict[int, RadixNode] = {}
        # A node precedes its parent in this order, so the first node is always a leaf.
        self._used: OrderedDict[RadixNode, None] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._used)

    def longest(self, tokens: IntArray) -> int:
        """Return the length of the longest cached prefix of the tokens."""
        return sum(length for _, length in self._walk(tokens))

    def states(self, tokens: IntArray) -> tuple[list[torch.Tensor], int]:
        """Return the keys and values of cached tokens, node by node, and the next position."""
        path = list(self._walk(tokens))
        self._touch(path[-1][0] if path else None)
        last = int(path[-1][0].after[path[-1][1] - 1]) if path else 0
        return [one.states[:, :, :length] for one, length in path], last

    def add(self, tokens: IntArray, states: torch.Tensor, after: IntArray) -> None:
        """Add tokens. `states` and `after` cover the last of them; the earlier ones are cached.

        The tree takes ownership of `states`.
        """
        cached, parent = 0, None
        for one, length in self._walk(tokens):
            cached += length
            parent = one if length == len(one.tokens) else self._split(one, length)
        begin = cached - (len(tokens) - states.shape[2])
        if cached < len(tokens):
            # A view would keep the memory of the whole tensor.
            new = states[:, :, begin:].clone() if begin else states
            rest = RadixNode(tokens[cached:].copy(), new, after[begin:].copy())
            parent = self._put(rest, parent)
        self._touch(parent)

    def trim(self) -> None:
        """Drop the least recently used leaves until the tree fits into `max_bytes`."""
        while self.nbytes > self._max_bytes:
            dropped, _ = self._used.popitem(last=False)
            del self._siblings(dropped)[int(dropped.tokens[0])]
            self.nbytes -= dropped.nbytes

    def clear(self) -> None:
        self._roots, self.nbytes = {}, 0
        self._used.clear()

    def capacity(self, nbytes: int) -> int:
        """Return the number of tokens that fit, at `nbytes` of keys and values per token."""
        return self._max_bytes // (nbytes + TOKEN_BYTES)

    def _walk(self, tokens: IntArray) -> Iterator[tuple[RadixNode, int]]:
        children, begin = self._roots, 0
        while begin < len(tokens) and (one := children.get(int(tokens[begin]))) is not None:
            length = common_prefix(one.tokens, tokens[begin:])
            yield one, length
            if length < len(one.tokens):
                return
            children, begin = one.children, begin + length

    def _split(self, one: RadixNode, length: int) -> RadixNode:
        """Split a node after `length` tokens; return the first part, parent of the second.

        Both parts are copies: dropping one frees its memory.
        """
        del self._used[one]
        self.nbytes -= one.nbytes
        cut = slice(None, length), slice(length, None)
        head, tail = (
            RadixNode(
                one.tokens[part].copy(), one.states[:, :, part].clone(), one.after[part].copy()
            )
            for part in cut
        )
        tail.children = one.children
        for child in tail.children.values():
            child.parent = tail
        self._put(head, one.parent)
        self._touch(self._put(tail, head))
        return head

    def _put(self, one: RadixNode, parent: RadixNode | None) -> RadixNode:
        one.parent = parent
        self._siblings(one)[int(one.tokens[0])] = one
        self._used[one] = None
        self.nbytes += one.nbytes
        return one

    def _siblings(self, one: RadixNode) -> dict[int, RadixNode]:
        return self._roots if one.parent is None else one.parent.children

    def _touch(self, one: RadixNode | None) -> None:
        while one is not None:
            self._used.move_to_end(one)
            one = one.parent


def common_prefix(one: IntArray, other: IntArray) -> int:
    """Return the length of the common prefix."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
