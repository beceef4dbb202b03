"""config.json and GGUF metadata to ModelConfig: what is understood, and what is refused by name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from jaxkv.config import RopeConfig
from jaxkv.rope import attention_scaling, inverse_frequencies
from jaxkv.weights import gguf, hf
from jaxkv.weights.gguf_metadata import GGUFHeader, TensorEntry

RAW: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.vocab_size": 128256,
    "llama.context_length": 131072,
    "llama.embedding_length": 4096,
    "llama.block_count": 32,
    "llama.feed_forward_length": 14336,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
    "llama.rope.dimension_count": 128,
}


def header(*tensors: TensorEntry, architecture: str = "llama", **changes: Any) -> GGUFHeader:
    """METADATA of another architecture, with keys changed (dots written as __) or, where None, removed."""
    metadata = {key.replace("llama.", f"{architecture}."): value for key, value in METADATA.items()}
    metadata |= {"general.architecture": architecture}
    metadata |= {key.replace("__", ".").replace("arch.", f"{architecture}."): value for key, value in changes.items()}
    return GGUFHeader({key: value for key, value in metadata.items() if value is not None}, tensors)


def test_what_config_json_leaves_out() -> None:
    config = hf.model_config(RAW, name="plain")
    assert (config.head_dim, config.norm_eps, config.rope, config.tied_head) == (128, 1e-6, RopeConfig(), False)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm) == (False, False, False, False)
    assert (config.bos_token_id, config.eos_token_ids, config.name, config.context) == (None, (), "plain", 131072)
    assert hf.model_config(RAW | {"num_key_value_heads": None}).kv_heads == 32
    assert hf.model_config(RAW | {"model_type": "qwen3", "hidden_size": 1024}).head_dim == 128
    with pytest.raises(ValueError, match="lacks vocab_size, hidden_size; a llama model"):
        hf.model_config(RAW | {"vocab_size": None, "hidden_size": None})


@pytest.mark.parametrize(
    ("architecture", "flags"),
    # qkv_bias, output_bias, mlp_bias, qk_norm where config.json sets attention_bias and mlp_bias
    [
        ("llama", (True, True, True, False)),
        ("mistral", (False, False, False, False)),
        ("qwen2", (True, False, False, False)),
        ("qwen3", (True, True, False, True)),
    ],
)
def test_biases_and_norms(architecture: str, flags: tuple[bool, ...]) -> None:
    raw = RAW | {"model_type": architecture, "sliding_window": None}
    config = hf.model_config(raw | {"attention_bias": True, "mlp_bias": True})
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm) == flags
    config = hf.model_config(raw)
    assert config.qkv_bias == (architecture == "qwen2")
    assert not config.output_bias
    assert not config.mlp_bias


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [
        (2, None, (2,)),
        ([5, 2], 2, (5, 2)),
        (None, [7, 8], (7, 8)),
        (1, [3, 1, 0], (1, 3, 0)),
        (0, None, (0,)),
        (None, None, ()),
    ],
)
def test_eos_ids_are_the_union(config_eos: Any, generation_eos: Any, expected: tuple[int, ...]) -> None:
    raw = RAW | {"eos_token_id": config_eos, "bos_token_id": 9}
    config = hf.model_config(raw, {"eos_token_id": generation_eos})
    assert config.eos_token_ids == expected
    assert config.bos_token_id == 9


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
YARN_CONFIG = RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_context=32768)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 1e6}, RopeConfig(theta=1e6)),
        ({"rope_theta": 1e6, "rope_scaling": None}, RopeConfig(theta=1e6)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeConfig(theta=1e6)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(kind="linear", factor=2.0)),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
            RopeConfig(theta=5e5, kind="linear", factor=2.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_context=8192),
        ),
        (
            {"rope_parameters": LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": None}},
            RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_context=131072),
        ),
        ({"rope_theta": 1e6, "rope_scaling": YARN}, YARN_CONFIG),
        ({"rope_theta": 1e6, "rope_scaling": YARN | {"factor": None}}, YARN_CONFIG),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            dataclasses.replace(YARN_CONFIG, original_context=131072),
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": YARN, "original_max_position_embeddings": 4096},
            dataclasses.replace(YARN_CONFIG, original_context=4096),
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": YARN | {"attention_factor": 1.5, "truncate": False, "beta_fast": 16}},
            dataclasses.replace(YARN_CONFIG, attention_factor=1.5, truncate=False, beta_fast=16),
        ),
        ({"rope_theta": 1e6, "rope_scaling": YARN | {"mscale": 0.7}}, YARN_CONFIG),
        (
            {"rope_theta": 1e6, "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}},
            dataclasses.replace(YARN_CONFIG, attention_factor=(1 + 0.07 * math.log(4.0)) / (1 + 0.05 * math.log(4.0))),
        ),
    ],
)
def test_rope_in_the_old_and_the_new_style(changes: dict[str, Any], expected: RopeConfig) -> None:
    config = hf.model_config(RAW | changes)
    factors = (config.rope.attention_factor, expected.attention_factor)
    assert dataclasses.replace(config.rope, attention_factor=None) == dataclasses.replace(
        expected, attention_factor=None
    )
    assert factors == (None, None) or factors[0] == pytest.approx(factors[1], rel=1e-12)
    assert config.context == 131072


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gpt_neox"}, r"model_type='gpt_neox' .* use a checkpoint of llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type=None"),
        ({"num_local_experts": 8}, "num_local_experts=8: a mixture of experts"),
        ({"num_experts": 64}, "num_experts=64: a mixture of experts"),
        ({"kv_lora_rank": 512}, "kv_lora_rank=512: multi-head latent attention"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window=4096 below max_position_embeddings=131072"),
        ({"model_type": "mistral"}, "sliding_window=4096 below .* null switches it off"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}, r"use_sliding_window=true .*=8"),
        ({"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window=true"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type='longrope'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters for each of full_attention",
        ),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method='hqq': packed weights other than awq, gptq"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type='linear' lacks factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high_freq_factor"),
    ],
)
def test_config_json_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        hf.model_config(RAW | changes)


def test_all_reasons_are_in_one_error() -> None:
    with pytest.raises(ValueError, match=r"num_experts=4[\s\S]*quant_method='fp8'[\s\S]*hidden_act='relu'"):
        hf.model_config(RAW | {"num_experts": 4, "quantization_config": {"quant_method": "fp8"}, "hidden_act": "relu"})


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 131072},
        {"model_type": "mistral", "max_position_embeddings": 4096},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096},
        {"partial_rotary_factor": 1.0, "num_experts": 0, "quantization_config": None, "hidden_act": "silu"},
    ],
)
def test_what_changes_nothing_is_accepted(changes: dict[str, Any]) -> None:
    plain = hf.model_config(
        RAW | {"model_type": changes.get("model_type", RAW["model_type"])} | {"sliding_window": None}
    )
    changed = hf.model_config(RAW | changes)
    assert dataclasses.replace(changed, context=plain.context) == plain


def test_gguf_metadata() -> None:
    tokens = {f"tokenizer.ggml.{name}_token_id": i for name, i in (("bos", 1), ("eos", 3), ("eot", 4), ("eom", 3))}
    config = gguf.model_config(header(**tokens, general__name="Tiny"))
    assert (config.architecture, config.vocab_size, config.width, config.mlp_width) == ("llama", 128256, 4096, 14336)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (32, 32, 8, 128)
    assert (config.norm_eps, config.context, config.rope) == (1e-5, 131072, RopeConfig(theta=500000.0))
    assert (config.tied_head, config.bos_token_id, config.eos_token_ids, config.name) == (True, 1, (3, 4), "Tiny")
    assert not any((config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm))
    qwen2 = gguf.model_config(header(architecture="qwen2", arch__rope__dimension_count=None))
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.eos_token_ids) == (True, False, ())
    qwen3 = gguf.model_config(
        header(architecture="qwen3", arch__attention__key_length=64, arch__rope__dimension_count=64)
    )
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 64)


def test_gguf_tensors_tell_what_the_metadata_does_not() -> None:
    names = ("output.weight", "blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_gate.bias")
    tensors = [TensorEntry(name, (8,), 0, 0) for name in names]
    config = gguf.model_config(header(*tensors, TensorEntry("token_embd.weight", (99, 8), 0, 0), arch__vocab_size=None))
    assert (config.tied_head, config.qkv_bias, config.output_bias, config.mlp_bias) == (False, True, True, True)
    assert config.vocab_size == 99
    config = gguf.model_config(header(arch__vocab_size=None, tokenizer__ggml__tokens=["a", "b"]))
    assert config.vocab_size == 2
    assert gguf.model_config(header(arch__attention__head_count_kv=None)).kv_heads == 32
    assert gguf.model_config(header(arch__feed_forward_length=[64] * 32)).mlp_width == 64


@pytest.mark.parametrize(
    ("changes", "kind", "factor", "scaling"),
    [
        ({"arch__rope__scaling__type": "none", "arch__rope__scaling__factor": 4.0}, "default", 1.0, 1.0),
        ({"arch__rope__scaling__factor": 4.0}, "linear", 4.0, 1.0),
        ({"arch__rope__scale_linear": 2.0}, "linear", 2.0, 1.0),
        ({"arch__rope__scaling__type": "linear", "arch__rope__scaling__factor": 1.0}, "default", 1.0, 1.0),
        (
            {"arch__rope__scaling__type": "yarn", "arch__rope__scaling__factor": 4.0},
            "yarn",
            4.0,
            0.1 * math.log(4.0) + 1,
        ),
        (
            {
                "arch__rope__scaling__type": "yarn",
                "arch__rope__scaling__factor": 4.0,
                "arch__rope__scaling__attn_factor": 0.5,
            },
            "yarn",
            4.0,
            0.05 * math.log(4.0) + 0.5,
        ),
    ],
)
def test_gguf_rope_scaling(changes: dict[str, Any], kind: str, factor: float, scaling: float) -> None:
    rope = gguf.model_config(header(arch__rope__scaling__original_context_length=32768, **changes)).rope
    assert (rope.theta, rope.kind, rope.factor) == (500000.0, kind, factor)
    assert attention_scaling(rope) == pytest.approx(scaling, rel=1e-12)
    assert rope.original_context == (32768 if kind == "yarn" else 0)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3s_parameters_are_found_again(factor: float) -> None:
    plain = RopeConfig(theta=500000.0)
    expected = dataclasses.replace(plain, kind="llama3", factor=factor, original_context=8192)
    divisors = inverse_frequencies(plain, 128) / inverse_frequencies(expected, 128)
    assert gguf.model_config(header(), divisors.astype(np.float32)).rope == expected
    assert gguf.model_config(header(), np.ones(64, np.float32)).rope == plain
    for wrong in (divisors * 1.0001, divisors[:32], np.where(divisors < 2, np.nan, divisors), 0 * divisors):
        with pytest.raises(ValueError, match=r"rope_freqs\.weight is not Llama 3\.1's rescaling"):
            gguf.model_config(header(), wrong)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight .* \(rope\.scaling\.type='yarn', factor=2\.0"):
        gguf.model_config(header(arch__rope__scaling__type="yarn", arch__rope__scaling__factor=2.0), divisors)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"general__architecture": "gemma"}, "general.architecture='gemma' .* use a model of llama, qwen2, qwen3"),
        ({"arch__expert_count": 8}, "llama.expert_count=8: a mixture of experts"),
        ({"arch__attention__sliding_window": 4096}, "llama.attention.sliding_window=4096 below context_length=131072"),
        ({"arch__rope__dimension_count": 64}, "llama.rope.dimension_count=64 other than the head dimension 128"),
        ({"arch__attention__value_length": 64}, "llama.attention.value_length=64 other than the head dimension 128"),
        ({"arch__rope__scaling__type": "longrope"}, "llama.rope.scaling.type='longrope'"),
        ({"arch__rope__scaling__attn_factor": 1.2}, "llama.rope.scaling.attn_factor=1.2 without YaRN"),
        ({"arch__rope__scaling__yarn_log_multiplier": 0.1}, "llama.rope.scaling.yarn_log_multiplier=0.1"),
        ({"split__count": 3}, "split.count=3: a split file"),
        ({"arch__block_count": None}, "lacks llama.block_count"),
        ({"arch__attention__head_count_kv": [8, 4]}, r"llama.attention.head_count_kv=\[8, 4\] differs between layers"),
    ],
)
def test_gguf_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        gguf.model_config(header(**changes))
    gguf.model_config(header(arch__attention__sliding_window=131072, arch__expert_count=0, split__count=1))
