"""Which row has which blocks: found, grown, shared, moved by a compaction, swapped out, kept after the end.

Everything is settled here in integers before the device is told. Who has to give way when blocks lack is the engine's
to say; nothing in here takes a block from a row.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

from jaxkv import keys
from jaxkv.blocks import BlockManager
from jaxkv.compression import freed_blocks, written_blocks
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.device import Device, Move
from jaxkv.dims import ceil_div
from jaxkv.request import RequestError
from jaxkv.row import Kept, Row, Swapped


class Memory:
    """The pool's blocks and what rows hold of them.

    Args:
      model, cache: a decoder and its pool.
      device: the pool itself.
      weights_digest: of the weights, where keys have to mean something outside of this engine.

    Attributes:
      blocks: who holds what.
      kept: rows that ended and can be continued, by request id, the least recently used first.
      give_way: takes blocks from work that nobody waits for, and says whether there were any.
    """

    def __init__(self, model: ModelConfig, cache: CacheConfig, device: Device, weights_digest: str = "") -> None:
        self.blocks = BlockManager(cache.blocks)
        self.kept: collections.OrderedDict[int, Kept] = collections.OrderedDict()
        self.give_way: Callable[[], bool] = lambda: False
        self._model, self._cache, self._device = model, cache, device
        self._weights_digest = weights_digest

    # -- prefixes ------------------------------------------------------------------------------------------------

    def root(self, salt: str) -> bytes:
        """Return the fingerprint that the keys of requests with this salt begin from."""
        return keys.fingerprint(self._model, dtype=self._cache.dtype, weights=self._weights_digest, salt=salt)

    def prompt_keys(self, prompt: Sequence[int], root: bytes) -> list[bytes]:
        """Return the keys of a prompt's full blocks; none where prefixes are not looked for."""
        return keys.prefix_keys(root, prompt, self._cache.block_size) if self._cache.prefix_cache else []

    def findable(self, row: Row) -> Sequence[bytes]:
        """Return the keys of those prompt blocks that a row may take from others.

        Its last token is always computed, for the logits that follow it. A prompt that is compacted between its chunks
        takes nothing past the first compaction. What a policy gathers from queries cannot be found in blocks, so where
        it does, a row with a budget computes its whole prompt.
        """
        if row.continued or row.dirty or (self._device.observed is not None and row.budget is not None):
            return ()
        slots = row.prompt_end - 1
        if row.compacts_prefill and row.budget is not None:
            slots = min(slots, ceil_div(row.budget.trigger, self._cache.prefill_chunk) * self._cache.prefill_chunk)
        return row.prompt_keys[: slots // self._cache.block_size]

    def find(self, row: Row) -> None:
        """Give a row the blocks that follow what it holds, as far as they are in the pool."""
        size = self._cache.block_size
        if row.length % size or not len(row.keys) == len(row.blocks) == row.length // size:
            return
        wanted = self.findable(row)[len(row.keys) :]
        found = self.blocks.find(wanted)
        self.blocks.share(found)
        row.blocks += found
        row.keys = [*row.keys, *wanted[: len(found)]]
        row.length += len(found) * size
        row.position += len(found) * size
        row.cached_tokens += len(found) * size
        row.note_blocks()

    def held_by_others(self, row: Row) -> int:
        """How many of a row's prompt blocks are in other rows, and take no room of their own."""
        found = self.blocks.find(self.findable(row))
        return sum(self.blocks.holders(block) > 0 for block in found)

    def note(self, row: Row) -> None:
        """Make a clean row's new full blocks findable."""
        size = self._cache.block_size
        if row.dirty or not self._cache.prefix_cache:
            return
        for at in range(len(row.keys), row.length // size):
            if at < len(row.prompt_keys):
                row.keys.append(row.prompt_keys[at])
            else:
                parent = row.keys[-1] if row.keys else row.root
                row.keys.append(keys.block_key(parent, row.tokens[at * size : (at + 1) * size]))
            self.blocks.remember(row.blocks[at], row.keys[-1])

    # -- growing -------------------------------------------------------------------------------------------------

    def missing(self, row: Row, slots: int) -> int:
        """How many blocks a row lacks for its first ``slots`` slots, a copy of one that others hold too included."""
        return max(0, ceil_div(slots, self._cache.block_size) - len(row.blocks)) + (self._shared_end(row) is not None)

    def grow(self, row: Row, slots: int) -> None:
        """Give a row the blocks that ``slots`` slots take. A half-full one that others hold too is copied first."""
        at = self._shared_end(row)
        if at is not None:
            (fresh,) = self.blocks.allocate(1)
            self._device.copy([row.blocks[at]], [fresh])
            self.blocks.release([row.blocks[at]])
            row.blocks[at] = fresh
        row.blocks += self.blocks.allocate(max(0, ceil_div(slots, self._cache.block_size) - len(row.blocks)))
        row.note_blocks()

    def _shared_end(self, row: Row) -> int | None:
        at, used = divmod(row.length, self._cache.block_size)
        return at if used and self.blocks.holders(row.blocks[at]) > 1 else None

    # -- compaction ----------------------------------------------------------------------------------------------

    def copies(self, row: Row) -> int:
        """How many fresh blocks a compaction of this row cannot do without: one for each that others hold too."""
        return sum(self.blocks.holders(row.blocks[at]) > 1 for at in self._written(row))

    def move(self, row: Row) -> Move:
        """Take the fresh blocks that a compaction of a row cannot do without. ``settle`` follows."""
        assert row.budget is not None
        target = list(row.blocks)
        shared = [at for at in self._written(row) if self.blocks.holders(row.blocks[at]) > 1]
        for at, fresh in zip(shared, self.blocks.allocate(len(shared)), strict=True):
            target[at] = fresh
        return Move(row.index, row.blocks, target, row.length, row.position, row.budget)

    def settle(self, rows: Sequence[Row], moves: Sequence[Move]) -> None:
        """Give back what rows that are compacted together no longer need.

        All fresh blocks are taken before any block is given back: none is one row's source and another's target.
        """
        for row, move in zip(rows, moves, strict=True):
            self._keep_prefix(row, move)
        for row, move in zip(rows, moves, strict=True):
            self._shrink(row, move)

    def _written(self, row: Row) -> range:
        assert row.budget is not None
        return written_blocks(row.length, row.budget, self._cache.block_size)

    def _keep_prefix(self, row: Row, move: Move) -> None:
        """Blocks that only this row holds but others could find are copied out of while there is room, else written."""
        for at in self._written(row):
            block = row.blocks[at]
            if move.target[at] != block or self.blocks.key(block) is None:
                continue
            if self.blocks.available:
                (move.target[at],) = self.blocks.allocate(1)
            else:
                self.blocks.forget(block)

    def _shrink(self, row: Row, move: Move) -> None:
        """Give back the row's tail, and its share of the blocks that fresh ones replace."""
        tail = move.source[freed_blocks(row.length, move.budget.b_row, self._cache.block_size).start :]
        replaced = [was for was, now in zip(move.source, move.target, strict=True) if was != now]
        kept = len(move.source) - len(tail)
        let_go = len(self.blocks.release(tail))
        row.blocks_returned += let_go
        # A block that a fresh one replaces comes free at the price of another: nothing is gained by it.
        row.blocks_dropped += len(tail) - let_go + len(replaced) - len(self.blocks.release(replaced))
        row.blocks = move.target[:kept]
        row.tokens_evicted += row.length - move.budget.kept(row.length)
        row.dirty = row.dirty or row.length > move.budget.b_row
        row.length = move.budget.kept(row.length)
        row.compactions += 1
        row.note_blocks()

    def share(self, row: Row, fork: Row) -> None:
        """Begin a row where another stands, in the same blocks."""
        fork.blocks, fork.keys = row.blocks[: ceil_div(row.length, self._cache.block_size)], list(row.keys)
        self.blocks.share(fork.blocks)
        fork.length, fork.position, fork.dirty = row.length, row.position, row.dirty
        fork.note_blocks()

    # -- out of the pool and back --------------------------------------------------------------------------------

    def trim(self, row: Row) -> None:
        """Release blocks that a row took ahead and has no slot in."""
        size = ceil_div(row.length, self._cache.block_size)
        self.blocks.release(row.blocks[size:])
        del row.blocks[size:]

    def swap_out(self, row: Row) -> None:
        """Move a row to host memory, bit for bit."""
        self.trim(row)
        row.swapped = Swapped(self._device.save(row.blocks), self._device.save_observed(row.index))
        self.release(row)

    def swap_in(self, row: Row) -> None:
        """Bring a row back, into its present place and whichever blocks can be had."""
        assert row.swapped is not None
        row.blocks = self.blocks.allocate(ceil_div(row.length, self._cache.block_size))
        self._device.load(row.blocks, row.swapped.pages)
        self._device.load_observed(row.index, row.swapped.observed)
        row.swapped = None
        row.note_blocks()

    def release(self, row: Row) -> None:
        """Let go of everything that a row holds."""
        self.blocks.release(row.blocks)
        row.blocks = []

    # -- rows that ended -----------------------------------------------------------------------------------------

    def keep(self, row: Row) -> None:
        """Hold on to a row that ends, and let go of those kept longest where these become too many."""
        self.trim(row)
        self.kept[row.request_id] = Kept(
            tokens=row.tokens,
            length=row.length,
            position=row.position,
            keys=row.keys,
            dirty=row.dirty,
            root=row.root,
            budget=row.budget,
            blocks=row.blocks,
            observed=self._device.save_observed(row.index),
        )
        row.blocks = []
        idle = [name for name, kept in self.kept.items() if not kept.waiting]
        for name in idle[: max(0, len(self.kept) - self._cache.kept_rows)]:
            self.forget(name)

    def kept_row(self, request_id: int) -> Kept:
        """Return a row that can be continued.

        Raises:
          RequestError: there is none by this id.
        """
        if request_id not in self.kept:
            raise RequestError(
                f"continue_from={request_id}: no such row is kept. It was not asked for with keep=True, has not ended, "
                f"or had to go for others (kept_rows={self._cache.kept_rows}); send the whole text"
            )
        return self.kept[request_id]

    def forget(self, request_id: int) -> None:
        """Let go of a kept row. One that is unknown is left alone."""
        kept = self.kept.pop(request_id, None)
        if kept is not None:
            self.blocks.release(kept.blocks)

    def make_room(self) -> bool:
        """Take blocks from work that nobody waits for, or a kept row's, those of the least recently used; return
        whether there were any.

        A kept row that a queued request continues goes to host memory, any other is let go.
        """
        if self.give_way():
            return True
        for name, kept in self.kept.items():
            if not kept.blocks:
                continue
            if kept.waiting:
                kept.swapped = Swapped(self._device.save(kept.blocks))
                self.blocks.release(kept.blocks)
                kept.blocks = []
            else:
                self.forget(name)
            return True
        return False

    def resume(self, row: Row) -> None:
        """Begin a row with what the kept one that it continues has, which can be continued again: blocks are shared."""
        assert row.request.continue_from is not None
        kept = self.kept[row.request.continue_from]
        self.kept.move_to_end(row.request.continue_from)
        kept.waiting -= 1
        row.length, row.position, row.dirty = kept.length, kept.position, kept.dirty
        row.keys = list(kept.keys)
        row.swapped = Swapped([] if kept.swapped is None else kept.swapped.pages, kept.observed)
        if kept.swapped is not None:
            self.swap_in(row)
            return
        self.blocks.share(kept.blocks)
        row.blocks, row.swapped = list(kept.blocks), None
        self._device.load_observed(row.index, kept.observed)
        row.note_blocks()
