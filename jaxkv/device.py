"""What an engine keeps on the device, and its calls into the jitted steps. Nothing in here decides anything."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import pallas_kernels
from jaxkv import decode, monitor, policies
from jaxkv.compact import compaction_widths
from jaxkv.compression import CompressionConfig, RowBudget
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.dims import host_array
from jaxkv.model import Weights
from jaxkv.policies.base import Observed
from jaxkv.pool import KVPool
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
            if self._policy is not None:
                for width in self._widths:
                    self._compact(width, [move])
            jax.block_until_ready((self.pool, self.observed, out, rounds))
        return compiled

    def prefill(self, chunk: decode.Chunk) -> decode.PrefillOutput:
        """Put a chunk into the pool."""
        chunk = chunk.replace(observed=self.observed)  # type: ignore[attr-defined]
        self.pool, out = decode.prefill_chunk(
            self._weights, self.pool, chunk, config=self._model, implementation=self._implementation
        )
        self.observed = out.observed
        return out

    def decode(self, rows: decode.Rows, steps: int) -> decode.RoundOutput:
        """Decode a round."""
        rows = rows.replace(observed=self.observed)  # type: ignore[attr-defined]
        self.pool, rows, out = decode.decode_round(
            self._weights,
            self.pool,
            rows,
            np.int32(steps),
            config=self._model,
            max_steps=self._cache.round_steps,
            implementation=self._implementation,
        )
        self.observed = rows.observed
        return out

    def compact(self, moves: Sequence[Move]) -> None:
        """Compact rows. How wide a row's call is depends on that row alone, and so does every bit of it."""
        for narrower, width in itertools.pairwise([0, *self._widths]):
            own = [move for move in moves if narrower < len(move.source) <= width]
            if own:
                self._compact(width, own)

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
