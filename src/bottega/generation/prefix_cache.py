"""Keys and values of token sequences that a model has read, as a tree that shares what they share.

Needs torch. What the tree holds is never handed to a model as it is: callers copy it into a cache
of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Numbers: TypeAlias = npt.NDArray[np.int64]
OWN_BYTES = 16  # of a token: its number and the position that follows


@dataclass(eq=False)
class Stretch:
    """Tokens that follow on `parent`. `states` are the keys and values of all layers: (2 * layers,
    heads, tokens, width). `after` is the position, for each token, that follows on it."""

    tokens: Numbers
    states: torch.Tensor
    after: Numbers
    parent: Stretch | None = None
    children: dict[int, Stretch] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.states.nbytes + self.tokens.nbytes + self.after.nbytes


class Prefixes:
    """A tree of stretches. `trim` drops the least recently used ends beyond `keep` bytes.

    Tokens are numbers that stand for a token, or for a token of one certain image.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._first: dict[int, Stretch] = {}
        # Every stretch stands before the one that it follows on: the first has no children.
        self._used: OrderedDict[Stretch, None] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._used)

    def longest(self, tokens: Numbers) -> int:
        """How many of them, from the first on, are known."""
        return sum(length for _, length in self._along(tokens))

    def states(self, tokens: Numbers) -> tuple[list[torch.Tensor], int]:
        """Of tokens that are all known: their keys and values, stretch by stretch, and the position
        that follows on the last."""
        path = list(self._along(tokens))
        self._touch(path[-1][0] if path else None)
        last = int(path[-1][0].after[path[-1][1] - 1]) if path else 0
        return [one.states[:, :, :length] for one, length in path], last

    def add(self, tokens: Numbers, states: torch.Tensor, after: Numbers) -> None:
        """`states`, which becomes the tree's own, and `after` are those of the last of the tokens;
        those before are known."""
        known, parent = 0, None
        for one, length in self._along(tokens):
            known += length
            parent = one if length == len(one.tokens) else self._split(one, length)
        begin = known - (len(tokens) - states.shape[2])
        if known < len(tokens):
            # A view would keep the memory of the whole.
            new = states[:, :, begin:].clone() if begin else states
            rest = Stretch(tokens[known:].copy(), new, after[begin:].copy())
            parent = self._put(rest, parent)
        self._touch(parent)

    def trim(self) -> None:
        while self.nbytes > self._keep:
            dropped, _ = self._used.popitem(last=False)
            del self._siblings(dropped)[int(dropped.tokens[0])]
            self.nbytes -= dropped.nbytes

    def clear(self) -> None:
        self._first, self.nbytes = {}, 0
        self._used.clear()

    def room(self, nbytes: int) -> int:
        """How many tokens fit whose keys and values have so many bytes each."""
        return self._keep // (nbytes + OWN_BYTES)

    def _along(self, tokens: Numbers) -> Iterator[tuple[Stretch, int]]:
        children, begin = self._first, 0
        while begin < len(tokens) and (one := children.get(int(tokens[begin]))) is not None:
            length = common(one.tokens, tokens[begin:])
            yield one, length
            if length < len(one.tokens):
                return
            children, begin = one.children, begin + length

    def _split(self, one: Stretch, length: int) -> Stretch:
        """Its first part, with the second as its child. Both are copies, so that dropping one frees
        its memory."""
        del self._used[one]
        self.nbytes -= one.nbytes
        cut = slice(None, length), slice(length, None)
        head, tail = (
            Stretch(one.tokens[part].copy(), one.states[:, :, part].clone(), one.after[part].copy())
            for part in cut
        )
        tail.children = one.children
        for child in tail.children.values():
            child.parent = tail
        self._put(head, one.parent)
        self._touch(self._put(tail, head))
        return head

    def _put(self, one: Stretch, parent: Stretch | None) -> Stretch:
        one.parent = parent
        self._siblings(one)[int(one.tokens[0])] = one
        self._used[one] = None
        self.nbytes += one.nbytes
        return one

    def _siblings(self, one: Stretch) -> dict[int, Stretch]:
        return self._first if one.parent is None else one.parent.children

    def _touch(self, one: Stretch | None) -> None:
        while one is not None:
            self._used.move_to_end(one)
            one = one.parent


def common(one: Numbers, other: Numbers) -> int:
    """How many tokens they begin with are the same."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
