"""Clocks of the device check: compiles apart from runs, medians and spread, a limit of time, a file that grows."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

REPEATS = 7


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one call: the median of the repeats, the 10th and the 90th percentile, and the compile."""

    median: float
    p10: float
    p90: float
    compile: float

    @classmethod
    def of(cls, seconds: list[float], compile_seconds: float) -> Times:
        """Return the spread of measured seconds."""
        low, median, high = np.percentile(seconds, [10, 50, 90])
        return cls(float(median), float(low), float(high), compile_seconds)


def compiled(function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> tuple[Any, float]:
    """Return a function compiled for its arguments, and how many seconds that took."""
    start = time.perf_counter()
    program = jax.jit(function, donate_argnums=donate).lower(*args).compile()
    return program, time.perf_counter() - start


def clock(call: Callable[[], Any], calls: int, compile_seconds: float, repeats: int = REPEATS, warm: int = 2) -> Times:
    """Time a call that has the device do ``calls`` times the work; ``warm`` more come first."""
    for _ in range(warm):
        jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append((time.perf_counter() - start) / calls)
    return Times.of(seconds, compile_seconds)


class Report:
    """What has been found, written to a file whenever something is added, and the time that is left.

    Args:
      path: the file; None keeps it in memory.
      facts: what the report begins with.
      seconds: from now until no further case is begun.
    """

    def __init__(self, path: pathlib.Path | None, facts: dict[str, Any], seconds: float) -> None:
        self.path = path
        self.found: dict[str, Any] = dict(facts)
        self.start = time.monotonic()
        self.seconds = seconds
        self.write()

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.monotonic() - self.start)

    def add(self, section: str, entry: dict[str, Any]) -> None:
        """Append an entry to a section."""
        self.found.setdefault(section, []).append(entry)
        self.write()

    def put(self, name: str, value: Any) -> None:
        """Set a fact."""
        self.found[name] = value
        self.write()

    def say(self, text: str) -> None:
        """Print progress."""
        print(f"[{time.monotonic() - self.start:6.1f} s] {text}", file=sys.stderr, flush=True)

    def run(self, name: str, estimate: float, case: Callable[[], None]) -> None:
        """Run a case if there is time for it. A failure is an entry, and the next case goes on."""
        if self.left < estimate:
            self.say(f"{name}: skipped, {self.left:.0f} s are left and it may take {estimate:.0f}")
            self.add("skipped", {"case": name, "estimate_seconds": estimate, "left_seconds": self.left})
            return
        self.say(name)
        try:
            case()
        except Exception as error:
            # Out of memory here says nothing about the cases after it, and what was found so far has to be told.
            reason = f"{type(error).__name__}: {str(error)[:600]}"
            self.say(f"{name}: failed, {reason}")
            self.add("failures", {"case": name, "reason": reason})

    def write(self) -> None:
        """Write everything to the file, which is whole at any moment."""
        if self.path is not None:
            part = self.path.with_name(self.path.name + ".part")
            part.write_text(json.dumps({**self.found, "seconds": time.monotonic() - self.start}, indent=1))
            os.replace(part, self.path)
