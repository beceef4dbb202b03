"""What other processes do to a store in tests: ``python store_program.py ACTION FOLDER CAP ARGUMENT...``.

It does not import JAX, so that starting many is quick. Each prints one JSON object at its end.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import time

import store_cases as cases

from jaxkv.store import LostError, Store


def put(store: Store, first: int, count: int) -> dict[str, int]:
    """Put pieces."""
    return {"stored": sum(store.put(*cases.piece(number), wait=True) for number in range(first, first + count))}


def get(store: Store, first: int, count: int) -> dict[str, int]:
    """Get pieces and compare them."""
    return {"right": sum(cases.same(store.get(cases.key(number)), number) for number in range(first, first + count))}


def hold(store: Store, *numbers: int) -> dict[str, int]:
    """Lease pieces until stdin is closed."""
    with store.lease([cases.key(number) for number in numbers]) as views:
        print("held", flush=True)
        sys.stdin.read()
        return {"right": sum(cases.same(view.arrays(), n) for n, view in zip(numbers, views, strict=True) if view)}


def churn(store: Store, seed: int, seconds: int) -> dict[str, int]:
    """Put, get, lease and look up pieces of a range that does not fit, and count what was wrong."""
    rng, done, wrong = random.Random(seed), 0, 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        numbers = rng.sample(range(60), 4)
        store.put(*cases.piece(numbers[0]), wait=rng.random() < 0.5)
        found = store.get(cases.key(numbers[1]))
        wrong += found is not None and not cases.same(found, numbers[1])
        store.lookup([cases.key(number) for number in numbers])
        with store.lease([cases.key(number) for number in numbers]) as views:
            for number, view in zip(numbers, views, strict=True):
                try:
                    wrong += view is not None and not cases.same(view.arrays(), number)
                except LostError:
                    wrong += 1
        done += 1
    return {"done": done, "wrong": wrong}


def main() -> None:
    """Do one thing."""
    action, folder, cap, *numbers = sys.argv[1:]
    with Store(folder, disk=int(cap)) as store:
        result = {"put": put, "get": get, "hold": hold, "churn": churn}[action](store, *map(int, numbers))
    report = {**result, **dataclasses.asdict(store.counters), "hash": hash("hash"), "jax": "jax" in sys.modules}
    print(json.dumps(report), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
