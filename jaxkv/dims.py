"""The letters: one glossary for every signature, comment and einsum of the project.

======  ==============================  ======  ======================================
letter  meaning                         letter  meaning
======  ==============================  ======  ======================================
B       rows (sequences) in a batch     H       query heads
T       tokens of a row                 K       KV heads
N       blocks in the pool              G       query heads per KV head, H // K
P       block size: slots in a block    D       head dimension
M       blocks per row in a table       F       RoPE frequencies, D // 2
L       layers                          V       vocabulary
E       model width                     I       MLP width
======  ==============================  ======  ======================================

``length`` is how many slots a row holds in the pool. ``position`` is how many of its tokens
have had their K and V computed, which is the RoPE position of its next token. They are equal
until a row is first compacted; after that ``length < position``. No code derives one from the
other: this is the fault that breaks most KV compressors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

__all__ = ["Array", "Bool", "Float", "Int", "UInt32", "ceil_div", "host_array"]


def ceil_div(numerator: int, denominator: int) -> int:
    """Return ``ceil(numerator / denominator)`` in integers."""
    return -(-numerator // denominator)


def host_array(*shape: int, dtype: Any = np.int32, fill: Any = 0) -> Any:
    """Return a NumPy array for a field that is a device array inside a jitted step. Fill it, call, and do not write to
    it again: on a CPU a step may still be reading it after the call has returned.
    """
    return np.full(shape, fill, dtype)
