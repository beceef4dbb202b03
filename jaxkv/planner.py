"""What fits where, by arithmetic: weights, pool, temporaries and reserve against a device's memory.

Nothing is allocated and nothing runs. The temporaries are formulas for what the compiler plans for the engine's three
programs; ``scripts/plan_proof.py`` compiles those for chips that are not there and prints both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jaxkv import quant
from jaxkv.compact import compaction_widths
from jaxkv.compression import CompressionConfig, RowBudget
from jaxkv.config import CacheConfig
from jaxkv.dims import ceil_div
from jaxkv.facts import Facts
from jaxkv.pool import page_dim

GIB = 2**30
MIB = 2**20
KEEP_EVERYTHING = CompressionConfig()
PREALLOCATED = 0.75
"""Share of an NVIDIA GPU's memory that JAX takes at its first operation, unless told otherwise."""

PREFILL_CHUNK = 512
BLOCK_SIZE = CacheConfig(blocks=1, context=1).block_size
_ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
WEIGHTS = ("int4", "int8", *_ITEM)
_DRAWN = {"gpu": (24, 24), "tpu": (12, 54)}
"""Bytes of scratch a token of the vocabulary to draw from float32 logits: a row, and at least."""
_MOST = 2**40


@dataclasses.dataclass(frozen=True)
class Device:
    """A device's memory.

    Attributes:
      name: for reports.
      memory: bytes, as its driver counts them.
      platform: gpu or tpu.
      reserve: bytes that are nobody's: what the driver keeps, and the context that a process has on the device with its
        code and the workspaces of libraries.
      kind: the chip's name in ``pallas_kernels.device``, or empty.
    """

    name: str
    memory: int
    platform: str = "gpu"
    reserve: int = 640 * MIB
    kind: str = ""

    def __post_init__(self) -> None:
        if self.memory < 1 or self.reserve < 0:
            raise ValueError(f"{self.name} has {self.memory} bytes and a reserve of {self.reserve}; give what it has")


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("rtx3090", 24576 * MIB, kind="NVIDIA GeForce RTX 3090"),
        Device("rtx4090", 24564 * MIB, kind="NVIDIA GeForce RTX 4090"),
        Device("a100-80g", 81920 * MIB, kind="NVIDIA A100"),
        Device("h100", 81559 * MIB, kind="NVIDIA H100"),
        Device("h200", 143771 * MIB, kind="NVIDIA H200"),
        # libtpu compiles no program for more than memory less this.
        Device("v5e", 16 * GIB, "tpu", 256 * MIB, kind="TPU v5 lite"),
        Device("v6e", 32 * GIB, "tpu", 768 * MIB, kind="TPU v6 lite"),
    )
}


def device(text: str, reserve: int | None = None) -> Device:
    """Return the device of a name in ``DEVICES``, or a GPU of a size as ``24GiB``, with another reserve if one is
    given.

    Raises:
      ValueError: the text is neither.
    """
    found = DEVICES.get(text.lower())
    if found is None:
        from jaxkv.sizing import parse_bytes  # psutil, which names do without

        try:
            found = Device(text, parse_bytes(text))
        except ValueError:
            known = ", ".join(DEVICES)
            raise ValueError(f"device {text!r} is unknown: give {known}, or a GPU's memory as 24GiB") from None
    return found if reserve is None else dataclasses.replace(found, reserve=reserve)


# -- bytes ------------------------------------------------------------------------------------------------------------


def weights_bytes(model: Facts, weights: str) -> int:
    """Return the bytes of a model's weights: the matrices of its layers as ``quant`` packs them, the rest in bfloat16.

    int4 is half a byte a weight, and a float16 scale and a byte of zero point for each group of an output; int8 a byte,
    and a float16 scale. A group is of the largest size in ``quant.GROUPS`` that divides the inputs; a matrix that none
    divides stays as it is. Embedding and output head are never packed.

    Raises:
      ValueError: weights is neither int4, int8 nor the dtype of all weights.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights={weights!r} is unknown; one of {', '.join(WEIGHTS)} is")
    plain, total = _ITEM.get(weights, 2), 0
    for array in model.arrays():
        size = array.outputs * max(1, array.inputs)
        group = quant.group_size(array.inputs) if array.packs and array.inputs else None
        if weights in _ITEM or group is None:
            total += array.count * plain * size
        elif weights == "int8":
            total += array.count * (size + 2 * size // group)
        else:
            total += array.count * (size // 2 + 3 * size // group)
    return total


@dataclasses.dataclass(frozen=True)
class Cache:
    """What the layers keep of a row, in bytes.

    Attributes:
      slot: of a slot that a compaction can free.
      token: of a token that stays whatever is done: latent attention.
      windowed: of a token in layers with a sliding window, which hold ``window`` tokens at most.
      window: tokens; 0 without such layers.
      state: of a row however long it is: linear attention.
      padding: of ``slot`` and ``token`` together, what holds nothing: a TPU's pages are a multiple of 128 wide.
    """

    slot: int
    token: int
    windowed: int
    window: int
    state: int
    padding: int

    @property
    def per_token(self) -> int:
        """Bytes that a token adds to a row that nothing compacts, once its windows are full."""
        return self.slot + self.token

    def row(self, tokens: int, slots: int) -> int:
        """Return the bytes of a row of so many tokens that holds so many slots."""
        return self.slot * slots + self.token * tokens + self.windowed * min(tokens, self.window) + self.state


def cache(model: Facts, dtype: str, platform: str) -> Cache:
    """Return what a model's layers keep.

    Raises:
      ValueError: the dtype is not one that a pool can have.
    """
    if dtype not in _ITEM:
        raise ValueError(f"kv dtype={dtype!r} is not supported; {', '.join(_ITEM)} are")
    item = _ITEM[dtype]
    full, sliding, latent = (model.layers_of(kind) for kind in ("full", "sliding", "latent"))
    heads, page = 2 * model.kv_heads, page_dim(model.head_dim, platform)
    low = page_dim(model.latent, platform)
    wide, narrow = model.state_numbers
    return Cache(
        slot=full * heads * page * item,
        token=latent * low * item,
        windowed=sliding * heads * page * item,
        window=(model.window or 0) if sliding else 0,
        state=4 * wide + item * narrow,
        padding=full * heads * (page - model.head_dim) * item + latent * (low - model.latent) * item,
    )


def temporaries(model: Facts, rows: int, context: int, platform: str, packed: bool, compacts: bool) -> dict[str, int]:
    """Return the bytes that each of the engine's programs takes beside weights and pool: its scratch, and what else
    goes in and comes out.

    Args:
      model, rows: the shapes, and B.
      context: tokens of a row at most.
      platform: gpu or tpu.
      packed: whether the layers' matrices are in 4 bits.
      compacts: whether rows are compacted.
    """
    vocabulary = model.vocabulary
    # What each row has seen: an int32 and a bool a token of the vocabulary. A TPU pads the rows of bools to four.
    seen = vocabulary * (4 * rows + (rows if platform == "gpu" else 4 * ceil_div(rows, 4)))
    each, least = (size * vocabulary for size in _DRAWN[platform])
    # The widest arrays of an MLP, and a hidden one, of a chunk in 16 bits.
    chunk = 2 * PREFILL_CHUNK * (3 * model.mlp_width + model.width)
    if platform == "tpu":
        # Kernels of packed matrices take few rows there: a chunk's are written out in float32, some at once. Of plain
        # ones a layer's keys' is laid out anew.
        keys = 2 * len(model.kinds) * model.kv_heads * model.head_dim * model.width
        chunk += 20 * model.width * model.mlp_width if packed else keys
    found = {
        # What was seen is not donated: it goes in and comes out again.
        "decode": 2 * seen + max(each * rows, least),
        "prefill": seen + max(chunk, least) + 4 * vocabulary,
    }
    if compacts:
        # A float32 for each query head and slot of one layer, and what is pooled and sorted of them. Warm-up runs the
        # compaction at its widest. A TPU pads a group to eight.
        width = compaction_widths(ceil_div(context, BLOCK_SIZE), BLOCK_SIZE)[-1] * BLOCK_SIZE
        heads = model.heads if platform == "gpu" else model.kv_heads * 8 * ceil_div(model.heads // model.kv_heads, 8)
        found["compaction"] = 4 * rows * width * (heads + 4 * model.kv_heads)
    return found


# -- what fits --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What some rows of some length take together, in bytes."""

    weights: int
    pool: int
    blocks: int
    """Of ``BLOCK_SIZE`` slots that the pool has for rows; the null block comes on top."""
    temporaries: dict[str, int]
    reserve: int

    @property
    def scratch(self) -> int:
        """The largest program's temporaries: one runs at a time."""
        return max(self.temporaries.values())

    @property
    def used(self) -> int:
        """What JAX allocates at most: all but the reserve."""
        return self.weights + self.pool + self.scratch

    @property
    def total(self) -> int:
        """All of it."""
        return self.used + self.reserve


@dataclasses.dataclass(frozen=True)
class Plan:
    """A model on a device.

    Attributes:
      model, device: which.
      weights: int4, int8, or the dtype of all weights.
      kv_dtype: of the pool.
      compression: how rows are kept within a budget.
      rows: B.
      context: tokens of a row at most; None is the model's own.
    """

    model: Facts
    device: Device
    weights: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    compression: CompressionConfig = KEEP_EVERYTHING
    rows: int = 1
    context: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("batch", self.rows), ("context", self.tokens)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")

    @property
    def tokens(self) -> int:
        """Tokens of a row at most."""
        return self.model.context if self.context is None else self.context

    @property
    def cache(self) -> Cache:
        """What the layers keep of a row."""
        return cache(self.model, self.kv_dtype, self.device.platform)

    @property
    def budget(self) -> RowBudget | None:
        """What a row may hold; None keeps every token. Raises as ``CompressionConfig.resolve``."""
        if self.compression.method == "none":
            return None
        window = self.cache.window or None
        return self.compression.resolve(0, self.tokens, BLOCK_SIZE, sliding_window=window)

    def sizes(self, rows: int, tokens: int, compressed: bool = True) -> Sizes:
        """Return what so many rows of so many tokens take, while each is at its longest."""
        budget = self.budget if compressed else None
        slots = tokens if budget is None else min(tokens, budget.trigger)
        compacts = budget is not None and tokens >= budget.trigger
        blocks = rows * ceil_div(slots, BLOCK_SIZE)
        if compacts and budget is not None and rows > 1:
            # The engine keeps room for one compaction out of shared blocks.
            blocks += ceil_div(budget.b_row, BLOCK_SIZE)
        held = self.cache
        pool = held.slot * BLOCK_SIZE * (blocks + 1) + rows * held.row(tokens, 0)
        scratch = temporaries(self.model, rows, self.tokens, self.device.platform, self.weights == "int4", compacts)
        return Sizes(weights_bytes(self.model, self.weights), pool, blocks, scratch, self.device.reserve)

    @property
    def tokens_until_full(self) -> int | None:
        """Tokens that each row can have when nothing is compacted; None where memory never ends them."""
        if not self.cache.per_token:
            return None
        return _most(lambda tokens: self._fits(self.rows, tokens, compressed=False))

    @property
    def max_batch(self) -> int:
        """Rows that fit at once, each as long as the context allows."""
        return _most(lambda rows: self._fits(rows, self.tokens))

    @property
    def max_trace_tokens(self) -> int | None:
        """Tokens that each row can have with the compression there is; None where only the context ends it."""
        if self._fits(self.rows, self.tokens):
            return None
        return _most(lambda tokens: tokens <= self.tokens and self._fits(self.rows, tokens))

    def _fits(self, rows: int, tokens: int, compressed: bool = True) -> bool:
        return self.sizes(rows, tokens, compressed).total <= self.device.memory

    def to_json(self) -> dict[str, Any]:
        """Return all numbers, of ``rows`` rows at ``tokens`` tokens where they depend on these."""
        sizes, held = self.sizes(self.rows, self.tokens), self.cache
        return {
            "model": self.model.name,
            "device": self.device.name,
            "memory_bytes": self.device.memory,
            "weights": self.weights,
            "weights_bytes": sizes.weights,
            "kv_dtype": self.kv_dtype,
            "kv_bytes_per_token": held.per_token,
            "kv_padding_bytes_per_token": held.padding,
            "kv_fixed_bytes_per_row": held.row(self.tokens, 0) - held.token * self.tokens,
            "batch": self.rows,
            "context": self.tokens,
            "pool_bytes": sizes.pool,
            "pool_blocks": sizes.blocks,
            "temporaries_bytes": sizes.scratch,
            "temporaries": sizes.temporaries,
            "reserve_bytes": sizes.reserve,
            "total_bytes": sizes.total,
            "fits": sizes.total <= self.device.memory,
            "tokens_until_full": self.tokens_until_full,
            "max_batch": self.max_batch,
            "max_trace_tokens": self.max_trace_tokens,
        }


def memory_fraction(plan: Plan) -> float | None:
    """Return the share of a GPU's memory that JAX has to be given, all but the reserve; None where its own will do, or
    nothing would.
    """
    memory, used = plan.device.memory, plan.sizes(plan.rows, plan.tokens).used
    most = memory - plan.device.reserve
    if plan.device.platform != "gpu" or not PREALLOCATED * memory < used <= most:
        return None
    return math.floor(100 * most / memory) / 100


def without_help(plan: Plan) -> list[str]:
    """Return what no compaction makes smaller, a sentence each: layers by kind, and models that jaxkv does not run."""
    model, held = plan.model, plan.cache
    count = {kind: model.layers_of(kind) for kind in ("full", "sliding", "latent", "linear")}
    layers, found = len(model.kinds), []
    if count["sliding"]:
        bound = held.windowed * held.window
        found.append(
            f"{count['sliding']} of {layers} layers have a sliding window of {held.window} tokens: they hold "
            f"{bound / MIB:.1f} MiB a row at most, and compaction does not make that less"
        )
    if count["latent"]:
        found.append(
            f"{count['latent']} of {layers} layers have latent attention (kv_lora_rank={model.raw['kv_lora_rank']}): "
            "their keys are shared by all heads, and no policy here scores them"
        )
    if count["linear"]:
        found.append(
            f"{count['linear']} of {layers} layers have linear attention: {held.state / MIB:.1f} MiB a row however "
            "long it is, and nothing to compact"
        )
    if found:
        found.append(f"compaction works on {count['full']} of {layers} layers: {held.slot:,} bytes a token")
    if model.refused:
        found.append(f"jaxkv does not run this model ({model.refused}): the figures are what weights and cache need")
    return found


def _most(fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, given that all smaller ones do; 0 if none does."""
    high = 1
    while high < _MOST and fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
