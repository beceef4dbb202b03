"""What rounding the weights costs: int4 and int8 against float, with and without TriAttention, teacher-forced.

    python scripts/quality_int4.py --text pydoc_data.topics --json quality_int4.json

Each model prefills a passage's beginning itself, then 256 of the tokens that follow are scored, 128 at a time; with a
budget the row is compressed before each 128. KL(float || other) and perplexity are means over those tokens; float is
the model as it is loaded without ``--quantize``, with every token kept. The table has means over passages, KL with its
standard error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from quality import Case, full_log_probabilities, measure, prefilled
from quality_report import mean_and_error
from quality_steps import CHUNK
from quality_texts import PYTHON, Reader, named

from jaxkv import quant, weights

FLOAT = "float"


def main() -> int:
    """Measure every kind of weights and every budget, and print the table."""
    args = parser().parse_args()
    if args.prompt % CHUNK or args.scored % CHUNK or min(args.prompt, args.scored) < CHUNK:
        sys.exit(f"error: --prompt and --scored must be multiples of {CHUNK}")
    plain = Reader.load(args.model, args.dtype)
    readers = {FLOAT: plain}
    for kind in args.quantize:
        loaded = weights.load(weights.locate(args.model), args.dtype, quantize=kind)[1]
        readers[kind] = dataclasses.replace(plain, weights=loaded)
    found = list(lines(plain, readers, args))
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps({"setting": setting(args), "rows": rows(found), "passages": found}, indent=1))
    return 0


def lines(plain: Reader, readers: dict[str, Reader], args: argparse.Namespace) -> Any:
    """Yield what was found for each passage, kind of weights and budget; a budget of 0 keeps every token."""
    for seed, (name, text) in enumerate(named(args.text or [PYTHON]).items()):
        for index in range(args.passages):
            ids = plain.passage(text, index, args.passages, args.prompt + args.scored + 1)
            start = prefilled(plain, ids[: args.prompt], args.scored, mass=False)
            full = full_log_probabilities(plain, start, ids[args.prompt : -1])
            for kind, reader in readers.items():
                row = start if kind == FLOAT else prefilled(reader, ids[: args.prompt], args.scored, mass=False)
                for budget in (0, *args.budgets):
                    # A budget that no row outgrows is no budget.
                    case = dataclasses.replace(Case.parse("triattention:per_head"), budget=budget or ids.size)
                    began = time.perf_counter()
                    own, _ = measure(reader, row, ids[args.prompt :], full, case, 100 * seed + index)
                    about = {"weights": kind, "budget": budget, "text": name, "passage": index}
                    yield {**about, **own, "seconds": round(time.perf_counter() - began, 2)}


def rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return means over passages for each kind of weights and budget."""
    out = []
    for kind, budget in dict.fromkeys((line["weights"], line["budget"]) for line in found):
        own = [line for line in found if (line["weights"], line["budget"]) == (kind, budget)]
        kl, error = mean_and_error([line["kl"] for line in own])
        nll, full = (float(np.mean([line[key] for line in own])) for key in ("nll", "nll_full"))
        out.append(
            {
                "weights": kind,
                "method": "triattention" if budget else "none",
                "budget": budget or None,
                "passages": len(own),
                "perplexity": float(np.exp(nll)),
                "perplexity_ratio": float(np.exp(nll - full)),
                "kl": kl,
                "kl_error": error,
                "top1": float(np.mean([line["top1"] for line in own])),
            }
        )
    return out


def table(found: list[dict[str, Any]]) -> str:
    """Return the means as Markdown."""
    out = ["| weights | kept | perplexity | as a multiple | KL | top-1 |", "|---|---|---|---|---|---|"]
    for row in rows(found):
        kept = "all" if row["budget"] is None else f"{row['budget']} slots"
        out.append(
            f"| {row['weights']} | {kept} | {row['perplexity']:.3f} | {row['perplexity_ratio']:.3f} "
            f"| {row['kl']:.4f} ± {row['kl_error']:.4f} | {row['top1']:.1%} |"
        )
    return "\n".join(out)


def setting(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the numbers depend on."""
    return {name: getattr(args, name) for name in ("model", "dtype", "passages", "prompt", "scored", "text")}


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(prog="python scripts/quality_int4.py", description=__doc__.splitlines()[0])
    made.add_argument("--model", help="as for jaxkv.generate; the demo model by default")
    made.add_argument("--dtype", default="float32", help="of the float weights; the pool is float32")
    made.add_argument("--quantize", nargs="+", choices=quant.KINDS, default=quant.KINDS, help="kinds to compare")
    made.add_argument("--text", action="append", help="NAME=FILE, NAME=FOLDER or pydoc_data.topics; again for more")
    made.add_argument("--passages", type=int, default=4, help="of each text, evenly spaced")
    made.add_argument("--prompt", type=int, default=2048, help="tokens before the scored ones, BOS included")
    made.add_argument("--scored", type=int, default=256, help="tokens scored")
    made.add_argument("--budgets", type=int, nargs="*", default=[512], help="slots that TriAttention keeps")
    made.add_argument("--json", type=Path, metavar="FILE", help="also write what was found")
    return made


if __name__ == "__main__":
    sys.exit(main())
