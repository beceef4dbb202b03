"""Checkpoints that are packed, or are packed while they load: the same values packed and plain, on the device."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import packers
import pytest
import tiny_folder
from expected import dense
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file
from test_weights import LLAMA, config_json, state_dict, write_folder, write_gguf

from jaxkv import generate, model, quant, weights
from jaxkv.llm import LLM
from jaxkv.model import init_weights
from jaxkv.sampling import SamplingParams

MATRICES = 7 * tiny_folder.CONFIG.layers


def dequantized(loaded: model.Weights) -> model.Weights:
    """Return weights of plain NumPy arrays."""
    return jax.tree.map(
        lambda x: np.asarray(quant.dequantize(x) if quant.is_packed(x) else x), loaded, is_leaf=quant.is_packed
    )


def logits(loaded: weights.Loaded) -> np.ndarray:
    tokens = np.random.default_rng(0).integers(0, loaded.config.vocab_size, (1, 12))

    @jax.jit
    def run(weights: model.Weights) -> jax.Array:
        _, hidden = model.forward(weights, loaded.config, tokens, np.arange(12)[None], dense, None)
        return model.logits(weights, hidden)

    with jax.default_matmul_precision("float32"):
        return np.asarray(run(loaded.weights), np.float64)


def assert_alike(path: Path, **options: Any) -> tuple[weights.Loaded, weights.Loaded]:
    """Load a checkpoint packed and plain, and see that values are equal and logits are, up to rounding."""
    packed, plain = (weights.read(path, packed=keep, **options) for keep in (True, False))
    assert not any(quant.is_packed(x) for x in jax.tree.leaves(plain.weights, is_leaf=quant.is_packed))
    assert jax.tree.all(jax.tree.map(np.array_equal, dequantized(packed.weights), plain.weights))
    one, other = logits(packed), logits(plain)
    np.testing.assert_allclose(one, other, rtol=0, atol=2e-6 * np.abs(other).max())
    return packed, plain


def assert_levels(loaded: model.Weights, levels: dict[str, packers.Levels]) -> None:
    """See that every matrix has the values that were packed. Their products are exact in float32."""
    for index, layer in enumerate(dequantized(loaded).layers):
        for field, module in tiny_folder._MODULES.items():
            if not field.endswith("norm"):
                expected = levels[f"model.layers.{index}.{module}.weight"].values
                np.testing.assert_array_equal(getattr(layer, field), expected, err_msg=field)


def test_awq(tmp_path: Path) -> None:
    levels = packers.convert(tiny_folder.make(tmp_path), "awq")
    packed, plain = assert_alike(tmp_path)
    assert_levels(packed.weights, levels)
    assert packed.report.kept == plain.report.dequantized == {"awq": MATRICES}
    assert packed.report.nbytes < plain.report.nbytes
    assert str(packed.report).endswith(f"{MATRICES} matrices of awq packed")
    assert f"{MATRICES} of awq dequantised to float32 (a CPU multiplies these faster)" in str(plain.report)
    assert weights.read(tmp_path).report == plain.report


@pytest.mark.parametrize(
    "options",
    [
        {"symmetric": True, "config": {"sym": True, "desc_act": False}},
        {"act_order": True, "config": {"desc_act": True}},
        {"act_order": True, "version": 2},
        {"size": -1, "config": {"dynamic": {"-:lm_head": {}}}},
    ],
    ids=["symmetric", "act-order", "act-order, version 2", "a group a row"],
)
def test_gptq(options: dict[str, Any], tmp_path: Path) -> None:
    levels = packers.convert(tiny_folder.make(tmp_path), "gptq", **options)
    packed, _ = assert_alike(tmp_path)
    assert_levels(packed.weights, levels)
    assert packed.report.kept == {"gptq": MATRICES}
    ordered = packed.weights.layers[0].q.permutation is None
    assert ordered != options.get("act_order", False)


def test_matrices_that_were_left_out_and_biases_of_zeros(tmp_path: Path) -> None:
    plain = load_file(tiny_folder.make(tmp_path) / "model.safetensors")
    name = "model.layers.1.mlp.down_proj."
    levels = packers.convert(tmp_path, "gptq")
    arrays = load_file(tmp_path / "model.safetensors")
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del arrays[name + part]
    arrays[name + "weight"] = plain[name + "weight"]
    arrays["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float16)
    save_file(arrays, tmp_path / "model.safetensors")
    packed, _ = assert_alike(tmp_path)
    assert packed.report.kept == {"gptq": MATRICES - 1}
    assert packed.report.plain == 1
    np.testing.assert_array_equal(packed.weights.layers[1].down, plain[name + "weight"])
    assert len(levels) == MATRICES

    arrays["model.layers.0.self_attn.q_proj.bias"][3] = 1
    save_file(arrays, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"surplus \(1\):\n  model\.layers\.0\.self_attn\.q_proj\.bias: found \[64\]"):
        weights.load(tmp_path)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"quant_method": "awq", "bits": 8}, "awq with bits=8; AWQ is read with 4"),
        ({"quant_method": "awq", "version": "gemv"}, "version='gemv'; AWQ is read as gemm packs it"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point=false"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "backend='llm-awq'"),
        ({"quant_method": "awq", "group_size": 48}, "group_size=48; groups are read in multiples of 32"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 16}, r"bits=3; [\s\S]*group_size=16"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "is_marlin_format=true"),
        ({"quant_method": "gptq", "pack_dtype": "int16"}, "pack_dtype='int16'"),
        ({"quant_method": "gptq", "dynamic": {"+:.*down.*": {"bits": 8}}}, r"dynamic=\['\+:\.\*down\.\*'\]"),
    ],
)
def test_what_is_not_read_is_refused_by_name(given: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json(LLAMA, quantization_config=given)))
    with pytest.raises(ValueError, match=reason):
        weights.read_config(tmp_path)


def test_parts_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    packers.convert(tiny_folder.make(tmp_path), "gptq", act_order=True)
    good, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.up_proj."
    bad = {key: array for key, array in good.items() if key != name + "qzeros"}
    bad[name + "scales"] = good[name + "scales"][:1]
    save_file(bad, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="not packed as its quantization_config says") as caught:
        weights.load(tmp_path)
    assert f"{name}qzeros: expected [2, 12] of I32, found none" in str(caught.value)
    assert f"{name}scales: expected [2, 96] of F16 or BF16 or F32, found [1, 96] of F16" in str(caught.value)

    uneven = good | {name + "g_idx": np.where(np.arange(64) < 31, 0, 1).astype(np.int32)}
    save_file(uneven, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"up_proj\.weight: g_idx does not give each of 2 groups the same share of 64"):
        weights.load(tmp_path)


# -- GGUF --------------------------------------------------------------------------------------------------------------

WIDE = dataclasses.replace(LLAMA, width=256, mlp_width=512, heads=16, kv_heads=8, layers=1)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
def test_gguf_blocks_of_32_are_repacked_without_loss(kind: Kind, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", LLAMA, state_dict(init_weights(LLAMA, seed=7)), kind)
    packed, plain = assert_alike(path)
    assert packed.report.kept == plain.report.dequantized == {kind.name: 7 * LLAMA.layers}
    assert isinstance(packed.weights.layers[0].q, quant.Int8 if kind == Kind.Q8_0 else quant.Int4)
    assert isinstance(packed.weights.embedding, jax.Array)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K])
def test_gguf_blocks_of_256_are_repacked_without_loss(kind: Kind, tmp_path: Path) -> None:
    arrays, raw, rng = state_dict(init_weights(WIDE)), {}, np.random.default_rng(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    for name in [name for name in arrays if "_proj.weight" in name]:
        outputs, inputs = arrays.pop(name).shape
        blocks = rng.integers(0, 256, (outputs, inputs // block, size), np.uint8)
        # Random bits are no scales: what they stand for has the size of weights.
        for at in {Kind.Q4_K: (0, 2), Kind.Q6_K: (208,)}[kind]:
            scale = rng.uniform(0.5e-3, 1e-3, blocks.shape[:2]).astype(np.float16)
            blocks[:, :, at : at + 2] = scale[:, :, None].view(np.uint8)
        raw[names.get_name(name, try_suffixes=(".weight",))] = (blocks.reshape(outputs, -1), kind)
    packed, _ = assert_alike(write_gguf(tmp_path / "wide.gguf", WIDE, arrays, raw=raw))
    assert packed.report.kept == {kind.name: 7}
    blocks, _ = raw["blk.0.ffn_down.weight"]
    expected = gguf.quants.dequantize(blocks, kind)
    np.testing.assert_array_equal(dequantized(packed.weights).layers[0].down, expected)


# -- quantised while loading -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_float_checkpoints_are_quantised_matrix_by_matrix(kind: str, tmp_path: Path) -> None:
    drawn = init_weights(LLAMA, seed=3)
    folder = write_folder(tmp_path / "plain", state_dict(drawn), config_json(LLAMA))
    packed, plain = assert_alike(folder, quantize=kind)
    assert packed.report.kept == plain.report.dequantized == {kind: 7 * LLAMA.layers}
    expected = quant.quantize(drawn.layers[1].down, kind)
    assert len(expected.scale) == 96 // 32
    assert jax.tree.all(jax.tree.map(np.array_equal, packed.weights.layers[1].down, expected))
    np.testing.assert_array_equal(packed.weights.embedding, drawn.embedding)
    np.testing.assert_array_equal(packed.weights.head, drawn.head)
    described = quant.abstract(model.weight_shapes(LLAMA), kind)
    assert jax.tree.map(jnp.shape, packed.weights) == jax.tree.map(jnp.shape, described)


def test_a_gguf_file_is_quantised_from_the_values_that_it_has(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", LLAMA, state_dict(init_weights(LLAMA, seed=7)), Kind.Q8_0)
    packed, _ = assert_alike(path, quantize="int4")
    expected = quant.quantize(np.asarray(weights.load(path)[1].layers[0].k), "int4")
    assert jax.tree.all(jax.tree.map(np.array_equal, packed.weights.layers[0].k, expected))


def test_matrices_that_no_group_divides_are_named(tmp_path: Path) -> None:
    config = dataclasses.replace(LLAMA, mlp_width=100)
    folder = write_folder(tmp_path / "odd", state_dict(init_weights(config)), config_json(config))
    report = weights.read(folder, quantize="int4", packed=True).report
    assert report.left == tuple(f"model.layers.{index}.mlp.down_proj.weight" for index in range(2))
    assert "not quantised, since no group of 32, 64, 128 divides their inputs: model.layers.0.mlp" in str(report)
    assert report.kept == {"int4": 6 * config.layers}


def test_quantize_is_refused_by_name(tmp_path: Path) -> None:
    folder, other = tmp_path / "plain", tmp_path / "packed"
    for made in (folder, other):
        made.mkdir()
        tiny_folder.make(made)
    with pytest.raises(ValueError, match="quantize='int2' is unknown; one of int4, int8 is"):
        weights.load(folder, quantize="int2")
    arrays = load_file(folder / "model.safetensors")
    arrays["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e9
    save_file(arrays, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.weight: a group of weights spans 1000000"):
        weights.load(folder, quantize="int4")
    packers.convert(other, "awq")
    with pytest.raises(ValueError, match="is quantised by awq already; leave out quantize='int4'"):
        weights.load(other, quantize="int4")


def test_an_engine_of_packed_weights_writes_what_one_of_plain_weights_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tiny_folder.make(tmp_path))
    llm = LLM(folder, quantize="int4", packed=True, rows=1)
    assert llm.weights_report.kept == {"int4": MATRICES}
    (packed,) = llm.generate(["one"], SamplingParams(max_tokens=24, ignore_eos=True), raw=True)
    command = ["--model", folder, "--raw", "-p", "one", "-m", "24", "--ignore-eos", "--rows", "1"]
    assert generate.main([*command, "--quantize", "int4"]) == 0
    out, report = capsys.readouterr()
    assert out == packed.text + "\n"
    assert f"weights: 0.4 MiB; {MATRICES} of int4 dequantised to float32 (a CPU multiplies these faster)" in report
    assert generate.main(command) == 0
    plain, report = capsys.readouterr()
    assert plain != out
    assert "weights:" not in report
