"""Check the kernels on the NVIDIA GPU of this machine: right or wrong, how near to its memory bus, how fast to decode.

    python scripts/device_check.py --out device.json      # 8 minutes at most
    python scripts/device_check.py --dry-run              # all of it on a CPU, at toy sizes

Takes jax, flax, numpy and this checkout, and downloads nothing. Progress goes to stderr, a table to stdout, and the
file grows with every result. Exits with 1 if a check fails or a case breaks off. See docs/device.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import sys
from typing import Any

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1]), str(pathlib.Path(__file__).resolve().parent)]
# What JAX takes by itself leaves a quarter of the memory unused, and rows with it.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import device_bench as bench  # noqa: E402
import device_cases as cases  # noqa: E402
import device_table  # noqa: E402
import jax  # noqa: E402
import jaxlib  # noqa: E402
from device_bench import Load  # noqa: E402
from device_cases import QWEN3, SMOLLM2, Heads  # noqa: E402
from device_decode import Decoding  # noqa: E402
from device_timing import Report  # noqa: E402

import pallas_kernels  # noqa: E402
from pallas_kernels import device  # noqa: E402

SECONDS = 450.0
"""After which no further case is begun; the last one may still run on."""
LOADS = (Load(1, 32768), Load(8, 8192), Load(32, 4096), Load(128, 2048))
DRY_LOADS = (Load(8, 32),)
MOVES = ((8, 3200, 3072), (32, 3200, 3072), (128, 3200, 3072))
DRY_MOVES = ((2, 48, 32),)


def main() -> int:
    """Run everything that there is time for, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="JSON, rewritten with every result")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="begin no case that may end later")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, kernels interpreted for an H200")
    args = parser.parse_args()
    chip = jax.local_devices()[0]
    if chip.platform not in ("gpu", "cuda") and not args.dry_run:
        parser.error(f"the default device is {chip.device_kind}; an NVIDIA GPU is needed, or --dry-run")
    with device.target("NVIDIA H200", interpret=True) if args.dry_run else contextlib.nullcontext():
        report = Report(args.out, _facts(chip, args.dry_run), args.seconds)
        run(report, args.dry_run)
    report.put("goals", device_table.goals(report.found))
    wrong = device_table.failed(report.found)
    print(device_table.table(report.found))
    passed = sum(entry["status"] == "passed" for entry in report.found.get("checks", []))
    print(f"\n{passed} checks passed, wrong: {'; '.join(wrong) or 'nothing'}")
    return 1 if wrong else 0


def run(report: Report, dry: bool) -> None:
    """Run the cases, those first that say most."""
    bench.copy_bandwidth(report, dry)
    cases.run_checks(report, dry)
    _ops(report, QWEN3, dry)
    Decoding(report, dry).run()
    _ops(report, SMOLLM2, dry)


def _ops(report: Report, heads: Heads, dry: bool) -> None:
    for load in DRY_LOADS if dry else LOADS:
        report.run(f"attention {heads.name} {load}", 15, lambda at=load: bench.attention(report, heads, at, dry))  # type: ignore[misc]
    for load in DRY_LOADS if dry else LOADS:
        report.run(f"scoring {heads.name} {load}", 10, lambda at=load: bench.scoring(report, heads, at, dry))  # type: ignore[misc]
    for move in DRY_MOVES if dry else MOVES:
        report.run(f"moving {heads.name} {move[0]} rows", 10, lambda at=move: bench.moving(report, heads, at, dry))  # type: ignore[misc]


def _facts(chip: jax.Device, dry: bool) -> dict[str, Any]:
    stats = chip.memory_stats() or {}
    return {
        "chip": chip.device_kind,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "platform": chip.client.platform_version.splitlines()[0],
        "memory_bytes": stats.get("bytes_limit"),
        "dry_run": dry,
        "candidates": list(pallas_kernels.candidates()),
    }


if __name__ == "__main__":
    sys.exit(main())
