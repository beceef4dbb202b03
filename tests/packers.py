"""AWQ and GPTQ folders, packed here word by word from the published description of their layouts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs lies in each half byte of a word, from the low end."""


@dataclasses.dataclass(frozen=True)
class Levels:
    """A matrix as integers: ``w[o, i] = scale[g, o] * (q[i, o] - zero[g, o])`` with ``g = group[i]``."""

    q: np.ndarray  # [X, O], 0 to 15
    zero: np.ndarray  # [groups, O]
    scale: np.ndarray  # [groups, O], float16
    group: np.ndarray  # [X]

    @property
    def values(self) -> np.ndarray:
        """[O, X] in float64."""
        scale, zero = self.scale.astype(np.float64), self.zero.astype(np.float64)
        return (scale[self.group] * (self.q - zero[self.group])).T


def draw(weights: np.ndarray, size: int, *, seed: int, act_order: bool = False, symmetric: bool = False) -> Levels:
    """Return random levels of about the magnitude of a matrix [O, X]; act-order gives every input any group."""
    rng = np.random.default_rng(seed)
    outputs, inputs = weights.shape
    size = inputs if size == -1 else size
    groups = inputs // size
    scale = (np.std(weights) / 4 * rng.uniform(0.5, 1.5, (groups, outputs))).astype(np.float16)
    zero = np.full(scale.shape, 8) if symmetric else rng.integers(1, 16, scale.shape)
    group = np.arange(inputs) // size
    return Levels(rng.integers(0, 16, (inputs, outputs)), zero, scale, rng.permutation(group) if act_order else group)


def words(nibbles: np.ndarray, order: Any = range(8)) -> np.ndarray:
    """Pack the last axis, eight to a word, the half byte at place p from the low end taking number ``order[p]``."""
    out = np.zeros((*nibbles.shape[:-1], nibbles.shape[-1] // 8), np.uint32)
    for index in np.ndindex(out.shape):
        eight = nibbles[index[:-1]][8 * index[-1] : 8 * index[-1] + 8]
        out[index] = sum(int(eight[number]) * 16**place for place, number in enumerate(order))
    return out.view(np.int32)


def awq(levels: Levels) -> dict[str, np.ndarray]:
    """Outputs in words, in AWQ's order."""
    return {"qweight": words(levels.q, AWQ_ORDER), "qzeros": words(levels.zero, AWQ_ORDER), "scales": levels.scale}


def gptq(levels: Levels, version: int = 1) -> dict[str, np.ndarray]:
    """Inputs in the words of the weights and outputs in those of the zeros, which version 1 stores less one."""
    return {
        "qweight": np.ascontiguousarray(words(levels.q.T).T),
        "qzeros": words(levels.zero - 1 if version == 1 else levels.zero),
        "scales": levels.scale,
        "g_idx": levels.group.astype(np.int32),
    }


def convert(folder: Path, method: str, **options: Any) -> dict[str, Levels]:
    """Pack the layers' matrices of a folder with model.safetensors in place, and return their levels by name.

    Args:
      folder: a plain model's.
      method: awq or gptq.
      options: ``size``, ``act_order`` and ``symmetric`` as for ``draw``, ``version`` as for ``gptq``, and
        ``config``: more of the quantization_config.
    """
    size, config = options.pop("size", 32), options.pop("config", {})
    version = options.pop("version", 1)
    arrays, found = load_file(folder / "model.safetensors"), {}
    for seed, name in enumerate([name for name in arrays if "_proj.weight" in name]):
        levels = draw(arrays.pop(name), size, seed=seed, **options)
        parts = awq(levels) if method == "awq" else gptq(levels, version)
        arrays |= {name.replace("weight", part): array for part, array in parts.items()}
        found[name] = levels
    given = {"quant_method": method, "bits": 4, "group_size": size, **config}
    if method == "awq":
        given = {"version": "gemm", "zero_point": True, **given}
    elif version == 2:
        given["checkpoint_format"] = "gptq_v2"
    save_file(arrays, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": given}))
    return found
