"""Compare how jaxkv reads AWQ, GPTQ and GGUF with what the packers of AutoAWQ, AutoGPTQ and gguf write.

    python3 -m venv peers && . peers/bin/activate
    pip install torch transformers setuptools wheel . && pip install --no-deps --no-build-isolation autoawq auto-gptq
    python scripts/check_packers.py --json packers.json

A matrix is rounded to levels here, packed by a peer's class, and read by jaxkv's loader. Printed are the largest
difference from ``scale * (q - zero)``, which has to be zero, and from the peer's own dequantiser, whose arithmetic may
be float16. Exits with 1 if a value differs by more.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from jaxkv import quant
from jaxkv.weights import awq, gguf_packed, gptq

INPUTS, OUTPUTS = 512, 256


def levels(size: int, act_order: bool, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return scales [groups, O] in float16, zeros, levels [X, O] and each input's group."""
    rng = np.random.default_rng(seed)
    size = INPUTS if size == -1 else size
    shape = (INPUTS // size, OUTPUTS)
    scale = rng.uniform(0.005, 0.05, shape).astype(np.float16)
    group = np.arange(INPUTS) // size
    group = rng.permutation(group) if act_order else group
    return scale, rng.integers(1, 16, shape), rng.integers(0, 16, (INPUTS, OUTPUTS)), group


def check_awq(size: int) -> tuple[float, float]:
    """Pack by AutoAWQ's linear layer; return the differences from the levels and from AutoAWQ's own values."""
    import torch

    _bare("awq", "awq.modules", "awq.modules.linear", "awq.utils")
    gemm = importlib.import_module("awq.modules.linear.gemm").WQLinear_GEMM
    unpack = importlib.import_module("awq.utils.packing_utils").dequantize_gemm
    scale, zero, q, group = levels(size, False, 500 + size)
    wide = scale.astype(np.float32)
    linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    linear.weight.data = torch.from_numpy((wide[group] * (q - zero[group])).T.astype(np.float32).copy())
    packed = gemm.from_linear(linear, 4, size, False, torch.from_numpy(wide), torch.from_numpy(zero.astype(np.float32)))
    parts = {name: getattr(packed, name).numpy() for name in awq.PARTS}
    ours = _values(awq.matrix(parts, {"group_size": size}))
    theirs = unpack(packed.qweight, packed.qzeros, packed.scales, 4, packed.group_size).float().numpy().T
    return _difference(ours, _expected(scale, zero, q, group)), _difference(ours, theirs)


def check_gptq(size: int, act_order: bool) -> tuple[float, float]:
    """Pack by AutoGPTQ's linear layer; return the differences from the levels and from AutoGPTQ's own product."""
    import torch

    _bare("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear")
    layer = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear
    scale, zero, q, group = levels(size, act_order, 1000 + size)
    wide = scale.astype(np.float32)
    linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    linear.weight.data = torch.from_numpy((wide[group] * (q - zero[group])).T.astype(np.float32).copy())
    packed = layer(4, size, INPUTS, OUTPUTS, False, weight_dtype=torch.float32)
    zeros = torch.from_numpy(zero.T.astype(np.float32).copy())
    packed.pack(linear, torch.from_numpy(wide.T.copy()), zeros, torch.from_numpy(group.astype(np.int32)))
    parts = {name: getattr(packed, name).numpy() for name in (*gptq.PARTS, *gptq.OPTIONAL)}
    ours = _values(gptq.matrix(parts, {"group_size": size, "desc_act": act_order}))
    theirs = packed(torch.eye(INPUTS)).numpy().T
    return _difference(ours, _expected(scale, zero, q, group)), _difference(ours, theirs)


def check_gguf(kind: GGMLQuantizationType) -> tuple[float, float]:
    """Pack by the gguf package, or draw blocks where it cannot; return the differences from its dequantiser."""
    rng = np.random.default_rng(int(kind))
    try:
        blocks = quants.quantize(rng.standard_normal((OUTPUTS, INPUTS), dtype=np.float32), kind)
    except NotImplementedError:
        block, size = GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (OUTPUTS, INPUTS // block, size), np.uint8)
        for at in (208,) if kind == GGMLQuantizationType.Q6_K else (0, 2):
            scales = rng.uniform(1e-3, 2e-3, blocks.shape[:2]).astype(np.float16)
            blocks[:, :, at : at + 2] = scales[:, :, None].view(np.uint8)
        blocks = blocks.reshape(OUTPUTS, -1)
    theirs = quants.dequantize(blocks, kind)
    matrix = gguf_packed.repack(blocks, kind)
    assert matrix is not None
    difference = _difference(_values(matrix), theirs)
    return difference, difference


def checks() -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield the name of each case and its two differences."""
    for size in (32, 64, 128):
        yield f"AutoAWQ, group_size={size}", check_awq(size)
    for size in (32, 64, 128, -1):
        for act_order in (False, True):
            if size > 0 or not act_order:
                yield f"AutoGPTQ, group_size={size}{', act-order' * act_order}", check_gptq(size, act_order)
    for name in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"):
        yield f"gguf, {name}", check_gguf(GGMLQuantizationType[name])


def main() -> int:
    """Run every check, print a table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write what was found")
    args = parser.parse_args()
    found = []
    print(f"{'case':<40} {'from the levels':>16} {'from the peer':>16}")
    for name, (exact, peer) in checks():
        found.append({"case": name, "from_levels": exact, "from_peer": peer})
        print(f"{name:<40} {exact:>16.3g} {peer:>16.3g}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found))
    # Half a unit in the last place of float16 at the largest weight, which is below 1.
    return int(any(case["from_levels"] > 0 or case["from_peer"] > 2**-12 for case in found))


def _expected(scale: np.ndarray, zero: np.ndarray, q: np.ndarray, group: np.ndarray) -> np.ndarray:
    return (scale.astype(np.float64)[group] * (q - zero[group])).T


def _values(matrix: Any) -> np.ndarray:
    return np.concatenate([piece.reshape(-1) for piece in quant.host_values(matrix)]).reshape(matrix.shape)


def _difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours.astype(np.float64) - theirs).max())


def _bare(*packages: str) -> None:
    """Make packages importable without running their __init__, which wants models of an older transformers."""
    for name in packages:
        if name in sys.modules:
            continue
        spec = importlib.util.find_spec(name)
        if spec is None or spec.submodule_search_locations is None:
            sys.exit(f"error: {name} is not installed; see the top of this file")
        module = types.ModuleType(name)
        module.__path__ = list(spec.submodule_search_locations)
        sys.modules[name] = module


if __name__ == "__main__":
    sys.exit(main())
