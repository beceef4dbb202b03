"""The forward pass and RoPE, against values that transformers' torch models gave (scripts/make_reference.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expected import dense, load
from hypothesis import given
from hypothesis import strategies as st

from jaxkv import model, rope
from jaxkv.config import ModelConfig, RopeConfig
from jaxkv.dims import Array

GOLDEN = Path(__file__).parents[2] / "shared" / "golden" / "D_rope_scaling.npz"


TINY = load("tiny_models")
ROPES = load("rope")


def tiny_config(case: Mapping[str, np.ndarray]) -> ModelConfig:
    fields = json.loads(str(case["config"]))
    return ModelConfig(**fields | {"rope": RopeConfig(**fields.get("rope", {}))})


def logits_of(weights: model.Weights, config: ModelConfig, tokens: Any, positions: Any) -> Array:
    with jax.default_matmul_precision("float32"):
        _, hidden = model.forward(weights, config, tokens, positions, dense, None)
        return model.logits(weights, hidden)


jitted_logits = jax.jit(logits_of, static_argnames="config")


@pytest.fixture(params=TINY)
def tiny(request: pytest.FixtureRequest) -> tuple[ModelConfig, model.Weights, dict[str, np.ndarray]]:
    case = TINY[request.param]
    config = tiny_config(case)
    weights = model.init_weights(config, int(case["seed"]))
    # Where this fails, NumPy's generator has changed: make the files again.
    np.testing.assert_array_equal(weights.layers[-1].down[-1, :8], case["drawn"])
    return config, weights, case


def test_logits_agree_with_transformers(tiny: tuple[ModelConfig, model.Weights, dict[str, np.ndarray]]) -> None:
    config, weights, case = tiny
    logits = jitted_logits(weights, config, case["tokens"], case["positions"])
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits[:, 1::2], case["logits"], rtol=0, atol=1e-4)


def test_the_positions_of_the_data_matter() -> None:
    case = TINY["qwen3"]
    config = tiny_config(case)
    weights = model.init_weights(config, int(case["seed"]))
    contiguous = np.broadcast_to(case["positions"][0], case["positions"].shape)
    logits = np.asarray(jitted_logits(weights, config, case["tokens"], contiguous))[:, 1::2]
    np.testing.assert_allclose(logits[0], case["logits"][0], rtol=0, atol=1e-4)
    assert np.abs(logits[1] - case["logits"][1]).max() > 0.1


def test_the_data_has_every_architecture_and_rope() -> None:
    configs = [tiny_config(case) for case in TINY.values()]
    assert {config.architecture for config in configs} == {"llama", "mistral", "qwen2", "qwen3"}
    assert {config.rope.kind for config in configs} == {"default", "linear", "llama3", "yarn"}
    assert {config.tied_head for config in configs} == {True, False}
    for flag in ("qkv_bias", "output_bias", "mlp_bias", "qk_norm"):
        assert {getattr(config, flag) for config in configs} == {True, False}, flag


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_bfloat16_weights_give_float32_logits_near_the_float32_ones(name: str) -> None:
    case = TINY[name]
    config = tiny_config(case)
    weights = model.init_weights(config, int(case["seed"]), dtype=jnp.bfloat16)
    _, hidden = model.forward(weights, config, case["tokens"], case["positions"], dense, None)
    logits = model.logits(weights, hidden)
    assert hidden.dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    error = np.asarray(logits[:, 1::2]) - case["logits"]
    assert np.sqrt(np.mean(error**2)) < 3e-2 * np.sqrt(np.mean(case["logits"] ** 2))


def test_a_tied_head_is_the_embedding() -> None:
    config = ModelConfig("llama", 97, 16, 24, 1, 2, 1, 8, tied_head=True)
    weights = model.init_weights(config)
    assert weights.head is None
    hidden = np.random.default_rng(0).standard_normal((3, 16), dtype=np.float32)
    expected = hidden.astype(np.float64) @ weights.embedding.astype(np.float64).T
    np.testing.assert_allclose(model.logits(weights, hidden), expected, rtol=0, atol=1e-5)


def test_drawn_weights_have_the_described_shapes() -> None:
    for case in TINY.values():
        config = tiny_config(case)
        drawn = jax.tree.map(lambda array: (array.shape, array.dtype), model.init_weights(config))
        described = jax.tree.map(lambda array: (array.shape, array.dtype), model.weight_shapes(config))
        assert drawn == described


@given(
    rows=st.sampled_from([1, 2, 3, 8, 17]),
    shape=st.sampled_from([(48, 64), (64, 48), (97, 64)]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    seed=st.integers(0, 2**16),
)
def test_linear_equals_a_float64_product(rows: int, shape: tuple[int, int], dtype: str, seed: int) -> None:
    generator = np.random.default_rng(seed)
    weight = jnp.asarray(generator.standard_normal(shape) / np.sqrt(shape[1]), dtype)
    x = jnp.asarray(generator.standard_normal((rows, shape[1])), dtype)
    with jax.default_matmul_precision("float32"):
        out = model.linear(weight, x, jnp.float32)
        narrow = model.linear(weight, x)
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    assert narrow.dtype == x.dtype
    np.testing.assert_array_equal(narrow, out.astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [2, 8])
def test_a_row_alone_equals_itself_among_others(dtype: str, rows: int) -> None:
    generator = np.random.default_rng(3)
    weight = jnp.asarray(generator.standard_normal((96, 64)) / 8, dtype)
    x = jnp.asarray(generator.standard_normal((rows, 64)), dtype)
    alone = model.linear(weight, x[:1], jnp.float32)
    among = model.linear(weight, x, jnp.float32)[:1]
    if dtype == "bfloat16" and rows == 2:
        # One bfloat16 row is computed as two, so these are the same program.
        np.testing.assert_array_equal(alone, among)
    np.testing.assert_allclose(alone, among, rtol=0, atol=1e-6)


def test_linear_keeps_leading_axes() -> None:
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    x = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    np.testing.assert_array_equal(model.linear(weight, x), np.einsum("oi,abi->abo", weight, x))


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_agree_with_transformers(name: str) -> None:
    case = ROPES[name]
    config, head_dim = RopeConfig(**json.loads(str(case["config"]))), int(case["head_dim"])
    omega = rope.inverse_frequencies(config, head_dim)
    assert omega.dtype == np.float64
    np.testing.assert_allclose(omega, case["inverse_frequencies"], rtol=1e-6)
    np.testing.assert_allclose(rope.attention_scaling(config), case["attention_scaling"], rtol=1e-12)


GOLDEN_ROPES = {
    "yarn_qwen3": (128, RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_context=32768)),
    "llama3": (128, RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_context=8192)),
    "yarn_gptoss": (64, RopeConfig(theta=150000.0, kind="yarn", factor=32.0, original_context=4096, truncate=False)),
    "qwen3_default_theta1e6": (128, RopeConfig(theta=1e6)),
    "ds_qwen7b_theta1e4": (128, RopeConfig(theta=1e4)),
}


@pytest.mark.skipif(not GOLDEN.exists(), reason="the vectors of the TriAttention authors are not beside the repository")
@pytest.mark.parametrize("name", GOLDEN_ROPES)
def test_rope_agrees_with_the_triattention_vectors(name: str) -> None:
    head_dim, config = GOLDEN_ROPES[name]
    with np.load(GOLDEN) as golden:
        np.testing.assert_allclose(rope.inverse_frequencies(config, head_dim), golden[f"{name}_inv_freq"], rtol=1e-6)
        if f"{name}_k_pre" not in golden:
            return
        np.testing.assert_allclose(rope.attention_scaling(config), golden[f"{name}_attention_scaling"], rtol=1e-6)
        positions = golden[f"{name}_positions"]
        k_pre, expected = (golden[f"{name}_{which}"].swapaxes(1, 2) for which in ("k_pre", "k_roped"))
    cos, sin = rope.rotation(config, head_dim, positions[None])
    # A frequency that differs by a float32 rounding or two turns position p by up to p times that.
    tolerance = np.abs(expected).max() * (positions * 2.0**-22 + 1e-6)
    error = np.abs(rope.rotate(k_pre, cos, sin) - expected).max(axis=(0, 2, 3))
    assert (error <= tolerance).all(), (error / tolerance).max()


@given(start=st.integers(0, 30000), head_dim=st.sampled_from([2, 64, 80, 128]), seed=st.integers(0, 2**16))
def test_rotation_equals_complex_multiplication(start: int, head_dim: int, seed: int) -> None:
    config = RopeConfig(theta=1e4, kind="yarn", factor=4.0, original_context=4096)
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((1, 3, 2, head_dim), dtype=np.float32)
    positions = start + np.arange(3)
    cos, sin = rope.rotation(config, head_dim, positions[None])
    turned = np.asarray(rope.rotate(jnp.asarray(x), cos, sin))

    bands = head_dim // 2
    # The phase's rounding to float32 is the definition here, as in every checkpoint's training.
    omega = rope.inverse_frequencies(config, head_dim).astype(np.float32)
    phase = (positions[:, None].astype(np.float32) * omega).astype(np.float64)
    numbers = x[..., :bands].astype(np.float64) + 1j * x[..., bands:]
    expected = numbers * rope.attention_scaling(config) * np.exp(1j * phase)[None, :, None]
    np.testing.assert_allclose(turned, np.concatenate([expected.real, expected.imag], axis=-1), rtol=0, atol=1e-5)
