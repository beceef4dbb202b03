"""AWQ (arXiv 2306.00978) in safetensors, as AutoAWQ's GEMM version packs it.

``qweight`` int32 [X, O / 8] holds eight outputs of an input in a word, four bits each from the low end, in the order
0, 2, 4, 6, 1, 3, 5, 7; ``qzeros`` int32 [X / group, O / 8] likewise; ``scales`` are float16 [X / group, O]. A weight is
``scale * (q - zero)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxkv.quant import Int4, join, pack
from jaxkv.weights.words import nibbles, regrouped, supported_group

PARTS = ("qweight", "qzeros", "scales")
OPTIONAL: tuple[str, ...] = ()

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_OUTPUTS = 1024


def refusals(given: Mapping[str, Any]) -> list[str]:
    """Return every reason why a quantization_config is not read; empty if there is none."""
    found = []
    bits, group = given.get("bits", given.get("w_bit", 4)), group_of(given)
    version = str(given.get("version") or given.get("format") or "gemm").lower()
    if bits != 4:
        found.append(f"bits={bits}; AWQ is read with 4")
    if supported_group(group) is None:
        found.append(f"group_size={group}; groups are read in multiples of 32, or -1 for one a row")
    if version != "gemm":
        found.append(f"version={version!r}; AWQ is read as gemm packs it")
    if given.get("backend", "autoawq") != "autoawq":
        found.append(f"backend={given['backend']!r}; AWQ is read as autoawq packs it")
    if not given.get("zero_point", True):
        found.append("zero_point=false; AWQ is read with zero points")
    return found


def group_of(given: Mapping[str, Any]) -> int:
    """Return the inputs of a group; -1 is all."""
    return int(given.get("group_size", given.get("q_group_size", 128)))


def shapes(qweight: tuple[int, ...], group: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of ``weight`` and of its parts, from that of ``qweight``."""
    inputs, words = qweight
    groups = 1 if group == -1 else -(-inputs // group)
    return {
        "weight": (8 * words, inputs),
        "qweight": qweight,
        "qzeros": (groups, words),
        "scales": (groups, 8 * words),
    }


def matrix(parts: Mapping[str, np.ndarray], given: Mapping[str, Any]) -> Int4:
    """Return a matrix as ``jaxkv.quant`` packs it."""
    inputs = parts["qweight"].shape[0]
    scale, zeros = regrouped(inputs, group_of(given), parts["scales"], _columns(parts["qzeros"]))
    found = []
    for at in range(0, scale.shape[1], _OUTPUTS):
        columns = slice(at, at + _OUTPUTS)
        q = _columns(parts["qweight"][:, at // 8 : (at + _OUTPUTS) // 8])
        found.append(Int4(pack(np.ascontiguousarray(q.T), len(scale)), scale[:, columns], zeros[:, columns]))
    return join(found)


def _columns(words: np.ndarray) -> np.ndarray:
    """Return ``[R, 8 C]`` integers of ``[R, C]`` words."""
    # Nibble i of a word is output _ORDER[i].
    return nibbles(words)[:, :, np.argsort(_ORDER)].reshape(len(words), -1)
