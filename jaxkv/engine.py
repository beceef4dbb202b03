"""The engine: requests come, share rows and blocks with others, and go.

The host keeps everything that decides (queue, blocks, lengths, positions) as plain integers, and sends it along with
each call; the device keeps the pool. The host reads one thing a round: its tokens.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import jax

import pallas_kernels
from jaxkv import decode, monitor
from jaxkv.compression import CompressionConfig
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.device import Device
from jaxkv.dims import ceil_div
from jaxkv.documents import Documents, DocumentsConfig
from jaxkv.memory import Memory
from jaxkv.model import Weights
from jaxkv.prefill import Prefill
from jaxkv.request import Event, Request, RequestError, Totals
from jaxkv.row import Kept, Row
from jaxkv.scheduler import Scheduler
from jaxkv.stats import QueryStats
from jaxkv.terms import KEEP_EVERYTHING, Terms

WAITING_SHARE = 8
"""A round is this many times shorter while a prompt waits for its next chunk: neither side waits long for the other."""


class Engine:
    """Continuous batching over one pool.

    ``add`` queues a request, ``step`` moves everything on and returns what happened, ``cancel`` ends a request early.
    When the pool is full the newest row gives way: it goes to host memory with all that it has, and comes back, bit for
    bit, when it fits again; see ``scheduler``. Prompts begin with what the pool has of them; see ``memory``.

    Args:
      weights, model: a decoder.
      cache: the pool's size and the shapes to compile for.
      eos_token_ids: tokens that end a text.
      compression: how rows are kept within a budget, unless a request says otherwise.
      stats: query statistics, for a method that has use for them; None with TriAttention takes each row's own.
      implementation: as for ``pallas_kernels.attend``.
      step_tokens: prompt tokens that a step prefills before its decode round, rounded up to a call. One call is the
        default, and the longest that decoding rows ever wait for a prompt; more finishes prompts sooner.
      weights_digest: of the weights, for keys that mean something outside of this engine.
      documents: how requests' documents are reused; needs a store.
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
        weights_digest: str = "",
        documents: DocumentsConfig | None = None,
    ) -> None:
        self.terms = Terms(model, cache, tuple(eos_token_ids), compression)
        self.cache = cache
        self.step_tokens = step_tokens or cache.prefill_rows * cache.prefill_chunk
        self.device = Device(weights, model, cache, compression, stats, implementation)
        self.memory = Memory(model, cache, self.device, weights_digest)
        self.blocks = self.memory.blocks
        self.scheduler = Scheduler(self.terms, cache, self.memory, self.device)
        self.documents = None
        if documents is not None:
            parts = (documents, weights, model, cache, self.device, self.memory, weights_digest, implementation)
            self.documents = Documents(*parts)
            self.memory.give_way = self.documents.give_way
        steps = (self._compact, self._forks, self.documents)
        self.prefill = Prefill(self.terms, self.scheduler, self.memory, self.device, *steps)
        self._ids = itertools.count()
        self._told_first = False

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> int:
        """Queue a request and return its id.

        Raises:
          RequestError: it can never be served: an empty prompt, a token out of range, too many stop tokens, a prompt
            that fills the context, a budget that leaves nothing to choose, more blocks than the pool has, or a row to
            continue that is not kept.
        """
        past = None if request.continue_from is None else self.memory.kept_row(request.continue_from)
        root = self.memory.root(request.salt)
        if past is not None and past.root != root:
            raise RequestError(f"salt={request.salt!r} is not that of the row it continues; give the same")
        self.terms.check(request, past)
        if request.segments:
            self._check_documents(request)
        row = self._row(next(self._ids), 0, request, root, past)
        row.forks = request.params.n - 1
        self.scheduler.enqueue(row)
        if past is not None:
            past.waiting += 1
        return row.request_id

    def cancel(self, request_id: int) -> list[Event]:
        """End a request wherever it is. One that is unknown or has ended is left alone: nothing happens."""
        rows = [row for row in (*self.scheduler.rows, *self.scheduler.queue) if row.request_id == request_id]
        rows += [fork for row in rows for fork in self._forks(row)]
        for row in rows:
            row.finish_reason = "cancelled"
        return [self._finish(row) for row in sorted(rows, key=lambda row: row.order)]

    def forget(self, request_id: int) -> None:
        """Let go of a row that was kept. One that a queued request continues, or that is unknown, is left alone."""
        kept = self.memory.kept.get(request_id)
        if kept is not None and not kept.waiting:
            self.memory.forget(request_id)

    @property
    def has_work(self) -> bool:
        """Whether a request is queued or running, or a document has yet to be computed for the store."""
        waiting = self.documents is not None and self.documents.has_work
        return waiting or bool(self.scheduler.queue or self.scheduler.rows)

    @property
    def queued(self) -> list[int]:
        """Ids of the requests that wait for a place or for blocks, the oldest first."""
        return list(dict.fromkeys(row.request_id for row in self.scheduler.queue))

    @property
    def rows(self) -> list[Row]:
        """The rows at work, the oldest first, to look at."""
        return self.scheduler.rows

    @property
    def totals(self) -> Totals:
        """What has been done since the engine was made."""
        return self.scheduler.totals

    def state(self, request_id: int) -> str:
        """``queued``, ``prefilling``, ``decoding``, or ``finished`` for one that is no longer here."""
        for row in self.rows:
            if row.request_id == request_id:
                return "decoding" if row.decoding else "prefilling"
        return "queued" if request_id in self.queued else "finished"

    # -- running -------------------------------------------------------------------------------------------------

    def warmup(self) -> monitor.Compiles:
        """Compile every program before a request is there; return how many there were and the seconds they took."""
        with monitor.compiles() as compiled:
            self.device.warmup()
            if self.documents is not None:
                self.documents.warmup()
        return compiled

    def step(self, round_steps: int | None = None) -> list[Event]:
        """Compact what is due, admit what fits, prefill up to ``step_tokens``, decode a round; return the news.

        First tokens are told at once, without a round; the next step then begins with one, so rows that decode never
        wait for more than ``step_tokens``.

        Args:
          round_steps: most steps of the round, at most the cache's: fewer make a smoother stream. None is the cache's.
        """
        self._compact([row for row in self.rows if row.decoding and row.due])
        self.scheduler.admit()
        decoding = any(row.decoding for row in self.rows)
        first = [] if self._told_first and decoding else self.prefill.run(self.step_tokens)
        events = [event for one in first for event in self._take(one.row, [one.token], [one.logprob])]
        self._told_first = bool(events)
        events = events or self._decode(min(round_steps or self.cache.round_steps, self.cache.round_steps))
        if self.documents is not None and all(row.decoding for row in self.rows):
            self.documents.advance(idle=not self.rows)
        return events

    def _check_documents(self, request: Request) -> None:
        if self.documents is None:
            raise RequestError("the request has documents and the engine has no store for their KV; give it one")
        if self.device.observed is not None and self.terms.budget(request) is not None:
            raise RequestError(
                f"method={self.terms.compression.method!r} gathers the queries of the whole prompt, and blending "
                "computes few of them; compress with statistics from a file, or without documents"
            )

    def _forks(self, row: Row) -> list[Row]:
        """Return the continuations that are still to begin with this row's prompt. They are asked for once."""
        count, row.forks = row.forks, 0
        return [self._row(row.request_id, choice, row.request, row.root, None) for choice in range(1, count + 1)]

    # -- decoding ------------------------------------------------------------------------------------------------

    def _decode(self, round_steps: int) -> list[Event]:
        decoding = [row for row in self.rows if row.decoding]
        self._compact([row for row in decoding if row.due])
        decoding = [row for row in decoding if row.placed]
        if not decoding:
            return []
        if any(not row.decoding for row in self.rows):
            round_steps = ceil_div(round_steps, WAITING_SHARE)
        start = time.perf_counter()
        # The round ends where the first row has its last token or is due, so what a live row grows by is known before.
        steps = min(round_steps, *(min(row.tokens_left, row.room) for row in decoding))
        rows = decode.Rows.idle(self.cache)
        ready = []
        for row in decoding:
            # The oldest come first, and only the newest give way: a row that is ready stays.
            if not row.placed or not self.scheduler.room(row, self.memory.missing(row, row.length + steps)):
                continue
            self.memory.grow(row, row.length + steps)
            ready.append(row)
            rows.token[row.index] = row.tokens[-1]
            rows.table[row.index, : len(row.blocks)] = row.blocks
            rows.length[row.index], rows.position[row.index] = row.length, row.position
            rows.active[row.index] = True
            self.terms.fill(rows.sampling, row.index, row)
        if not ready:
            return []
        out = self.device.decode(rows, steps)
        tokens, logprobs, count = self.device.read((out.tokens, out.logprobs, out.count))
        seconds = time.perf_counter() - start
        events = []
        for row in ready:
            row.decode_seconds += seconds
            taken = int(count[row.index])
            row.length += taken
            row.position += taken
            events += self._take(row, tokens[row.index, :taken].tolist(), logprobs[row.index, :taken].tolist())
        return events

    def _take(self, row: Row, tokens: list[int], logprobs: list[float]) -> list[Event]:
        """Give a row its new tokens, end it if one of them says so, and tell."""
        stops, watch = self.terms.stop_ids(row.request), row.request.watcher(row.choice)
        kept = 0
        for token in tokens:
            kept += 1
            stopped = token in stops or (watch is not None and watch(token))
            if stopped or row.generated + kept == row.max_tokens:
                row.finish_reason = "stop" if stopped else "length"
                break
        # Tokens after a stop string were computed, but belong to nobody.
        row.length -= len(tokens) - kept
        row.position -= len(tokens) - kept
        if not row.generated:
            row.first_token_seconds = time.perf_counter() - row.added
        row.tokens += tokens[:kept]
        row.generated += kept
        self.totals.generated_tokens += kept
        self.memory.note(row)
        event = Event(row.request_id, tuple(tokens[:kept]), tuple(logprobs[:kept]), choice=row.choice)
        return [event, self._finish(row)] if row.finish_reason else [event]

    # -- details -------------------------------------------------------------------------------------------------

    def _row(self, request_id: int, choice: int, request: Request, root: bytes, past: Kept | None) -> Row:
        now = time.perf_counter()
        row = Row(
            request_id=request_id,
            choice=choice,
            request=request,
            max_tokens=self.terms.most_tokens(request, past),
            root=root,
            tokens=[*(past.tokens if past else ()), *request.prompt],
            added=now,
            arrived=now,
            budget=self.terms.budget(request, past),
        )
        if past is None:
            row.compacts_prefill = self.terms.compacts_prefill(request)
            row.prompt_keys = self.memory.prompt_keys(request.prompt, root)
        else:
            row.continued, row.history = len(past.tokens), past.history
            row.length, row.position, row.dirty = past.length, past.position, past.dirty
        return row

    def _compact(self, rows: list[Row]) -> None:
        """Bring rows down to their budgets. Which blocks come free is settled before anything is scored."""
        due, moves = [], []
        for row in sorted(rows, key=lambda row: row.order):
            # The oldest come first, and only the newest give way: a row that has its move stays.
            if row.placed and self.scheduler.room(row, self.memory.copies(row)):
                due.append(row)
                moves.append(self.memory.move(row))
        if not due:
            return
        start = time.perf_counter()
        self.memory.settle(due, moves)
        self.device.compact(moves)
        # Nothing is read: this waits so that the seconds are those of the compaction and not of the next round.
        jax.block_until_ready(self.device.pool)
        seconds = time.perf_counter() - start
        self.totals.compaction_seconds += seconds
        self.totals.compactions += len(due)
        for row in due:
            row.compaction_seconds += seconds

    def _finish(self, row: Row) -> Event:
        if not row.placed:
            row.queued_seconds += time.perf_counter() - row.arrived
        report = row.report(self.cache.block_size)
        past = None if row.request.continue_from is None else self.memory.kept.get(row.request.continue_from)
        if past is not None and not row.placed and row.swapped is None:
            past.waiting -= 1
        if row.request.keep and row.finish_reason != "cancelled":
            self.memory.keep(row)
        self.memory.release(row)
        self.scheduler.remove(row)
        self.totals.add(report, row.choice)
        return Event(row.request_id, report=report, choice=row.choice)
