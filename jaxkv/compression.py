"""What a row keeps, on the host and in integers alone: nothing in here ever sees an array.

A budget is fixed when a request is admitted. From then on every count (when the row is compacted, how many slots
it keeps, which of its blocks come free) follows from the row's length, so blocks go back to the allocator the moment
a compaction is enqueued, before any score exists.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Literal, get_args

from jaxkv import policies
from jaxkv.dims import ceil_div

Mode = Literal["per_head", "per_layer_head", "union", "shared"]
PromptPolicy = Literal["evict", "pin"]
Aggregation = Literal["mean", "max"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclasses.dataclass(frozen=True)
class RowBudget:
    """What one request may hold. All counts are token slots.

    Attributes:
      b_row: slots that a compaction leaves; a multiple of the block size.
      interval: slots above ``b_row`` at which the row is compacted.
      window: newest slots that are always kept.
      sinks: oldest slots that are always kept.
      pinned: tokens of a prompt that is always kept, 0 where it may be evicted.
    """

    b_row: int
    interval: int
    window: int
    sinks: int
    pinned: int

    @property
    def oldest(self) -> int:
        """Oldest slots that are always kept. Sinks are part of a pinned prompt, so the larger of the two counts."""
        return max(self.sinks, self.pinned)

    @property
    def trigger(self) -> int:
        """The length at which a decoding row is compacted, which is the longest it ever gets."""
        return self.b_row + self.interval

    def kept(self, length: int) -> int:
        """Slots that a compaction at this length leaves."""
        return min(length, self.b_row)


@dataclasses.dataclass(frozen=True)
class CompressionConfig:
    """How a request's cache is kept within a budget.

    Attributes:
      method: ``none``, or the name of a policy (a module of ``jaxkv.policies``).
      budget: slots a row keeps: an integer, or a float ratio 0 < r <= 1 of its prompt and ``max_tokens`` together.
        Rounded up to a block.
      interval: decoded tokens between two compactions.
      window: newest slots always kept.
      sinks: oldest slots always kept.
      mode: whose scores are pooled. ``per_head``: one kept set a KV head, by the mean over layers. ``per_layer_head``:
        one a layer and KV head. ``union``: one in all, by the maximum over layers and heads. ``shared``: one in all,
        by their mean.
      prompt_policy: whether the prompt may be evicted or is pinned.
      offsets: largest future offset that TriAttention looks ahead; a power of two.
      aggregation: how TriAttention pools its future offsets.
      stats: file of query statistics, ``online`` for the row's own, or None.
      compact_prefill: whether a prompt above the budget is compacted between its chunks.
      seed: of the random policy.
    """

    method: str = "none"
    budget: int | float = 2048
    interval: int = 128
    window: int = 128
    sinks: int = 4
    mode: Mode = "per_head"
    prompt_policy: PromptPolicy = "evict"
    offsets: int = 2**16
    aggregation: Aggregation = "mean"
    stats: str | None = None
    compact_prefill: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        known = ("none", *policies.names())
        if self.method not in known:
            raise ValueError(f"method={self.method!r} is unknown; one of {', '.join(known)} is")
        for field, choices in (("mode", MODES), ("prompt_policy", get_args(PromptPolicy))):
            _check_choice(field, getattr(self, field), choices)
        _check_choice("aggregation", self.aggregation, get_args(Aggregation))
        if isinstance(self.budget, bool) or not isinstance(self.budget, int | float):
            raise ValueError(f"budget={self.budget!r} must be an integer (slots) or a float (a ratio)")
        if isinstance(self.budget, float) and not 0 < self.budget <= 1:
            raise ValueError(f"budget={self.budget} is a ratio, so it must be in (0, 1]; give slots as an integer")
        if isinstance(self.budget, int) and self.budget < 1:
            raise ValueError(f"budget={self.budget} must be at least 1 slot")
        for field, least in (("interval", 1), ("window", 0), ("sinks", 0)):
            if getattr(self, field) < least:
                raise ValueError(f"{field}={getattr(self, field)} must be at least {least}")
        if self.offsets < 1 or self.offsets & (self.offsets - 1):
            raise ValueError(f"offsets={self.offsets} must be a power of two; the default is {2**16}")

    def resolve(
        self, prompt_tokens: int, max_tokens: int, block_size: int, sliding_window: int | None = None
    ) -> RowBudget:
        """Return a request's budget, which holds for as long as the request lives.

        A pinned prompt counts inside the budget while it is at most half of it; a longer one comes on top, so the
        newest tokens keep their room.

        Args:
          prompt_tokens: tokens of the prompt.
          max_tokens: most tokens the request may generate.
          block_size: P.
          sliding_window: widest sliding window among the model's layers, if it has any.

        Raises:
          ValueError: the slots that are always kept leave no room to choose, or a sliding window does not fit;
            the message has both numbers.
        """
        if self.method == "none":
            raise ValueError("method='none' keeps every token and has no budget")
        total = prompt_tokens + max_tokens
        slots = _ratio(self.budget, total) if isinstance(self.budget, float) else self.budget
        b_row = _round_up(slots, block_size)
        pinned = prompt_tokens if self.prompt_policy == "pin" else 0
        if 2 * pinned > b_row:
            b_row = _round_up(slots + pinned, block_size)
        row = RowBudget(b_row=b_row, interval=self.interval, window=self.window, sinks=self.sinks, pinned=pinned)
        # A ratio of a short request is a short budget. Where nothing is ever evicted there is nothing to refuse.
        evicts = isinstance(self.budget, int) or b_row < total
        if evicts and row.oldest + row.window >= b_row:
            raise ValueError(
                f"{row.oldest + row.window} slots are always kept (sinks={self.sinks}, pinned prompt={pinned}, "
                f"window={self.window}) and the row's budget is {b_row}: raise budget, or lower window or sinks"
            )
        if sliding_window is not None and b_row < sliding_window:
            raise ValueError(
                f"the row's budget is {b_row} and the model has a sliding window of {sliding_window} slots, "
                f"which has to fit: raise budget to {sliding_window} or more"
            )
        return row


def freed_blocks(length: int, b_row: int, block_size: int) -> range:
    """Return which of a row's blocks, by their index in its table, a compaction at ``length`` hands back.

    Integers only, so the host calls it before it enqueues the scores.
    """
    return range(ceil_div(min(length, b_row), block_size), ceil_div(length, block_size))


def written_blocks(length: int, row: RowBudget, block_size: int) -> range:
    """Return which of a row's blocks a compaction at ``length`` may write.

    Of these, the shared ones need fresh blocks in the target table. Blocks that hold only slots that are always kept
    stay as they are and stay shared; so does everything where nothing is evicted.
    """
    if length <= row.b_row:
        return range(0)
    return range(row.oldest // block_size, ceil_div(row.b_row, block_size))


def _ratio(ratio: float, total: int) -> int:
    # 0.55 * 100 is 55.000000000000007 in floats, and its ceiling is a slot too many.
    return math.ceil(Fraction(str(ratio)) * total)


def _round_up(slots: int, block_size: int) -> int:
    return ceil_div(slots, block_size) * block_size


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{field}={value!r} is unknown; one of {', '.join(choices)} is")
