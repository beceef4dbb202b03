"""Documents of prompts: found in the store and blended into a row's blocks, or computed and stored for later."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import pallas_kernels
from jaxkv import blend, blend_segment, keys
from jaxkv.blend_control import Choice, Speeds, choose
from jaxkv.blend_layout import Layout, Piece, check_model, padded
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.device import Device
from jaxkv.dims import ceil_div, host_array
from jaxkv.memory import Memory
from jaxkv.model import Weights
from jaxkv.row import Row
from jaxkv.sampling import Sampling
from jaxkv.segments import Document, Ratio, Span, check_ratio
from jaxkv.store import Key, LostError, Store, View

DISK_BYTES_A_SECOND = 1e9
"""What a disk is taken to read until it has been seen reading."""


@dataclasses.dataclass(frozen=True)
class DocumentsConfig:
    """How documents are reused.

    Attributes:
      store: where their KV is; the caller's to close.
      ratio: share of their tokens that is recomputed, or ``auto``: what hides behind loading, at least
        ``blend.RATIO``, and a full prefill where that is predicted to be as fast.
      before: tokens that a document is prefilled behind, and whose KV is dropped.
    """

    store: Store
    ratio: Ratio = blend.RATIO
    before: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_ratio(self.ratio)


def _find_damage(views: Sequence[View | None]) -> None:
    """Read what a failed blend left unread. Where one file is damaged others may be, and what is found now is stored
    anew behind this prompt, rather than a document a request."""
    for view in views:
        with contextlib.suppress(LostError):
            if view is not None:
                view.arrays()


@dataclasses.dataclass
class _Job:
    """A document that is being computed alone, a chunk a step."""

    key: Key
    ids: np.ndarray
    blocks: list[int] = dataclasses.field(default_factory=list)
    at: int = 0
    parts: list[Any] = dataclasses.field(default_factory=list)


class Documents:
    """The engine's way to blended prompts.

    Only KV that was computed from a document alone goes into the store, and that happens when no prompt waits: the
    request that brings a document for the first time computes it as a part of its prompt.

    Args:
      config: how documents are reused.
      weights, model, cache, device, memory, implementation: the engine's.
      weights_digest: of the weights: what is stored outlives this process.
    """

    def __init__(
        self,
        config: DocumentsConfig,
        weights: Weights,
        model: ModelConfig,
        cache: CacheConfig,
        device: Device,
        memory: Memory,
        weights_digest: str,
        implementation: pallas_kernels.Implementation | None,
    ) -> None:
        check_model(model)
        self.config = config
        self.speeds: Speeds | None = None
        self._weights, self._model, self._cache, self._digest = weights, model, cache, weights_digest
        self._device, self._memory = device, memory
        self._options: dict[str, Any] = {"config": model, "implementation": implementation}
        self._jobs: collections.OrderedDict[bytes, _Job] = collections.OrderedDict()

    def warmup(self) -> None:
        """Compile what blending needs, and measure how fast this machine prefills."""
        width, chunk, device = self._cache.table_width, self._cache.prefill_chunk, self._device
        # No prompt is longer than the context, or than the pool.
        most = min(self._cache.context, self._cache.blocks * self._cache.block_size)
        device.pool = blend.warmup(self._weights, device.pool, width, chunk=chunk, most=most, **self._options)
        logits = np.zeros((1, self._model.vocab_size), np.float32)
        device.draw_again(logits, host_array(self._cache.rows), Sampling.idle(self._cache.rows))
        measured, spent = [], 0.0
        for index in range(max(1, min(4, most // chunk))):
            start = time.perf_counter()
            bounds = np.asarray([index * chunk, chunk], np.int32)
            args = (self._weights, device.pool, host_array(1, width), host_array(chunk), bounds)
            device.pool, *rest = blend_segment.run_chunk(*args, **self._options)
            jax.block_until_ready(rest)
            spent += time.perf_counter() - start
            measured.append(((index + 1) * chunk, spent))
        self.speeds = Speeds.fit(measured)

    # -- what a row's documents are ------------------------------------------------------------------------------

    def blends(self, row: Row) -> bool:
        """Whether a row that holds nothing but a found prefix is to be blended; see ``DocumentsConfig.ratio``."""
        if row.plain or row.length != row.cached_tokens or not row.request.segments:
            return False
        spans = self._wanted(row)
        tiers = self.config.store.lookup([self._key(row, span) for span in spans])
        row.plain = not any(tiers)
        ratio = self.config.ratio if row.request.recompute_ratio is None else row.request.recompute_ratio
        if not row.plain and ratio == "auto":
            choice = self._choice(row, spans, tiers)
            row.plain, row.ratio = choice.full, choice.ratio
        elif not row.plain:
            row.ratio = float(ratio)
        return not row.plain

    def blend(self, row: Row) -> tuple[Any, int] | None:
        """Put a row's whole prompt into its blocks, which it has, and return the logits behind it, [1, V], and how many
        of its tokens are as a prefill would have them.

        Where the store has lost what it had, None: the row is prefilled as any other.
        """
        spans = self._wanted(row)
        table = host_array(1, self._cache.table_width)
        table[0, : len(row.blocks)] = row.blocks
        with self.config.store.lease([self._key(row, span) for span in spans]) as views:
            layout = self._layout(row, spans, [view is not None for view in views])
            held = [(view, max(0, row.length - s.start)) for s, view in zip(spans, views, strict=True) if view]

            def cached(layer: int) -> list[Any]:
                return [tuple(array[cut:] for array in view.layer(layer)) for view, cut in held]

            try:
                self._device.pool, out = blend.blend_prefill(
                    self._weights,
                    self._device.pool,
                    table,
                    layout,
                    cached,
                    ratio=row.ratio,
                    chunk=self._cache.prefill_chunk,
                    **self._options,
                )
            except blend.LoadError as error:
                self._device.pool, row.plain = error.pool, True
                _find_damage(views)
                return None
            selected = self._device.read(out.selected)
            selected = selected[selected >= 0]
            tiers = {span: "computed" if view is None else view.tier for span, view in zip(spans, views, strict=True)}
        self._tell(row, {s: "host" if tier == "memory" else tier for s, tier in tiers.items()}, selected + row.length)
        row.full_prefill_seconds = self._full_seconds(layout)
        return out.logits, row.length + layout.clean

    def computed(self, row: Row) -> None:
        """Say what became of the documents of a row that was prefilled as any other, and have them stored."""
        if row.request.segments and not row.documents:
            self._tell(row, {}, np.arange(row.cached_tokens, row.prompt_end))

    def _wanted(self, row: Row) -> list[Span]:
        """Spans that may be blended and are not all in the row's blocks."""
        spans = row.request.segments
        return [span for span in spans if span.reuse == "blend" and span.end > max(span.start, row.length)]

    def _key(self, row: Row, span: Span) -> Key:
        # KV that was prepared behind other tokens is other KV.
        dtype = f"{self._weights.embedding.dtype.name} before RoPE, behind {list(self.config.before)}"
        root = keys.fingerprint(self._model, dtype=dtype, weights=self._digest, salt=row.request.salt)
        return Key.content(root, row.tokens[span.start : span.end])

    def _layout(self, row: Row, spans: Sequence[Span], there: Sequence[bool]) -> Layout:
        return Layout.of(*self._pieces(row, spans, there), start=row.length)

    def _pieces(self, row: Row, spans: Sequence[Span], there: Sequence[bool]) -> tuple[list[Piece], list[int]]:
        pieces, at = [], row.length
        for span, cached in zip(spans, there, strict=True):
            begin = max(span.start, at)
            if begin > at:
                pieces.append(Piece(row.tokens[at:begin]))
            exact = cached and tuple(row.tokens[: span.start]) == self.config.before
            pieces.append(Piece(row.tokens[begin : span.end], cached=cached, exact=exact))
            at = span.end
        return pieces, row.tokens[at : row.prompt_end]

    def _choice(self, row: Row, spans: Sequence[Span], tiers: Sequence[str | None]) -> Choice:
        layout = self._layout(row, spans, [tier is not None for tier in tiers])
        counters = self.config.store.counters
        speed = counters.read_bytes / counters.load_seconds if counters.load_seconds else DISK_BYTES_A_SECOND
        token = 2 * self._model.layers * self._model.kv_heads * self._model.head_dim
        token *= self._weights.embedding.dtype.itemsize
        on_disk = sum(span.end - span.start for span, tier in zip(spans, tiers, strict=True) if tier == "disk")
        assert self.speeds is not None
        return choose(layout, self._model, self.speeds, on_disk * token / speed, least=blend.RATIO)

    def _full_seconds(self, layout: Layout) -> float:
        if self.speeds is None:
            return 0.0
        keys_seen = float(np.arange(layout.start + 1, layout.start + layout.size + 1).sum())
        return layout.size * self.speeds.token_seconds + keys_seen * self.speeds.pair_seconds

    def _tell(self, row: Row, sources: dict[Span, Any], computed: np.ndarray) -> None:
        """Note what became of each document, and queue those whose KV is not stored."""
        for span in row.request.segments:
            tokens = span.end - span.start
            again = int(((computed >= span.start) & (computed < span.end)).sum())
            source = sources.get(span, "pool" if again < tokens else "computed")
            row.documents.append(Document(span.name, tokens, source, tokens - again, again))
            if span.reuse == "blend" and tokens and source in ("computed", "pool"):
                key = self._key(row, span)
                ids = np.asarray([*self.config.before, *row.tokens[span.start : span.end]], np.int32)
                self._jobs.setdefault(key.digest, _Job(key, ids))

    # -- computing documents alone -------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether documents wait to be computed for the store."""
        return bool(self._jobs)

    def advance(self, idle: bool) -> None:
        """Compute a chunk of the first document that waits. Without blocks for it, wait; if nobody has any, give up."""
        while self._jobs:
            job = next(iter(self._jobs.values()))
            (tier,) = self.config.store.lookup([job.key]) if not job.at else (None,)
            needed = 0 if job.blocks else ceil_div(job.ids.size, self._cache.block_size)
            while idle and self._memory.blocks.available < needed and self._memory.make_room():
                pass
            if tier is None and self._memory.blocks.available >= needed:
                job.blocks += self._memory.blocks.allocate(needed)
                self._compute(job)
                return
            if tier is None and not idle:
                return
            self._jobs.pop(job.key.digest)

    def give_way(self) -> bool:
        """Let go of the blocks that a document is being computed in; return whether there were any."""
        for job in self._jobs.values():
            if job.blocks:
                self._memory.blocks.release(job.blocks)
                job.blocks, job.at, job.parts = [], 0, []
                return True
        return False

    def _compute(self, job: _Job) -> None:
        chunk = self._cache.prefill_chunk
        table = host_array(1, self._cache.table_width)
        table[0, : len(job.blocks)] = job.blocks
        piece = job.ids[job.at : job.at + chunk]
        bounds = np.asarray([job.at, piece.size], np.int32)
        args = (self._weights, self._device.pool, table, padded(piece, chunk), bounds)
        self._device.pool, kv, _ = blend_segment.run_chunk(*args, **self._options)
        job.parts.append([array[:, : piece.size] for array in jax.device_get(kv)])
        job.at += piece.size
        if job.at == job.ids.size:
            skip = len(self.config.before)
            k, v = (np.concatenate(arrays, axis=1)[:, skip:] for arrays in zip(*job.parts, strict=True))
            self.config.store.put(job.key, {"k": k, "v": v})
            self._memory.blocks.release(job.blocks)
            self._jobs.pop(job.key.digest)
