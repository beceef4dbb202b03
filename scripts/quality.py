"""How good the answers are: every policy against full attention, teacher-forced on real text.

    python scripts/quality.py --text pydoc_data.topics --text anarchism=FOLDER --text jargon=FILE --out quality.jsonl

A passage is prefilled densely, compressed, 128 of its next tokens are scored, it is compressed again, and 128 more are
scored (``--regime prompt``); or it is compressed every 128 tokens from its start (``--regime stream``). A line of the
output is one passage under one policy, mode and budget; lines that are there already are not computed again. A table
of means and their standard errors over passages is printed at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import quality_report
import quality_steps as steps
from quality_steps import CHUNK, Row
from quality_texts import PYTHON, Reader, named

from jaxkv import policies
from jaxkv.compression import CompressionConfig, Mode
from jaxkv.policies.base import Policy
from jaxkv.stats import QueryStats
from jaxkv.stats_packaged import packaged

ALL = "h2o_all"
"""H2O over every query. It is no policy: see ``quality_steps``."""

KNOWN = (*policies.names(), ALL)


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to compress.

    Attributes:
      method: a policy, or ``h2o_all``.
      mode: whose scores are pooled.
      stats: of TriAttention: ``packaged``, ``online`` or a file.
      sinks: oldest slots always kept.
      budget, window: slots kept, and newest ones always kept, inside the budget.
    """

    method: str
    mode: Mode = "per_head"
    stats: str = ""
    sinks: int = 0
    budget: int = 1024
    window: int = 128

    def __post_init__(self) -> None:
        if self.method not in KNOWN:
            raise ValueError(f"method={self.method!r} is unknown; one of {', '.join(KNOWN)} is")
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode={self.mode!r} is unknown; one of {', '.join(get_args(Mode))} is")

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read ``method[:mode[:field=value]..]``, as ``triattention:per_head:stats=online:sinks=4``."""
        method, *rest = text.split(":")
        fields: dict[str, Any] = {"method": method}
        if rest and "=" not in rest[0]:
            fields["mode"] = rest.pop(0)
        for item in rest:
            name, value = item.split("=", 1)
            fields[name] = value if name == "stats" else int(value)
        if method == "triattention":
            fields.setdefault("stats", "packaged")
        return cls(**fields)

    def config(self, seed: int) -> CompressionConfig:
        """Return what the library calls it; ``h2o_all`` has the budget of any other."""
        method = "knorm" if self.method == ALL else self.method
        stats = "online" if self.stats == "online" else None
        return CompressionConfig(
            method=method,
            stats=stats,
            seed=seed,
            budget=self.budget,
            window=self.window,
            sinks=self.sinks,
            mode=self.mode,
        )

    def policy(self, reader: Reader, seed: int) -> Policy | None:
        """Return the policy; None for ``h2o_all``."""
        if self.method == ALL:
            return None
        stats = None
        if self.method == "triattention" and self.stats != "online":
            own = self.stats == "packaged"
            stats = packaged(reader.config) if own else QueryStats.load(self.stats, reader.config)
            if stats is None:
                raise ValueError("no statistics of this model come with the package; give stats=FILE or stats=online")
        return policies.make(self.config(seed), reader.config, stats)


DEFAULT_CASES = (
    *(f"triattention:{mode}" for mode in ("per_head", "per_layer_head", "shared", "union")),
    *(f"triattention:{mode}:stats=online" for mode in ("per_head", "per_layer_head")),
    "triattention:per_head:sinks=4",
    "random:per_head:sinks=4",
    "streaming:per_head:sinks=4",
    "streaming:per_head:sinks=0",
    *(f"{method}:{mode}" for method in ("snapkv", "h2o", ALL) for mode in ("per_head", "per_layer_head")),
    *(f"{method}:{mode}" for method in ("knorm", "keydiff") for mode in ("per_head", "per_layer_head")),
)


def prefilled(reader: Reader, ids: np.ndarray, room: int, mass: bool) -> Row:
    """Return a row with all of ``ids`` in it and room for as many tokens more, all kept."""
    row = Row.empty(reader.config, ids.size + room, mass)
    for start in range(0, ids.size, CHUNK):
        row, _ = steps.run(reader.weights, reader.config, row, ids[start : start + CHUNK])
    return row


def full_log_probabilities(reader: Reader, row: Row, ids: np.ndarray) -> list[jax.Array]:
    """Return what full attention says after each of ``ids``, chunk by chunk."""
    row = dataclasses.replace(row, mass=None)
    out = []
    for start in range(0, ids.size, CHUNK):
        row, hidden = steps.run(reader.weights, reader.config, row, ids[start : start + CHUNK])
        out.append(steps.log_probabilities(reader.weights, hidden))
    return out


def measure(
    reader: Reader, row: Row, ids: np.ndarray, full: list[jax.Array], case: Case, seed: int
) -> tuple[dict[str, float], int]:
    """Score a passage after the tokens that are in ``row``, compressing before each chunk that finds it above budget.

    Args:
      reader: the model.
      row: the passage's beginning.
      ids: what follows, and one token more: a multiple of 128 plus 1.
      full: what full attention says, for the last chunks; earlier ones are run and not scored.
      case: how to compress.
      seed: of the random policy.

    Returns:
      Means over the scored positions, and the most slots that the row held after its first compaction.
    """
    policy, budget = case.policy(reader, seed), case.config(seed).resolve(row.length, ids.size, steps.BLOCK)
    if policy is not None:
        row = dataclasses.replace(row, mass=None)
    scored, most = [], 0
    chunks = ids.size // CHUNK
    for chunk in range(chunks):
        if row.length > budget.b_row:
            row = steps.compress(row, budget, policy, case.mode)
        piece = ids[chunk * CHUNK : (chunk + 1) * CHUNK + 1]
        row, hidden = steps.run(reader.weights, reader.config, row, piece[:-1])
        most = max(most, row.length)
        if chunk >= chunks - len(full):
            scored.append(steps.compare(reader.weights, hidden, full[chunk - chunks + len(full)], piece[1:]))
    kl, top1, nll, nll_full = np.asarray(np.concatenate(jax.device_get(scored), axis=1), np.float64).mean(axis=1)
    numbers = {"kl": kl, "top1": top1, "nll": nll, "nll_full": nll_full, "ppl_ratio": np.exp(nll - nll_full)}
    return {name: float(value) for name, value in numbers.items()}, most


def lines(
    reader: Reader, texts: dict[str, str], cases: list[Case], args: argparse.Namespace, done: set[str]
) -> Iterator[dict[str, Any]]:
    """Yield a line for every passage and case that is not done yet, passage by passage."""
    total = args.prompt + args.scored
    for index in range(args.passages):
        for seed, (name, text) in enumerate(texts.items()):
            about = {"regime": args.regime, "text": name, "passage": index, "of": args.passages}
            about |= {"prompt": args.prompt, "scored": args.scored, "dtype": args.dtype}
            todo = [case for case in cases if identity(about | dataclasses.asdict(case)) not in done]
            if not todo:
                continue
            ids = reader.passage(text, index, args.passages, total + 1)
            mass = any(case.method == ALL for case in todo)
            row = prefilled(reader, ids[: args.prompt], args.scored, mass)
            full = full_log_probabilities(reader, row, ids[args.prompt : total])
            start = args.prompt
            if args.regime == "stream":
                # A row is as wide as it has to be: budget and chunk.
                start, row = 0, Row.empty(reader.config, max(case.budget for case in todo) + CHUNK, mass)
            for case in todo:
                began = time.perf_counter()
                own, most = measure(reader, row, ids[start:], full, case, 100 * seed + index)
                seconds = round(time.perf_counter() - began, 2)
                yield {**about, **dataclasses.asdict(case), **own, "most_slots": most, "seconds": seconds}


def identity(line: dict[str, Any]) -> str:
    """Return what tells a line from all others: everything but its results."""
    fields = ["regime", "text", "passage", "of", "prompt", "scored", "dtype"]
    fields += [field.name for field in dataclasses.fields(Case)]
    return json.dumps([line[field] for field in fields])


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(prog="python scripts/quality.py", description=__doc__.splitlines()[0])
    made.add_argument("--model", help="as for jaxkv.generate; the demo model by default")
    made.add_argument("--dtype", default="bfloat16", help="of the weights; the pool is float32")
    made.add_argument("--text", action="append", help="NAME=FILE, NAME=FOLDER or pydoc_data.topics; again for more")
    made.add_argument("--passages", type=int, default=4, help="of each text, evenly spaced")
    made.add_argument("--regime", choices=("prompt", "stream"), default="prompt")
    made.add_argument("--prompt", type=int, default=2048, help="tokens before the scored ones, BOS included")
    made.add_argument("--scored", type=int, default=256, help="tokens scored")
    made.add_argument("--budgets", type=int, nargs="+", default=[1024, 512, 192])
    made.add_argument("--cases", nargs="+", default=DEFAULT_CASES, help="METHOD[:MODE[:FIELD=VALUE]..]")
    made.add_argument("--out", type=Path, required=True, help="JSON lines; what is in it is not computed again")
    made.add_argument("--minutes", type=float, default=float("inf"), help="stop after this long")
    made.add_argument("--table", action="store_true", help="only print the table of what is there")
    return made


def main() -> int:
    """Measure what is missing and print the table."""
    args = parser().parse_args()
    if args.prompt % CHUNK or args.scored % CHUNK or min(args.prompt, args.scored) < CHUNK:
        sys.exit(f"error: --prompt and --scored must be multiples of {CHUNK}")
    try:
        cases = [dataclasses.replace(Case.parse(text), budget=b) for b in args.budgets for text in args.cases]
    except (TypeError, ValueError) as error:
        sys.exit(f"error: {error}")
    found = quality_report.read(args.out)
    if not args.table:
        began = time.monotonic()
        reader = Reader.load(args.model, args.dtype)
        done = {identity(line) for line in found}
        with args.out.open("a") as file:
            for line in lines(reader, named(args.text or [PYTHON]), cases, args, done):
                file.write(json.dumps(line) + "\n")
                file.flush()
                found.append(line)
                if time.monotonic() - began > 60 * args.minutes:
                    break
    print(quality_report.table([line for line in found if line["regime"] == args.regime]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
