"""GGUF files: their metadata as a ModelConfig, and their tensors, dequantised or repacked.

The keys are those of ggml's ``docs/gguf.md``; the numbers behind each type are the ``gguf`` package's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from jaxkv.config import ModelConfig, RopeConfig
from jaxkv.quant import Packed
from jaxkv.rope import inverse_frequencies
from jaxkv.weights.gguf_metadata import GGUFHeader, TensorEntry, read_header
from jaxkv.weights.gguf_packed import repack
from jaxkv.weights.names import GGUF, Checkpoint, Parameter, Tensor

# Values dequantised at once: twice as fast as 2 ** 20, whose temporaries no longer fit in the cache.
PIECE = 1 << 17
ROPE_FACTORS = "rope_freqs.weight"
NEUTRAL = {"yarn_log_multiplier": 0, "yarn_ext_factor": 1, "yarn_attn_factor": 1, "alpha": 0}
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_config(path: Path) -> ModelConfig:
    """Return the model that a GGUF file's header describes; raises as ``model_config``."""
    header = read_header(path)
    return model_config(header, _rope_factors(path, header), origin=str(path))


def model_config(header: GGUFHeader, rope_factors: np.ndarray | None = None, origin: str = "GGUF") -> ModelConfig:
    """Translate a GGUF header.

    Args:
      header: its metadata and list of tensors. The tensors say whether there are biases and a head of its own.
      rope_factors: the tensor ``rope_freqs.weight``, [F], if there is one: what each RoPE frequency is divided by.
      origin: what messages call the file.

    Raises:
      ValueError: for an unknown architecture, an absent key, or whatever the forward pass does not have: every
        reason in one message.
    """
    kind: Any = header.metadata.get("general.architecture")
    if kind not in GGUF:
        raise ValueError(f"{origin}: general.architecture={kind!r} is not supported; use a model of {', '.join(GGUF)}")
    keys = _Keys(header.metadata, kind, origin)
    tensors = {entry.name: entry for entry in header.tensors}
    embedding = tensors.get(GGUF[kind].embedding)
    vocabulary = keys.get("vocab_size") or (embedding.shape[0] if embedding else None)
    heads, width = keys.need("attention.head_count"), keys.need("embedding_length")
    head_dim = keys.get("attention.key_length") or width // heads
    refused = _refusals(keys, head_dim)
    if refused:
        reasons = "\n".join(f"  {reason}" for reason in refused)
        raise ValueError(f"{origin} asks for what is not supported; use a model without:\n{reasons}")
    eos = [header.metadata.get(f"tokenizer.ggml.{key}") for key in EOS_KEYS]
    return ModelConfig(
        architecture=kind,
        vocab_size=vocabulary or len(header.metadata.get("tokenizer.ggml.tokens", ())),
        width=width,
        mlp_width=keys.need("feed_forward_length"),
        layers=keys.need("block_count"),
        heads=heads,
        kv_heads=keys.get("attention.head_count_kv") or heads,
        head_dim=head_dim,
        norm_eps=keys.need("attention.layer_norm_rms_epsilon"),
        context=keys.need("context_length"),
        rope=_rope_config(keys, head_dim, rope_factors),
        tied_head=GGUF[kind].head not in tensors,
        qkv_bias=kind == "qwen2" or "blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=kind == "qwen3",
        bos_token_id=header.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
        name=header.metadata.get("general.name") or Path(origin).stem,
    )


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file.

    Raises:
      ValueError: as ``model_config``, or if the file is damaged or cut short.
    """
    header = read_header(path)
    config = model_config(header, _rope_factors(path, header), origin=str(path))
    data = _map(path)
    entries = {entry.name: entry for entry in header.tensors}
    if len(entries) < len(header.tensors):
        raise ValueError(f"{path} lists a tensor twice; the file is damaged: fetch it again")

    def rows(parameter: Parameter) -> tuple[np.ndarray, GGMLQuantizationType]:
        entry = entries[parameter.name]
        raw = _raw(data, entry, path).reshape(parameter.shape[0], -1)
        if parameter.permuted_heads is not None:
            raw = _unpermute(raw, parameter.permuted_heads)
        return raw, GGMLQuantizationType(entry.ggml_type)

    def pieces(parameter: Parameter) -> Iterator[np.ndarray]:
        raw, kind = rows(parameter)
        return dequantize(raw.reshape(-1), kind)

    def packed(parameter: Parameter) -> Packed | None:
        return repack(*rows(parameter))

    return Checkpoint(
        origin=str(path),
        config=config,
        names=GGUF[config.architecture],
        tensors={name: Tensor(entry.shape, _kind(entry.ggml_type)) for name, entry in entries.items()},
        readable=tuple(kind.name for kind in GGMLQuantizationType if _readable(kind)),
        pieces=pieces,
        packed=packed,
    )


def dequantize(raw: np.ndarray, kind: GGMLQuantizationType) -> Iterator[np.ndarray]:
    """Yield the float32 values of a flat uint8 array of whole blocks, in order, piece by piece."""
    block, size = GGML_QUANT_SIZES[kind]
    step = max(1, PIECE // block) * size
    for start in range(0, raw.size, step):
        # As one row: the package works through 16 rows at a time, and a call for 16 short rows is mostly overhead.
        yield quants.dequantize(raw[None, start : start + step], kind)


def llama3_rope(factors: np.ndarray, theta: float, head_dim: int) -> RopeConfig | None:
    """Return the RoPE whose frequencies are the default ones divided by ``factors`` [F], to 1e-5, or None.

    llama.cpp stores Llama 3.1's rescaling as these quotients and drops the parameters. Every published model has a
    pretraining context of 8,192 and wavelength bounds 1 and 4; the largest quotient is the factor.
    """
    plain = RopeConfig(theta=theta)
    if factors.shape != (head_dim // 2,) or not np.all(np.isfinite(factors) & (factors > 0)):
        return None
    wanted = inverse_frequencies(plain, head_dim) / factors
    rescaled = RopeConfig(theta=theta, kind="llama3", factor=float(factors.max()), original_context=8192)
    for rope in (plain, rescaled):
        if np.allclose(inverse_frequencies(rope, head_dim), wanted, rtol=1e-5, atol=0):
            return rope
    return None


class _Keys:
    """The metadata of one architecture; a key that has one value a layer must have the same one in all."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, origin: str) -> None:
        self.metadata, self.architecture, self.origin = metadata, architecture, origin

    def get(self, key: str, default: Any = None) -> Any:
        name = f"{self.architecture}.{key}"
        value = self.metadata.get(name, default)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise ValueError(
                f"{self.origin}: {name}={value} differs between layers; use a model whose layers are alike"
            )
        return value[0]

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.origin} lacks {self.architecture}.{key}; convert the model to GGUF anew")
        return value


def _refusals(keys: _Keys, head_dim: int) -> list[str]:
    """Every reason why the forward pass does not compute this model."""
    kind, context = keys.architecture, keys.need("context_length")
    window, scaling = keys.get("attention.sliding_window"), keys.get("rope.scaling.type")
    refused = [
        f"{kind}.{key}={keys.get(key)} other than the head dimension {head_dim}"
        for key in ("rope.dimension_count", "attention.value_length")
        if keys.get(key, head_dim) != head_dim
    ]
    if keys.get("expert_count"):
        refused.append(f"{kind}.expert_count={keys.get('expert_count')}: a mixture of experts")
    if window and window < context:
        refused.append(f"{kind}.attention.sliding_window={window} below context_length={context}: a sliding window")
    if scaling not in (None, "none", "linear", "yarn"):
        refused.append(f"{kind}.rope.scaling.type={scaling!r}: RoPE other than none, linear, yarn")
    if scaling != "yarn" and keys.get("rope.scaling.attn_factor", 1) != 1:
        refused.append(f"{kind}.rope.scaling.attn_factor={keys.get('rope.scaling.attn_factor')} without YaRN")
    for key, neutral in NEUTRAL.items():
        value = keys.get(f"rope.scaling.{key}", neutral)
        if value != neutral:
            refused.append(f"{kind}.rope.scaling.{key}={value} other than {neutral}")
    if keys.metadata.get("split.count", 1) > 1:
        refused.append(f"split.count={keys.metadata['split.count']}: a split file; join it by llama-gguf-split --merge")
    return refused


def _rope_config(keys: _Keys, head_dim: int, factors: np.ndarray | None) -> RopeConfig:
    theta, context = keys.get("rope.freq_base", 10000.0), keys.need("context_length")
    kind = keys.get("rope.scaling.type", "linear")
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
    scaled = kind == "yarn" or (kind == "linear" and factor != 1.0)
    if factors is not None:
        rope = None if scaled else llama3_rope(factors, theta, head_dim)
        if rope is None:
            raise ValueError(
                f"{keys.origin}: {ROPE_FACTORS} is not Llama 3.1's rescaling of rope.freq_base={theta} alone "
                f"(rope.scaling.type={kind!r}, factor={factor}); use the model's safetensors"
            )
        return rope
    if not scaled:
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    attention = keys.get("rope.scaling.attn_factor")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=keys.get("rope.scaling.original_context_length") or context,
        beta_fast=keys.get("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.get("rope.scaling.yarn_beta_slow", 1.0),
        # llama.cpp multiplies YaRN's own scaling (its eq. 22) by the stated factor.
        attention_factor=None if attention is None else attention * (0.1 * math.log(factor) + 1.0),
    )


def _rope_factors(path: Path, header: GGUFHeader) -> np.ndarray | None:
    for entry in header.tensors:
        if entry.name == ROPE_FACTORS and _readable(entry.ggml_type):
            raw = _raw(_map(path), entry, path)
            kind = GGMLQuantizationType(entry.ggml_type)
            return np.concatenate([piece.reshape(-1) for piece in dequantize(raw, kind)]).astype(np.float64)
    return None


def _map(path: Path) -> np.ndarray:
    return np.asarray(np.memmap(path, mode="r", dtype=np.uint8))


def _raw(data: np.ndarray, entry: TensorEntry, path: Path) -> np.ndarray:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(entry.ggml_type)]
    end = entry.offset + math.prod(entry.shape) // block * size
    if end > data.size:
        raise ValueError(f"{path} is cut short: {entry.name} ends at byte {end} of {data.size}; fetch it again")
    return data[entry.offset : end]


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order, in which rows f and f + F of a head are neighbours. Rows may be quantised bytes."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _kind(ggml_type: int) -> str:
    try:
        return GGMLQuantizationType(ggml_type).name
    except ValueError:
        return f"number {ggml_type}"


def _readable(ggml_type: int) -> bool:
    """Whether the package dequantises a type: asked with one block of zeros, since it publishes no list."""
    try:
        kind = GGMLQuantizationType(ggml_type)
        quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (NotImplementedError, ValueError, KeyError):
        return False
    return True
