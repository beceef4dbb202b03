"""What JAX compiles, counted by listening to its own monitoring events."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax


@dataclasses.dataclass(eq=False)
class Compiles:
    """Programs compiled (or loaded from the persistent cache) inside a ``with compiles()``, and its seconds."""

    programs: int = 0
    seconds: float = 0.0


_open: list[Compiles] = []
_listening = False


@contextlib.contextmanager
def compiles() -> Iterator[Compiles]:
    """Count the programs that are compiled inside the block, by any thread; its seconds are wall time."""
    global _listening
    if not _listening:
        # A listener cannot be taken back publicly, so there is one for good, which feeds whoever is counting.
        jax.monitoring.register_event_duration_secs_listener(_on_event)
        _listening = True
    counted = Compiles()
    _open.append(counted)
    start = time.perf_counter()
    try:
        yield counted
    finally:
        counted.seconds = time.perf_counter() - start
        _open.remove(counted)


def _on_event(event: str, duration_secs: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        for counted in _open:
            counted.programs += 1
