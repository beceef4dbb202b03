"""Checkpoints written here, from seeded models and the published block layouts, and read back."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxkv import weights
from jaxkv.config import ModelConfig, RopeConfig
from jaxkv.model import Weights, init_weights

Arrays = dict[str, np.ndarray]

LLAMA = ModelConfig("llama", vocab_size=96, width=64, mlp_width=96, layers=2, heads=6, kv_heads=2, head_dim=16)
CONFIGS = {
    "llama": LLAMA,
    "llama tied": dataclasses.replace(LLAMA, tied_head=True),
    "llama biased": dataclasses.replace(LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True),
    "mistral": dataclasses.replace(LLAMA, architecture="mistral", head_dim=32),
    "qwen2": dataclasses.replace(LLAMA, architecture="qwen2", qkv_bias=True, tied_head=True),
    "qwen3": dataclasses.replace(LLAMA, architecture="qwen3", qk_norm=True, head_dim=32),
}
MODULES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}


def state_dict(model: Weights) -> Arrays:
    """The names under which transformers saves a model."""
    arrays = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.final_norm}
    if model.head is not None:
        arrays["lm_head.weight"] = model.head
    for index, layer in enumerate(model.layers):
        for field, value in vars(layer).items():
            if value is not None:
                stem, kind = (field[:-5], "bias") if field.endswith("_bias") else (field, "weight")
                arrays[f"model.layers.{index}.{MODULES[stem]}.{kind}"] = value
    return arrays


def config_json(config: ModelConfig, **changes: Any) -> dict[str, Any]:
    raw = {
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.context,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied_head,
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
    }
    return raw | changes


def write_folder(folder: Path, arrays: Arrays, raw: dict[str, Any], shards: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if shards == 1:
        save_file(arrays, folder / "model.safetensors")
        return folder
    index = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(arrays)}
    for file in set(index.values()):
        save_file({name: arrays[name] for name in arrays if index[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order, one row at a time: f and f + F of a head become neighbours."""
    half, out = len(rows) // heads // 2, np.empty_like(rows)
    for head in range(heads):
        for f in range(half):
            for part in (0, 1):
                out[head * 2 * half + 2 * f + part] = rows[head * 2 * half + part * half + f]
    return out


def write_gguf(
    path: Path,
    config: ModelConfig,
    arrays: Arrays,
    kind: Kind = Kind.F32,
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    raw: dict[str, tuple[np.ndarray, Kind]] | None = None,
) -> Path:
    """Write a model as llama.cpp's converter does; ``raw`` are tensors that are there as bytes already."""
    arch = "llama" if config.architecture == "mistral" else config.architecture
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), config.layers)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    edit(writer)
    for name, array in arrays.items():
        if arch == "llama" and ".q_proj" in name:
            array = permuted(array, config.heads)
        if arch == "llama" and ".k_proj" in name:
            array = permuted(array, config.kv_heads)
        packed = kind if array.ndim == 2 else Kind.F32
        data = gguf.quants.quantize(array.astype(np.float32), packed)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")) or name, data, raw_dtype=packed)
    for name, (blocks, packed) in (raw or {}).items():
        writer.add_tensor(name, blocks, raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same(loaded: Weights, expected: Weights) -> None:
    assert jax.tree.structure(loaded) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True):
        assert isinstance(ours, jax.Array)
        np.testing.assert_array_equal(np.asarray(ours, np.float64), np.asarray(theirs, np.float64))


# Each layout as ggml publishes it, one block at a time in float64.


def half(blocks: bytes) -> float:
    return float(np.frombuffer(blocks[:2], np.float16)[0])


def nibbles(data: bytes) -> list[int]:
    return [byte & 15 for byte in data] + [byte >> 4 for byte in data]


def q4_k(block: bytes) -> list[float]:
    d, dmin, packed, values = half(block), half(block[2:]), block[4:16], []
    for j in range(8):
        if j < 4:
            scale, low = packed[j] & 63, packed[j + 4] & 63
        else:
            scale = packed[j + 4] & 15 | packed[j - 4] >> 6 << 4
            low = packed[j + 4] >> 4 | packed[j] >> 6 << 4
        quarter = nibbles(block[16 + 32 * (j // 2) : 48 + 32 * (j // 2)])
        values += [d * scale * q - dmin * low for q in quarter[32 * (j % 2) : 32 * (j % 2) + 32]]
    return values


def q6_k(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8)
    values = []
    for i in range(256):
        side, part, lane = i // 128, i % 128 // 32, i % 32
        nibble = low[64 * side + 32 * (part % 2) + lane] >> 4 * (part // 2) & 15
        q = nibble | (high[32 * side + lane] >> 2 * part & 3) << 4
        values.append(half(block[208:]) * int(scales[i // 16]) * (q - 32))
    return values


LAYOUTS: dict[Kind, tuple[int, Callable[[bytes], list[float]]]] = {
    Kind.F32: (4, lambda b: list(np.frombuffer(b, np.float32).astype(float))),
    Kind.F16: (2, lambda b: [half(b)]),
    Kind.BF16: (2, lambda b: list(np.frombuffer(b"\0\0" + b, np.float32).astype(float))),
    Kind.Q8_0: (34, lambda b: [half(b) * q for q in np.frombuffer(b[2:], np.int8).tolist()]),
    Kind.Q4_0: (18, lambda b: [half(b) * (q - 8) for q in nibbles(b[2:])]),
    Kind.Q4_1: (20, lambda b: [half(b) * q + half(b[2:]) for q in nibbles(b[4:])]),
    Kind.Q4_K: (144, q4_k),
    Kind.Q6_K: (210, q6_k),
}


def unpacked(rows: np.ndarray, kind: Kind) -> np.ndarray:
    size, block_values = LAYOUTS[kind]
    data = np.ascontiguousarray(rows).tobytes()
    values = [value for at in range(0, len(data), size) for value in block_values(data[at : at + size])]
    return np.array(values).reshape(len(rows), -1)


@pytest.fixture(params=CONFIGS)
def tiny(request: pytest.FixtureRequest) -> tuple[ModelConfig, Weights]:
    config = CONFIGS[request.param]
    return config, init_weights(config, seed=7)


@pytest.mark.parametrize("shards", [1, 3])
def test_safetensors_come_back(tiny: tuple[ModelConfig, Weights], shards: int, tmp_path: Path) -> None:
    config, model = tiny
    folder = write_folder(tmp_path / "tiny", state_dict(model), config_json(config, sliding_window=None), shards)
    read, loaded = weights.load(folder)
    assert read == dataclasses.replace(config, name="tiny") == weights.read_config(str(folder))
    assert_same(loaded, model)


@pytest.mark.parametrize("stored", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_stored_and_wanted_dtypes(stored: Any, tmp_path: Path) -> None:
    model = init_weights(LLAMA, seed=1, dtype=stored)
    folder = write_folder(tmp_path, state_dict(model), config_json(LLAMA))
    assert_same(weights.load(folder, np.float32)[1], model)
    _, loaded = weights.load(folder, "bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype(jnp.bfloat16)}
    bits = np.asarray(model.embedding, np.float32).view(np.uint32)
    nearest_even = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    np.testing.assert_array_equal(np.asarray(loaded.embedding, np.float32), nearest_even.view(np.float32))
    with pytest.raises(ValueError, match="dtype='int8' is not supported; float32, bfloat16, float16 are"):
        weights.load(folder, np.int8)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_gguf_comes_back(tiny: tuple[ModelConfig, Weights], kind: Kind, tmp_path: Path) -> None:
    config, model = tiny
    read, loaded = weights.load(write_gguf(tmp_path / "tiny.gguf", config, state_dict(model), kind))
    architecture = "llama" if config.architecture == "mistral" else config.architecture
    eps = float(np.float32(config.norm_eps))
    assert read == dataclasses.replace(config, architecture=architecture, norm_eps=eps, name="tiny")

    def stored(array: np.ndarray) -> np.ndarray:
        array = np.asarray(array)
        return unpacked(gguf.quants.quantize(array, kind), kind) if array.ndim == 2 else array

    for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(jax.tree.map(stored, model)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K])
def test_k_quants_follow_the_published_layout(kind: Kind, tmp_path: Path) -> None:
    config = dataclasses.replace(LLAMA, width=256, heads=4, layers=1)
    arrays, generator = state_dict(init_weights(config)), np.random.default_rng(3)
    size, raw, expected = LAYOUTS[kind][0], {}, {}
    halves = {Kind.Q4_K: (0, 2), Kind.Q6_K: (208,)}[kind]
    for field, heads in (("q", 4), ("k", 2)):
        blocks = generator.integers(0, 256, (heads * 16, size), np.uint8)
        for at in halves:
            blocks[:, at : at + 2] = generator.normal(size=(len(blocks), 1)).astype(np.float16).view(np.uint8)
        del arrays[f"model.layers.0.self_attn.{field}_proj.weight"]
        raw[f"blk.0.attn_{field}.weight"] = (permuted(blocks, heads), kind)
        expected[field] = unpacked(blocks, kind)
    _, loaded = weights.load(write_gguf(tmp_path / "k.gguf", config, arrays, raw=raw))
    for field, values in expected.items():
        np.testing.assert_allclose(getattr(loaded.layers[0], field), values, rtol=1e-5, atol=1e-4)


def test_rope_factors_in_a_file_become_llama3s_rescaling(tmp_path: Path) -> None:
    config = dataclasses.replace(LLAMA, rope=RopeConfig(theta=500_000.0))
    factors = []
    for f in range(8):
        wavelength = 2 * np.pi * 500_000.0 ** (f / 8)
        blend = min(max((8192 / wavelength - 1) / 3, 0), 1)
        factors.append(1 / ((1 - blend) / 32 + blend))
    raw = {"rope_freqs.weight": (np.array(factors, np.float32), Kind.F32)}
    path = write_gguf(tmp_path / "scaled.gguf", config, state_dict(init_weights(config)), raw=raw)
    expected = RopeConfig(theta=500_000.0, kind="llama3", factor=32.0, original_context=8192)
    assert weights.load(path)[0].rope == weights.read_config(path).rope == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(piece=st.integers(1, 7000))
def test_the_size_of_a_piece_changes_nothing(piece: int, tmp_path: Path) -> None:
    model = init_weights(LLAMA, seed=2)
    folder = write_folder(tmp_path / "folder", state_dict(model), config_json(LLAMA))
    file = write_gguf(tmp_path / "file.gguf", LLAMA, state_dict(model))
    with mock.patch("jaxkv.weights.hf.PIECE", piece), mock.patch("jaxkv.weights.gguf.PIECE", piece):
        assert_same(weights.load(folder)[1], model)
        assert_same(weights.load(file)[1], model)


def test_the_host_never_holds_a_second_copy(tmp_path: Path) -> None:
    config = dataclasses.replace(LLAMA, vocab_size=20_000, tied_head=True)
    path = write_gguf(tmp_path / "wide.gguf", config, state_dict(init_weights(config)), Kind.Q8_0)
    weights.load(path)
    tracemalloc.start()
    with mock.patch("jaxkv.weights.gguf.PIECE", 1 << 12):
        _, loaded = weights.load(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.2 * sum(leaf.nbytes for leaf in jax.tree.leaves(loaded))


def test_every_fault_of_a_checkpoint_is_in_one_error(tmp_path: Path) -> None:
    arrays = state_dict(init_weights(LLAMA))
    del arrays["model.layers.1.mlp.up_proj.weight"], arrays["lm_head.weight"]
    arrays["model.layers.0.self_attn.k_proj.weight"] = np.zeros((48, 64), np.float32)
    arrays["model.extra"] = np.zeros(3, np.float32)
    arrays["model.norm.weight"] = np.zeros(64, np.int8)
    with pytest.raises(ValueError, match="does not hold the llama model") as caught:
        weights.load(write_folder(tmp_path, arrays, config_json(LLAMA)))
    for line in (
        "missing (2):",
        "  lm_head.weight: expected [96, 64]",
        "  model.layers.1.mlp.up_proj.weight: expected [96, 64]",
        "surplus (1):\n  model.extra: found [3]",
        "mis-shaped (1):\n  model.layers.0.self_attn.k_proj.weight: expected [32, 64], found [48, 64]",
        "unreadable (1):\n  model.norm.weight: type I8; readable are F64, F32, F16, BF16",
        "set tie_word_embeddings to true",
    ):
        assert line in str(caught.value)

    q = {"blk.0.attn_q.weight": (np.zeros((96, 64), np.int8), Kind.I8)}
    arrays = {name: array for name, array in state_dict(init_weights(LLAMA)).items() if "0.self_attn.q" not in name}
    arrays["model.norm.weight"] = np.zeros(32, np.float32)
    with pytest.raises(ValueError, match=r"output_norm\.weight: expected \[64\], found \[32\]") as caught:
        weights.load(write_gguf(tmp_path / "bad.gguf", LLAMA, arrays, raw=q))
    listed = str(caught.value).split("blk.0.attn_q.weight: type I8; readable are ")[1].split(", ")
    assert {kind.name for kind in LAYOUTS} <= set(listed)


def test_many_faults_are_counted_not_listed(tmp_path: Path) -> None:
    config = dataclasses.replace(LLAMA, layers=9)
    with pytest.raises(ValueError, match=r"missing \(63\):[\s\S]*and 43 more"):
        weights.load(write_folder(tmp_path, state_dict(init_weights(LLAMA)), config_json(config)))


def test_harmless_tensors_are_ignored(tmp_path: Path) -> None:
    model = init_weights(CONFIGS["llama tied"])
    arrays = state_dict(model) | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
        "lm_head.weight": np.zeros((96, 64), np.float32),
    }
    assert_same(weights.load(write_folder(tmp_path, arrays, config_json(CONFIGS["llama tied"])))[1], model)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    arrays, raw = state_dict(init_weights(LLAMA)), config_json(LLAMA)
    folder = write_folder(tmp_path / "sharded", arrays, raw, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks model-00002-of-00003\.safetensors"):
        weights.load(folder)
    folder = write_folder(tmp_path / "torch", arrays, raw)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"only config\.json, pytorch_model\.bin; convert"):
        weights.load(folder)
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read as safetensors"):
        weights.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        weights.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        weights.load(folder)
    with pytest.raises(ValueError, match=r"neither a folder nor a \.gguf file"):
        weights.load(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"absent\.gguf does not exist"):
        weights.load(tmp_path / "absent.gguf")
    whole = write_gguf(tmp_path / "whole.gguf", LLAMA, arrays)
    whole.write_bytes(whole.read_bytes()[:-4096])
    with pytest.raises(ValueError, match="is cut short"):
        weights.load(whole)
