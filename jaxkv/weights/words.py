"""Four-bit integers in words of 32 bits, and groups of sizes that ``jaxkv.quant`` does not have."""

from __future__ import annotations

import numpy as np

from jaxkv.quant import GROUPS


def nibbles(words: np.ndarray) -> np.ndarray:
    """Return ``[R, C, 8]`` integers from 0 to 15 of ``[R, C]`` words, from the low end."""
    # The bytes of a word, low first, whatever this machine's order is.
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8).reshape(*words.shape, 4, 1)
    return np.concatenate([octets & 15, octets >> 4], axis=3).reshape(*words.shape, 8)


def supported_group(group: int) -> int | None:
    """Return the group size that stands for one of a checkpoint, -1 being a whole row; None if there is none."""
    if group == -1:
        return GROUPS[-1]
    return next((size for size in GROUPS if group > 0 and group % size == 0), None)


def regrouped(inputs: int, group: int, scale: np.ndarray, zeros: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and zero points [S, O] with groups of a size in ``GROUPS``: larger groups are repeated.

    Raises:
      ValueError: a group of this size does not divide the inputs.
    """
    group = inputs if group == -1 else group
    size = next((size for size in GROUPS if group % size == 0), None)
    if size is None or inputs % group:
        raise ValueError(f"{inputs} inputs are not split into groups of {group}")
    return np.repeat(scale, group // size, axis=0), np.repeat(zeros, group // size, axis=0)
