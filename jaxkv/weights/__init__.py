"""Checkpoints to weights: a folder of safetensors or a GGUF file in, ``ModelConfig`` and ``Weights`` out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.config import ModelConfig
from jaxkv.model import Weights
from jaxkv.weights import gguf, hf
from jaxkv.weights.locate import locate
from jaxkv.weights.names import Parameter, check, parameters

__all__ = ["load", "locate", "read_config"]

DTYPES = ("float32", "bfloat16", "float16")
ALIGNMENT = 64


def load(path: str | Path, dtype: Any = jnp.float32) -> tuple[ModelConfig, Weights]:
    """Read a checkpoint onto the default device.

    Quantised tensors are dequantised. One tensor at a time passes through the host, a few MB at a time.

    Args:
      path: a folder with config.json and safetensors, or a .gguf file.
      dtype: dtype of every weight: float32, bfloat16 or float16.

    Returns:
      The model's configuration, and its weights with the shapes of ``model.weight_shapes``.

    Raises:
      FileNotFoundError: if the path, or a file that belongs to it, is not there.
      ValueError: if the model is not supported, or if tensors are missing, surplus, mis-shaped or of an unknown
        type: all of them in one message.
    """
    path, target = Path(path), np.dtype(dtype)
    if target.name not in DTYPES:
        raise ValueError(f"weights dtype={target.name!r} is not supported; {', '.join(DTYPES)} are")
    checkpoint = _format(path).open_checkpoint(path)
    check(checkpoint)

    def array(parameter: Parameter) -> jax.Array:
        return jax.device_put(_fill(parameter.shape, target, checkpoint.pieces(parameter)))

    return checkpoint.config, jax.tree.map(array, parameters(checkpoint.names, checkpoint.config))


def read_config(path: str | Path) -> ModelConfig:
    """Return the configuration of a checkpoint without reading its weights; raises as ``load``."""
    path = Path(path)
    return _format(path).read_config(path)


def _format(path: Path) -> ModuleType:
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist; give a folder with config.json and safetensors, or a .gguf file"
        )
    if path.is_dir():
        return hf
    if path.suffix == ".gguf":
        return gguf
    raise ValueError(f"{path} is neither a folder nor a .gguf file; give one with config.json and safetensors in it")


def _fill(shape: tuple[int, ...], dtype: np.dtype, pieces: Iterable[np.ndarray]) -> np.ndarray:
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
