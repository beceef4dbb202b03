"""How a running server does under load: tokens a second, time to first token, time between tokens, by clients.

    python -m jaxkv.serve --pool-blocks 1024 &
    python scripts/load_serve.py --clients 1 4 16 64

Each client streams one answer after the other, until all have had ``--requests`` answers. What is timed is what a
client sees: a piece of a stream may bring several tokens, and its time is divided among them.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx2 as httpx

PERCENTILES = (50, 90, 99)
GAIN = 1.1
"""More clients that bring less than this much more tokens a second are past saturation."""


@dataclasses.dataclass
class Answer:
    """One answer, in seconds and tokens, as its client saw it."""

    first: float
    whole: float
    between: list[float]
    tokens: int


@dataclasses.dataclass
class Load:
    """What was measured with so many clients."""

    clients: int
    answers: list[Answer]
    failed: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all answers, over the time that they took together."""
        return sum(answer.tokens for answer in self.answers) / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Return the numbers; latencies in milliseconds."""
        return {
            "clients": self.clients,
            "answers": len(self.answers),
            "failed": self.failed,
            "seconds": round(self.seconds, 2),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "first_token_ms": percentiles([answer.first for answer in self.answers]),
            "between_tokens_ms": percentiles([gap for answer in self.answers for gap in answer.between]),
            "answer_ms": percentiles([answer.whole for answer in self.answers]),
        }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles in milliseconds, by name; none of nothing."""
    ordered = sorted(seconds)
    return {f"p{p}": round(1000 * ordered[(len(ordered) - 1) * p // 100], 2) for p in PERCENTILES} if ordered else {}


async def ask(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Answer | None:
    """Stream one answer; None is one that was refused or broke off."""
    start = time.perf_counter()
    last, first, tokens, done, between = start, 0.0, 0, False, []
    try:
        async with client.stream("POST", url + "/v1/chat/completions", json=body) as stream:
            if stream.status_code != 200:
                return None
            async for line in stream.aiter_lines():
                done = done or line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                choices = json.loads(line[6:])["choices"]
                # Each token has an entry, also one that shows no text yet.
                new = sum(len((choice["logprobs"] or {"content": []})["content"]) for choice in choices)
                now = time.perf_counter()
                if new and not tokens:
                    first = now - start
                elif new:
                    between += [(now - last) / new] * new
                if new:
                    last, tokens = now, tokens + new
    except httpx.HTTPError:
        return None
    return Answer(first, time.perf_counter() - start, between, tokens) if done and tokens else None


async def measure(url: str, headers: dict[str, str], body: dict[str, Any], clients: int, requests: int) -> Load:
    """Keep so many clients busy until so many answers are through."""
    waiting = iter(range(requests))
    found: list[Answer | None] = []

    async def work(client: httpx.AsyncClient) -> None:
        for number in waiting:
            content = f"{body['messages'][0]['content']} ({number})"
            own = {**body, "seed": number, "messages": [{"role": "user", "content": content}]}
            found.append(await ask(client, url, own))

    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(headers=headers, timeout=None, limits=limits) as client:
        start = time.perf_counter()
        await asyncio.gather(*(work(client) for _ in range(clients)))
        seconds = time.perf_counter() - start
    answers = [answer for answer in found if answer is not None]
    return Load(clients, answers, len(found) - len(answers), seconds)


def saturation(loads: Sequence[Load]) -> int | None:
    """Return the fewest clients past which more bring no more tokens a second; None if that was not reached."""
    ordered = sorted(loads, key=lambda load: load.clients)
    for at, load in enumerate(ordered[:-1]):
        if all(more.tokens_per_second < GAIN * load.tokens_per_second for more in ordered[at + 1 :]):
            return load.clients
    return None


def show(loads: Sequence[Load]) -> None:
    """Print a table, and where the server saturates."""
    print("| clients | tokens/s | first token p50 / p90 / p99, ms | between tokens p50 / p90 / p99, ms | failed |")
    print("|---|---|---|---|---|")
    for load in loads:
        numbers = load.to_json()
        latencies = [
            " / ".join(f"{value:.0f}" for value in numbers[name].values()) or "-"
            for name in ("first_token_ms", "between_tokens_ms")
        ]
        print(f"| {load.clients} | {load.tokens_per_second:.1f} | {latencies[0]} | {latencies[1]} | {load.failed} |")
    at = saturation(loads)
    print("more clients bring more tokens up to the last" if at is None else f"saturates at {at} clients")


def main() -> int:
    """Measure a server that runs, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64], metavar="N")
    parser.add_argument(
        "--requests", type=int, metavar="N", help="answers a load (default: twice the clients, 4 at least)"
    )
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--prompt", default="Write a few lines about the sea.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    headers = {"Authorization": f"Bearer {os.environ['JAXKV_API_KEY']}"} if "JAXKV_API_KEY" in os.environ else {}
    try:
        model = httpx.get(args.url + "/v1/models", headers=headers).raise_for_status().json()["data"][0]["id"]
    except httpx.HTTPError as error:
        parser.error(f"no server answers at {args.url} ({error}); start one, give --url, or its key in JAXKV_API_KEY")
    body = {
        "model": model,
        "messages": [{"role": "user", "content": args.prompt}],
        "max_tokens": args.max_tokens,
        "temperature": 0.7,
        "ignore_eos": True,
        "logprobs": True,
        "stream": True,
    }
    loads = [
        asyncio.run(measure(args.url, headers, body, clients, max(args.requests or max(4, 2 * clients), clients)))
        for clients in args.clients
    ]
    if args.json:
        report = {"model": model, "max_tokens": args.max_tokens, "loads": [load.to_json() for load in loads]}
        print(json.dumps({**report, "saturates_at": saturation(loads)}, indent=1))
    else:
        show(loads)
    return 1 if any(load.failed for load in loads) else 0


if __name__ == "__main__":
    sys.exit(main())
