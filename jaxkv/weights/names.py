"""What checkpoints call their tensors, and the check that a checkpoint holds what its configuration asks for.

One table a format and architecture. Which biases and norms a model has is not said here: ``weight_shapes`` knows
from the configuration, and the table only names them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxkv.config import ModelConfig
from jaxkv.model import Weights, weight_shapes
from jaxkv.quant import Packed

LISTED = 20


@dataclasses.dataclass(frozen=True)
class NameMap:
    """Tensor names of one architecture in one format.

    Attributes:
      embedding, final_norm, head: names of the tensors outside the layers.
      layer: what a layer's names start with; ``{index}`` is its number.
      fields: for each field of ``model.Layer``, the rest of the name.
      harmless: patterns of names that may be there and carry no weights.
      permuted: fields whose rows the format reorders within each head, and the count of those heads in ModelConfig.
    """

    embedding: str
    final_norm: str
    head: str
    layer: str
    fields: Mapping[str, str]
    harmless: tuple[str, ...] = ()
    permuted: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = set(self.permuted) - set(self.fields)
        if unknown:
            raise ValueError(f"permuted fields {sorted(unknown)} have no name; add them to fields")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One array of the model: its name in the checkpoint, its shape, and how many heads its rows are reordered in."""

    name: str
    shape: tuple[int, ...]
    permuted_heads: int | None = None


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint as its header describes it; ``kind`` is the format's own name of its type."""

    shape: tuple[int, ...]
    kind: str


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint, of any format.

    Attributes:
      origin: where it lies, for messages.
      config: the model it holds.
      names: its table of names.
      tensors: what its headers list, by name.
      readable: the types that ``pieces`` can read.
      pieces: yields a parameter's values in order, as arrays of some float dtype, a few MB at a time.
      packed: returns a matrix as it is kept packed, or None where its type is not.
      quantized: what the checkpoint as a whole was quantised by, as its configuration says; empty if it does not.
    """

    origin: str
    config: ModelConfig
    names: NameMap
    tensors: Mapping[str, Tensor]
    readable: tuple[str, ...]
    pieces: Callable[[Parameter], Iterator[np.ndarray]]
    packed: Callable[[Parameter], Packed | None] = lambda _: None
    quantized: str = ""


_HF = NameMap(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    layer="model.layers.{index}.",
    fields={
        "attention_norm": "input_layernorm.weight",
        "q": "self_attn.q_proj.weight",
        "k": "self_attn.k_proj.weight",
        "v": "self_attn.v_proj.weight",
        "o": "self_attn.o_proj.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        "gate": "mlp.gate_proj.weight",
        "up": "mlp.up_proj.weight",
        "down": "mlp.down_proj.weight",
        "q_bias": "self_attn.q_proj.bias",
        "k_bias": "self_attn.k_proj.bias",
        "v_bias": "self_attn.v_proj.bias",
        "o_bias": "self_attn.o_proj.bias",
        "gate_bias": "mlp.gate_proj.bias",
        "up_bias": "mlp.up_proj.bias",
        "down_bias": "mlp.down_proj.bias",
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
    },
    harmless=(r".*rotary_emb\.inv_freq",),
)

_GGUF = NameMap(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    head="output.weight",
    layer="blk.{index}.",
    fields={
        "attention_norm": "attn_norm.weight",
        "q": "attn_q.weight",
        "k": "attn_k.weight",
        "v": "attn_v.weight",
        "o": "attn_output.weight",
        "mlp_norm": "ffn_norm.weight",
        "gate": "ffn_gate.weight",
        "up": "ffn_up.weight",
        "down": "ffn_down.weight",
        "q_bias": "attn_q.bias",
        "k_bias": "attn_k.bias",
        "v_bias": "attn_v.bias",
        "o_bias": "attn_output.bias",
        "gate_bias": "ffn_gate.bias",
        "up_bias": "ffn_up.bias",
        "down_bias": "ffn_down.bias",
        "q_norm": "attn_q_norm.weight",
        "k_norm": "attn_k_norm.weight",
    },
    harmless=(r"rope_freqs\.weight",),
)

# llama.cpp rotates neighbouring dimensions in its llama architecture, and its converter reorders q and k to suit.
_GGUF_LLAMA = dataclasses.replace(
    _GGUF, permuted={"q": "heads", "k": "kv_heads", "q_bias": "heads", "k_bias": "kv_heads"}
)

HF: Mapping[str, NameMap] = {"llama": _HF, "mistral": _HF, "qwen2": _HF, "qwen3": _HF}
GGUF: Mapping[str, NameMap] = {"llama": _GGUF_LLAMA, "qwen2": _GGUF, "qwen3": _GGUF}


def parameters(names: NameMap, config: ModelConfig) -> Weights:
    """Return the model's weights with a ``Parameter`` in the place of every array."""

    def parameter(path: Any, array: jax.ShapeDtypeStruct) -> Parameter:
        field = path[-1].name
        if path[0].name != "layers":
            return Parameter(getattr(names, field), array.shape)
        heads = names.permuted.get(field)
        return Parameter(
            name=names.layer.format(index=path[1].idx) + names.fields[field],
            shape=array.shape,
            permuted_heads=None if heads is None else getattr(config, heads),
        )

    return jax.tree_util.tree_map_with_path(parameter, weight_shapes(config))


def check(checkpoint: Checkpoint) -> None:
    """Raise one ValueError that lists every missing, surplus, mis-shaped and unreadable tensor of a checkpoint."""
    wanted = {p.name: p for p in jax.tree.leaves(parameters(checkpoint.names, checkpoint.config))}
    found, names = checkpoint.tensors, checkpoint.names
    ignored = [*names.harmless, re.escape(names.head)] if checkpoint.config.tied_head else names.harmless
    both = [(wanted[name], found[name]) for name in wanted if name in found]
    faults = {
        "missing": [f"{name}: expected {list(p.shape)}" for name, p in wanted.items() if name not in found],
        "surplus": [
            f"{name}: found {list(tensor.shape)}"
            for name, tensor in found.items()
            if name not in wanted and not any(re.fullmatch(pattern, name) for pattern in ignored)
        ],
        "mis-shaped": [
            f"{p.name}: expected {list(p.shape)}, found {list(tensor.shape)}"
            for p, tensor in both
            if p.shape != tensor.shape
        ],
        "unreadable": [
            f"{p.name}: type {tensor.kind}; readable are {', '.join(checkpoint.readable)}"
            for p, tensor in both
            if tensor.kind not in checkpoint.readable
        ],
    }
    if any(faults.values()):
        raise ValueError(_report(checkpoint, faults))


def _report(checkpoint: Checkpoint, faults: Mapping[str, list[str]]) -> str:
    lines = [f"{checkpoint.origin} does not hold the {checkpoint.config.architecture} model that it describes:"]
    for kind, entries in faults.items():
        if entries:
            lines.append(f"{kind} ({len(entries)}):")
            lines.extend(f"  {entry}" for entry in entries[:LISTED])
        if len(entries) > LISTED:
            lines.append(f"  and {len(entries) - LISTED} more")
    head = checkpoint.names.head
    if any(entry.startswith(f"{head}:") for entry in faults["missing"]):
        lines.append(
            f"If the output head is the embedding, set tie_word_embeddings to true: {head} is then not needed."
        )
    return "\n".join(lines)
