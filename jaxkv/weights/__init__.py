"""Checkpoints to weights: a folder of safetensors or a GGUF file in, ``ModelConfig`` and ``Weights`` out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import quant
from jaxkv.config import ModelConfig
from jaxkv.model import Weights
from jaxkv.weights import gguf, hf
from jaxkv.weights.locate import locate
from jaxkv.weights.names import check
from jaxkv.weights.placement import Placer, Report

__all__ = ["Loaded", "Report", "load", "locate", "read", "read_config"]

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A checkpoint on the default device: its configuration, its weights, and in what form they are."""

    config: ModelConfig
    weights: Weights
    report: Report


def load(path: str | Path, dtype: Any = jnp.float32, **options: Any) -> tuple[ModelConfig, Weights]:
    """Read a checkpoint onto the default device: ``read`` without its report."""
    loaded = read(path, dtype, **options)
    return loaded.config, loaded.weights


def read(
    path: str | Path, dtype: Any = jnp.float32, *, quantize: str | None = None, packed: bool | None = None
) -> Loaded:
    """Read a checkpoint onto the default device. One tensor at a time passes through the host.

    Matrices of the layers that are packed in the checkpoint (AWQ, GPTQ, GGUF's Q4_0, Q4_1, Q4_K, Q6_K and Q8_0) or that
    ``quantize`` packs stay packed, in the form of ``jaxkv.quant``, everywhere but on a CPU, which multiplies plain
    ones faster. Everything else, embedding and output head included, is plain.

    Args:
      path: a folder with config.json and safetensors, or a .gguf file.
      dtype: of every weight that is not packed: float32, bfloat16 or float16.
      quantize: int4 or int8 to round the layers' matrices to the nearest in groups of 128, 64 or 32 inputs: the
        largest that divides them. A matrix that none divides stays plain, and the report names it.
      packed: whether packed matrices stay so; None is by the device.

    Returns:
      The model's configuration, its weights with the shapes of ``model.weight_shapes``, and a report.

    Raises:
      FileNotFoundError: if the path, or a file that belongs to it, is not there.
      ValueError: if the model is not supported, or if tensors are missing, surplus, mis-shaped or of an unknown
        type: all of them in one message; or if ``quantize`` is unknown or the checkpoint is AWQ or GPTQ already.
    """
    path, target = Path(path), np.dtype(dtype)
    if target.name not in DTYPES:
        raise ValueError(f"weights dtype={target.name!r} is not supported; {', '.join(DTYPES)} are")
    if quantize is not None:
        quant.check_kind(quantize)
    checkpoint = _format(path).open_checkpoint(path)
    check(checkpoint)
    if quantize is not None and checkpoint.quantized:
        raise ValueError(f"{path} is quantised by {checkpoint.quantized} already; leave out quantize={quantize!r}")
    keep = jax.default_backend() != "cpu" if packed is None else packed
    return Loaded(checkpoint.config, *Placer(checkpoint, target, quantize, keep).place())


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
