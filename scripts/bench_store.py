"""What the store costs: puts and gets by tier beside plain file operations on the same bytes, keys and lookups.

    python scripts/bench_store.py
    python scripts/bench_store.py --folder FOLDER_ON_THE_DISK_IN_QUESTION --json

The default segment is 512 tokens of SmolLM2-135M in float32. Each line is a median over rounds, with the 10th and the
90th percentile; the kinds take turns within a round, so that a change of the machine's speed meets all of them.
"Cold" reads come after the kernel was told to drop the file from its cache; on tmpfs it has nowhere to drop it to.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv import cli
from jaxkv.store import Key, Store
from jaxkv.store.file_format import DTYPES

ROOT = bytes(32)
NAMES = {str(dtype): dtype for dtype in DTYPES.values() if dtype.itemsize > 1}
TIMES = 200
WARM = 4
"""Rounds that do not count."""


def parser() -> argparse.ArgumentParser:
    """Return the script's parser."""
    parser = argparse.ArgumentParser(prog="python scripts/bench_store.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", help="where to write (default: the folder for temporary files)")
    parser.add_argument("--rounds", type=int, default=9, metavar="N")
    parser.add_argument("--layers", type=int, default=30, metavar="L")
    parser.add_argument("--tokens", type=int, default=512, metavar="T")
    parser.add_argument("--kv-heads", type=int, default=3, metavar="K")
    parser.add_argument("--head-dim", type=int, default=64, metavar="D")
    parser.add_argument("--dtype", choices=sorted(NAMES), default="float32")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, and no table")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    args = parser().parse_args(argv)
    return cli.run(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    for name in ("rounds", "layers", "tokens", "kv_heads", "head_dim"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    shape = (args.layers, args.tokens, args.kv_heads, args.head_dim)
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape, np.float32).astype(NAMES[args.dtype]) for name in ("k", "v")}
    nbytes = sum(array.nbytes for array in arrays.values())
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        moved = transfers(Path(folder), arrays, args.rounds)
        asked = questions(Path(folder), args.tokens, args.rounds)
    report: dict[str, Any] = {"shape": shape, "dtype": args.dtype, "bytes": nbytes, "rounds": args.rounds}
    report["megabytes_a_second"] = {
        name: spread([nbytes / 1e6 / s for s in seconds]) for name, seconds in moved.items() if name != "first layer"
    }
    report["first_layer_milliseconds"] = spread([1e3 * s for s in moved["first layer"]])
    report["microseconds"] = {name: spread([1e6 * s for s in seconds]) for name, seconds in asked.items()}
    print(json.dumps(report) if args.json else _text(report))


def transfers(folder: Path, arrays: dict[str, np.ndarray], rounds: int) -> dict[str, list[float]]:
    """Return seconds of a segment's way in and out, by kind, one number a round."""
    plain, copy = folder / "plain", folder / "copy"
    data = b"".join(array.tobytes() for array in arrays.values())
    seconds: dict[str, list[float]] = {}

    def note(name: str, action: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        value = action()
        seconds.setdefault(name, []).append(time.perf_counter() - begin)
        return value

    disk = Store(folder / "disk", disk=1 << 40)
    # Memory that a virtual machine has not touched before is slow. A full host tier and dropped files give theirs back.
    both = Store(folder / "both", memory=2 * len(data), disk=1 << 40, queue=1 << 40)
    memory = Store(memory=2 * len(data))
    with disk, both, memory:
        for number in range(-WARM, rounds):
            key = Key.content(ROOT, [number + WARM] * 8)
            note("plain write and fsync", lambda: _write(plain, data))
            note("plain copy of a cached file, no fsync", lambda: shutil.copyfile(plain, copy))
            note("plain read, cached", lambda: _read(plain))
            _drop(plain)
            note("plain read, cold", lambda: _read(plain))
            note("put, memory", lambda key=key: memory.put(key, arrays))
            note("put, disk, waiting", lambda key=key: disk.put(key, arrays, wait=True))
            note("put, both, until it returns", lambda key=key: both.put(key, arrays))
            note("put, both, until it is written", both.flush)
            note("get, memory", lambda key=key: memory.get(key))
            note("get, disk, cached", lambda key=key: disk.get(key))
            for name in ("disk", "both"):
                _drop(folder / name / key.name[:2] / f"{key.name}.safetensors")
            note("get, disk, cold", lambda key=key: disk.get(key))
            with disk.lease([key]) as (view,):
                note("first layer", lambda view=view: view.layer(0))
            if number < 0:
                seconds.clear()
    return seconds


def questions(folder: Path, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return seconds of making a key and of a lookup, by kind: means over some hundred calls, one a round."""
    ids = np.random.default_rng(1).integers(0, 50000, (TIMES, tokens))
    lists = ids.tolist()
    keys = [Key.content(ROOT, row) for row in ids]
    absent = [Key.content(ROOT, row + 50000) for row in ids]
    small = {"k": np.zeros((2, 1), np.float32)}
    seconds: dict[str, list[float]] = {}
    with Store(folder / "questions", disk=1 << 30) as disk, Store(memory=1 << 30) as memory:
        for key in keys:
            disk.put(key, small, wait=True)
            memory.put(key, small)
        kinds: dict[str, Callable[[], Any]] = {
            "content key, from an array": lambda: [Key.content(ROOT, row) for row in ids],
            "content key, from a list": lambda: [Key.content(ROOT, row) for row in lists],
            "prefix keys at blocks of 16, from an array": lambda: [Key.prefix(ROOT, row, 16) for row in ids],
            "lookup, in memory": lambda: memory.lookup(keys),
            "lookup, on disk": lambda: disk.lookup(keys),
            "lookup, nowhere": lambda: disk.lookup(absent),
        }
        for number in range(-1, rounds):
            for name, action in kinds.items():
                begin = time.perf_counter()
                action()
                seconds.setdefault(name, []).append((time.perf_counter() - begin) / TIMES)
            if number < 0:
                seconds.clear()
    return seconds


def spread(values: list[float]) -> dict[str, float]:
    """Return the median and the 10th and 90th percentile."""
    low, median, high = np.percentile(values, [10, 50, 90])
    return {"median": float(median), "p10": float(low), "p90": float(high)}


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> np.ndarray:
    buffer = np.empty(path.stat().st_size, np.uint8)
    with path.open("rb", buffering=0) as file:
        file.readinto(memoryview(buffer))  # type: ignore[arg-type]
    return buffer


def _drop(path: Path) -> None:
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _text(report: dict[str, Any]) -> str:
    lines = [f"{report['bytes'] / 1e6:.1f} MB: k and v {list(report['shape'])} {report['dtype']}"]
    for unit, name in (("MB/s", "megabytes_a_second"), ("us a segment", "microseconds")):
        lines.append(f"\n{unit:<42} {'median':>9} {'10 %':>9} {'90 %':>9}")
        for kind, of in report[name].items():
            lines.append(f"{kind:<42} {of['median']:>9.1f} {of['p10']:>9.1f} {of['p90']:>9.1f}")
    first = report["first_layer_milliseconds"]
    lines.append(
        f"\nfirst layer from disk, cached: {first['median']:.2f} ms ({first['p10']:.2f} to {first['p90']:.2f})"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
