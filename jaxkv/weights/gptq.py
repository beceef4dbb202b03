"""GPTQ (arXiv 2210.17323) in safetensors, as AutoGPTQ and GPTQModel pack it.

``qweight`` int32 [X / 8, O] holds eight inputs of an output in a word, four bits each from the low end; ``qzeros``
int32 [X / group, O / 8] eight outputs; ``scales`` are float16 [X / group, O]; ``g_idx`` int32 [X] is each input's
group, in any order where ``desc_act`` (act-order) is on. A weight is ``scale * (q - zero)``. Version 1 stores zero - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxkv.quant import Int4, join, pack
from jaxkv.weights.words import nibbles, regrouped, supported_group

PARTS = ("qweight", "qzeros", "scales")
OPTIONAL = ("g_idx",)

_OUTPUTS = 1024


def refusals(given: Mapping[str, Any]) -> list[str]:
    """Return every reason why a quantization_config is not read; empty if there is none."""
    found = []
    bits, group = given.get("bits", 4), group_of(given)
    form = given.get("checkpoint_format") or given.get("format") or "gptq"
    if bits != 4:
        found.append(f"bits={bits}; GPTQ is read with 4")
    if supported_group(group) is None:
        found.append(f"group_size={group}; groups are read in multiples of 32, or -1 for one a row")
    if form not in ("gptq", "gptq_v2"):
        found.append(f"checkpoint_format={form!r}; GPTQ is read as gptq or gptq_v2")
    if given.get("is_marlin_format"):
        found.append("is_marlin_format=true; GPTQ is read as gptq or gptq_v2")
    if given.get("pack_dtype", "int32") != "int32":
        found.append(f"pack_dtype={given['pack_dtype']!r}; GPTQ is read in words of int32")
    # Rules that begin with -: leave modules out, and those are there as floats.
    rules = [rule for rule in given.get("dynamic") or {} if not rule.startswith("-:")]
    if rules:
        found.append(f"dynamic={rules}; GPTQ is read with the same bits and groups everywhere")
    return found


def group_of(given: Mapping[str, Any]) -> int:
    """Return the inputs of a group; -1 is all."""
    return int(given.get("group_size", 128))


def shapes(qweight: tuple[int, ...], group: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of ``weight`` and of its parts, from that of ``qweight``."""
    words, outputs = qweight
    groups = 1 if group == -1 else -(-8 * words // group)
    return {
        "weight": (outputs, 8 * words),
        "qweight": qweight,
        "qzeros": (groups, outputs // 8),
        "scales": (groups, outputs),
        "g_idx": (8 * words,),
    }


def matrix(parts: Mapping[str, np.ndarray], given: Mapping[str, Any]) -> Int4:
    """Return a matrix as ``jaxkv.quant`` packs it, its inputs sorted by group.

    Raises:
      ValueError: ``g_idx`` does not give every group the same number of inputs.
    """
    words, group = parts["qweight"], group_of(given)
    inputs = 8 * len(words)
    zeros = nibbles(parts["qzeros"]).reshape(len(parts["qzeros"]), -1)
    if (given.get("checkpoint_format") or given.get("format") or "gptq") == "gptq":
        zeros = zeros + np.uint8(1)
    order = _order(parts.get("g_idx"), inputs, len(parts["scales"]))
    scale, zeros = regrouped(inputs, group, parts["scales"], zeros)
    found = []
    for at in range(0, scale.shape[1], _OUTPUTS):
        columns = slice(at, at + _OUTPUTS)
        q = nibbles(words[:, columns]).transpose(1, 0, 2).reshape(-1, inputs)
        q = q if order is None else q[:, order]
        found.append(Int4(pack(q, len(scale)), scale[:, columns], zeros[:, columns], order))
    return join(found)


def _order(g_idx: np.ndarray | None, inputs: int, groups: int) -> np.ndarray | None:
    """Return the inputs sorted by group, each group in order; None where they are sorted already."""
    share = np.full(groups, inputs // groups)
    if inputs % groups or (g_idx is not None and not np.array_equal(np.bincount(g_idx), share)):
        raise ValueError(f"g_idx does not give each of {groups} groups the same share of {inputs} inputs")
    if g_idx is None or np.all(np.diff(g_idx) >= 0):
        return None
    return np.argsort(g_idx, kind="stable").astype(np.int32)
