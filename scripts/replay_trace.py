"""How much of a trace's prompts a prefix cache would serve, by its size and by what it evicts.

    python scripts/replay_trace.py qwen_traceA_blksz_16.jsonl
    python scripts/replay_trace.py --synthetic 2000 --sizes 1% 10% 50% --json

The format is that of the public qwen-bailian traces (alibaba-edu/qwen-bailian-usagetraces-anon): JSON lines with
``chat_id``, ``parent_chat_id`` (-1 for a first turn), ``timestamp`` in seconds, ``input_length`` and ``output_length``
in tokens, ``type``, ``turn``, and ``hash_ids``, one for each 16 tokens of the prompt. Those ids name what is in a
block alone, so here a block is its id together with all ids before it: KV depends on them.

A hit is a block of a prompt that is in the cache together with all blocks before it. After its prompt is served, a
request's blocks are put into the cache, first ones first. ``lru``, ``fifo`` and ``lfu`` never evict for a request what
the request itself uses, and evict a prompt's later blocks before its earlier ones where nothing else decides.
``belady`` knows the future and evicts what is needed last, which no policy beats. The ideal is a cache without end.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxkv import cli

POLICIES = ("lru", "fifo", "lfu", "belady")
BLOCK = 16
SIZES = ("1%", "2%", "5%", "10%", "20%", "50%")
_REUSED = 0.1
"""The published figure: this share of the blocks serves 77 % of the hits."""


def parser() -> argparse.ArgumentParser:
    """Return the script's parser."""
    parser = argparse.ArgumentParser(prog="python scripts/replay_trace.py", description=__doc__.partition("\n")[0])
    parser.add_argument("trace", nargs="?", help="the JSON lines")
    parser.add_argument("--synthetic", type=int, metavar="N", help="make up N requests instead")
    parser.add_argument("--seed", type=int, default=0, help="of --synthetic")
    parser.add_argument("--write", metavar="FILE", help="keep the trace of --synthetic")
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="SIZE", help="blocks, or 5%% of all distinct ones")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES, metavar="POLICY")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, and no table")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Replay and print."""
    args = parser().parse_args(argv)
    return cli.run(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    if (args.trace is None) == (args.synthetic is None):
        raise ValueError("give the file of a trace or --synthetic N, and one of them")
    if args.write is not None and args.synthetic is None:
        raise ValueError("--write keeps what --synthetic made; give that too")
    if args.synthetic is not None:
        if args.synthetic < 1:
            raise ValueError(f"--synthetic {args.synthetic} must be at least 1")
        lines = [json.dumps(request) for request in synthetic(args.synthetic, args.seed)]
        if args.write is not None:
            Path(args.write).write_text("\n".join(lines) + "\n")
    else:
        with Path(args.trace).open() as file:
            lines = list(file)
    report = replay(read(lines), args.sizes, args.policies)
    print(json.dumps(report) if args.json else _text(report))


def read(lines: Iterable[str]) -> list[list[int]]:
    """Return the blocks of each request in order of time. Equal numbers are equal blocks with equal blocks before them.

    Raises:
      ValueError: a line is not of the format.
    """
    timed = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = json.loads(line)
            at, ids = float(request["timestamp"]), [int(i) for i in request["hash_ids"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} is no request with timestamp and hash_ids: {error!r}") from error
        timed.append((at, ids))
    timed.sort(key=lambda request: request[0])
    known: dict[tuple[int, int], int] = {}
    out = []
    for _, ids in timed:
        parent, blocks = -1, []
        for i in ids:
            parent = known.setdefault((parent, i), len(known))
            blocks.append(parent)
        out.append(blocks)
    return out


def replay(requests: Sequence[Sequence[int]], sizes: Sequence[str], policies: Sequence[str]) -> dict[str, Any]:
    """Return hit rates, shares of all blocks asked for, by size and policy, and the shape of the reuse."""
    asked = sum(map(len, requests))
    if not asked:
        raise ValueError("the trace asks for no block; its hash_ids are empty")
    reuse = reuses(requests)
    blocks = [_size(size, len(reuse)) for size in sizes]
    return {
        "requests": len(requests),
        "blocks_asked": asked,
        "distinct_blocks": len(reuse),
        "ideal_hit_rate": sum(reuse) / asked,
        "top_tenth_serves": served_by(reuse, _REUSED),
        "blocks_that_serve_77_percent": serving(reuse, 0.77),
        "hit_rates": [
            {"size": size, "blocks": count, **{name: hits(requests, count, name) / asked for name in policies}}
            for size, count in zip(sizes, blocks, strict=True)
        ],
    }


def reuses(requests: Iterable[Sequence[int]]) -> list[int]:
    """Return how often each distinct block is found in a cache without end, the most reused first."""
    counts: dict[int, int] = {}
    for block in itertools.chain.from_iterable(requests):
        counts[block] = counts.get(block, -1) + 1
    return sorted(counts.values(), reverse=True)


def served_by(reuse: Sequence[int], share: float) -> float:
    """Return the share of hits that the most reused ``share`` of the blocks serves."""
    return sum(reuse[: math.ceil(share * len(reuse))]) / max(sum(reuse), 1)


def serving(reuse: Sequence[int], share: float) -> float:
    """Return the smallest share of the blocks that serves ``share`` of the hits."""
    needed, count = share * sum(reuse), 0
    while needed > 1e-9:
        needed, count = needed - reuse[count], count + 1
    return count / len(reuse)


def hits(requests: Sequence[Sequence[int]], capacity: int, policy: str) -> int:
    """Return how many blocks a cache of ``capacity`` blocks serves."""
    cache = _Cache(capacity, policy)
    uses = _next_uses(requests) if policy == "belady" else [()] * len(requests)
    return sum(cache.serve(now, blocks, uses[now]) for now, blocks in enumerate(requests))


class _Cache:
    """Ranks of the cached blocks; the lowest goes first. The heap also holds ranks that are no longer true."""

    def __init__(self, capacity: int, policy: str) -> None:
        self._capacity, self._policy = capacity, policy
        self._ranks: dict[int, tuple[float, ...]] = {}
        self._heap: list[tuple[tuple[float, ...], int]] = []

    def serve(self, now: int, blocks: Sequence[int], next_uses: Sequence[float]) -> int:
        """Return the hits of one request, and put its blocks in."""
        ranks = self._ranks
        found = sum(1 for _ in itertools.takewhile(ranks.__contains__, blocks))
        own = set(blocks)
        for depth, block in enumerate(blocks):
            if block not in ranks and not self._make_room(own):
                break
            ranks[block] = self._rank(now, depth, ranks.get(block), next_uses)
            heapq.heappush(self._heap, (ranks[block], block))
            if len(ranks) > self._capacity:
                self._evict(())
        return found

    def _rank(
        self, now: int, depth: int, old: tuple[float, ...] | None, next_uses: Sequence[float]
    ) -> tuple[float, ...]:
        if self._policy == "belady":
            return (-next_uses[depth], -depth)
        if self._policy == "lfu":
            return ((old[0] if old else 0) + 1, now, -depth)
        return old if old and self._policy == "fifo" else (now, -depth)

    def _make_room(self, own: set[int]) -> bool:
        # Belady first takes a block in, and then evicts whatever is needed last: the block itself, maybe.
        if self._policy == "belady":
            return self._capacity > 0
        return len(self._ranks) < self._capacity or self._evict(own)

    def _evict(self, spared: Iterable[int]) -> bool:
        aside, done = [], False
        while self._heap and not done:
            rank, block = heapq.heappop(self._heap)
            if self._ranks.get(block) != rank:
                continue
            if block in spared:
                aside.append((rank, block))
            else:
                del self._ranks[block]
                done = True
        for item in aside:
            heapq.heappush(self._heap, item)
        return done


def _next_uses(requests: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return for each block of each request the number of the next request that has it, or infinity."""
    known: dict[int, float] = {}
    out: list[list[float]] = []
    for now in range(len(requests) - 1, -1, -1):
        out.append([known.get(block, math.inf) for block in requests[now]])
        known.update(dict.fromkeys(requests[now], now))
    return out[::-1]


def synthetic(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return made-up requests of the format: chats of several turns that begin with one of a few system prompts."""
    rng = random.Random(seed)
    fresh = itertools.count()
    prompts = [[next(fresh) for _ in range(rng.randint(2, 40))] for _ in range(20)]
    weights = [1 / (rank + 1) for rank in range(len(prompts))]
    open_chats: list[tuple[int, int, list[int]]] = []
    requests, now = [], 0.0
    for chat in range(count):
        now += rng.expovariate(2.0)
        parent, turn, ids = -1, 1, rng.choices(prompts, weights)[0]
        if open_chats and rng.random() < 0.5:
            parent, turn, ids = open_chats.pop(rng.randrange(len(open_chats)))
        ids = [*ids, *(next(fresh) for _ in range(rng.randint(1, 30)))]
        answer = [next(fresh) for _ in range(rng.randint(1, 20))]
        requests.append(
            {
                "chat_id": chat,
                "parent_chat_id": parent,
                "timestamp": round(now, 3),
                "input_length": BLOCK * len(ids),
                "output_length": BLOCK * len(answer),
                "type": "text",
                "turn": turn,
                "hash_ids": ids,
            }
        )
        open_chats = [*open_chats[-200:], (chat, turn + 1, ids + answer)]
    return requests


def _size(text: str, distinct: int) -> int:
    try:
        number = float(text.removesuffix("%"))
        blocks = round(number / 100 * distinct) if text.endswith("%") else int(text)
    except (ValueError, OverflowError):
        blocks = 0
    if blocks < 1:
        raise ValueError(f"size {text!r} is not at least one block; write 1000, or 5% of all distinct blocks")
    return blocks


def _text(report: dict[str, Any]) -> str:
    names = [name for name in POLICIES if name in report["hit_rates"][0]]
    counted = f"{report['requests']} requests, {report['blocks_asked']} blocks, {report['distinct_blocks']} distinct"
    reuse = (
        f"ideal hit rate {report['ideal_hit_rate']:.1%}; a tenth of the blocks serves {report['top_tenth_serves']:.0%} "
        f"of the hits, {report['blocks_that_serve_77_percent']:.1%} of them serve 77 % (published: 10 % serve 77 %)"
    )
    lines = [counted, reuse, f"{'size':>8} {'blocks':>9} " + " ".join(f"{name:>8}" for name in names)]
    lines += [
        f"{row['size']:>8} {row['blocks']:>9} " + " ".join(f"{row[name]:>8.1%}" for name in names)
        for row in report["hit_rates"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
