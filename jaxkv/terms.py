"""What an engine can serve. Requests are checked against it before anything is compiled or queued."""

from __future__ import annotations

import dataclasses

from jaxkv.compression import CompressionConfig, RowBudget
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.dims import ceil_div
from jaxkv.request import Request, RequestError
from jaxkv.sampling import STOP_IDS

KEEP_EVERYTHING = CompressionConfig()
_ENGINES_OWN = ("method", "mode", "offsets", "aggregation", "stats", "seed")
"""What of a compression is compiled into the engine or loaded with it; the rest is a request's own."""


@dataclasses.dataclass(frozen=True)
class Terms:
    """A model, a cache, and how rows are kept within their budgets.

    Attributes:
      model: the decoder's shapes.
      cache: the pool's size and the compiled shapes.
      eos_token_ids: tokens that end a text.
      compression: the default of requests. A request may have a budget of its own, or none, but not another method.
    """

    model: ModelConfig
    cache: CacheConfig
    eos_token_ids: tuple[int, ...] = ()
    compression: CompressionConfig = KEEP_EVERYTHING

    def __post_init__(self) -> None:
        if len(self.eos_token_ids) > STOP_IDS:
            raise ValueError(f"{len(self.eos_token_ids)} eos tokens are more than the {STOP_IDS} a row can watch for")

    def most_tokens(self, request: Request) -> int:
        """Tokens that a request generates at most: max_tokens, or what the context leaves."""
        return min(request.params.max_tokens, self.cache.context - len(request.prompt))

    def stop_ids(self, request: Request) -> tuple[int, ...]:
        """Tokens that end a request, the model's own among them unless they are ignored."""
        own = () if request.params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*own, *request.params.stop_token_ids)))

    def budget(self, request: Request) -> RowBudget | None:
        """What a request may hold; None keeps every token.

        Raises:
          RequestError: its compression is not one of this engine's, or leaves no slot to choose.
        """
        wanted = self.compression if request.compression is None else request.compression
        if wanted.method == "none":
            return None
        other = [name for name in _ENGINES_OWN if getattr(wanted, name) != getattr(self.compression, name)]
        if other:
            named = ", ".join(f"{name}={getattr(wanted, name)!r}" for name in other)
            raise RequestError(
                f"the request wants {named} and the engine was made for "
                + ", ".join(f"{name}={getattr(self.compression, name)!r}" for name in other)
                + "; make an engine for it, or leave these as the engine has them"
            )
        try:
            return wanted.resolve(len(request.prompt), self.most_tokens(request), self.cache.block_size)
        except ValueError as error:
            raise RequestError(str(error)) from None

    def compacts_prefill(self, request: Request) -> bool:
        """Whether a prompt is compacted between its chunks.

        This depends on the request and the size of the pool alone, never on what is free at the moment.
        """
        budget = self.budget(request)
        if budget is None or len(request.prompt) < budget.trigger:
            return False
        wanted = self.compression if request.compression is None else request.compression
        return wanted.compact_prefill or self._blocks(len(request.prompt)) > self.cache.blocks

    def worst_case(self, request: Request) -> int:
        """Blocks that a request holds at most. The last token's K and V are never computed."""
        total = len(request.prompt) + self.most_tokens(request) - 1
        budget = self.budget(request)
        if budget is None:
            return self._blocks(total)
        if self.compacts_prefill(request):
            return self._blocks(min(total, budget.trigger - 1 + self.cache.prefill_chunk))
        return self._blocks(max(len(request.prompt), min(total, budget.trigger)))

    def check(self, request: Request) -> None:
        """Raise a ``RequestError`` if a request can never be served."""
        count, cache = len(request.prompt), self.cache
        if not count:
            raise RequestError("the prompt has no tokens; give at least one")
        size = self.model.vocab_size
        wrong = next((token for token in request.prompt if not 0 <= token < size), None)
        if wrong is not None:
            raise RequestError(f"token {wrong} of the prompt is not one of the model's 0 to {size - 1}")
        if count >= cache.context:
            raise RequestError(
                f"the prompt has {count} tokens and the context is {cache.context}, which leaves no room for an "
                "answer; shorten the prompt or raise the context"
            )
        stops = len(self.stop_ids(request))
        if stops > STOP_IDS:
            raise RequestError(f"{stops} stop tokens are more than the {STOP_IDS} a row can watch for")
        needed = self.worst_case(request)
        if needed > cache.blocks:
            remedy = "lower max_tokens, enlarge the pool"
            remedy += ", or compress with a budget" if self.budget(request) is None else ", or lower the budget"
            raise RequestError(
                f"the request needs {needed} blocks of {cache.block_size} for {count} prompt tokens and "
                f"max_tokens={self.most_tokens(request)}, and the pool has {cache.blocks}; {remedy}"
            )

    def _blocks(self, slots: int) -> int:
        return ceil_div(slots, self.cache.block_size)
