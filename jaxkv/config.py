"""Frozen, validated descriptions: of a model, of its RoPE, and of a cache."""

from __future__ import annotations

import dataclasses
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, half-split: band f pairs dimension f with f + F.

    Attributes:
      theta: base of the geometric series of wavelengths.
      kind: how the frequencies are rescaled for a longer context.
      factor: context extension; used by linear, llama3 and yarn.
      original_context: context of the pretraining run; used by llama3 and yarn.
      low_freq_factor, high_freq_factor: llama3's two wavelength bounds.
      beta_fast, beta_slow: yarn's two bounds, in rotations over the original context.
      attention_factor: yarn's scaling s of q and k. None: 0.1 ln(factor) + 1.
      truncate: whether yarn rounds its ramp to whole bands.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope kind={self.kind!r} is not supported; one of {', '.join(ROPE_KINDS)} is")
        if not self.theta > 1:
            raise ValueError(f"rope theta={self.theta} must be above 1")
        if not self.factor > 0:
            raise ValueError(f"rope factor={self.factor} must be above 0")
        if self.kind in ("llama3", "yarn") and self.original_context <= 0:
            raise ValueError(
                f"rope kind={self.kind!r} needs original_context, the context of the pretraining run, "
                f"and got {self.original_context}"
            )
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"rope high_freq_factor={self.high_freq_factor} must be above low_freq_factor={self.low_freq_factor}"
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family. Architectures differ only by the data in here.

    Attributes:
      architecture: the name in the checkpoint (llama, mistral, qwen2, qwen3); it picks the name map.
      vocab_size, width, mlp_width, layers, heads, kv_heads, head_dim: V, E, I, L, H, K, D.
      norm_eps: epsilon of every RMS norm.
      context: how many tokens the model was made for.
      rope: the rotary embedding.
      tied_head: whether the output head is the embedding.
      qkv_bias, output_bias, mlp_bias: which projections have a bias.
      qk_norm: whether q and k are RMS-normed per head before RoPE (Qwen3).
      bos_token_id: token that a raw prompt starts with, if the tokenizer adds one.
      eos_token_ids: every token that ends a text, from config and generation config.
      name: the model's own name, for reports.
    """

    architecture: str
    vocab_size: int
    width: int
    mlp_width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float = 1e-5
    context: int = 2048
    rope: RopeConfig = RopeConfig()
    tied_head: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        for field in ("vocab_size", "width", "mlp_width", "layers", "heads", "kv_heads", "head_dim", "context"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; RoPE pairs dimensions")

    @property
    def groups(self) -> int:
        """G: query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def frequencies(self) -> int:
        """F: RoPE frequencies of a head."""
        return self.head_dim // 2


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Size and type of the pool, and the shapes that the engine compiles for.

    Attributes:
      blocks: blocks a request can use; block 0, the null block, comes on top.
      block_size: P, token slots in a block.
      dtype: the pool's dtype, by name.
      rows: B, requests that decode at once.
      prefill_chunk: tokens of a row that one prefill call takes.
      prefill_rows: rows that one prefill call takes.
      round_steps: decode steps between two looks of the host.
      context: most tokens a row may have; it fixes the width M of a block table.
      prefix_cache: whether full blocks can be found again by the tokens in them and before them.
      kept_rows: rows that are held on to after their end, at most, so that they can be continued.
    """

    blocks: int
    context: int
    block_size: int = 16
    dtype: str = "float32"
    rows: int = 8
    prefill_chunk: int = 128
    prefill_rows: int = 1
    round_steps: int = 32
    prefix_cache: bool = True
    kept_rows: int = 8

    def __post_init__(self) -> None:
        for field in ("blocks", "context", "block_size", "rows", "prefill_chunk", "prefill_rows", "round_steps"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        if self.kept_rows < 0:
            raise ValueError(f"kept_rows={self.kept_rows} must be 0 (none) or above")
        if self.block_size & (self.block_size - 1) or self.block_size > 256:
            raise ValueError(f"block_size={self.block_size} must be a power of two up to 256")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"pool dtype={self.dtype!r} is not supported; float32, bfloat16 and float16 are")

    @property
    def table_width(self) -> int:
        """M: blocks per row in a block table."""
        return -(-self.context // self.block_size)
