"""CacheBlend (arXiv 2405.16444): KV of documents reused wherever they land, its few wrong tokens recomputed.

    pool, k, v = segment_kv(weights, pool, table, document, config=config)       # once a document; store it
    layout = Layout.of([Piece(system), Piece(document, cached=True)], question)  # any documents in any order
    pool, out = blend_prefill(weights, pool, table, layout, lambda layer: [(k[layer], v[layer])], config=config)

What is left in the pool is ordinary KV: ``out.logits`` give the first token, and decoding goes on as after a prefill.
It is not clean, though, and belongs under no content key and in no prefix cache. The mask is exact: a recomputed token
sees the slots up to its own.

``python -m jaxkv.blend check`` measures what it costs on a model and texts of one's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from flax import struct

import pallas_kernels
from jaxkv import blend_segment, blend_steps, model
from jaxkv.blend_control import Choice as Choice
from jaxkv.blend_control import Speeds as Speeds
from jaxkv.blend_control import choose as choose
from jaxkv.blend_layout import CACHED, CHECK_LAYER, EXACT, FIRST, Layout, check_model, padded, widths
from jaxkv.blend_layout import Piece as Piece
from jaxkv.blend_segment import scratch as scratch
from jaxkv.blend_segment import segment_kv as segment_kv
from jaxkv.config import ModelConfig
from jaxkv.dims import Array, Float, Int
from jaxkv.pool import KVPool

RATIO = 0.15
"""Share of cached tokens that is recomputed unless somebody says otherwise."""

CHUNK = 128
"""Tokens of a forward pass."""

KV = tuple[Any, Any]
"""Keys before RoPE and values of one layer and piece, ``[T, K, D]`` each."""

Cached = Callable[[int], Sequence[KV]]
"""Gives the KV of a layer, for each cached piece that has tokens, in order. Asked layer by layer in ascending order,
while the layers before are still being computed; it may wait for a disk. Layers whose cached KV is not used are not
asked for.
"""


class LoadError(Exception):
    """Cached KV could not be had while a prompt was being blended. The row's blocks hold nothing of use; prefill it.

    Attributes:
      pool: in place of the one that was given away.
    """

    def __init__(self, layer: int, pool: KVPool) -> None:
        super().__init__(f"the cached KV of layer {layer} could not be had; prefill the prompt instead")
        self.pool = pool


@struct.dataclass
class BlendOutput:
    """What follows a blended prompt, and what was done for it. W is the prompt's padded length."""

    logits: Float[Array, "1 V"]
    """Behind the last token."""
    hidden: Float[Array, "W E"]
    """Of the tokens that were computed, in order: what the final norm would get."""
    selected: Int[Array, "W"]
    """Which tokens these are, -1 after the last of them."""
    deviation: Float[Array, "W"]
    """How far the cached values of each token are off at the check layer. Anything where there are none."""
    computed: int = struct.field(pytree_node=False)
    """Tokens that went through the layers, fresh ones included."""
    recomputed: int = struct.field(pytree_node=False)
    """Those of them that had cached KV."""
    reused: int = struct.field(pytree_node=False)
    """Tokens whose cached KV stands in all layers after the check layer; exact ones included."""


def blend_prefill(
    weights: model.Weights,
    pool: KVPool,
    table: Int[np.ndarray, "1 M"],
    layout: Layout,
    cached: Cached,
    *,
    config: ModelConfig,
    ratio: float = RATIO,
    chunk: int = CHUNK,
    width: int | None = None,
    priority: Float[np.ndarray, "T"] | None = None,
    implementation: pallas_kernels.Implementation | None = None,
    watch: Callable[[int, Array], None] | None = None,
) -> tuple[KVPool, BlendOutput]:
    """Put a prompt into the pool, reusing cached KV, and return the logits behind it.

    This returns once everything is on its way to the device; reading a result waits for it.

    Args:
      weights: the model's weights.
      pool: donated.
      table: the row's blocks, with room for ``layout.start + layout.size`` slots, its own from ``start`` on.
      layout: the prompt.
      cached: see ``Cached``; of use where the layout has cached pieces.
      config: the model's shapes.
      ratio: share of the eligible tokens that are recomputed; 0 is plain reuse, 1 a full prefill.
      chunk: tokens of a forward pass; a shape that is compiled for.
      width: what the prompt is padded to, a multiple of the chunk; a shape that is compiled for. None: the next one of
        ``widths``.
      priority: which eligible tokens are recomputed, highest first, in place of their deviation.
      implementation: as for ``pallas_kernels.attend``.
      watch: called with each layer after its work has been queued and with its hidden vectors.

    Raises:
      ValueError: the ratio is not from 0 to 1, or table or width do not fit the layout.
      NotImplementedError: see ``check_model``.
      LoadError: ``cached`` raised, or what it gave does not fit the layout; that error is the cause.
    """
    check_model(config)
    recomputed = layout.recomputed(ratio)
    width = _width(pool, table, layout, chunk, width, priority)
    row = _Row(pool, np.asarray(table, np.int32), layout, cached, config, chunk, width, weights.embedding.dtype)
    early = range(CHECK_LAYER + 1)
    old = row.restore(early)
    static = {"config": config, "chunk": chunk, "implementation": implementation}
    bounds = np.array([layout.start, layout.size, layout.skipped], np.int32)
    tokens = padded(layout.tokens, width)
    upto = weights.replace(layers=weights.layers[: CHECK_LAYER + 1])  # type: ignore[attr-defined]
    pages, hidden, deviation = blend_steps.check(upto, row.pages(early), tokens, old, bounds, row.table, **static)
    row.put(early, pages)
    computed = np.int32(layout.fresh + recomputed)
    ranks = deviation if priority is None else padded(np.asarray(priority, np.float32), width)
    kinds = padded(layout.kind, width, EXACT)
    hidden, slots, selected = blend_steps.select(hidden, ranks, kinds, computed, np.int32(layout.start))
    hidden = _through_layers(row, weights, hidden, slots, computed, static, watch)
    logits = blend_steps.finish(weights.replace(layers=()), hidden, computed, config=config)  # type: ignore[attr-defined]
    reused = layout.eligible + layout.exact - recomputed
    counts = {"computed": int(computed), "recomputed": recomputed, "reused": reused}
    return row.pool, BlendOutput(logits=logits, hidden=hidden, selected=selected, deviation=deviation, **counts)


def _through_layers(
    row: _Row,
    weights: model.Weights,
    hidden: Array,
    slots: Array,
    computed: np.int32,
    static: dict[str, Any],
    watch: Callable[[int, Array], None] | None,
) -> Array:
    """Run the chosen tokens through the layers from the check layer on; return what the final norm would get."""
    for layer in range(CHECK_LAYER, len(weights.layers)):
        if layer > CHECK_LAYER:
            row.restore([layer])
        args = (weights.layers[layer], row.pages([layer]), hidden, slots, computed, row.table)
        pages, hidden = blend_steps.run_layer(*args, **static)
        row.put([layer], pages)
        if watch is not None:
            watch(layer, hidden)
    return hidden


def warmup(
    weights: model.Weights,
    pool: KVPool,
    table_width: int,
    *,
    config: ModelConfig,
    chunk: int = CHUNK,
    most: int | None = None,
    implementation: pallas_kernels.Implementation | None = None,
) -> KVPool:
    """Compile everything that ``blend_prefill`` and ``segment_kv`` run, by running it into the null block.

    Args:
      weights: the model's weights.
      pool: donated.
      table_width: M of the tables to come, the same for both.
      config: the model's shapes.
      chunk, implementation: those of the calls to come.
      most: tokens of the longest prompt to come; None is what a table holds.

    Returns:
      The pool, with nothing changed outside the null block.
    """
    table = np.zeros((1, table_width), np.int32)
    options = {"config": config, "chunk": chunk, "implementation": implementation}
    pool = blend_segment.warmup(weights, pool, table_width, **options)  # type: ignore[arg-type]
    kv = np.zeros((2, 1, config.kv_heads, config.head_dim), weights.embedding.dtype)
    layout = Layout.of([Piece([0], cached=True)], [0])
    for width in widths(most or table_width * pool.block_size, chunk):
        pool, _ = blend_prefill(weights, pool, table, layout, lambda _: [tuple(kv)], width=width, **options)  # type: ignore[arg-type]
    return pool


class _Row:
    """The pool of a prompt on its way, and where its cached KV goes."""

    def __init__(
        self,
        pool: KVPool,
        table: np.ndarray,
        layout: Layout,
        cached: Cached,
        config: ModelConfig,
        chunk: int,
        width: int,
        dtype: Any,
    ) -> None:
        self.table, self._dtype = table, dtype
        self._k, self._v, self._pool = list(pool.k), list(pool.v), pool
        self._layout, self._cached, self._config, self._chunk, self._width = layout, cached, config, chunk, width
        self._slots = layout.slots(width, FIRST, CACHED, EXACT)
        self._front = np.where(np.arange(width) < layout.skipped, self._slots, -1)
        self._any = layout.eligible > 0 or layout.exact > 0

    @property
    def pool(self) -> KVPool:
        return self._pool.replace(k=tuple(self._k), v=tuple(self._v))  # type: ignore[attr-defined]

    def pages(self, layers: Sequence[int]) -> KVPool:
        return KVPool(k=tuple(self._k[layer] for layer in layers), v=tuple(self._v[layer] for layer in layers))

    def put(self, layers: Sequence[int], pages: KVPool) -> None:
        for at, layer in enumerate(layers):
            self._k[layer], self._v[layer] = pages.k[at], pages.v[at]

    def restore(self, layers: Sequence[int]) -> np.ndarray:
        """Put into layers what is not computed there, and return the cached values of the last one [W, K, D]."""
        late = layers[-1] > CHECK_LAYER
        slots = self._slots if late else self._front
        skips = self._layout.skipped > 0
        for layer in layers:
            wanted = self._any and (late or skips or layer == CHECK_LAYER)
            k, v = self._gather(layer) if wanted else (None, self._empty())
            if k is not None and (late or skips):
                pages = self.pages([layer])
                pages = blend_steps.restore(pages, k, v, slots, self.table, config=self._config, chunk=self._chunk)
                self.put([layer], pages)
        return v

    def _gather(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        spans, shape = self._layout.spans, (self._config.kv_heads, self._config.head_dim)
        wanted = [(end - begin, *shape) for begin, end in spans for _ in range(2)]
        try:
            pieces = self._cached(layer)
            found = [np.shape(x) for pair in pieces for x in pair]
            if found != wanted:
                raise ValueError(f"cached k and v have shapes {found}, and the layout's pieces {wanted}")
        except Exception as error:
            raise LoadError(layer, self.pool) from error
        out = []
        for which in range(2):
            # A new one each time: a step may be reading the last one still.
            rows = np.empty((self._width, *shape), np.asarray(pieces[0][which]).dtype)
            for (begin, end), pair in zip(spans, pieces, strict=True):
                rows[begin:end] = pair[which]
            out.append(rows)
        return out[0], out[1]

    def _empty(self) -> np.ndarray:
        return np.zeros((self._width, self._config.kv_heads, self._config.head_dim), self._dtype)


def _width(pool: KVPool, table: np.ndarray, layout: Layout, chunk: int, width: int | None, priority: Any) -> int:
    room, end = table.shape[1] * pool.block_size, layout.start + layout.size
    if table.shape[0] != 1 or end > room:
        raise ValueError(f"a table of shape {table.shape} has room for {room} slots of one row, and {end} are needed")
    if priority is not None and np.shape(priority) != (layout.size,):
        raise ValueError(f"priority has shape {np.shape(priority)}, and the prompt {layout.size} tokens")
    if width is None:
        width = next(width for width in widths(room, chunk) if width >= layout.size)
    if width < layout.size or width % chunk:
        raise ValueError(f"width={width} is not a multiple of chunk={chunk} that {layout.size} tokens fit in")
    return width


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``python -m jaxkv.blend`` and return its exit code."""
    from jaxkv import blend_check

    return blend_check.main(argv)


if __name__ == "__main__":
    sys.exit(main())
