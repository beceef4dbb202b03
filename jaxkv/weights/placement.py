"""In what form each array of a checkpoint comes to lie on the device: plain or packed, and why."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxkv import quant
from jaxkv.model import Weights
from jaxkv.quant import Matrix, Packed
from jaxkv.weights.names import Checkpoint, Parameter, parameters

ALIGNMENT = 64
_GROUPS = ", ".join(map(str, sorted(quant.GROUPS)))


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of the layers' matrices.

    Attributes:
      dtype: of every array that is not packed.
      kept: how many are packed on the device, by type.
      dequantized: how many are packed in the checkpoint or were quantised, and plain on the device, by type.
      plain: how many are plain in both.
      left: those that ``quantize`` could not split into groups, by name.
      packs: whether matrices are kept packed where they can be.
      nbytes: bytes of all weights on the device.
    """

    dtype: str
    kept: dict[str, int]
    dequantized: dict[str, int]
    plain: int
    left: tuple[str, ...]
    packs: bool
    nbytes: int

    @property
    def quantized(self) -> bool:
        """Whether any matrix is or was packed, or should have been."""
        return bool(self.kept or self.dequantized or self.left)

    def __str__(self) -> str:
        parts = [f"{count} matrices of {kind} packed" for kind, count in self.kept.items()]
        why = "" if self.packs else " (a CPU multiplies these faster)"
        parts += [f"{count} of {kind} dequantised to {self.dtype}{why}" for kind, count in self.dequantized.items()]
        if self.plain:
            parts.append(f"{self.plain} in {self.dtype}")
        if self.left:
            parts.append(f"not quantised, since no group of {_GROUPS} divides their inputs: {', '.join(self.left)}")
        return f"{self.nbytes / 2**20:.1f} MiB; {'; '.join(parts)}"


class Placer:
    """Brings the arrays of one checkpoint to the default device.

    Args:
      checkpoint: where they come from.
      dtype: of what is not packed.
      quantize: int4 or int8 to quantise plain matrices of the layers, or None.
      packed: whether matrices stay packed.
      transpose: whether those of the layers that do not become ``quant.Transposed``.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: np.dtype, quantize: str | None, packed: bool, transpose: bool = False
    ) -> None:
        self._checkpoint, self._dtype, self._quantize, self._packed = checkpoint, dtype, quantize, packed
        self._transpose = transpose
        self._kept: collections.Counter[str] = collections.Counter()
        self._dequantized: collections.Counter[str] = collections.Counter()
        self._plain, self._left = 0, list[str]()

    def place(self) -> tuple[Weights, Report]:
        """Return all weights and what is to be said of them."""
        tree = parameters(self._checkpoint.names, self._checkpoint.config)
        weights = jax.tree_util.tree_map_with_path(self._array, tree)
        report = Report(
            dtype=self._dtype.name,
            kept=dict(self._kept),
            dequantized=dict(self._dequantized),
            plain=self._plain,
            left=tuple(self._left),
            packs=self._packed,
            nbytes=sum(leaf.nbytes for leaf in jax.tree.leaves(weights)),
        )
        return weights, report

    def _array(self, path: Any, parameter: Parameter) -> Matrix:
        if path[0].name == "layers" and len(parameter.shape) == 2:
            matrix: Matrix = jax.device_put(self._matrix(parameter))
            return quant.transposed(matrix) if self._transpose and not quant.is_packed(matrix) else matrix
        return jax.device_put(self._filled(parameter))

    def _matrix(self, parameter: Parameter) -> Any:
        stored = self._checkpoint.tensors[parameter.name].kind
        if self._quantize is not None:
            if quant.group_size(parameter.shape[1]) is None:
                self._left.append(parameter.name)
                return self._filled(parameter)
            return self._kept_or_not(self._quantized(parameter, self._quantize), self._quantize)
        matrix = self._checkpoint.packed(parameter) if self._packed else None
        if matrix is not None:
            return self._kept_or_not(matrix, stored)
        if stored in PLAIN:
            self._plain += 1
        else:
            self._dequantized[stored] += 1
        return self._filled(parameter)

    def _kept_or_not(self, matrix: Packed, kind: str) -> Any:
        if self._packed:
            self._kept[kind] += 1
            return matrix
        self._dequantized[kind] += 1
        return fill(matrix.shape, self._dtype, quant.host_values(matrix))

    def _quantized(self, parameter: Parameter, kind: str) -> Packed:
        values = fill(parameter.shape, np.dtype(np.float32), self._checkpoint.pieces(parameter))
        step = max(1, _PIECE // parameter.shape[1])
        rows = (values[at : at + step] for at in range(0, len(values), step))
        try:
            return quant.quantize(rows, kind)
        except ValueError as error:
            raise ValueError(f"{parameter.name}: {error}") from error

    def _filled(self, parameter: Parameter) -> np.ndarray:
        return fill(parameter.shape, self._dtype, self._checkpoint.pieces(parameter))


PLAIN = ("F64", "F32", "F16", "BF16")
"""Types that are not packed, as both formats call them."""

_PIECE = 1 << 20


def fill(shape: tuple[int, ...], dtype: np.dtype, pieces: Iterable[np.ndarray]) -> np.ndarray:
    """Join pieces in a buffer that starts on a cache line: JAX adopts such a buffer on a CPU without a copy."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    flat = buffer[start : start + size].view(dtype)
    filled = 0
    for piece in pieces:
        flat[filled : filled + piece.size] = piece.reshape(-1)
        filled += piece.size
    if filled != flat.size:
        raise ValueError(f"a tensor of shape {list(shape)} got {filled} values for {flat.size}; the file is cut short")
    return flat.reshape(shape)
