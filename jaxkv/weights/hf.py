"""Hugging Face folders: config.json and safetensors, plain, AWQ or GPTQ, without torch.

What config.json leaves out has the value that transformers gives it, so that a folder means the same here and there.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import safe_open

from jaxkv.config import ROPE_KINDS, ModelConfig, RopeConfig
from jaxkv.quant import Packed, host_values
from jaxkv.weights import prequantized
from jaxkv.weights.names import HF, Checkpoint, Parameter, Tensor, parameters

READABLE = ("F64", "F32", "F16", "BF16")
PIECE = 1 << 20
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What an architecture fixes, or takes from a key of config.json (a string) that may be absent (false).

    Attributes:
      qkv_bias, output_bias, mlp_bias, qk_norm: as in ModelConfig.
      windowed: whether ``sliding_window`` is obeyed.
      window: the ``sliding_window`` of a config.json that has none.
      head_dim: the head dimension of a config.json that has none; None is width // heads.
    """

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    windowed: bool | str = False
    window: int | None = None
    head_dim: int | None = None


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Architecture(windowed=True, window=4096),
    "qwen2": Architecture(qkv_bias=True, windowed="use_sliding_window"),
    "qwen3": Architecture(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        windowed="use_sliding_window",
        head_dim=128,
    ),
}


def model_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, name: str = "", origin: str = "config.json"
) -> ModelConfig:
    """Translate a config.json.

    Args:
      raw: config.json, old style (``rope_theta``, ``rope_scaling``) or new (``rope_parameters``).
      generation: generation_config.json, for its EOS ids.
      name: the model's name in reports.
      origin: what messages call the file.

    Raises:
      ValueError: for an unknown architecture, an absent key, or whatever the forward pass does not have: every
        reason in one message.
    """
    kind: Any = raw.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{origin}: model_type={kind!r} (architectures={raw.get('architectures')}) is not supported; "
            f"use a checkpoint of {', '.join(ARCHITECTURES)}"
        )
    architecture = ARCHITECTURES[kind]
    absent = [key for key in REQUIRED if raw.get(key) is None]
    if absent:
        raise ValueError(f"{origin} lacks {', '.join(absent)}; a {kind} model cannot be described without")
    refused = _refusals(raw, architecture)
    if refused:
        reasons = "\n".join(f"  {reason}" for reason in refused)
        raise ValueError(f"{origin} asks for what is not supported; use a checkpoint without:\n{reasons}")
    heads = raw["num_attention_heads"]
    return ModelConfig(
        architecture=kind,
        vocab_size=raw["vocab_size"],
        width=raw["hidden_size"],
        mlp_width=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or architecture.head_dim or raw["hidden_size"] // heads,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        context=raw["max_position_embeddings"],
        rope=_rope_config(raw),
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=_flag(raw, architecture.qkv_bias),
        output_bias=_flag(raw, architecture.output_bias),
        mlp_bias=_flag(raw, architecture.mlp_bias),
        qk_norm=architecture.qk_norm,
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=_eos_ids(raw, generation or {}),
        name=name,
    )


def read_config(folder: Path) -> ModelConfig:
    """Return the model that a folder's config.json and generation_config.json describe; see ``model_config``."""
    generation = folder / "generation_config.json"
    return model_config(
        _config_json(folder),
        _json(generation) if generation.is_file() else None,
        name=_name(folder),
        origin=str(folder / "config.json"),
    )


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a folder of config.json and safetensors: one file, or shards with their index; plain, AWQ or GPTQ.

    Raises:
      FileNotFoundError: if config.json, the safetensors or some of the shards are not there.
      ValueError: as ``model_config``, or for a file that is no safetensors file, or if the tensors of a packed matrix
        do not fit together.
    """
    config, given = read_config(folder), _config_json(folder).get("quantization_config")
    slices: dict[str, Any] = {}
    for path in _files(folder):
        try:
            handle = safe_open(path, framework="np")
            names = handle.keys()
            slices.update({name: handle.get_slice(name) for name in names})
        except Exception as error:  # safetensors' own error derives from Exception alone
            raise ValueError(f"{path} cannot be read as safetensors ({error}); fetch it again") from error

    tensors = {name: Tensor(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    names, scheme = HF[config.architecture], None
    readable: tuple[str, ...] = READABLE
    if given:
        scheme = prequantized.Scheme(given, lambda name: slices[name][:])
        wanted = {parameter.name for parameter in jax.tree.leaves(parameters(names, config))}
        tensors, readable = scheme.folded(tensors, wanted, str(folder)), (*READABLE, scheme.name)

    def packed(parameter: Parameter) -> Packed | None:
        if scheme is None or tensors[parameter.name].kind != scheme.name:
            return None
        return scheme.matrix(parameter.name, slices)

    def pieces(parameter: Parameter) -> Iterator[np.ndarray]:
        matrix = packed(parameter)
        return _pieces(slices[parameter.name], parameter.shape) if matrix is None else host_values(matrix)

    quantized = "" if scheme is None else scheme.name
    return Checkpoint(str(folder), config, names, tensors, readable, pieces, packed, quantized)


def _pieces(part: Any, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    rows = max(1, PIECE * shape[0] // math.prod(shape))
    for start in range(0, shape[0], rows):
        yield part[start : min(start + rows, shape[0])]


def _refusals(raw: Mapping[str, Any], architecture: Architecture) -> list[str]:
    """Every reason why the forward pass does not compute this model."""
    rope, context = _rope_parameters(raw), raw["max_position_embeddings"]
    window, kind = raw.get("sliding_window", architecture.window), _rope_kind(rope)
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    refused = [f"{key}={raw[key]}: a mixture of experts" for key in EXPERTS if raw.get(key)]
    if raw.get("kv_lora_rank"):
        refused.append(f"kv_lora_rank={raw['kv_lora_rank']}: multi-head latent attention")
    if isinstance(architecture.windowed, str):
        if _flag(raw, architecture.windowed):
            refused.append(f"{architecture.windowed}=true (sliding_window={window}): sliding-window attention")
    elif architecture.windowed and window is not None and window < context:
        refused.append(
            f"sliding_window={window} below max_position_embeddings={context}: sliding-window attention "
            f"(absent means {architecture.window}; null switches it off)"
        )
    if partial not in (None, 1):
        refused.append(f"partial_rotary_factor={partial}: RoPE over a part of each head")
    if any(isinstance(value, Mapping) for value in rope.values()):
        refused.append(f"rope_parameters for each of {', '.join(map(str, rope))}: RoPE that differs between layers")
    elif kind not in ROPE_KINDS:
        refused.append(f"rope_type={kind!r}: RoPE other than {', '.join(ROPE_KINDS)}")
    if raw.get("quantization_config"):
        refused += prequantized.refusals(raw["quantization_config"])
    if raw.get("hidden_act", "silu") != "silu":
        refused.append(f"hidden_act={raw['hidden_act']!r}: an activation other than silu")
    return refused


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    return {key: value for key, value in given.items() if value is not None}


def _rope_kind(parameters: Mapping[str, Any]) -> Any:
    return parameters.get("rope_type", parameters.get("type", "default"))


def _rope_config(raw: Mapping[str, Any]) -> RopeConfig:
    rope, context = _rope_parameters(raw), raw["max_position_embeddings"]
    kind, theta = _rope_kind(rope), rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
    if kind == "default":
        return RopeConfig(theta=theta)
    original = raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or context
    if kind == "yarn" and "factor" not in rope:
        rope["factor"] = context / original
    needed = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    absent = [key for key in needed if key not in rope]
    if absent:
        raise ValueError(f"rope_type={kind!r} lacks {', '.join(absent)}; its rope_scaling or rope_parameters set them")
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=rope["factor"])
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=rope["factor"],
            original_context=original,
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
        )
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=rope["factor"],
        original_context=original,
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        attention_factor=_yarn_attention_factor(rope),
        truncate=bool(rope.get("truncate", True)),
    )


def _yarn_attention_factor(rope: Mapping[str, Any]) -> float | None:
    """The stated factor, or the quotient of the two DeepSeek-style magnitudes, or None for YaRN's own (its eq. 22)."""
    if "attention_factor" in rope:
        return float(rope["attention_factor"])
    if not (rope.get("mscale") and rope.get("mscale_all_dim")):
        return None
    growth = 0.1 * math.log(max(rope["factor"], 1.0))
    return (1.0 + rope["mscale"] * growth) / (1.0 + rope["mscale_all_dim"] * growth)


def _eos_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        ids.extend([value] if isinstance(value, int) else value or [])
    return tuple(dict.fromkeys(ids))


def _flag(raw: Mapping[str, Any], value: bool | str) -> bool:
    return bool(raw.get(value, False)) if isinstance(value, str) else value


def _config_json(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json; give a folder with config.json and safetensors")
    return _json(path)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object; fetch it again")
    return content


def _name(folder: Path) -> str:
    """The folder's name, or the hub id where the folder is a snapshot in the hub's cache."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    return folder.name


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted({folder / shard for shard in _json(index)["weight_map"].values()})
        absent = [shard.name for shard in shards if not shard.is_file()]
        if absent:
            raise FileNotFoundError(f"{folder} lacks {', '.join(absent)}, which its index names; fetch them again")
        return shards
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        others = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
        raise FileNotFoundError(f"{folder} has no *.safetensors, only {others}; convert its weights to safetensors")
    return files
