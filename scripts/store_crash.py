"""Kill a process in the middle of its puts, with kill -9, again and again, and see what is left of the store.

    python scripts/store_crash.py --kills 1000

Two ways. *Timed*: a process that puts 12 pieces one after the other is killed after some of them and a random time.
*Stepped*: a process is killed before each single system call of a put that also evicts, and half way through each
write. After each death everything visible is read whole and compared with what was put; every put that had returned
must be found; the bytes must be under the cap; and no part of a dead writer may stay.

Processes are forked from one that has imported the store already, so that a thousand of them take minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import jaxkv
from jaxkv.store import Key, Store
from jaxkv.store.admin import Admin

ROOT = bytes(32)
SHAPE = (4, 64, 2, 32)
"""L, T, K, D: 64 KiB an array in float32."""
PUTS = 12
CAP = 2 * PUTS * (1 << 17) + (1 << 16)
"""Bytes that hold the puts of one process and as many older ones."""
NEVER, WAIT = -1, 0
_CALLS = ("open", "pwrite", "fsync", "rename", "unlink", "ftruncate", "mkdir", "utime", "close")


@dataclasses.dataclass
class Outcome:
    """What was seen. ``midway``: deaths that left an unfinished part; all others but ``kills`` must be 0."""

    kills: int = 0
    midway: int = 0
    damaged: int = 0
    wrong: int = 0
    lost: int = 0
    over_cap: int = 0
    left_behind: int = 0

    @property
    def faults(self) -> int:
        """How much went wrong."""
        return self.damaged + self.wrong + self.lost + self.over_cap + self.left_behind


def piece(number: int) -> tuple[Key, dict[str, np.ndarray]]:
    """Return key and arrays number so and so, the same in every process."""
    rng = np.random.default_rng(number)
    arrays = rng.standard_normal((2, *SHAPE), np.float32)
    return Key.content(ROOT, rng.integers(0, 50000, SHAPE[1])), {"k": arrays[0], "v": arrays[1]}


class Workers:
    """A process that forks one worker at a time."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, __file__, "--worker", str(folder)]
        self._done: list[int] = []
        # The worker imports the jaxkv that this process has, installed or not.
        environment = {**os.environ, "PYTHONPATH": str(Path(jaxkv.__file__).parents[1])}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
        )

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def start(self, first: int, puts: int, step: int) -> int:
        """Start a worker and return its process id once its store is open.

        Args:
          first, puts: numbers of what it puts.
          step: the system call that it dies before. ``NEVER``: it ends by itself; ``WAIT``: it waits to be killed.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{first} {puts} {step}\n")
        words = self._line()
        assert words[0] == "open", words
        return int(words[1])

    def follow(self, puts: int) -> float:
        """Wait until so many puts have returned, and return the seconds that the last one took."""
        begin = time.perf_counter()
        for _ in range(puts):
            begin = time.perf_counter()
            words = self._line()
            assert words[0] == "put", words
            self._done.append(int(words[1]))
        return time.perf_counter() - begin

    def end(self) -> tuple[list[int], bool]:
        """Return the numbers of the puts that had returned when the worker ended, and whether it was killed."""
        while (words := self._line())[0] == "put":
            self._done.append(int(words[1]))
        assert words[0] == "ended", words
        done, self._done = self._done, []
        return done, int(words[1]) == -signal.SIGKILL

    def _line(self) -> list[str]:
        assert self._process.stdout is not None
        return self._process.stdout.readline().split() or ["nothing"]


def work(folder: Path) -> None:
    """Fork a worker for each line of stdin: the arguments of ``Workers.start``."""
    while line := sys.stdin.readline():
        first, puts, step = map(int, line.split())
        child = os.fork()
        if not child:
            store = Store(folder, disk=CAP)
            say("open", os.getpid())
            if step > 0:
                die_at(step)
            for number in range(first, first + puts):
                if store.put(*piece(number), wait=True):
                    say("put", number)
            while step == WAIT:
                signal.pause()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        say("ended", -os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)


def say(word: str, number: int) -> None:
    """Write a line in one system call: a process that is killed says all of it or nothing."""
    os.write(1, f"{word} {number}\n".encode())


def die_at(step: int) -> None:
    """Make this process kill itself before the ``step``-th system call from now on, or in the middle of a write."""
    left = step

    def mortal(call: Any) -> Any:
        def wrapper(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if not left:
                if call is write:
                    call(args[0], args[1][: len(args[1]) // 2], args[2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return wrapper

    write = os.pwrite
    for name in _CALLS:
        setattr(os, name, mortal(getattr(os, name)))
    fcntl.flock = mortal(fcntl.flock)


def check(folder: Path, done: list[int], numbers: range, outcome: Outcome) -> None:
    """Look at the folder that a dead process has left, and add to the outcome."""
    parts = folder / "parts"
    outcome.midway += parts.is_dir() and bool(os.listdir(parts))
    with Store(folder, disk=CAP) as store:
        outcome.left_behind += parts.is_dir() and len(os.listdir(parts))
        for number in numbers:
            key, arrays = piece(number)
            found = store.get(key)
            if found is not None:
                outcome.wrong += any(not np.array_equal(found[name], arrays[name]) for name in arrays)
            elif number in done:
                outcome.lost += 1
        outcome.damaged += store.counters.corrupt_files
    with Admin(folder) as admin:
        items = list(admin.verify())
    outcome.damaged += sum(item.damage is not None for item in items)
    outcome.over_cap += sum(item.nbytes for item in items) > CAP


def timed(folder: Path, kills: int, seed: int = 0) -> Outcome:
    """Kill processes at random times: after some puts, and within the time that one more takes."""
    rng, outcome, first = random.Random(seed), Outcome(), 0
    with Workers(folder) as workers:
        workers.start(first, PUTS, NEVER)
        seconds = workers.follow(PUTS)
        workers.end()
        for _ in range(kills):
            first += PUTS
            pid = workers.start(first, PUTS, WAIT)
            if before := rng.randrange(PUTS):
                seconds += 0.2 * (workers.follow(before) - seconds)
            time.sleep(rng.uniform(0, seconds))
            os.kill(pid, signal.SIGKILL)
            done, killed = workers.end()
            outcome.kills += killed
            # The numbers of the process before are there too, or were evicted by this one.
            check(folder, done, range(first - PUTS, first + PUTS), outcome)
    return outcome


def stepped(folder: Path) -> Outcome:
    """Kill a process before each of its system calls, until one call after the last."""
    outcome, first, step = Outcome(), 0, 0
    with Workers(folder) as workers:
        workers.start(first, 3 * PUTS, NEVER)
        workers.end()
        first += 3 * PUTS
        while True:
            step, killed = step + 1, True
            workers.start(first, 1, step)
            done, killed = workers.end()
            outcome.kills += killed
            check(folder, done, range(max(0, first - PUTS), first + 1), outcome)
            if not killed:
                return outcome
            first += 1


def main() -> int:
    """Run both ways and print what was seen; exit 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--folder", help="where to put the stores (default: a temporary folder)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(Path(args.worker))
        return 0
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        outcomes = {"timed": timed(Path(folder, "timed"), args.kills), "stepped": stepped(Path(folder, "stepped"))}
    print(json.dumps({name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()}))
    return int(any(outcome.faults for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
