"""Matrices packed into 4 or 8 bits a weight, and the one ``linear`` that multiplies by them and by plain ones.

Values are ``scale * q - minimum``, group by group along the input axis, and not ``scale * (q - zero)``: a minimum
holds everything that is read here, and a zero point does not. GGUF's Q4_1 and Q4_K state a minimum that is no multiple
of the scale, so that a zero point would be a rounded quotient. Where a format has integer zero points (AWQ, GPTQ,
Q4_0, our own) they are kept in a byte each: their minimum is ``scale * zero``, which is exact in float32 for scales of
16 bits, as every ``scale * q`` is. So each format comes out as its own dequantiser gives it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

import pallas_kernels
from jaxkv.dims import Array, Float

Kind = Literal["int4", "int8"]
KINDS: tuple[Kind, ...] = get_args(Kind)

GROUPS = (128, 64, 32)
"""Group sizes of 4-bit matrices, and those that ``quantize`` chooses from: the largest that divides the inputs."""

_LARGEST = {"int4": 15, "int8": 127}
_PIECE = 1 << 20


@struct.dataclass
class Int4:
    """A matrix ``[O, X]`` of two weights a byte, in S groups of X // S inputs: 32, 64 or 128.

    Leaves are arrays of NumPy or JAX, or ``jax.ShapeDtypeStruct``.

    Attributes:
      packed: byte j of a group has input j in its low half and input ``j + X // S // 2`` in its high half.
      scale: float16, bfloat16 or float32; with units an integer.
      offset: integers are zero points, ``minimum = scale * offset``; floats are minimums.
      permutation: column j belongs to input ``permutation[j]`` (GPTQ's act-order); None where they are in order.
      units: where scale and offset are small integers, what they count: the scale is ``units[0] * scale`` and the
        minimum ``units[1] * offset``, for S // U groups each.
    """

    packed: Any  # uint8 [O, X // 2]
    scale: Any  # [S, O]
    offset: Any  # [S, O]
    permutation: Any = None  # int32 [X]
    units: Any = None  # [2, U, O]

    def __post_init__(self) -> None:
        packed, scale = self.packed, self.scale
        if not _are_matrices(packed, scale, self.offset):
            return
        inputs, groups = 2 * packed.shape[1], scale.shape[0]
        if scale.shape != self.offset.shape or scale.shape[1] != packed.shape[0]:
            raise ValueError(
                f"scale and offset are [S, O] for packed [O, X // 2], and got {scale.shape} and {self.offset.shape} "
                f"for {packed.shape}"
            )
        if packed.dtype != np.uint8:
            raise ValueError(f"packed is of {packed.dtype}; two weights lie in a uint8")
        if inputs % groups or inputs // groups not in GROUPS:
            raise ValueError(f"{groups} groups of {inputs} inputs; groups have {', '.join(map(str, GROUPS))} inputs")
        order = self.permutation
        if order is not None and getattr(order, "shape", (inputs,)) != (inputs,):
            raise ValueError(f"permutation has shape {order.shape}, and the matrix {inputs} inputs")
        _check_units(self.units, groups, (2, packed.shape[0]))

    @property
    def shape(self) -> tuple[int, int]:
        """``(O, X)``."""
        return self.packed.shape[0], 2 * self.packed.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays together."""
        return _nbytes(self)


@struct.dataclass
class Int8:
    """A matrix ``[O, X]`` of a byte a weight: ``scale * q``, in S groups of X // S inputs. S = 1 is a scale a row.

    Leaves are arrays of NumPy or JAX, or ``jax.ShapeDtypeStruct``. Where scales are small integers, ``units`` are what
    they count, for S // U groups each.
    """

    q: Any  # int8 [O, X]
    scale: Any  # [S, O]
    units: Any = None  # [U, O]

    def __post_init__(self) -> None:
        q, scale = self.q, self.scale
        if not _are_matrices(q, scale):
            return
        if scale.shape[1] != q.shape[0] or q.shape[1] % scale.shape[0]:
            raise ValueError(f"scale is [S, O] for q [O, X], S a divisor of X, and got {scale.shape} for {q.shape}")
        if q.dtype != np.int8:
            raise ValueError(f"q is of {q.dtype}; a weight lies in an int8")
        _check_units(self.units, scale.shape[0], (q.shape[0],))

    @property
    def shape(self) -> tuple[int, int]:
        """``(O, X)``."""
        return self.q.shape[0], self.q.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays together."""
        return _nbytes(self)


@struct.dataclass
class Transposed:
    """A plain matrix ``[O, X]`` that lies in memory input by input.

    In float32 XLA:CPU multiplies 2 to 8 rows by one in two thirds of the time, and as fast as ever 1 row or 256.
    """

    values: Any  # float [X, O]

    @property
    def shape(self) -> tuple[int, int]:
        """``(O, X)``."""
        return self.values.shape[1], self.values.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return int(self.values.nbytes)


Packed = Int4 | Int8
PackedT = TypeVar("PackedT", Int4, Int8, Packed)
Matrix = Array | Int4 | Int8 | Transposed
"""What ``linear`` multiplies by: ``[O, X]``, plain, packed or lying the other way."""


def linear(weight: Matrix, x: Float[Array, "*R X"], dtype: Any = None) -> Float[Array, "*R O"]:
    """Multiply rows by a matrix ``[out, in]``, accumulating in float32; the result has ``dtype``, or x's.

    Packed matrices go through ``pallas_kernels.int4_matmul`` and ``int8_matmul``.
    """
    rows, dtype = x.reshape(-1, x.shape[-1]), dtype or x.dtype
    if isinstance(weight, Int4):
        if weight.permutation is not None:
            rows = jnp.take(rows, weight.permutation, axis=1, mode="clip")
        args = (rows, weight.packed, weight.scale, weight.offset)
        out = pallas_kernels.int4_matmul(*args, units=weight.units, dtype=dtype)
    elif isinstance(weight, Int8):
        out = pallas_kernels.int8_matmul(rows, weight.q, weight.scale, units=weight.units, dtype=dtype)
    elif isinstance(weight, Transposed):
        out = jnp.dot(rows.astype(weight.values.dtype), weight.values, preferred_element_type=jnp.float32).astype(dtype)
    else:
        out = _product(weight, rows).astype(dtype)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _product(weight: Float[Array, "O X"], rows: Float[Array, "R X"]) -> Float[Array, "R O"]:
    """Return the float32 product.

    The weights stand on the left, which XLA:CPU runs fastest in float32. In bfloat16 it falls off a cliff there at few
    rows, and at one row in any form, so bfloat16 rows come first and a lone row is computed twice.
    """
    contract = (((1,), (1,)), ((), ()))
    if weight.dtype == jnp.float32:
        return lax.dot_general(weight, rows, contract, preferred_element_type=jnp.float32).T
    count = rows.shape[0]
    if count == 1:
        rows = jnp.concatenate([rows, rows])
    return lax.dot_general(rows.astype(weight.dtype), weight, contract, preferred_element_type=jnp.float32)[:count]


@jax.jit
def transposed(matrix: Float[Array, "O X"]) -> Transposed:
    """Return a plain matrix as it is multiplied by fastest on a CPU; see ``Transposed``."""
    return Transposed(matrix.T)


# -- values ------------------------------------------------------------------------------------------------------------


def dequantize(matrix: Packed) -> Float[Array, "O X"]:
    """Return a packed matrix in float32, on the device that it is on."""
    if isinstance(matrix, Int8):
        return pallas_kernels.int8_reference.dequantize(matrix.q, matrix.scale, matrix.units)
    values = pallas_kernels.int4_reference.dequantize(matrix.packed, matrix.scale, matrix.offset, matrix.units)
    order = matrix.permutation
    return values if order is None else jnp.zeros_like(values).at[:, order].set(values, unique_indices=True)


def host_values(matrix: Packed) -> Iterator[np.ndarray]:
    """Yield the float32 values of a matrix of NumPy arrays in order, some rows at a time."""
    outputs, inputs = matrix.shape
    step = max(1, _PIECE // inputs)
    if isinstance(matrix, Int8):
        scale = _counted(matrix.scale, matrix.units).T
        for at in range(0, outputs, step):
            rows = slice(at, at + step)
            yield _grouped(matrix.q[rows], scale.shape[1]) * scale[rows, :, None]
        return
    units = (None, None) if matrix.units is None else matrix.units
    scale, minimum = _counted(matrix.scale, units[0]).T, _counted(matrix.offset, units[1]).T
    if matrix.units is None and np.issubdtype(matrix.offset.dtype, np.integer):
        minimum = minimum * scale
    order = None if matrix.permutation is None else np.argsort(matrix.permutation)
    for at in range(0, outputs, step):
        rows = slice(at, at + step)
        q = _grouped(unpack(matrix.packed[rows], scale.shape[1]), scale.shape[1])
        values = (q * scale[rows, :, None] - minimum[rows, :, None]).reshape(-1, inputs)
        yield values if order is None else values[:, order]


def _counted(scale: np.ndarray, units: np.ndarray | None) -> np.ndarray:
    """Return scales [S, O] in float32, times their units [U, O] where there are any."""
    wide = scale.astype(np.float32)
    return wide if units is None else wide * np.repeat(units.astype(np.float32), len(scale) // len(units), axis=0)


def pack(q: np.ndarray, groups: int) -> np.ndarray:
    """Return ``[O, X // 2]`` bytes of ``[O, X]`` integers from 0 to 15; see ``Int4``."""
    halves = q.astype(np.uint8, copy=False).reshape(q.shape[0], groups, 2, -1)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(q.shape[0], -1)


def unpack(packed: np.ndarray, groups: int) -> np.ndarray:
    """Return ``[O, X]`` integers from 0 to 15: the inverse of ``pack``."""
    halves = packed.reshape(packed.shape[0], groups, 1, -1)
    return np.concatenate([halves & 15, halves >> 4], axis=2).reshape(packed.shape[0], -1)


# -- quantising --------------------------------------------------------------------------------------------------------


def group_size(inputs: int) -> int | None:
    """Return the largest supported group size that divides a number of inputs, or None."""
    return next((group for group in GROUPS if inputs % group == 0), None)


def check_kind(kind: str) -> Kind:
    """Return ``kind``.

    Raises:
      ValueError: it is not one of ``KINDS``.
    """
    for known in KINDS:
        if kind == known:
            return known
    raise ValueError(f"quantize={kind!r} is unknown; one of {', '.join(KINDS)} is")


def quantize(values: np.ndarray | Iterable[np.ndarray], kind: str, group: int | None = None) -> Packed:
    """Round a matrix to the nearest, on the host.

    Four bits take 16 levels from the least value of a group to its largest, 0 among them: scale is the range / 15 and
    the zero point an integer. Eight bits are symmetric: scale is the largest magnitude / 127. Scales are float16,
    rounded up, so that no value is clipped and none is off by more than half a scale.

    Args:
      values: ``[O, X]``, whole or as pieces of whole rows.
      kind: int4 or int8.
      group: inputs of a group; None is ``group_size(X)``.

    Raises:
      ValueError: the kind is unknown, no group fits, or values are not finite or too large for a float16 scale.
    """
    kind = check_kind(kind)
    pieces = [values] if isinstance(values, np.ndarray) else values
    parts = [_quantize_rows(np.asarray(piece, np.float32), kind, group) for piece in pieces]
    return join(parts)


def join(parts: Sequence[PackedT]) -> PackedT:
    """Return one matrix of some of a kind that follow each other along the outputs, their inputs in one order."""

    def joined(path: Any, *leaves: Any) -> np.ndarray:
        name = path[0].name
        return leaves[0] if name == "permutation" else np.concatenate(leaves, axis=0 if name in ("packed", "q") else -1)

    return jax.tree_util.tree_map_with_path(joined, *parts)


def _quantize_rows(values: np.ndarray, kind: Kind, group: int | None) -> Packed:
    inputs = values.shape[1]
    group = group or group_size(inputs)
    if group is None or inputs % group:
        raise ValueError(f"{inputs} inputs cannot be split into groups of {group or ', '.join(map(str, GROUPS))}")
    grouped = values.reshape(len(values), inputs // group, group)
    low, high = np.minimum(grouped.min(axis=2), 0), np.maximum(grouped.max(axis=2), 0)
    span = high - low if kind == "int4" else np.maximum(high, -low)
    scale = _scale(span, _LARGEST[kind])
    quotient = grouped / scale[:, :, None].astype(np.float32)
    if kind == "int8":
        q = np.rint(quotient).astype(np.int8).reshape(values.shape)
        return Int8(q, np.ascontiguousarray(scale.T))
    zero = np.rint(-low / scale.astype(np.float32))
    q = np.clip(np.rint(quotient) + zero[:, :, None], 0, 15).astype(np.uint8)
    zeros = np.ascontiguousarray(zero.T.astype(np.uint8))
    return Int4(pack(q.reshape(values.shape), scale.shape[1]), np.ascontiguousarray(scale.T), zeros)


def _scale(span: np.ndarray, steps: int) -> np.ndarray:
    """Return the least float16 that covers a span in so many steps; 1 where there is nothing to cover."""
    wanted = span / np.float32(steps)
    if not np.all(wanted <= np.finfo(np.float16).max):
        raise ValueError(
            f"a group of weights spans {float(span.max())}, and a float16 scale holds finite spans up to "
            f"{float(np.finfo(np.float16).max) * steps:.0f}; leave out quantize for this checkpoint"
        )
    scale = wanted.astype(np.float16)
    scale = np.where(scale < wanted, np.nextafter(scale, np.float16(np.inf)), scale)
    return np.where(scale == 0, np.float16(1), scale)


def abstract(weights: Any, kind: str, group: int | None = None) -> Any:
    """Return a tree of ``jax.ShapeDtypeStruct`` with the layers' matrices packed, as ``quantize`` packs them.

    Args:
      weights: ``model.weight_shapes``, or any tree with a field ``layers``.
      kind, group: as for ``quantize``. A matrix that no group divides stays as it is.
    """
    kind = check_kind(kind)

    def packed(path: Any, leaf: Any) -> Any:
        size = group or (group_size(leaf.shape[-1]) if leaf.ndim == 2 else None)
        if path[0].name != "layers" or leaf.ndim != 2 or size is None or leaf.shape[1] % size:
            return leaf
        (outputs, inputs), array = leaf.shape, jax.ShapeDtypeStruct
        scale = array((inputs // size, outputs), jnp.float16)
        if kind == "int8":
            return Int8(array((outputs, inputs), jnp.int8), scale)
        return Int4(array((outputs, inputs // 2), jnp.uint8), scale, array(scale.shape, jnp.uint8))

    return jax.tree_util.tree_map_with_path(packed, weights)


def is_packed(leaf: Any) -> bool:
    """Whether something is a packed matrix: what ``jax.tree.map`` takes as ``is_leaf``."""
    return isinstance(leaf, Int4 | Int8)


def is_matrix(leaf: Any) -> bool:
    """Whether something is a matrix that is more than an array, or lies otherwise."""
    return isinstance(leaf, Int4 | Int8 | Transposed)


def _check_units(units: Any, groups: int, rest: tuple[int, ...]) -> None:
    shape: tuple[int, ...] = getattr(units, "shape", ())
    if len(shape) == len(rest) + 1 and (groups % shape[-2] or (*shape[:-2], shape[-1]) != rest):
        raise ValueError(f"units are for U of {groups} groups, U a divisor, and {rest[-1]} outputs, and got {shape}")


def _are_matrices(*leaves: Any) -> bool:
    """Whether these are arrays, or shapes of arrays: JAX also builds the class around whatever a tree map returns."""
    return all(hasattr(leaf, "dtype") and len(getattr(leaf, "shape", ())) == 2 for leaf in leaves)


def _grouped(q: np.ndarray, groups: int) -> np.ndarray:
    return q.reshape(len(q), groups, -1).astype(np.float32)


def _nbytes(matrix: Packed) -> int:
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(matrix))
