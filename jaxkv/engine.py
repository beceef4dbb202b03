"""The engine: requests come, share rows and blocks with others, and go.

The host keeps everything that decides (queue, blocks, lengths, positions) as plain integers, and sends it along with
each call; the device keeps the pool. The host reads one thing a round: its tokens.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import pallas_kernels
from jaxkv import decode, monitor
from jaxkv.blocks import BlockManager
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.dims import ceil_div
from jaxkv.model import Weights
from jaxkv.pool import KVPool
from jaxkv.request import Event, Report, Request, Row
from jaxkv.sampling import STOP_IDS, Sampling


class Engine:
    """Continuous batching over one pool.

    ``add`` queues a request, ``step`` moves everything on and returns what happened, ``cancel`` ends a request early.
    Until preemption exists a request is admitted only when its worst case, prompt and max_tokens, fits beside the
    others'.

    Args:
      weights, model: a decoder.
      cache: the pool's size and the shapes to compile for.
      eos_token_ids: tokens that end a text.
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
        implementation: pallas_kernels.Implementation | None = None,
        step_tokens: int | None = None,
    ) -> None:
        if len(eos_token_ids) > STOP_IDS:
            raise ValueError(f"{len(eos_token_ids)} eos tokens are more than the {STOP_IDS} a row can watch for")
        self.model, self.cache = model, cache
        self.implementation = pallas_kernels.candidates(implementation)[0]
        self.step_tokens = step_tokens or cache.rows * cache.prefill_chunk
        self.pool = KVPool.create(model, cache)
        self.blocks = BlockManager(cache.blocks)
        self._weights = weights
        self._eos = tuple(eos_token_ids)
        self._ids = itertools.count()
        self._queue: collections.deque[tuple[int, Request, float]] = collections.deque()
        self._rows: list[Row | None] = [None] * cache.rows
        self._reserved = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> int:
        """Queue a request and return its id.

        Raises:
          RequestError: it can never be served: an empty prompt, a token out of range, too many stop tokens, a prompt
            that fills the context, or a worst case larger than the pool.
        """
        self.check(request)
        request_id = next(self._ids)
        self._queue.append((request_id, request, time.perf_counter()))
        return request_id

    def check(self, request: Request) -> None:
        """Raise the ``RequestError`` that ``add`` would."""
        request.check(self.model, self.cache, self._eos)

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
                return [Event(request_id, report=_never_admitted(entry[1], waited))]
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
        with monitor.compiles() as compiled:
            chunk, rows = decode.Chunk.idle(self.cache), decode.Rows.idle(self.cache)
            self.pool, *outputs = self._call_prefill(chunk)
            self.pool, _, out = self._call_round(rows, 0)
            jax.block_until_ready((self.pool, outputs, out))
        return compiled

    def step(self, round_steps: int | None = None) -> list[Event]:
        """Admit what fits, prefill up to ``step_tokens``, decode one round; return the news.

        Args:
          round_steps: most steps of the round, at most the cache's: fewer make a smoother stream. None is the cache's.
        """
        self._admit()
        events = self._prefill()
        return events + self._decode(min(round_steps or self.cache.round_steps, self.cache.round_steps))

    def _admit(self) -> None:
        while self._queue:
            request_id, request, arrived = self._queue[0]
            free = next((index for index, row in enumerate(self._rows) if row is None), None)
            needed = request.worst_case(self.cache)
            # First come, first served: a small request does not overtake one that waits for blocks.
            if free is None or self._reserved + needed > self.cache.blocks:
                return
            self._queue.popleft()
            self._reserved += needed
            self._rows[free] = Row(
                request_id=request_id,
                index=free,
                request=request,
                max_tokens=request.most_tokens(self.cache),
                reserved=needed,
                queued_seconds=time.perf_counter() - arrived,
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
        start = time.perf_counter()
        chunk = decode.Chunk.idle(self.cache)
        for at, row in enumerate(rows):
            # Nothing has been generated, so what is in the pool is the prompt's first `position` tokens.
            tokens = row.request.prompt[row.position : row.position + self.cache.prefill_chunk]
            self._grow(row, row.length + len(tokens))
            chunk.tokens[at, : len(tokens)] = tokens
            chunk.count[at] = len(tokens)
            chunk.table[at, : len(row.blocks)] = row.blocks
            chunk.length[at], chunk.position[at] = row.length, row.position
            self._fill_sampling(chunk.sampling, at, row)
        self.pool, tokens, logprobs = self._call_prefill(chunk)
        done = []
        for at, row in enumerate(rows):
            row.length += int(chunk.count[at])
            row.position += int(chunk.count[at])
            if row.position == len(row.request.prompt):
                done.append((at, row))
        if done:
            tokens, logprobs = jax.device_get((tokens, logprobs))
        else:
            jax.block_until_ready(tokens)
        seconds = time.perf_counter() - start
        for row in rows:
            row.prefill_seconds += seconds
        return [event for at, row in done for event in self._take(row, tokens[at : at + 1], logprobs[at : at + 1])]

    def _decode(self, round_steps: int) -> list[Event]:
        decoding = [row for row in self._admitted() if row.decoding]
        if not decoding:
            return []
        start = time.perf_counter()
        # The round ends when the first row has its last token, so what a live row grows by is known beforehand.
        steps = min(round_steps, *(row.tokens_left for row in decoding))
        rows = decode.Rows.idle(self.cache)
        for row in decoding:
            self._grow(row, row.length + steps)
            rows.token[row.index] = row.token
            rows.table[row.index, : len(row.blocks)] = row.blocks
            rows.length[row.index], rows.position[row.index] = row.length, row.position
            rows.active[row.index] = True
            self._fill_sampling(rows.sampling, row.index, row)
        self.pool, _, out = self._call_round(rows, steps)
        tokens, logprobs, count = jax.device_get((out.tokens, out.logprobs, out.count))
        seconds = time.perf_counter() - start
        events = []
        for row in decoding:
            row.decode_seconds += seconds
            taken = int(count[row.index])
            row.length += taken
            row.position += taken
            events += self._take(row, tokens[row.index, :taken], logprobs[row.index, :taken])
        return events

    def _take(self, row: Row, tokens: np.ndarray, logprobs: np.ndarray) -> list[Event]:
        """Give a row its new tokens, end it if one of them says so, and tell."""
        stops = row.request.stop_ids(self._eos)
        kept = 0
        for token in tokens.tolist():
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
        event = Event(row.request_id, tuple(tokens[:kept].tolist()), tuple(logprobs[:kept].tolist()))
        return [event, self._finish(row)] if row.finish_reason else [event]

    def _finish(self, row: Row) -> Event:
        held = ceil_div(row.length, self.cache.block_size)
        self.blocks.release(row.blocks)
        self._reserved -= row.reserved
        self._rows[row.index] = None
        prompt = len(row.request.prompt)
        report = Report(
            finish_reason=row.finish_reason,
            prompt_tokens=prompt,
            generated_tokens=row.generated,
            position=row.position,
            length=row.length,
            blocks_now=held,
            blocks_peak=row.blocks_peak,
            prefill_seconds=row.prefill_seconds,
            decode_seconds=row.decode_seconds,
            queued_seconds=row.queued_seconds,
            reached_context=row.finish_reason == "length" and row.generated < row.request.params.max_tokens,
        )
        return Event(row.request_id, report=report)

    # -- details -------------------------------------------------------------------------------------------------

    def _admitted(self) -> list[Row]:
        return [row for row in self._rows if row is not None]

    def _grow(self, row: Row, slots: int) -> None:
        """Give a row the blocks that ``slots`` slots take."""
        row.blocks += self.blocks.allocate(ceil_div(slots, self.cache.block_size) - len(row.blocks))
        row.blocks_peak = max(row.blocks_peak, len(row.blocks))

    def _fill_sampling(self, arrays: Sampling, at: int, row: Row) -> None:
        params = row.request.params
        for field in ("temperature", "top_p", "top_k", "min_p", "seed"):
            getattr(arrays, field)[at] = getattr(params, field)
        arrays.generated[at] = row.generated
        stops = row.request.stop_ids(self._eos)
        arrays.stop_ids[at, : len(stops)] = stops

    def _call_prefill(self, chunk: decode.Chunk) -> Any:
        return decode.prefill_sample(
            self._weights, self.pool, chunk, config=self.model, implementation=self.implementation
        )

    def _call_round(self, rows: decode.Rows, steps: int) -> Any:
        return decode.decode_round(
            self._weights,
            self.pool,
            rows,
            np.int32(steps),
            config=self.model,
            max_steps=self.cache.round_steps,
            implementation=self.implementation,
        )


def _never_admitted(request: Request, waited: float) -> Report:
    return Report("cancelled", len(request.prompt), 0, 0, 0, 0, 0, 0.0, 0.0, waited, False)
