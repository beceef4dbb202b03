"""Requests: what comes in, what is told of it, and what the host keeps while it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.dims import ceil_div
from jaxkv.sampling import STOP_IDS, SamplingParams


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

    def most_tokens(self, cache: CacheConfig) -> int:
        """Tokens that it generates at most: max_tokens, or what the context leaves."""
        return min(self.params.max_tokens, cache.context - len(self.prompt))

    def worst_case(self, cache: CacheConfig) -> int:
        """Blocks that it needs at most. The last token's K and V are never computed."""
        return ceil_div(len(self.prompt) + self.most_tokens(cache) - 1, cache.block_size)

    def stop_ids(self, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
        """Tokens that end it, the model's own among them unless they are ignored."""
        own = () if self.params.ignore_eos else eos_token_ids
        return tuple(dict.fromkeys((*own, *self.params.stop_token_ids)))

    def check(self, model: ModelConfig, cache: CacheConfig, eos_token_ids: Sequence[int]) -> None:
        """Raise a ``RequestError`` if it can never be served by an engine of this model and cache."""
        count = len(self.prompt)
        if not count:
            raise RequestError("the prompt has no tokens; give at least one")
        wrong = next((token for token in self.prompt if not 0 <= token < model.vocab_size), None)
        if wrong is not None:
            raise RequestError(f"token {wrong} of the prompt is not one of the model's 0 to {model.vocab_size - 1}")
        if count >= cache.context:
            raise RequestError(
                f"the prompt has {count} tokens and the context is {cache.context}, which leaves no room for an answer; "
                "shorten the prompt or raise the context"
            )
        stops = len(self.stop_ids(eos_token_ids))
        if stops > STOP_IDS:
            raise RequestError(f"{stops} stop tokens are more than the {STOP_IDS} a row can watch for")
        needed = self.worst_case(cache)
        if needed > cache.blocks:
            raise RequestError(
                f"the request needs {needed} blocks of {cache.block_size} for {count} prompt tokens and "
                f"max_tokens={self.most_tokens(cache)}, and the pool has {cache.blocks}; lower max_tokens or enlarge the pool"
            )


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
    """A request that was admitted to row ``index`` of the engine: all that decides, as plain integers."""

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
