"""What the host keeps of a request while it runs, and of one that can be continued: plain integers and lists."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxkv.compression import RowBudget
from jaxkv.dims import ceil_div
from jaxkv.request import Report, Request
from jaxkv.segments import Document

NOWHERE = -1
"""Index of a row that has no place in the engine."""


@dataclasses.dataclass(frozen=True)
class Swapped:
    """A row's blocks in host memory, and what the policy had gathered about it."""

    pages: list[Any]
    """As ``swap.save`` returns them."""
    observed: Any = None


@dataclasses.dataclass
class Row:
    """A request, or one of its n continuations, from ``add`` to its end: all that decides.

    Attributes:
      tokens: all tokens it knows: those of a continued request, the prompt, and what it has generated. The K and V of
        ``tokens[:position]`` are computed.
      keys: chained keys of its full blocks, for as long as these hold what a prefix of ``tokens`` gives.
      dirty: whether its slots are no longer a plain prefix, so that nothing of it may be found by others.
    """

    request_id: int
    choice: int
    request: Request
    max_tokens: int
    root: bytes
    """The fingerprint that its keys begin from."""
    tokens: list[int]
    added: float
    """When it was added; ``arrived`` is when it last joined the queue."""
    arrived: float
    index: int = NOWHERE
    """Its place in the engine."""
    prompt_keys: list[bytes] = dataclasses.field(default_factory=list)
    """Keys of the prompt's full blocks, to look for."""
    forks: int = 0
    """Continuations that begin with this one's prompt once it is in."""
    queued_seconds: float = 0.0
    continued: int = 0
    """How many of ``tokens`` come from the request that this one continues."""
    history: str = "none"
    budget: RowBudget | None = None
    """None keeps every token."""
    compacts_prefill: bool = False
    blocks: list[int] = dataclasses.field(default_factory=list)
    keys: list[bytes] = dataclasses.field(default_factory=list)
    dirty: bool = False
    swapped: Swapped | None = None
    length: int = 0
    position: int = 0
    generated: int = 0
    cached_tokens: int = 0
    plain: bool = False
    """Whether its documents are prefilled as any other tokens, for there is nothing to blend or nothing to gain."""
    ratio: float = 0.0
    """Share of its documents' tokens that is recomputed where they are blended."""
    documents: list[Document] = dataclasses.field(default_factory=list)
    first_token_seconds: float = 0.0
    full_prefill_seconds: float = 0.0
    tokens_evicted: int = 0
    compactions: int = 0
    preemptions: int = 0
    blocks_returned: int = 0
    blocks_dropped: int = 0
    blocks_peak: int = 0
    blocks_history: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    compaction_seconds: float = 0.0
    finish_reason: str = ""

    @property
    def order(self) -> tuple[int, int]:
        """Older rows sort first."""
        return self.request_id, self.choice

    @property
    def placed(self) -> bool:
        """Whether it has a place in the engine."""
        return self.index != NOWHERE

    @property
    def prompt_end(self) -> int:
        """Position at which the prompt is in."""
        return self.continued + len(self.request.prompt)

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
        return len(self.tokens) + self.max_tokens if self.budget is None else self.budget.trigger - self.length

    def next_chunk(self, most: int) -> list[int]:
        """Return the prompt tokens that come next, ``most`` at most, cut where a compaction has to come between."""
        count = most
        if self.compacts_prefill:
            # A prompt that began with cached blocks is cut where it would be cut without them.
            count = most - self.position % most
        if self.continued:
            # A row that is continued is compacted exactly where it would be if these tokens had been generated.
            count = min(count, self.room)
        return self.tokens[self.position : min(self.position + count, self.prompt_end)]

    def compacts_before_chunk(self, most: int) -> bool:
        """Whether the row is to be compacted before its next chunk of at most ``most`` tokens."""
        # Without cached blocks, chunks begin at multiples of their size, and compactions come between chunks.
        return self.due and (self.continued > 0 or (self.compacts_prefill and self.position % most == 0))

    def restart(self) -> None:
        """Forget what was computed, which nobody has been told of. Its blocks have been released."""
        self.length = self.position = self.cached_tokens = 0
        self.tokens_evicted = self.compactions = self.blocks_returned = self.blocks_dropped = 0
        self.keys, self.dirty, self.plain, self.documents = [], False, False, []

    def note_blocks(self) -> None:
        """Keep the peak and the history of blocks up to date."""
        held = len(self.blocks)
        self.blocks_peak = max(self.blocks_peak, held)
        if held != (self.blocks_history[-1][1] if self.blocks_history else 0):
            self.blocks_history.append((self.generated, held))

    def report(self, block_size: int) -> Report:
        """Return what became of it, before its blocks are released."""
        fields = ("finish_reason", "position", "length", "tokens_evicted", "compactions", "blocks_returned")
        more = ("blocks_dropped", "blocks_peak", "cached_tokens", "preemptions", "history", "queued_seconds")
        seconds = ("prefill_seconds", "decode_seconds", "compaction_seconds", "first_token_seconds")
        return Report(
            prompt_tokens=len(self.request.prompt),
            generated_tokens=self.generated,
            continued_tokens=self.continued,
            blocks_now=ceil_div(self.length, block_size),
            blocks_peak_uncompressed=ceil_div(self.position, block_size),
            prefill="compacted" if self.compacts_prefill else "dense",
            reached_context=self.finish_reason == "length" and self.generated < self.request.params.max_tokens,
            blocks_history=tuple(self.blocks_history),
            documents=tuple(self.documents),
            full_prefill_seconds=self.full_prefill_seconds,
            **{name: getattr(self, name) for name in (*fields, *more, *seconds)},
        )


@dataclasses.dataclass
class Kept:
    """A row that ended and can be continued. Its last token may have no K and V yet."""

    tokens: list[int]
    length: int
    position: int
    keys: list[bytes]
    dirty: bool
    root: bytes
    budget: RowBudget | None
    blocks: list[int]
    """Empty while it is in host memory."""
    observed: Any = None
    swapped: Swapped | None = None
    waiting: int = 0
    """Queued requests that continue from it: as long as there are any it is swapped out rather than dropped."""

    @property
    def history(self) -> str:
        """What a request that continues it reports of it."""
        return "compressed" if self.length < self.position else "whole"
