"""Who is in, who waits, and who gives way when the pool is full."""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence

from jaxkv.config import CacheConfig
from jaxkv.device import Device
from jaxkv.dims import ceil_div
from jaxkv.memory import Memory
from jaxkv.request import Totals
from jaxkv.row import NOWHERE, Row
from jaxkv.terms import Terms


class Scheduler:
    """Places of the engine and the queue before them.

    Rows are admitted in the order they came, as soon as their prompts fit. When blocks lack, rows that ended and are
    only kept go first, then the newest row gives way, be it the one that asks: it returns to the queue, which is in
    order of age. The oldest row never gives way, so there is always one that goes on to its end.

    Attributes:
      queue: rows that wait, the oldest first. Some have run before.
      totals: counts of everything, for the engine.
    """

    def __init__(self, terms: Terms, cache: CacheConfig, memory: Memory, device: Device) -> None:
        self.terms, self.cache = terms, cache
        self.queue: list[Row] = []
        self.totals = Totals()
        self._memory, self._device = memory, device
        self._places: list[Row | None] = [None] * cache.rows

    @property
    def rows(self) -> list[Row]:
        """Rows that have a place, the oldest first."""
        return sorted((row for row in self._places if row is not None), key=_order)

    def enqueue(self, row: Row) -> None:
        """Put a row where its age belongs in the queue."""
        bisect.insort(self.queue, row, key=_order)

    def place(self, row: Row) -> bool:
        """Give a row a place; return whether there was one."""
        index = next((index for index, one in enumerate(self._places) if one is None), NOWHERE)
        if index == NOWHERE:
            return False
        row.index, self._places[index] = index, row
        return True

    def remove(self, row: Row) -> None:
        """Take a row out of its place, or out of the queue."""
        if row.placed:
            self._places[row.index], row.index = None, NOWHERE
        elif row in self.queue:
            self.queue.remove(row)

    def admit(self) -> None:
        """Let in what fits. First come, first served: a small request does not overtake one that waits for blocks."""
        while self.queue and self._fits(self.queue[0]) and self.place(self.queue[0]):
            row = self.queue.pop(0)
            row.queued_seconds += time.perf_counter() - row.arrived
            if row.swapped is not None:
                self._memory.swap_in(row)
            elif row.continued:
                self._memory.resume(row)
            if row.request.params.penalised:
                self._device.mark(row.index, row.tokens[: row.prompt_end], row.tokens[row.prompt_end : -1])
            self._memory.find(row)

    def room(self, row: Row, blocks: int) -> bool:
        """Make blocks available to a row; False if it had to give way itself."""
        while self._memory.blocks.available < blocks:
            if self._memory.make_room():
                continue
            newest = self.rows[-1]
            self._preempt(newest)
            if newest is row:
                return False
        return True

    def _preempt(self, row: Row) -> None:
        if row.decoding or row.continued:
            self._memory.swap_out(row)
        else:
            # Nobody has been told of anything yet. What it computed can be found in the pool for as long as it lasts.
            self._memory.release(row)
            row.restart()
        row.preemptions += 1
        self.totals.preemptions += 1
        row.arrived = time.perf_counter()
        self.remove(row)
        self.enqueue(row)

    def _fits(self, row: Row) -> bool:
        """Whether a prompt fits beside what has been promised, with a reserve for the rows at work."""
        rows = self.rows
        promised = sum(max(0, self._prompt_blocks(one) - len(one.blocks)) for one in rows if not one.decoding)
        while True:
            needed = self._needed(row) + promised + (self._reserve([*rows, row]) if rows else 0)
            if needed <= self._memory.blocks.available:
                return True
            if not self._memory.make_room():
                return False

    def _reserve(self, rows: Sequence[Row]) -> int:
        """Blocks that no prompt is given: what rows without a budget grow by in a round, and room for one compaction,
        which may have to copy a whole row out of shared blocks before it gives any back.
        """
        size = self.cache.block_size
        growing = sum(row.budget is None for row in rows)
        budgets = [row.budget.b_row for row in rows if row.budget is not None]
        return growing * ceil_div(self.cache.round_steps, size) + ceil_div(max(budgets, default=0), size)

    def _needed(self, row: Row) -> int:
        """Blocks that a queued row has to find before it may begin."""
        if row.swapped is not None:
            return self._prompt_blocks(row) if not row.decoding else ceil_div(row.length, self.cache.block_size) + 1
        held = self._memory.held_by_others(row)
        if row.request.continue_from is not None:
            # Of what is continued, a half-full last block is copied before it is written.
            held = max(0, len(self._memory.kept_row(row.request.continue_from).blocks) - 1)
        return self._prompt_blocks(row) - held

    def _prompt_blocks(self, row: Row) -> int:
        """Blocks that a row holds at most until its prompt is in."""
        if not row.continued:
            return self.terms.prefill_peak(row.request)
        slots = row.length + row.prompt_end - row.position
        if row.budget is not None:
            slots = min(slots, max(row.budget.trigger, row.length))
        return ceil_div(slots, self.cache.block_size)


def _order(row: Row) -> tuple[int, int]:
    return row.order
