"""Random requests at the pool's limit, for as long as it is told: arrivals, cancellations, forks, second turns.

    python scripts/soak.py --seconds 600
    python scripts/soak.py --seconds 60 --json

A tiny seeded model, rows of several budgets, prefixes that many share, and a pool that holds a third of what is asked
for, so rows give way all the time. What a request generates is compared with what it generated alone. At the end, and
now and then while the engine is idle, every block, every device array and the host's memory have to be back.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import psutil

from jaxkv import cli
from jaxkv.compression import CompressionConfig
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.engine import Engine
from jaxkv.model import init_weights
from jaxkv.request import Request
from jaxkv.sampling import SamplingParams

MODEL = ModelConfig("llama", 97, 48, 64, 2, 6, 2, 8, context=256, tied_head=True, name="soak")
CACHE = CacheConfig(blocks=90, context=256, rows=8, prefill_chunk=16, block_size=4, round_steps=8, kept_rows=3)
COMPRESSION = CompressionConfig(method="knorm", budget=32, interval=8, window=8, sinks=2)
CATALOGUE = 60
"""Different requests, each of which comes again and again."""


class LeakError(AssertionError):
    """Something that should have come back did not, or a request's tokens depended on its neighbours."""


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(prog="python scripts/soak.py", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="how long (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def catalogue(rng: np.random.Generator) -> list[Request]:
    """Return the requests that come, with a few beginnings among them."""
    heads = [rng.integers(0, MODEL.vocab_size, 48).tolist() for _ in range(4)]
    own = [None, dataclasses.replace(COMPRESSION, budget=24, interval=4), CompressionConfig()]
    found = []
    for at in range(CATALOGUE):
        head = heads[rng.integers(4)][: rng.integers(0, 49)]
        prompt = [*head, *rng.integers(0, MODEL.vocab_size, rng.integers(1, 60)).tolist()]
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 120)),
            temperature=(0, 0.9)[at % 2],
            seed=at,
            ignore_eos=True,
            n=1 + 2 * (at % 7 == 3),
            repetition_penalty=1 + 0.3 * (at % 5 == 2),
        )
        found.append(Request(prompt, params, own[at % 3], keep=at % 6 == 0 and params.n == 1))
    return found


class Soak:
    """An engine under random load, and what has to be true of it.

    Raises:
      LeakError: it is not.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        weights = init_weights(MODEL, seed=3)
        self.engine = Engine(weights, MODEL, CACHE, compression=COMPRESSION)
        self.engine.warmup()
        self.requests = catalogue(self.rng)
        roomy = Engine(weights, MODEL, dataclasses.replace(CACHE, blocks=400), compression=COMPRESSION)
        roomy.warmup()
        self.alone = [self._alone(roomy, request) for request in self.requests]
        del roomy
        self.running: dict[int, int | None] = {}
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.counts = {"added": 0, "finished": 0, "cancelled": 0, "continued": 0, "compared": 0}
        self.kept: list[int] = []

    def _alone(self, engine: Engine, request: Request) -> dict[int, list[int]]:
        engine.add(dataclasses.replace(request, keep=False))
        out: dict[int, list[int]] = {}
        while engine.has_work:
            for event in engine.step():
                out.setdefault(event.choice, []).extend(event.token_ids)
        return out

    def arrive(self) -> None:
        """Add a request: one of the catalogue, or a second turn of one that is kept."""
        kept = [name for name in self.kept if name in self.engine.memory.kept]
        if kept and self.rng.random() < 0.6:
            name = int(self.rng.choice(kept))
            room = MODEL.context - len(self.engine.memory.kept[name].tokens) - 20
            if room > 0:
                prompt = self.rng.integers(0, MODEL.vocab_size, 10).tolist()
                params = SamplingParams(max_tokens=min(room, 30), ignore_eos=True)
                self.running[self.engine.add(Request(prompt, params, continue_from=name))] = None
                self.counts["continued"] += 1
                return
        at = int(self.rng.integers(CATALOGUE))
        self.running[self.engine.add(self.requests[at])] = at
        self.counts["added"] += 1

    def step(self) -> None:
        """Move on by a step, and compare what has ended."""
        for event in self.engine.step(int(self.rng.integers(1, 9))):
            self.tokens.setdefault((event.request_id, event.choice), []).extend(event.token_ids)
            if event.report is not None:
                self._ended(event.request_id, event.choice)

    def _ended(self, name: int, choice: int) -> None:
        tokens, at = self.tokens.pop((name, choice)), self.running[name]
        self.counts["finished"] += 1
        if at is None:
            return
        self.counts["compared"] += 1
        if tokens != self.alone[at][choice]:
            raise LeakError(
                f"request {at}, choice {choice}: {tokens} with neighbours and {self.alone[at][choice]} alone"
            )
        if self.requests[at].keep:
            self.kept.append(name)

    def cancel(self) -> None:
        """End one of the requests that are there, wherever it is."""
        names = [*self.engine.queued, *(row.request_id for row in self.engine.rows)]
        if names:
            name = int(self.rng.choice(names))
            for event in self.engine.cancel(name):
                self.tokens.pop((name, event.choice), None)
                self.counts["cancelled"] += 1

    def check(self) -> None:
        """See that every block has as many holders as rows and kept rows say."""
        holders = [0] * (CACHE.blocks + 1)
        for one in (*self.engine.rows, *self.engine.memory.kept.values()):
            for block in one.blocks:
                holders[block] += 1
        manager = self.engine.blocks
        if holders[1:] != [manager.holders(block) for block in range(1, CACHE.blocks + 1)]:
            raise LeakError("blocks and rows disagree on who holds what")

    def drain(self) -> dict[str, int]:
        """Run everything to its end, let go of what is kept, and return what is still there."""
        while self.engine.has_work:
            self.step()
        for name in list(self.engine.memory.kept):
            self.engine.forget(name)
        if self.engine.blocks.in_use:
            raise LeakError(f"{self.engine.blocks.in_use} blocks are held and nobody is there")
        self.running, self.tokens, self.kept = {}, {}, []
        gc.collect()
        return {"arrays": len(jax.live_arrays()), "rss": psutil.Process().memory_info().rss}


def run(seconds: float, seed: int, progress: cli.Progress) -> dict[str, Any]:
    """Run for a while and return the counts.

    Raises:
      LeakError: something leaked, or a request's tokens were not its own.
    """
    soak = Soak(seed)
    load(soak, 30)
    first = soak.drain()
    start = time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        load(soak, 60)
        now = soak.drain()
        if now["arrays"] > first["arrays"]:
            raise LeakError(f"{now['arrays']} device arrays are alive, and {first['arrays']} were")
        progress.say(f"{spent:.0f} of {seconds:.0f} s, {soak.counts['finished']} requests ended")
    grown = (now["rss"] - first["rss"]) / 2**20
    # Heaps breathe; a leak of the smallest kind we have, a list a request, would be more than this in ten minutes.
    if grown > 64:
        raise LeakError(f"host memory grew by {grown:.0f} MiB")
    totals = dataclasses.asdict(soak.engine.totals)
    return {"seconds": spent, **soak.counts, **totals, "cached_evicted": soak.engine.blocks.evicted, "rss_mib": grown}


def load(soak: Soak, arrivals: int) -> None:
    """Let requests come faster than they are served, and some of them go."""
    for _ in range(arrivals):
        soak.arrive()
        if soak.rng.random() < 0.1:
            soak.cancel()
        for _ in range(int(soak.rng.integers(0, 5))):
            soak.step()
            soak.check()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parser().parse_args(argv)

    def command() -> None:
        progress = cli.Progress(True)
        try:
            counts = run(args.seconds, args.seed, progress)
        finally:
            progress.close()
        if not (counts["preemptions"] and counts["cached_tokens"] and counts["compactions"]):
            raise LeakError(f"the load was too light to prove anything: {counts}")
        if args.json:
            print(json.dumps(counts))
        else:
            print("\n".join(f"{name:18} {value:.6g}" for name, value in counts.items()))

    return cli.run(command)


if __name__ == "__main__":
    sys.exit(main())
