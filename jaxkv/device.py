"""What an engine keeps on the device, and its calls into the jitted steps. Nothing in here decides anything."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import pallas_kernels
from jaxkv import decode, monitor, policies, swap
from jaxkv.compact import compaction_widths
from jaxkv.compression import CompressionConfig, RowBudget
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.dims import host_array
from jaxkv.model import Weights
from jaxkv.policies.base import Observed
from jaxkv.pool import KVPool
from jaxkv.sampling import Sampling, Seen
from jaxkv.select import Budgets
from jaxkv.stats import QueryStats


@dataclasses.dataclass(frozen=True)
class Move:
    """A compaction of one row, settled on the host before anything is scored."""

    row: int
    source: list[int]
    """Its blocks before."""
    target: list[int]
    """The same, with a fresh block in place of each shared one that survivors move to."""
    length: int
    """Slots held before."""
    position: int
    budget: RowBudget


class Device:
    """The pool, what is gathered about the rows, and the compiled programs over them.

    Attributes:
      pool: donated to every call and replaced by its result.
      observed: what the policy wants gathered, or None.
      seen: which tokens the rows have had, for penalties.
      reads: how often an array was read by the host.
      implementation: the kernels that are tried first, for reports.
    """

    def __init__(
        self,
        weights: Weights,
        model: ModelConfig,
        cache: CacheConfig,
        compression: CompressionConfig,
        stats: QueryStats | None,
        implementation: pallas_kernels.Implementation | None,
    ) -> None:
        self.implementation = pallas_kernels.candidates(implementation)[0]
        self._implementation = implementation
        self.pool = KVPool.create(model, cache)
        self.observed: Observed | None = None
        self.seen: Seen | None = Seen.create(cache.rows, model.vocab_size)
        self.reads = 0
        self._weights, self._model, self._cache, self._mode = weights, model, cache, compression.mode
        self._policy = None
        if compression.method != "none":
            # The engine's context, not the model's, is how far its rows can get.
            policy = policies.make(compression, dataclasses.replace(model, context=cache.context), stats)
            self.observed = Observed.create(policy, model, cache.rows)
            self._policy = jax.device_put(policy)
        # Rows one by one suit a CPU; kernels want them all at once.
        self._lanes = 1 if jax.default_backend() == "cpu" else cache.rows
        self._widths = compaction_widths(cache.table_width, cache.block_size)

    def warmup(self) -> monitor.Compiles:
        """Compile every program and run it once, in the null block; return how many there were and the seconds they
        took.

        A program that has only been compiled is slow the first time: its memory has to be touched. What is gathered
        about a row here is cleared when a request takes the row.
        """
        size = self._cache.block_size
        move = Move(0, [0, 0], [0, 0], 2 * size, 2 * size, RowBudget(size, interval=1, window=0, sinks=0, pinned=0))
        with monitor.compiles() as compiled:
            chunk, rows = decode.Chunk.idle(self._cache), decode.Rows.idle(self._cache)
            chunk.count[0], rows.active[0] = 1, True
            out = self.prefill(chunk)
            rounds = self.decode(rows, 1)
            # Null blocks out and in, and a row that has seen nothing: what else an engine may be asked for.
            self.load([0], self.save([0]))
            self.copy([0], [0])
            self.load_observed(0, self.save_observed(0))
            self.mark(0, [], [])
            self.fork(0, [])
            again = self.draw_again(out.logits, host_array(self._cache.rows), Sampling.idle(self._cache.rows))
            if self._policy is not None:
                for width in self._widths:
                    self._compact(width, [move])
            jax.block_until_ready((self.pool, self.observed, self.seen, out, rounds, again))
        return compiled

    def prefill(self, chunk: decode.Chunk) -> decode.PrefillOutput:
        """Put a chunk into the pool."""
        chunk = chunk.replace(observed=self.observed, seen=self.seen)  # type: ignore[attr-defined]
        self.pool, out = decode.prefill_chunk(
            self._weights, self.pool, chunk, config=self._model, implementation=self._implementation
        )
        self.observed = out.observed
        return out

    def decode(self, rows: decode.Rows, steps: int) -> decode.RoundOutput:
        """Decode a round."""
        rows = rows.replace(observed=self.observed, seen=self.seen)  # type: ignore[attr-defined]
        self.pool, rows, out = decode.decode_round(
            self._weights,
            self.pool,
            rows,
            np.int32(steps),
            config=self._model,
            max_steps=self._cache.round_steps,
            implementation=self._implementation,
        )
        self.observed, self.seen = rows.observed, rows.seen
        return out

    def draw_again(self, logits: Any, index: Any, rows: Sampling) -> Any:
        """Draw first tokens for rows that share a prompt: ``index`` is the prompt of each, in the chunk's logits."""
        return decode.draw_again(logits, index, rows, self.seen)

    def compact(self, moves: Sequence[Move]) -> None:
        """Compact rows. How wide a row's call is depends on that row alone, and so does every bit of it."""
        for narrower, width in itertools.pairwise([0, *self._widths]):
            own = [move for move in moves if narrower < len(move.source) <= width]
            if own:
                self._compact(width, own)

    # -- a row's state -------------------------------------------------------------------------------------------

    def save(self, blocks: Sequence[int]) -> list[KVPool]:
        """Return what is in some blocks, in host memory."""
        return swap.save(self.pool, blocks)

    def load(self, blocks: Sequence[int], saved: Sequence[KVPool]) -> None:
        """Put what ``save`` returned into some blocks."""
        self.pool = swap.load(self.pool, blocks, saved)

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy each source block to a target block."""
        self.pool = swap.copy(self.pool, source, target)

    def save_observed(self, row: int) -> Any:
        """Return what was gathered about a row, in host memory; None where nothing is gathered."""
        if self.observed is None:
            return None
        return jax.device_get(_take_observed(self.observed, np.asarray([row], np.int32)))

    def load_observed(self, row: int, saved: Any) -> None:
        """Put what ``save_observed`` returned into a row."""
        if self.observed is not None and saved is not None:
            self.observed = _put_observed(self.observed, np.asarray([row], np.int32), saved)

    def fork(self, row: int, others: Sequence[int]) -> None:
        """Give other rows what was gathered about one, and the tokens that it has seen."""
        source, target = host_array(self._cache.rows, fill=row), host_array(self._cache.rows, fill=self._cache.rows)
        target[: len(others)] = others
        if self.observed is not None:
            self.observed = _fork_observed(self.observed, source, target)
        self.seen = _fork_seen(self.seen, source, target)

    def mark(self, row: int, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """Say which tokens a row's prompt has, and which it has generated before its newest."""
        size = self._model.vocab_size
        counts = [np.bincount(np.asarray(tokens, np.int64), minlength=size) for tokens in (prompt, generated)]
        self.seen = _put_seen(self.seen, np.int32(row), counts[0] > 0, counts[1].astype(np.int32))

    def read(self, arrays: Any) -> Any:
        """Wait for arrays and return them as NumPy's."""
        self.reads += 1
        return jax.device_get(arrays)

    def _compact(self, width: int, moves: Sequence[Move]) -> None:
        count = self._cache.rows
        table, target = host_array(count, width), host_array(count, width)
        length, position = host_array(count), host_array(count)
        due = host_array(count, dtype=bool, fill=False)
        budgets: list[RowBudget | None] = [None] * count
        for move in moves:
            held = len(move.source)
            table[move.row, :held], target[move.row, :held] = move.source, move.target
            length[move.row], position[move.row], due[move.row] = move.length, move.position, True
            budgets[move.row] = move.budget
        rows = (table, target, length, position, due, Budgets.stack(budgets))
        self.pool = decode.compact_round(
            self.pool,
            *rows,
            self._policy,
            self.observed,
            mode=self._mode,
            lanes=self._lanes,
            implementation=self._implementation,
        )


@jax.jit
def _take_observed(observed: Observed, row: Any) -> Observed:
    return observed.at(row)


@jax.jit
def _put_observed(observed: Observed, row: Any, saved: Observed) -> Observed:
    return observed.put(row, saved)


@jax.jit
def _fork_observed(observed: Observed, source: Any, target: Any) -> Observed:
    return observed.put(target, observed.at(source))


@jax.jit
def _fork_seen(seen: Seen, source: Any, target: Any) -> Seen:
    return jax.tree.map(lambda x: x.at[target].set(x[source], mode="drop"), seen)


@jax.jit
def _put_seen(seen: Seen, row: Any, prompt: Any, generated: Any) -> Seen:
    return Seen(seen.prompt.at[row].set(prompt), seen.generated.at[row].set(generated))
