"""The engine: requests come, share rows and blocks with others, and go.

The host keeps everything that decides (queue, blocks, lengths, positions) as plain integers, and sends it along with
each call; the device keeps the pool. The host reads one thing a round: its tokens.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Sequence

import jax

import pallas_kernels
from jaxkv import decode, monitor
from jaxkv.blocks import BlockManager
from jaxkv.compression import CompressionConfig, freed_blocks, written_blocks
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.device import Device, Move
from jaxkv.dims import ceil_div
from jaxkv.model import Weights
from jaxkv.request import Event, Report, Request, Row
from jaxkv.sampling import Sampling
from jaxkv.stats import QueryStats
from jaxkv.terms import KEEP_EVERYTHING, Terms


class Engine:
    """Continuous batching over one pool.

    ``add`` queues a request, ``step`` moves everything on and returns what happened, ``cancel`` ends a request early.
    Until preemption exists a request is admitted only when the most blocks it can ever hold fit beside the others'.

    Args:
      weights, model: a decoder.
      cache: the pool's size and the shapes to compile for.
      eos_token_ids: tokens that end a text.
      compression: how rows are kept within a budget, unless a request says otherwise.
      stats: query statistics, for a method that has use for them; None with TriAttention takes each row's own.
      implementation: as for ``pallas_kernels.attend``.
      step_tokens: prompt tokens that a step prefills before its decode round, rounded up to a call; more finishes
        prompts sooner, fewer keeps decoding rows from waiting.
    """

    def __init__(
        self,
        weights: Weights,
        model: ModelConfig,
        cache: CacheConfig,
        *,
        eos_token_ids: Sequence[int] = (),
        compression: CompressionConfig = KEEP_EVERYTHING,
        stats: QueryStats | None = None,
        implementation: pallas_kernels.Implementation | None = None,
        step_tokens: int | None = None,
    ) -> None:
        self.terms = Terms(model, cache, tuple(eos_token_ids), compression)
        self.cache = cache
        self.step_tokens = step_tokens or cache.rows * cache.prefill_chunk
        self.blocks = BlockManager(cache.blocks)
        self.device = Device(weights, model, cache, compression, stats, implementation)
        self._ids = itertools.count()
        self._queue: collections.deque[tuple[int, Request, float]] = collections.deque()
        self._rows: list[Row | None] = [None] * cache.rows
        self._reserved = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> int:
        """Queue a request and return its id.

        Raises:
          RequestError: it can never be served: an empty prompt, a token out of range, too many stop tokens, a prompt
            that fills the context, a budget that leaves nothing to choose, or more blocks than the pool has.
        """
        self.terms.check(request)
        request_id = next(self._ids)
        self._queue.append((request_id, request, time.perf_counter()))
        return request_id

    def cancel(self, request_id: int) -> list[Event]:
        """End a request wherever it is. One that is unknown or has ended is left alone: nothing happens."""
        for row in self._admitted():
            if row.request_id == request_id:
                row.finish_reason = "cancelled"
                return [self._finish(row)]
        for entry in self._queue:
            if entry[0] == request_id:
                self._queue.remove(entry)
                waited = time.perf_counter() - entry[2]
                report = Report("cancelled", len(entry[1].prompt), queued_seconds=waited)
                return [Event(request_id, report=report)]
        return []

    @property
    def has_work(self) -> bool:
        """Whether a request is queued or running."""
        return bool(self._queue) or any(row is not None for row in self._rows)

    @property
    def queued(self) -> list[int]:
        """Ids of the requests that wait for a row or for blocks, first come first."""
        return [request_id for request_id, _, _ in self._queue]

    def state(self, request_id: int) -> str:
        """``queued``, ``prefilling``, ``decoding``, or ``finished`` for one that is no longer here."""
        for row in self._admitted():
            if row.request_id == request_id:
                return "decoding" if row.decoding else "prefilling"
        return "queued" if request_id in self.queued else "finished"

    # -- running -------------------------------------------------------------------------------------------------

    def warmup(self) -> monitor.Compiles:
        """Compile every program before a request is there; return how many there were and the seconds they took."""
        return self.device.warmup()

    def step(self, round_steps: int | None = None) -> list[Event]:
        """Admit what fits, prefill up to ``step_tokens``; unless that gave first tokens, compact what is due and decode
        one round; return the news.

        Args:
          round_steps: most steps of the round, at most the cache's: fewer make a smoother stream. None is the cache's.
        """
        self._admit()
        # A first token is told at once, not after the round that follows it. Prompts that get theirs fill the rows, so
        # decoding rows wait for no more than that.
        return self._prefill() or self._decode(min(round_steps or self.cache.round_steps, self.cache.round_steps))

    def _admit(self) -> None:
        while self._queue:
            request_id, request, arrived = self._queue[0]
            free = next((index for index, row in enumerate(self._rows) if row is None), None)
            needed = self.terms.worst_case(request)
            # First come, first served: a small request does not overtake one that waits for blocks.
            if free is None or self._reserved + needed > self.cache.blocks:
                return
            self._queue.popleft()
            self._reserved += needed
            self._rows[free] = Row(
                request_id=request_id,
                index=free,
                request=request,
                max_tokens=self.terms.most_tokens(request),
                reserved=needed,
                queued_seconds=time.perf_counter() - arrived,
                budget=self.terms.budget(request),
                compacts_prefill=self.terms.compacts_prefill(request),
            )

    def _prefill(self) -> list[Event]:
        events: list[Event] = []
        budget = self.step_tokens
        while budget > 0:
            waiting = sorted((r for r in self._admitted() if not r.decoding), key=lambda r: r.request_id)
            rows = waiting[: self.cache.prefill_rows]
            if not rows:
                break
            events += self._prefill_call(rows)
            budget -= self.cache.prefill_rows * self.cache.prefill_chunk
        return events

    def _prefill_call(self, rows: list[Row]) -> list[Event]:
        self._compact([row for row in rows if row.compacts_prefill and row.due])
        start = time.perf_counter()
        chunk = decode.Chunk.idle(self.cache)
        for at, row in enumerate(rows):
            # Nothing has been generated, so `position` tokens of the prompt are done, however few slots they hold.
            tokens = row.request.prompt[row.position : row.position + self.cache.prefill_chunk]
            self._grow(row, row.length + len(tokens))
            chunk.tokens[at, : len(tokens)] = tokens
            chunk.count[at] = len(tokens)
            chunk.table[at, : len(row.blocks)] = row.blocks
            chunk.length[at], chunk.position[at], chunk.row[at] = row.length, row.position, row.index
            self._fill_sampling(chunk.sampling, at, row)
        out = self.device.prefill(chunk)
        for at, row in enumerate(rows):
            row.length += int(chunk.count[at])
            row.position += int(chunk.count[at])
        done = [(at, row) for at, row in enumerate(rows) if row.position == len(row.request.prompt)]
        if done:
            tokens, logprobs = self.device.read((out.token, out.logprob))
        else:
            jax.block_until_ready(out.token)
        seconds = time.perf_counter() - start
        for row in rows:
            row.prefill_seconds += seconds
        events: list[Event] = []
        for at, row in done:
            events += self._take(row, [int(tokens[at])], [float(logprobs[at])])
        return events

    def _decode(self, round_steps: int) -> list[Event]:
        decoding = [row for row in self._admitted() if row.decoding]
        if not decoding:
            return []
        self._compact([row for row in decoding if row.due])
        start = time.perf_counter()
        # The round ends where the first row has its last token or is due, so what a live row grows by is known before.
        steps = min(round_steps, *(min(row.tokens_left, row.room) for row in decoding))
        rows = decode.Rows.idle(self.cache)
        for row in decoding:
            self._grow(row, row.length + steps)
            rows.token[row.index] = row.token
            rows.table[row.index, : len(row.blocks)] = row.blocks
            rows.length[row.index], rows.position[row.index] = row.length, row.position
            rows.active[row.index] = True
            self._fill_sampling(rows.sampling, row.index, row)
        out = self.device.decode(rows, steps)
        tokens, logprobs, count = self.device.read((out.tokens, out.logprobs, out.count))
        seconds = time.perf_counter() - start
        events = []
        for row in decoding:
            row.decode_seconds += seconds
            taken = int(count[row.index])
            row.length += taken
            row.position += taken
            events += self._take(row, tokens[row.index, :taken].tolist(), logprobs[row.index, :taken].tolist())
        return events

    def _take(self, row: Row, tokens: list[int], logprobs: list[float]) -> list[Event]:
        """Give a row its new tokens, end it if one of them says so, and tell."""
        stops = self.terms.stop_ids(row.request)
        kept = 0
        for token in tokens:
            kept += 1
            row.token = token
            stopped = token in stops or (row.request.watch is not None and row.request.watch(token))
            if stopped or row.generated + kept == row.max_tokens:
                row.finish_reason = "stop" if stopped else "length"
                break
        # Tokens after a stop string were computed, but belong to nobody.
        row.length -= len(tokens) - kept
        row.position -= len(tokens) - kept
        row.generated += kept
        event = Event(row.request_id, tuple(tokens[:kept]), tuple(logprobs[:kept]))
        return [event, self._finish(row)] if row.finish_reason else [event]

    def _compact(self, rows: list[Row]) -> None:
        """Bring rows down to their budgets. Which blocks come free is settled before anything is scored."""
        if not rows:
            return
        start = time.perf_counter()
        # All fresh blocks are taken before any block is given back: none is one row's source and another's target.
        moves = [self._move(row) for row in rows]
        for row, move in zip(rows, moves, strict=True):
            self._shrink(row, move)
        self.device.compact(moves)
        # Nothing is read: this waits so that the seconds are those of the compaction and not of the next round.
        jax.block_until_ready(self.device.pool)
        seconds = time.perf_counter() - start
        for row in rows:
            row.compaction_seconds += seconds

    def _move(self, row: Row) -> Move:
        assert row.budget is not None
        target = list(row.blocks)
        written = written_blocks(row.length, row.budget, self.cache.block_size)
        shared = [at for at in written if self.blocks.holders(row.blocks[at]) > 1]
        for at, fresh in zip(shared, self.blocks.allocate(len(shared)), strict=True):
            target[at] = fresh
        return Move(row.index, row.blocks, target, row.length, row.position, row.budget)

    def _shrink(self, row: Row, move: Move) -> None:
        """Give back what a row no longer needs: its tail, and its share of the blocks that fresh ones replace."""
        tail = freed_blocks(row.length, move.budget.b_row, self.cache.block_size)
        dropped = [was for was, now in zip(move.source, move.target, strict=True) if was != now]
        row.blocks_returned += len(self.blocks.release(move.source[tail.start :] + dropped))
        row.blocks = move.target[: tail.start]
        row.tokens_evicted += row.length - move.budget.kept(row.length)
        row.length = move.budget.kept(row.length)
        row.compactions += 1
        row.note_blocks()

    def _finish(self, row: Row) -> Event:
        report = row.report(self.cache.block_size)
        self.blocks.release(row.blocks)
        self._reserved -= row.reserved
        self._rows[row.index] = None
        return Event(row.request_id, report=report)

    # -- details -------------------------------------------------------------------------------------------------

    def _admitted(self) -> list[Row]:
        return [row for row in self._rows if row is not None]

    def _grow(self, row: Row, slots: int) -> None:
        """Give a row the blocks that ``slots`` slots take."""
        row.blocks += self.blocks.allocate(ceil_div(slots, self.cache.block_size) - len(row.blocks))
        row.note_blocks()

    def _fill_sampling(self, arrays: Sampling, at: int, row: Row) -> None:
        params = row.request.params
        for field in ("temperature", "top_p", "top_k", "min_p", "seed"):
            getattr(arrays, field)[at] = getattr(params, field)
        arrays.generated[at] = row.generated
        stops = self.terms.stop_ids(row.request)
        arrays.stop_ids[at, : len(stops)] = stops
