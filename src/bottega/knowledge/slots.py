"""Where in a faiss index each row lies: faiss numbers what it holds from zero, rows have keys."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
Bits = NDArray[np.uint8]
NOWHERE = -1
Scalar = TypeVar("Scalar", bound=np.generic)


class Slots:
    """Keys by slot and slots by key, as arrays: a dict would take as much memory as short vectors.

    A slot whose row is gone is dead. It keeps its number until the index is built anew.
    """

    def __init__(self) -> None:
        self._keys: Keys = np.empty(0, np.int64)
        self._alive: NDArray[np.bool_] = np.empty(0, bool)
        self._by_key: Keys = np.empty(0, np.int64)
        self._count = self._live = 0

    @classmethod
    def marked(cls, keys: Keys) -> Slots:
        """From `marked_keys`."""
        slots = cls()
        present = np.flatnonzero(keys != NOWHERE)
        slots._keys, slots._alive = keys.copy(), keys != NOWHERE
        slots._by_key = np.full(int(keys.max(initial=NOWHERE)) + 1, NOWHERE)
        slots._by_key[keys[present]] = present
        slots._count, slots._live = len(keys), len(present)
        return slots

    def __len__(self) -> int:
        """The slots with a row."""
        return self._live

    @property
    def dead(self) -> int:
        return self._count - self._live

    @property
    def keys(self) -> Keys:
        """By slot, dead ones included."""
        return self._keys[: self._count]

    def of(self, keys: Collection[int] | Keys) -> Keys:
        """The slots of those keys that have one."""
        wanted = keys if isinstance(keys, np.ndarray) else np.fromiter(keys, np.int64, len(keys))
        slots: Keys = self._by_key[wanted[(wanted >= 0) & (wanted < len(self._by_key))]]
        found: Keys = slots[slots != NOWHERE]
        return found

    def append(self, keys: Keys) -> None:
        start, end = self._count, self._count + len(keys)
        self._keys = _at_least(self._keys, end, NOWHERE)
        self._alive = _at_least(self._alive, end, False)
        self._by_key = _at_least(self._by_key, int(keys.max(initial=-1)) + 1, NOWHERE)
        self._keys[start:end] = keys
        self._alive[start:end] = True
        self._by_key[keys] = np.arange(start, end)
        self._count, self._live = end, self._live + len(keys)

    def kill(self, slots: Keys) -> None:
        self._alive[slots] = False
        self._by_key[self._keys[slots]] = NOWHERE
        self._live -= len(slots)

    def move(self, source: int, target: int) -> None:
        """The row in slot `source` goes to the dead slot `target`."""
        key = self._keys[source]
        self._keys[target], self._alive[target] = key, True
        self._alive[source] = False
        self._by_key[key] = target

    def living_keys(self) -> Keys:
        return self.keys[self._alive[: self._count]]

    def marked_keys(self) -> Keys:
        """By slot, `NOWHERE` in dead ones."""
        return np.where(self._alive[: self._count], self.keys, NOWHERE)

    def is_alive(self, slot: int) -> bool:
        return bool(self._alive[slot])

    def cut(self) -> None:
        """Forgets the slots behind the live ones, which stand first."""
        self._count = self._live

    def living(self) -> Bits:
        return np.packbits(self._alive[: self._count], bitorder="little")

    def bits(self, slots: Keys) -> Bits:
        chosen = np.zeros(self._count, bool)
        chosen[slots] = True
        return np.packbits(chosen, bitorder="little")

    def to_keys(self, slots: Keys) -> Keys:
        """`NOWHERE`, which faiss gives where it found too little, stays."""
        if not self._count:
            return slots
        keys = self._keys[slots]
        keys[slots == NOWHERE] = NOWHERE
        return keys


def _at_least(array: NDArray[Scalar], size: int, fill: int) -> NDArray[Scalar]:
    """Grown by half, so that appending one by one stays cheap."""
    if size <= len(array):
        return array
    grown = np.full(size + size // 2, fill, array.dtype)
    grown[: len(array)] = array
    return grown
