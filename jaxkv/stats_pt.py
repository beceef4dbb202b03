"""Read tensors out of a file of ``torch.save`` without torch, and without running anything that the file says.

Such a file is a zip with a pickle, and a pickle is a program that may call whatever it can import. This reader's
pickle can import ordered dicts, tensors and storages, and the last two are stand-ins of our own: NumPy arrays come out.
"""

from __future__ import annotations

import collections
import math
import pickle
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_STORAGES: dict[str, np.dtype] = {
    "FloatStorage": np.dtype("<f4"),
    "DoubleStorage": np.dtype("<f8"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
}


def read_pt(path: str | Path) -> Any:
    """Return what the file holds, with NumPy arrays for tensors.

    Raises:
      ValueError: the file is damaged, or its pickle asks for anything but tensors in plain containers.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [name for name in archive.namelist() if name.rsplit("/", 1)[-1] == "data.pkl"]
            if len(pickles) != 1:
                raise ValueError(f"{len(pickles)} pickles in the archive, and there should be one")
            with archive.open(pickles[0]) as file:
                return _TensorUnpickler(file, archive, pickles[0][: -len("data.pkl")]).load()
    except Exception as error:
        # A hostile pickle can fail in any way that a stack machine can; to the caller it is one fault.
        raise ValueError(f"{path} cannot be read as a file of tensors: {error}") from error


class _TensorUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, archive: zipfile.ZipFile, prefix: str) -> None:
        super().__init__(file)
        self._archive = archive
        self._prefix = prefix
        if f"{prefix}byteorder" in archive.namelist() and archive.read(f"{prefix}byteorder").strip() != b"little":
            raise ValueError("the file's byte order is not little endian")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"its pickle asks for {module}.{name}, which no tensor needs; refused")

    def persistent_load(self, key: Any) -> np.ndarray:
        kind, dtype, name, _, count = key
        if kind != "storage" or not isinstance(dtype, np.dtype) or not str(name).isalnum():
            raise pickle.UnpicklingError("its pickle has a reference that is no storage; refused")
        data = self._archive.read(f"{self._prefix}data/{name}")
        if len(data) < count * dtype.itemsize:
            raise pickle.UnpicklingError(f"storage {name} has {len(data)} bytes of {count * dtype.itemsize}")
        return np.frombuffer(data, dtype, count)


def _tensor(storage: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> np.ndarray:
    """Stand in for torch's own: a copy of a strided view, which must lie inside its storage."""
    if not isinstance(storage, np.ndarray) or storage.ndim != 1 or len(shape) != len(stride):
        raise pickle.UnpicklingError("a tensor without a storage")
    size = math.prod(shape)
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if min((offset, *shape, *stride)) < 0 or (size and last >= storage.size) or size > storage.size:
        raise pickle.UnpicklingError(f"a tensor {list(shape)} does not lie inside its storage of {storage.size}")
    if not size:
        return np.zeros(shape, storage.dtype)
    steps = tuple(step * storage.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps, writeable=False).copy()
