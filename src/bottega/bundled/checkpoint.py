"""Reader of PyTorch's checkpoint files from before version 1.6, without PyTorch."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
HEADERS = 3  # pickles before the tensors: a magic number, the version, and sizes of C types
SIZE_BYTES = 8  # the number of elements, before each storage


def read_checkpoint(data: bytes) -> dict[str, Array]:
    """Return the tensors of a checkpoint by name, as arrays. Its pickles can only create tensors:
    other content raises `pickle.UnpicklingError`."""
    file = io.BytesIO(data)
    for _ in range(HEADERS):
        _TensorUnpickler(file).load()
    unpickler = _TensorUnpickler(file)
    tensors: dict[str, Array] = unpickler.load()
    for key in _TensorUnpickler(file).load():
        storage = unpickler.storages[key]
        file.seek(SIZE_BYTES, io.SEEK_CUR)
        storage[:] = np.frombuffer(file.read(storage.nbytes), storage.dtype)
    return tensors


class _TensorUnpickler(pickle.Unpickler):
    """Unpickler whose tensors are views of empty `storages`: their numbers follow the pickles."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.storages: dict[str, Array] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a tensor")
        return ALLOWED[module, name]

    def persistent_load(self, pid: Any, /) -> Array:
        _, dtype, key, _, size, _ = pid
        return self.storages.setdefault(key, np.empty(size, dtype))


def _tensor(
    storage: Array, offset: int, shape: Sequence[int], strides: Sequence[int], *_: object
) -> Array:
    """Return a view of the storage, inside which numpy requires it to lie. Offset and strides are
    numbers of elements."""
    size = storage.itemsize
    return np.ndarray(
        shape, storage.dtype, storage, offset * size, [stride * size for stride in strides]
    )


ALLOWED = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "FloatStorage"): np.dtype("<f4"),
    ("torch", "LongStorage"): np.dtype("<i8"),
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
}
