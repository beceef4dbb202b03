"""Registers, spills, shared memory and occupancy of every kernel on chips that are not there; on TPUs vector memory.

    scripts/aot_env.sh .venv-aot && .venv-aot/bin/python scripts/kernel_report.py

Exits with 1 if a kernel spills. Occupancy is the theoretical one: resident threads over those that a multiprocessor
holds, as registers, shared memory and the size of a block allow.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from typing import Any

import ahead_of_time
import tpu_cases
from ahead_of_time import TARGETS, TPU_TARGETS, compile_for
from kernel_cases import Case, cases

from pallas_kernels.device import DEVICES


def main() -> int:
    """Compile what the arguments select, print a table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", action="append", choices=[*TARGETS, *TPU_TARGETS], help="a chip (default: all)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose kernel and name contain it")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write what was found, PTX included")
    args = parser.parse_args()
    chosen = [case for case in (*cases(), *tpu_cases.cases()) if args.only in f"{case.kernel} {case.name}"]
    found = []
    print(f"{'chip':<10} {'kernel':<14} {'case':<48} {'regs':>5} {'spill':>6} {'smem':>7} {'occupancy':>10}")
    for target in args.target or (*TARGETS, *TPU_TARGETS):
        for case in (case for case in chosen if target in (case.targets or TARGETS)):
            result = measure(target, case)
            found.append(result)
            if target in TPU_TARGETS:
                print(
                    f"{target:<11} {case.kernel:<14} {case.name:<48} {result['vector_memory']:>10} of vector memory",
                    flush=True,
                )
                continue
            print(
                f"{DEVICES[target].arch:<10} {case.kernel:<14} {case.name:<48} {result['registers']:>5} "
                f"{result['spilled']:>6} {result['shared_memory']:>7} {result['occupancy']:>10.0%}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(found))
    spills = [f"{result['target']}: {result['kernel']} {result['case']}" for result in found if result.get("spilled")]
    if spills:
        print("registers are spilled by", *spills, sep="\n  ", file=sys.stderr)
    return 1 if spills else 0


def measure(target: str, case: Case) -> dict[str, Any]:
    """Compile one case and return what is to be said of its kernel and of its memory."""
    program = compile_for(target, case.function, *case.args, donate=case.donate)
    (kernel,) = (kernel for kernel in program.kernels if kernel.name.startswith(case.kernel))
    donated = ahead_of_time.jax.tree.leaves([case.args[index] for index in case.donate])
    return {
        "target": target,
        "case": case.name,
        **dataclasses.asdict(kernel),
        "kernel": case.kernel,
        **({} if target in TPU_TARGETS else {"occupancy": kernel.occupancy(DEVICES[target])}),
        "donated": sum(x.size * x.dtype.itemsize for x in donated),
        "aliased": program.memory.alias_size_in_bytes,
        "temporaries": program.memory.temp_size_in_bytes,
        "copies": [line for size in {x.size for x in donated} for line in program.copies(size)],
    }


if __name__ == "__main__":
    sys.exit(main())
