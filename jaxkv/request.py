"""Requests: what comes in, what is told of it, and what the host keeps while it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxkv.compression import CompressionConfig, RowBudget
from jaxkv.dims import ceil_div
from jaxkv.sampling import SamplingParams


class RequestError(ValueError):
    """A request that can never be served as it is. Nothing was started."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
      prompt: token ids, at least one.
      params: how to sample, and how much.
      compression: this request's own budget and how its rows are kept within it; None is the engine's.
      watch: called with each generated token, in order; returning True ends the request with that token. Tokens that
        were drawn after it are in no output and no count. Stop strings are found this way.
    """

    prompt: Sequence[int]
    params: SamplingParams = SamplingParams()
    compression: CompressionConfig | None = None
    watch: Callable[[int], bool] | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of a request. Seconds are those of the calls it took part in, shared with its neighbours."""

    finish_reason: str
    """``stop``, ``length`` or ``cancelled``."""
    prompt_tokens: int
    generated_tokens: int = 0
    position: int = 0
    """Tokens whose K and V were computed."""
    length: int = 0
    """Slots held when it finished."""
    tokens_evicted: int = 0
    """Slots that compaction took away; in the per-head modes each head lost as many."""
    compactions: int = 0
    blocks_returned: int = 0
    """Blocks that compaction put back on the free list. References dropped to shared blocks do not count."""
    blocks_now: int = 0
    """Blocks held when it finished, before they were released."""
    blocks_peak: int = 0
    blocks_peak_uncompressed: int = 0
    """Blocks that ``position`` tokens take."""
    prefill: str = "dense"
    """``dense``, or ``compacted`` where the prompt was compacted between its chunks."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    compaction_seconds: float = 0.0
    queued_seconds: float = 0.0
    reached_context: bool = False
    """Whether ``length`` was the model's context rather than max_tokens."""
    blocks_history: tuple[tuple[int, int], ...] = ()
    """Blocks held, as (tokens generated, blocks), each time that the number changed."""


@dataclasses.dataclass(frozen=True)
class Event:
    """News of one request: tokens, and at the end a report."""

    request_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    report: Report | None = None


@dataclasses.dataclass
class Row:
    """A request that was admitted to row ``index`` of the engine: all that decides, as plain integers."""

    request_id: int
    index: int
    request: Request
    max_tokens: int
    reserved: int
    queued_seconds: float
    budget: RowBudget | None = None
    """None keeps every token."""
    compacts_prefill: bool = False
    blocks: list[int] = dataclasses.field(default_factory=list)
    length: int = 0
    position: int = 0
    token: int = 0
    generated: int = 0
    tokens_evicted: int = 0
    compactions: int = 0
    blocks_returned: int = 0
    blocks_peak: int = 0
    blocks_history: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    compaction_seconds: float = 0.0
    finish_reason: str = ""

    @property
    def decoding(self) -> bool:
        """Whether the prompt is in; the first token comes out of prefill."""
        return self.generated > 0

    @property
    def tokens_left(self) -> int:
        """Tokens it may still generate."""
        return self.max_tokens - self.generated

    @property
    def due(self) -> bool:
        """Whether it has to be compacted before its next token is written."""
        return self.budget is not None and self.length >= self.budget.trigger

    @property
    def room(self) -> int:
        """Tokens that may be written before it is due."""
        return self.max_tokens if self.budget is None else self.budget.trigger - self.length

    def note_blocks(self) -> None:
        """Keep the peak and the history of blocks up to date."""
        held = len(self.blocks)
        self.blocks_peak = max(self.blocks_peak, held)
        if not self.blocks_history or self.blocks_history[-1][1] != held:
            self.blocks_history.append((self.generated, held))

    def report(self, block_size: int) -> Report:
        """Return what became of it, before its blocks are released."""
        fields = ("finish_reason", "position", "length", "tokens_evicted", "compactions", "blocks_returned")
        more = ("blocks_peak", "prefill_seconds", "decode_seconds", "compaction_seconds", "queued_seconds")
        return Report(
            prompt_tokens=len(self.request.prompt),
            generated_tokens=self.generated,
            blocks_now=ceil_div(self.length, block_size),
            blocks_peak_uncompressed=ceil_div(self.position, block_size),
            prefill="compacted" if self.compacts_prefill else "dense",
            reached_context=self.finish_reason == "length" and self.generated < self.request.params.max_tokens,
            blocks_history=tuple(self.blocks_history),
            **{name: getattr(self, name) for name in (*fields, *more)},
        )
