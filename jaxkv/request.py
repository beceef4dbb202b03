"""Requests: what comes in, and what is told of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxkv.compression import CompressionConfig
from jaxkv.sampling import SamplingParams
from jaxkv.segments import Document, Ratio, Span

Watch = Callable[[int], bool]


class RequestError(ValueError):
    """A request that can never be served as it is. Nothing was started."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
      prompt: token ids, at least one.
      params: how to sample, and how much.
      compression: this request's own budget and how its rows are kept within it; None is the engine's.
      watch: called with each generated token, in order; returning True ends the request with that token. Tokens that
        were drawn after it are in no output and no count. Stop strings are found this way. A request with n > 1 has
        one for each of its continuations, or None.
      salt: only requests with the same salt find each other's blocks.
      keep: hold on to the row's blocks when it ends, so that another request can continue from it.
      segments: documents in the prompt, in order: parts whose KV may be blended. The engine needs a store for it.
      recompute_ratio: share of the documents' tokens that is recomputed, or ``auto``; None is the engine's.
      continue_from: id of a kept request whose row this one goes on with: the prompt is what comes after its last
        token. Its budget holds on, so ``compression`` stays None.
    """

    prompt: Sequence[int]
    params: SamplingParams = SamplingParams()
    compression: CompressionConfig | None = None
    watch: Watch | Sequence[Watch] | None = None
    salt: str = ""
    keep: bool = False
    segments: tuple[Span, ...] = ()
    recompute_ratio: Ratio | None = None
    continue_from: int | None = None

    def watcher(self, choice: int) -> Watch | None:
        """Return what watches one of the continuations."""
        return self.watch if self.watch is None or callable(self.watch) else self.watch[choice]


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of a request. Seconds are those of the calls it took part in, shared with its neighbours."""

    finish_reason: str
    """``stop``, ``length`` or ``cancelled``."""
    prompt_tokens: int
    generated_tokens: int = 0
    position: int = 0
    """Tokens whose K and V were computed."""
    length: int = 0
    """Slots held when it finished."""
    tokens_evicted: int = 0
    """Slots that compaction took away; in the per-head modes each head lost as many."""
    compactions: int = 0
    blocks_returned: int = 0
    """Blocks that compaction gave back: nobody holds them any more. Dropped references do not count."""
    blocks_dropped: int = 0
    """References that compaction dropped to blocks which others go on holding: these gave nothing back."""
    blocks_now: int = 0
    """Blocks held when it finished, before they were released."""
    blocks_peak: int = 0
    blocks_peak_uncompressed: int = 0
    """Blocks that ``position`` tokens take."""
    prefill: str = "dense"
    """``dense``, or ``compacted`` where the prompt was compacted between its chunks."""
    cached_tokens: int = 0
    """Prompt tokens whose K and V were found in the pool."""
    continued_tokens: int = 0
    """Tokens of the request that this one continued, all of them seen, however many are still held."""
    history: str = "none"
    """``none``, ``whole`` or ``compressed``: whether the continued request had been compacted."""
    documents: tuple[Document, ...] = ()
    """What became of each of the request's segments."""
    first_token_seconds: float = 0.0
    """From ``add`` to the first token; 0 where there was none."""
    full_prefill_seconds: float = 0.0
    """What a prefill of everything but a found prefix was predicted to take, where documents were blended."""
    preemptions: int = 0
    """How often it had to give its row and blocks to an older request for a while."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    compaction_seconds: float = 0.0
    queued_seconds: float = 0.0
    reached_context: bool = False
    """Whether ``length`` was the model's context rather than max_tokens."""
    blocks_history: tuple[tuple[int, int], ...] = ()
    """Blocks held, as (tokens generated, blocks), each time that the number changed."""


@dataclasses.dataclass(frozen=True)
class Event:
    """News of one request: tokens, and at the end a report."""

    request_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    report: Report | None = None
    choice: int = 0
    """Which of the request's n continuations it is about. Each has a report of its own."""


@dataclasses.dataclass
class Totals:
    """What an engine has done since it was made. A request's own counts come in when it ends."""

    requests: int = 0
    """Continuations that ended, for whatever reason."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were found in the pool."""
    generated_tokens: int = 0
    tokens_evicted: int = 0
    compactions: int = 0
    compaction_seconds: float = 0.0
    blocks_returned: int = 0
    blocks_dropped: int = 0
    preemptions: int = 0

    def add(self, report: Report, choice: int) -> None:
        """Count a continuation that ended. The first of a request counts its prompt."""
        self.requests += 1
        prompt = ("prompt_tokens", "cached_tokens") if choice == 0 else ()
        for name in (*prompt, "tokens_evicted", "blocks_returned", "blocks_dropped"):
            setattr(self, name, getattr(self, name) + getattr(report, name))
