"""GGUF's blocks, repacked once into the arrays of ``jaxkv.quant``: the same numbers in another order.

Every value stays what ggml's dequantiser gives, to the bit in float32. In Q4_K and Q6_K a scale is a product of a
float16 and an integer of 6 or 8 bits, which float32 holds exactly and float16 does not: both factors are kept. Bits a
weight are 4.5 for Q4_0, 5 for Q4_1 and 8.5 for Q8_0, as in the file, 4.6 for Q4_K and 8.6 for Q6_K instead of 4.5 and
6.6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxkv.quant import Int4, Int8, Packed, pack

Kind = GGMLQuantizationType


def repack(rows: np.ndarray, kind: GGMLQuantizationType) -> Packed | None:
    """Return the matrix whose rows are whole blocks, ``[O, bytes]``; None for a type that is not kept packed."""
    if kind not in _REPACK:
        return None
    return _REPACK[kind](rows.reshape(rows.shape[0], -1, GGML_QUANT_SIZES[kind][1]))


def _q4_0(blocks: np.ndarray) -> Int4:
    scale = _half(blocks, 0)
    # ggml splits 32 weights over the halves of 16 bytes as Int4 does.
    return Int4(_joined(blocks[:, :, 2:]), scale, np.full(scale.shape, 8, np.uint8))


def _q4_1(blocks: np.ndarray) -> Int4:
    return Int4(_joined(blocks[:, :, 4:]), _half(blocks, 0), -_half(blocks, 2))


def _q8_0(blocks: np.ndarray) -> Int8:
    return Int8(_joined(blocks[:, :, 2:]).view(np.int8), _half(blocks, 0))


def _q4_k(blocks: np.ndarray) -> Int4:
    """Blocks of 256: two float16, 8 scales and 8 minimums of 6 bits in 12 bytes, and 8 groups of 32 nibbles."""
    six = blocks[:, :, 4:16]
    low, high, rest = six[:, :, :4], six[:, :, 4:8], six[:, :, 8:]
    scales = np.concatenate([low & 63, rest & 15 | low >> 6 << 4], axis=2)
    minimums = np.concatenate([high & 63, rest >> 4 | high >> 6 << 4], axis=2)
    # 32 bytes hold two groups, one in their low halves and one in their high.
    pairs = blocks[:, :, 16:].reshape(*blocks.shape[:2], 4, 1, 32)
    q = np.concatenate([pairs & 15, pairs >> 4], axis=3)
    return Int4(
        packed=pack(q.reshape(len(q), -1), 8 * blocks.shape[1]),
        scale=_transposed(scales),
        offset=_transposed(minimums),
        units=np.stack([_half(blocks, 0), _half(blocks, 2)]),
    )


def _q6_k(blocks: np.ndarray) -> Int8:
    """Blocks of 256: 4 low bits each, 2 high bits each, 16 signed scales, and a float16."""
    sides = blocks.shape[:2]
    low = blocks[:, :, :128].reshape(*sides, 2, 1, 64)
    high = blocks[:, :, 128:192].reshape(*sides, 2, 1, 32)
    nibbles = np.concatenate([low & 15, low >> 4], axis=3).reshape(*sides, 2, 4, 32)
    pairs = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=3)
    q = (nibbles | pairs << 4).astype(np.int8) - np.int8(32)
    scales = blocks[:, :, 192:208].view(np.int8)
    return Int8(_joined(q.reshape(*sides, 256)), _transposed(scales), _half(blocks, 208))


_REPACK: Mapping[GGMLQuantizationType, Callable[[np.ndarray], Packed]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q4_K: _q4_k,
    Kind.Q6_K: _q6_k,
    Kind.Q8_0: _q8_0,
}


def _joined(parts: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(parts).reshape(len(parts), -1)


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """Return the float16 at a byte of every block, [S, O]."""
    return np.ascontiguousarray(np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[:, :, 0].T)


def _transposed(integers: np.ndarray) -> np.ndarray:
    """Return integers [O, S, groups of a block] as [S * groups, O]."""
    return np.ascontiguousarray(integers.reshape(len(integers), -1).T)
