"""Time to the first token of a prompt of documents: blended from stored KV, against full prefill.

    python scripts/bench_blend.py                                    # 12 documents of 256 tokens and 32 more
    python scripts/bench_blend.py --folder FOLDER_ON_THE_DISK_IN_QUESTION --json

Kinds take turns within a round, so that a change of the machine's speed meets all of them, and each is taken at the
chunk size that suits it best. Everything is warm: nothing compiles inside the clock. ``memory`` has all documents in
the store's host tier; ``disk`` opens a store on files that the kernel was told to drop, and its timeline says when each
layer was asked for, had been read, and had been computed. The FLOP bound counts multiplications and additions of
weights and of causal attention, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import blend, cli, decode, weights
from jaxkv.blend import Layout, Piece, Speeds
from jaxkv.blend_layout import CHECK_LAYER
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.pool import KVPool
from jaxkv.store import Key, Store

ROOT = bytes(32)


def parser() -> argparse.ArgumentParser:
    """Return the script's parser."""
    made = argparse.ArgumentParser(prog="python scripts/bench_blend.py", description=__doc__.partition("\n")[0])
    made.add_argument("--model", help="as for jaxkv.generate; the demo model by default")
    made.add_argument("--dtype", default="float32", help="of the weights and of stored KV")
    made.add_argument("--pool-dtype", default="float32")
    made.add_argument("--documents", type=int, default=12)
    made.add_argument("--tokens", type=int, default=256, help="of a document")
    made.add_argument("--suffix", type=int, default=32, help="tokens behind the documents")
    made.add_argument("--ratio", type=float, default=blend.RATIO)
    made.add_argument("--chunks", type=int, nargs="+", default=[128, 256, 512], help="sizes of a forward pass to try")
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--folder", help="where the disk tier is (default: the folder for temporary files)")
    made.add_argument("--json", action="store_true", help="one JSON object on stdout, and no table")
    return made


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    args = parser().parse_args(argv)
    return cli.run(lambda: _run(args))


class Bench:
    """The model, its pool, and one prompt with its documents stored.

    Args:
      args: of the command.
      folder: of the disk tier.
    """

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        path = weights.locate(args.model)
        self.config, loaded = weights.load(path, jnp.dtype(args.dtype))
        self.weights, self.folder, self.ratio = jax.device_put(loaded), folder, args.ratio
        rng = np.random.default_rng(0)
        sizes = [args.tokens] * args.documents
        self.documents = [rng.integers(0, self.config.vocab_size, size, np.int32) for size in sizes]
        suffix = rng.integers(0, self.config.vocab_size, args.suffix, np.int32)
        self.layout = Layout.of([Piece(ids, cached=True) for ids in self.documents], suffix)
        slots = -(-self.layout.size // max(args.chunks)) * max(args.chunks)
        self.cache = CacheConfig(blocks=-(-slots // 16), context=slots, dtype=args.pool_dtype)
        self.pool = KVPool.create(self.config, self.cache)
        self.table = np.arange(1, self.cache.blocks + 1, dtype=np.int32)[None]
        self.keys = [Key.content(ROOT, ids) for ids in self.documents]
        nbytes = 2 * self.config.layers * self.config.kv_heads * self.config.head_dim
        self.nbytes = nbytes * jnp.dtype(args.dtype).itemsize * self.layout.eligible
        self.memory = Store(memory=2 * self.nbytes)
        with Store(folder, disk=4 * self.nbytes) as disk:
            for ids, key in zip(self.documents, self.keys, strict=True):
                self.pool, k, v = blend.segment_kv(
                    self.weights, self.pool, self.table, ids, config=self.config, chunk=args.chunks[0]
                )
                assert disk.put(key, {"k": k, "v": v}, wait=True)
                assert self.memory.put(key, {"k": k, "v": v})

    def prefill(self, chunk: int, tokens: int | None = None) -> float:
        """Return the seconds of a full prefill of the prompt, or of its first tokens, until its token is there."""
        ids = self.layout.tokens[:tokens]
        shape = CacheConfig(blocks=self.cache.blocks, context=self.cache.context, prefill_chunk=chunk)
        begin = time.perf_counter()
        for start in range(0, ids.size, chunk):
            piece = decode.Chunk.idle(shape)
            part = ids[start : start + chunk]
            piece.tokens[0, : part.size], piece.count[0], piece.table[0] = part, part.size, self.table[0]
            piece.length[0] = piece.position[0] = start
            self.pool, out = decode.prefill_chunk(self.weights, self.pool, piece, config=self.config)
        int(out.token[0])
        return time.perf_counter() - begin

    def blend(self, chunk: int, store: Store, timeline: Timeline | None = None) -> float:
        """Return the seconds of a blended prefill, the lease included, until its token is there."""
        begin = time.perf_counter()
        with store.lease(self.keys) as views:
            if timeline is not None:
                timeline.begin = begin

            def cached(layer: int) -> list[Any]:
                asked = time.perf_counter()
                kv = [view.layer(layer) for view in views if view is not None]
                if timeline is not None:
                    timeline.note(layer, asked=asked, read=time.perf_counter())
                return kv

            self.pool, out = blend.blend_prefill(
                self.weights, self.pool, self.table, self.layout, cached, config=self.config, ratio=self.ratio,
                chunk=chunk, watch=None if timeline is None else timeline.watch,
            )  # fmt: skip
            int(jnp.argmax(out.logits))
        return time.perf_counter() - begin

    def blend_from_disk(self, chunk: int, timeline: Timeline | None = None) -> float:
        """Return the seconds of a blended prefill from files that nobody has in memory."""
        self._drop()
        with Store(self.folder, disk=4 * self.nbytes) as store:
            return self.blend(chunk, store, timeline)

    def load(self) -> float:
        """Return the seconds in which all documents are read from disk, and nothing else done."""
        self._drop()
        with Store(self.folder, disk=4 * self.nbytes) as store:
            begin = time.perf_counter()
            with store.lease(self.keys) as views:
                for view in views:
                    assert view is not None
                    view.arrays()
            return time.perf_counter() - begin

    def _drop(self) -> None:
        for key in self.keys:
            with (self.folder / key.name[:2] / f"{key.name}.safetensors").open("rb") as file:
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Timeline:
    """When each layer of a blended prefill was asked for, had been read and had been computed, in seconds."""

    def __init__(self) -> None:
        self.begin = 0.0
        self.layers: dict[int, dict[str, float]] = {}
        self._threads: list[threading.Thread] = []

    def note(self, layer: int, **moments: float) -> None:
        """Take down moments of a layer."""
        at = self.layers.setdefault(layer, {})
        at |= {name: moment - self.begin for name, moment in moments.items()}

    def watch(self, layer: int, hidden: jax.Array) -> None:
        """Take down when a layer's hidden vectors are there."""

        def wait() -> None:
            hidden.block_until_ready()
            self.note(layer, computed=time.perf_counter())

        self._threads.append(threading.Thread(target=wait))
        self._threads[-1].start()

    def rows(self) -> list[dict[str, Any]]:
        """Return a row a layer, once all are computed."""
        for thread in self._threads:
            thread.join()
        return [{"layer": layer, **moments} for layer, moments in sorted(self.layers.items())]


def flops(config: ModelConfig, layout: Layout, ratio: float) -> tuple[float, float]:
    """Return the floating-point operations of a full and of a blended prefill."""
    kv = 2 * config.kv_heads * config.head_dim * config.width
    linear = 2 * config.heads * config.head_dim * config.width + kv + 3 * config.width * config.mlp_width
    head = config.width * config.vocab_size

    def layer(tokens: float, pairs: float) -> float:
        return 2 * (tokens * linear + 2 * pairs * config.heads * config.head_dim)

    size, share = layout.size, layout.recomputed(ratio) / max(layout.eligible, 1)
    places = np.arange(1, size + 1)
    fresh = layout.kind == 0
    pairs = places[fresh].sum() + share * places[~fresh].sum()
    chosen = layout.fresh + layout.recomputed(ratio)
    full = config.layers * layer(size, places.sum()) + 2 * head
    early = CHECK_LAYER * layer(size, places.sum()) + 2 * size * kv
    return full, early + (config.layers - CHECK_LAYER) * layer(chosen, pairs) + 2 * head


def _run(args: argparse.Namespace) -> None:
    for name in ("documents", "tokens", "suffix", "rounds"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} must be at least 1")
    cli.keep_compiled_programs()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        bench = Bench(args, Path(folder))
        report = measure(bench, args)
    print(json.dumps(report) if args.json else _text(report))


def measure(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Run the rounds and return what they gave."""
    seconds: dict[str, list[float]] = {}
    half = bench.layout.size // 2
    for number in range(-1, args.rounds):
        for chunk in args.chunks:
            seconds.setdefault(f"full, chunk {chunk}", []).append(bench.prefill(chunk))
            seconds.setdefault(f"half, chunk {chunk}", []).append(bench.prefill(chunk, half))
            seconds.setdefault(f"blend from memory, chunk {chunk}", []).append(bench.blend(chunk, bench.memory))
            seconds.setdefault(f"blend from disk, chunk {chunk}", []).append(bench.blend_from_disk(chunk))
        seconds.setdefault("load from disk", []).append(bench.load())
        if number < 0:
            seconds.clear()
    middle = {name: float(np.median(values)) for name, values in seconds.items()}

    def best(kind: str) -> str:
        return min((name for name in middle if name.startswith(kind)), key=lambda name: middle[name])

    full, memory, disk = best("full"), best("blend from memory"), best("blend from disk")
    timeline = Timeline()
    bench.blend_from_disk(int(disk.rpartition(" ")[2]), timeline)
    whole, blended = flops(bench.config, bench.layout, args.ratio)
    prefills = [(half, middle[full.replace("full", "half")]), (bench.layout.size, middle[full])]
    choices = {
        name: vars(blend.choose(bench.layout, bench.config, Speeds.fit(prefills), load, least=args.ratio))
        for name, load in (("memory", 0.0), ("disk", middle["load from disk"]))
    }
    return {
        "model": bench.config.name,
        "prompt": {"documents": args.documents, "tokens": args.tokens, "suffix": args.suffix, "ratio": args.ratio},
        "dtype": args.dtype,
        "pool_dtype": args.pool_dtype,
        "device": jax.devices()[0].device_kind,
        "rounds": args.rounds,
        "cached_bytes": bench.nbytes,
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "best": {"full": full, "memory": memory, "disk": disk},
        "speedup_memory": middle[full] / middle[memory],
        "speedup_disk": middle[full] / middle[disk],
        "flop_bound": whole / blended,
        "share_of_bound": middle[full] / middle[memory] / (whole / blended),
        "predicted": choices,
        "timeline": timeline.rows(),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Return the median and the 10th and 90th percentile."""
    low, median, high = np.percentile(values, [10, 50, 90])
    return {"median": float(median), "p10": float(low), "p90": float(high)}


def _text(report: dict[str, Any]) -> str:
    prompt = report["prompt"]
    what = f"{prompt['documents']} x {prompt['tokens']} + {prompt['suffix']} tokens, r = {prompt['ratio']:g}"
    on = f"weights {report['dtype']}, pool {report['pool_dtype']}, {report['device']}"
    out = [f"{report['model']}, {what}, {on}"]
    out.append(f"{'seconds':<36} {'median':>8} {'10 %':>8} {'90 %':>8}")
    for name, of in report["seconds"].items():
        out.append(f"{name:<36} {of['median']:>8.3f} {of['p10']:>8.3f} {of['p90']:>8.3f}")
    out.append(
        f"from memory {report['speedup_memory']:.2f}x, {report['share_of_bound']:.0%} of the FLOP bound of "
        f"{report['flop_bound']:.2f}x; from disk {report['speedup_disk']:.2f}x"
    )
    for name, choice in report["predicted"].items():
        what = "full prefill" if choice["full"] else f"blend at r = {choice['ratio']:.2f}"
        out.append(
            f"the controller from {name}: {what}; predicted {choice['blend_seconds']:.3f} s blended, "
            f"{choice['full_seconds']:.3f} s in full"
        )
    out.append("from disk, ms:   layer    asked     read computed")
    for row in report["timeline"]:
        cells = [f"{1e3 * row[name]:>8.1f}" if name in row else " " * 8 for name in ("asked", "read", "computed")]
        out.append(f"{row['layer']:>22} " + " ".join(cells))
    return "\n".join(out)


if __name__ == "__main__":
    sys.exit(main())
