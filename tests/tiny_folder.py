"""A tiny seeded model in a folder, as the hub would give it: what the library front and the command are tried on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tiny_tokenizers import byte_level, byte_level_fields

from jaxkv.config import ModelConfig
from jaxkv.model import Weights, init_weights

TOKENS: list[str] = byte_level_fields()["tokenizer.ggml.tokens"]
CONTEXT = 256
CONFIG = ModelConfig(
    "llama", len(TOKENS), width=64, mlp_width=96, layers=2, heads=4, kv_heads=2, head_dim=16, context=CONTEXT
)
# The tokenizer, config.json and generation_config.json each name another token that ends a text.
TOKENIZER_EOS = TOKENS.index("<|eos|>")
CONFIG_EOS = TOKENS.index("<|im_end|>")
GENERATION_EOS = TOKENS.index("<|im_start|>")

_MODULES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def make(folder: Path, seed: int = 1, **changes: Any) -> Path:
    """Write the model of a seed into a folder and return the folder.

    Args:
      folder: exists.
      seed: of the weights.
      changes: to config.json.
    """
    weights = init_weights(CONFIG, seed=seed)
    # What is not plain text is made unlikely, so that greedy texts can be read, and cut by stop strings.
    plain = np.array([token.isascii() and token.isprintable() and token.isalpha() for token in TOKENS])
    weights = weights.replace(head=np.where(plain[:, None], weights.head, 0.3 * weights.head))
    save_file(_named(weights), folder / "model.safetensors")
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": CONFIG.architecture,
        "vocab_size": CONFIG.vocab_size,
        "hidden_size": CONFIG.width,
        "intermediate_size": CONFIG.mlp_width,
        "num_hidden_layers": CONFIG.layers,
        "num_attention_heads": CONFIG.heads,
        "num_key_value_heads": CONFIG.kv_heads,
        "head_dim": CONFIG.head_dim,
        "rms_norm_eps": CONFIG.norm_eps,
        "max_position_embeddings": CONTEXT,
        "rope_theta": CONFIG.rope.theta,
        "eos_token_id": CONFIG_EOS,
    }
    (folder / "config.json").write_text(json.dumps(raw | changes))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [CONFIG_EOS, GENERATION_EOS]}))
    byte_level().fast.save_pretrained(str(folder))
    return folder


def _named(weights: Weights) -> dict[str, np.ndarray]:
    """The names under which transformers saves a Llama."""
    arrays = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
        "lm_head.weight": weights.head,
    }
    for index, layer in enumerate(weights.layers):
        arrays |= {f"model.layers.{index}.{to}.weight": getattr(layer, name) for name, to in _MODULES.items()}
    return arrays
