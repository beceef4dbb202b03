"""Checkpoints to weights: a folder of safetensors, a GGUF file or a converted folder in, ``ModelConfig`` and
``Weights`` out.
"""

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
from jaxkv.weights import converted, gguf, hf
from jaxkv.weights.locate import locate
from jaxkv.weights.names import check
from jaxkv.weights.placement import Placer, Report

__all__ = ["Loaded", "Report", "load", "locate", "plain_dtype", "read", "read_config"]

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
    path: str | Path,
    dtype: Any = jnp.float32,
    *,
    quantize: str | None = None,
    packed: bool | None = None,
    transpose: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> Loaded:
    """Read a checkpoint onto the default device. One tensor at a time passes through the host.

    Matrices of the layers that are packed in the checkpoint (AWQ, GPTQ, GGUF's Q4_0, Q4_1, Q4_K, Q6_K and Q8_0) or that
    ``quantize`` packs stay packed, in the form of ``jaxkv.quant``, everywhere but on a CPU, which multiplies plain
    ones faster. Everything else, embedding and output head included, is plain.

    Args:
      path: a folder with config.json and safetensors, a .gguf file, or a folder of ``python -m jaxkv.convert``.
      dtype: of every weight that is not packed: float32, bfloat16 or float16.
      quantize: int4 or int8 to round the layers' matrices to the nearest in groups of 128, 64 or 32 inputs: the
        largest that divides them. A matrix that none divides stays plain, and the report names it.
      packed: whether packed matrices stay so; None is by the device.
      transpose: whether the layers' plain matrices become ``quant.Transposed``, which a CPU decodes batches by faster.
      mesh: devices to restore a converted folder to, cut as ``converted.load`` says, in place of the default device.

    Returns:
      The model's configuration, its weights with the shapes of ``model.weight_shapes``, and a report.

    Raises:
      FileNotFoundError: if the path, or a file that belongs to it, is not there.
      ValueError: if the model is not supported, or if tensors are missing, surplus, mis-shaped or of an unknown
        type: all of them in one message; or if ``quantize`` is unknown or the checkpoint is AWQ, GPTQ or converted
        already; or if a mesh is given for one that is not converted.
    """
    path, target = Path(path), np.dtype(dtype)
    if target.name not in DTYPES:
        raise ValueError(f"weights dtype={target.name!r} is not supported; {', '.join(DTYPES)} are")
    if quantize is not None:
        quant.check_kind(quantize)
    keep = jax.default_backend() != "cpu" if packed is None else packed
    if _format(path) is converted:
        if quantize is not None:
            raise ValueError(f"{path} is converted already; convert the original with quantize={quantize!r}")
        return Loaded(*converted.load(path, target, keep, transpose, mesh))
    if mesh is not None:
        raise ValueError(f"{path} cannot be read onto a mesh; convert it with python -m jaxkv.convert first")
    checkpoint = _format(path).open_checkpoint(path)
    check(checkpoint)
    if quantize is not None and checkpoint.quantized:
        raise ValueError(f"{path} is quantised by {checkpoint.quantized} already; leave out quantize={quantize!r}")
    return Loaded(checkpoint.config, *Placer(checkpoint, target, quantize, keep, transpose).place())


def plain_dtype(path: str | Path, packed: bool = True) -> str:
    """Return a dtype that holds what a checkpoint has plain: bfloat16 or float16 where all of it is, else float32.

    Args:
      path: a folder with safetensors, or a .gguf file.
      packed: whether matrices that are packed stay so; one that is written out needs float32.
    """
    checkpoint = _format(Path(path)).open_checkpoint(Path(path))
    kinds = {tensor.kind for tensor in checkpoint.tensors.values()}
    if packed:
        kinds.discard(checkpoint.quantized)
    return {"BF16": "bfloat16", "F16": "float16"}.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"


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
        return converted if converted.is_converted(path) else hf
    if path.suffix == ".gguf":
        return gguf
    raise ValueError(f"{path} is neither a folder nor a .gguf file; give one with config.json and safetensors in it")
