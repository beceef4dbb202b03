"""Requests: what comes in, what is told of it, and what the host keeps while it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxkv.sampling import SamplingParams


class RequestError(ValueError):
    """A request that can never be served as it is. Nothing was started."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
      prompt: token ids, at least one.
      params: how to sample, and how much.
      watch: called with each generated token, in order; returning True ends the request with that token. Tokens that
        were drawn after it are in no output and no count. Stop strings are found this way.
    """

    prompt: Sequence[int]
    params: SamplingParams = SamplingParams()
    watch: Callable[[int], bool] | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of a request. Seconds are those of the calls it took part in, shared with its neighbours."""

    finish_reason: str
    """``stop``, ``length`` or ``cancelled``."""
    prompt_tokens: int
    generated_tokens: int
    position: int
    length: int
    blocks_now: int
    """Blocks held when it finished, before they were released."""
    blocks_peak: int
    prefill_seconds: float
    decode_seconds: float
    queued_seconds: float
    reached_context: bool
    """Whether ``length`` was the model's context rather than max_tokens."""


@dataclasses.dataclass(frozen=True)
class Event:
    """News of one request: tokens, and at the end a report."""

    request_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    report: Report | None = None


@dataclasses.dataclass
class Row:
    """A request that was admitted to row ``index`` of the engine: everything about it that decides, as plain integers."""

    request_id: int
    index: int
    request: Request
    max_tokens: int
    reserved: int
    queued_seconds: float
    blocks: list[int] = dataclasses.field(default_factory=list)
    length: int = 0
    position: int = 0
    token: int = 0
    generated: int = 0
    blocks_peak: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    finish_reason: str = ""

    @property
    def decoding(self) -> bool:
        return self.generated > 0

    @property
    def tokens_left(self) -> int:
        return self.max_tokens - self.generated
