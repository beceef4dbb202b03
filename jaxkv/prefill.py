"""Prompts on their way into the pool: a chunk at a time, with what the pool has of them, until their first tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxkv import decode
from jaxkv.device import Device
from jaxkv.dims import host_array
from jaxkv.documents import Documents
from jaxkv.memory import Memory
from jaxkv.row import Row
from jaxkv.sampling import Sampling
from jaxkv.scheduler import Scheduler
from jaxkv.terms import Terms


class First(NamedTuple):
    """The first token of a row whose prompt is in."""

    row: Row
    token: int
    logprob: float


class Prefill:
    """The part of a step that prompts get.

    Args:
      terms, scheduler, memory, device: the engine's.
      compact: brings rows down to their budgets.
      forks: gives the continuations that begin with a row's prompt, once.
      documents: blends prompts that have some; None where there is no store.
    """

    def __init__(
        self,
        terms: Terms,
        scheduler: Scheduler,
        memory: Memory,
        device: Device,
        compact: Callable[[list[Row]], None],
        forks: Callable[[Row], list[Row]],
        documents: Documents | None = None,
    ) -> None:
        self._terms, self._cache = terms, terms.cache
        self._scheduler, self._memory, self._device = scheduler, memory, device
        self._compact, self._forks, self._documents = compact, forks, documents

    def run(self, budget: int) -> list[First]:
        """Prefill the oldest prompts, ``budget`` tokens rounded up to a call, and return the first tokens there are."""
        found: list[First] = []
        while budget > 0:
            # A row whose first token was found just now decodes as soon as the engine has taken that token.
            begun = {one.row.order for one in found}
            waiting = [row for row in self._scheduler.rows if not row.decoding and row.order not in begun]
            if not waiting:
                break
            rows = waiting[: self._cache.prefill_rows]
            blended = [row for row in rows if self._blends(row)]
            found += self._blend(rows[0]) if rows[0] in blended else self._call([r for r in rows if r not in blended])
            budget -= self._cache.prefill_rows * self._cache.prefill_chunk
        return found

    def _call(self, rows: list[Row]) -> list[First]:
        for row in rows:
            self._memory.find(row)
        self._compact([row for row in rows if row.compacts_before_chunk(self._cache.prefill_chunk)])
        start = time.perf_counter()
        chunk = decode.Chunk.idle(self._cache)
        ready: list[tuple[int, Row]] = []
        for at, row in enumerate(rows):
            if not row.placed:
                continue
            tokens = row.next_chunk(self._cache.prefill_chunk)
            if not self._scheduler.room(row, self._memory.missing(row, row.length + len(tokens))):
                continue
            self._memory.grow(row, row.length + len(tokens))
            ready.append((at, row))
            chunk.tokens[at, : len(tokens)] = tokens
            chunk.count[at] = len(tokens)
            chunk.table[at, : len(row.blocks)] = row.blocks
            chunk.length[at], chunk.position[at], chunk.row[at] = row.length, row.position, row.index
            self._terms.fill(chunk.sampling, at, row)
        if not ready:
            return []
        out = self._device.prefill(chunk)
        for at, row in ready:
            row.length += int(chunk.count[at])
            row.position += int(chunk.count[at])
            self._memory.note(row)
        done = [(at, row) for at, row in ready if row.position == row.prompt_end]
        if self._documents is not None:
            for _, row in done:
                self._documents.computed(row)
        first = self._first_tokens(done, out.logits, out.token, out.logprob)
        seconds = time.perf_counter() - start
        for _, row in ready:
            row.prefill_seconds += seconds
        return first

    def _blends(self, row: Row) -> bool:
        if self._documents is None or row.compacts_prefill:
            return False
        self._memory.find(row)
        return self._documents.blends(row)

    def _blend(self, row: Row) -> list[First]:
        """Put a whole prompt in at once, its documents' KV out of the store; nothing of it is found by others."""
        assert self._documents is not None
        start = time.perf_counter()
        if not self._scheduler.room(row, self._memory.missing(row, row.prompt_end)):
            return []
        self._memory.grow(row, row.prompt_end)
        blended = self._documents.blend(row)
        if blended is None:
            return []
        logits, row.length = blended
        self._memory.note(row)
        row.length = row.position = row.prompt_end
        row.dirty = True
        token, logprob = self._draw([(0, row)], logits)
        first = self._first_tokens([(0, row)], logits, token, logprob, at=row.index)
        row.prefill_seconds += time.perf_counter() - start
        return first

    def _first_tokens(
        self, done: list[tuple[int, Row]], logits: Any, token: Any, logprob: Any, at: int | None = None
    ) -> list[First]:
        """Return the first tokens of rows, whose logits stand at some places, and of those that fork from them.

        ``token`` and ``logprob`` are those of the rows at the same places, or at ``at`` for a single row.
        """
        if not done:
            jax.block_until_ready(token)
            return []
        # Forks first: a row that ends with its first token lets go of its blocks.
        forks = [(place, fork) for place, row in done for fork in self._fork(row)]
        again = self._draw(forks, logits) if forks else None
        tokens, logprobs, more = self._device.read((token, logprob, again))
        places = [(place if at is None else at, row) for place, row in done]
        first = [First(row, int(tokens[place]), float(logprobs[place])) for place, row in places]
        return first + [First(fork, int(more[0][fork.index]), float(more[1][fork.index])) for _, fork in forks]

    def _fork(self, row: Row) -> list[Row]:
        """Begin a row's other continuations in its blocks, as many as there are places for. The others queue."""
        placed = []
        for fork in self._forks(row):
            if self._scheduler.place(fork):
                self._memory.share(row, fork)
                placed.append(fork)
            else:
                self._scheduler.enqueue(fork)
        if placed:
            self._device.fork(row.index, [fork.index for fork in placed])
        return placed

    def _draw(self, rows: Sequence[tuple[int, Row]], logits: Any) -> tuple[jax.Array, jax.Array]:
        """Draw first tokens from the logits at some places, and return them at the rows' own places."""
        index, sampling = host_array(self._cache.rows), Sampling.idle(self._cache.rows)
        for at, row in rows:
            index[row.index] = at
            self._terms.fill(sampling, row.index, row)
        return self._device.draw_again(logits, index, sampling)
