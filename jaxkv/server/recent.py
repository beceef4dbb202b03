"""What the live page shows of the last seconds: tokens a second, and latencies."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable

WINDOW = 5.0
"""Seconds over which tokens a second are averaged."""
_SAMPLES = 256


class Recent:
    """The newest tokens and latencies. Written and read in the engine's thread."""

    def __init__(self) -> None:
        self._tokens: collections.deque[tuple[float, int]] = collections.deque()
        self._first: collections.deque[float] = collections.deque(maxlen=_SAMPLES)
        self._between: collections.deque[float] = collections.deque(maxlen=_SAMPLES)

    def tokens(self, count: int) -> None:
        """Note tokens that were made now."""
        self._tokens.append((time.perf_counter(), count))
        self._forget()

    def first_token(self, seconds: float) -> None:
        """Note how long somebody waited for a first token."""
        self._first.append(seconds)

    def between(self, seconds: float) -> None:
        """Note how long a token took after the one before it."""
        self._between.append(seconds)

    def to_json(self) -> dict[str, float | None]:
        """Return tokens a second, and the median and the 95th percentile of the latencies in milliseconds."""
        self._forget()
        return {
            "tokens_per_second": round(sum(count for _, count in self._tokens) / WINDOW, 1),
            "first_token_ms_p50": _percentile(self._first, 50),
            "first_token_ms_p95": _percentile(self._first, 95),
            "between_tokens_ms_p50": _percentile(self._between, 50),
            "between_tokens_ms_p95": _percentile(self._between, 95),
        }

    def _forget(self) -> None:
        while self._tokens and self._tokens[0][0] < time.perf_counter() - WINDOW:
            self._tokens.popleft()


def _percentile(values: Iterable[float], percent: int) -> float | None:
    ordered = sorted(values)
    return round(1000 * ordered[(len(ordered) - 1) * percent // 100], 1) if ordered else None
