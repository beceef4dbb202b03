"""What an engine can serve. Requests are checked against it before anything is compiled or queued."""

from __future__ import annotations

import dataclasses

from jaxkv.compression import CompressionConfig, RowBudget
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.dims import ceil_div
from jaxkv.request import Request, RequestError
from jaxkv.row import Kept, Row
from jaxkv.sampling import STOP_IDS, Sampling
from jaxkv.segments import check_ratio

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

    def most_tokens(self, request: Request, past: Kept | None = None) -> int:
        """Tokens that a request generates at most: max_tokens, or what the context leaves."""
        return min(request.params.max_tokens, self.cache.context - _seen(past) - len(request.prompt))

    def stop_ids(self, request: Request) -> tuple[int, ...]:
        """Tokens that end a request, the model's own among them unless they are ignored."""
        own = () if request.params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*own, *request.params.stop_token_ids)))

    def fill(self, arrays: Sampling, at: int, row: Row) -> None:
        """Set one row of arrays to how a row draws its next token."""
        arrays.put(at, row.request.params, row.choice, row.generated, self.stop_ids(row.request))

    def budget(self, request: Request, past: Kept | None = None) -> RowBudget | None:
        """What a request may hold; None keeps every token. One that continues a row has that row's.

        Raises:
          RequestError: its compression is not one of this engine's, or leaves no slot to choose.
        """
        if past is not None:
            return past.budget
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
        """Whether a prompt that continues nothing is compacted between its chunks.

        This depends on the request and the size of the pool alone, never on what is free at the moment.
        """
        budget = self.budget(request)
        if budget is None or len(request.prompt) < budget.trigger:
            return False
        wanted = self.compression if request.compression is None else request.compression
        return wanted.compact_prefill or self._blocks(len(request.prompt)) > self.cache.blocks

    def prefill_peak(self, request: Request, past: Kept | None = None) -> int:
        """Blocks that a request holds at most until its prompt is in."""
        budget = self.budget(request, past)
        if past is not None:
            # What is continued is compacted exactly at its trigger.
            slots = past.length + 1 + len(request.prompt)
            return self._blocks(slots if budget is None else min(slots, max(budget.trigger, past.length)))
        if budget is not None and self.compacts_prefill(request):
            return self._blocks(min(len(request.prompt), budget.trigger - 1 + self.cache.prefill_chunk))
        return self._blocks(len(request.prompt))

    def worst_case(self, request: Request, past: Kept | None = None) -> int:
        """Blocks that a request holds at most. The last token's K and V are never computed."""
        held = 0 if past is None else past.length + 1
        total = held + len(request.prompt) + self.most_tokens(request, past) - 1
        budget = self.budget(request, past)
        growth = self._blocks(total if budget is None else min(total, budget.trigger))
        return max(self.prefill_peak(request, past), growth)

    def check(self, request: Request, past: Kept | None = None) -> None:
        """Raise a ``RequestError`` if a request can never be served."""
        count, cache = len(request.prompt), self.cache
        if not count and past is None:
            raise RequestError("the prompt has no tokens; give at least one")
        size = self.model.vocab_size
        wrong = next((token for token in request.prompt if not 0 <= token < size), None)
        if wrong is not None:
            raise RequestError(f"token {wrong} of the prompt is not one of the model's 0 to {size - 1}")
        if _seen(past) + count >= cache.context:
            before = f" after {_seen(past)} that it continues" if past is not None else ""
            raise RequestError(
                f"the prompt has {count} tokens{before} and the context is {cache.context}, which leaves no room for "
                "an answer; shorten the prompt or raise the context"
            )
        self._check_options(request, past)
        needed = self.worst_case(request, past)
        if needed > cache.blocks:
            remedy = "lower max_tokens, enlarge the pool"
            compresses = self.budget(request, past) is not None
            remedy += ", or lower the budget" if compresses else ", or compress with a budget"
            raise RequestError(
                f"the request needs {needed} blocks of {cache.block_size} for {count} prompt tokens and "
                f"max_tokens={self.most_tokens(request, past)}, and the pool has {cache.blocks}; {remedy}"
            )

    def _check_options(self, request: Request, past: Kept | None) -> None:
        stops, choices = len(self.stop_ids(request)), request.params.n
        if stops > STOP_IDS:
            raise RequestError(f"{stops} stop tokens are more than the {STOP_IDS} a row can watch for")
        wrong = next((token for token in request.params.stop_token_ids if token >= self.model.vocab_size), None)
        if wrong is not None:
            raise RequestError(f"stop token {wrong} is not one of the model's 0 to {self.model.vocab_size - 1}")
        if request.keep and choices > 1:
            raise RequestError(f"keep=True is for one continuation, and n={choices}; ask for n=1")
        if request.keep and not self.cache.kept_rows:
            raise RequestError("keep=True and the engine keeps no rows (kept_rows=0); raise kept_rows")
        watched = choices if request.watch is None or callable(request.watch) else len(request.watch)
        if watched != choices or (choices > 1 and callable(request.watch)):
            raise RequestError(f"n={choices} continuations need a watch each; give a list of {choices}, or None")
        if past is not None and request.segments:
            raise RequestError("documents stand in a prompt that begins a text; a request that continues has none")
        if request.recompute_ratio is not None:
            if not request.segments:
                raise RequestError("recompute_ratio is for documents, and the request has none; leave it out")
            try:
                check_ratio(request.recompute_ratio)
            except ValueError as error:
                raise RequestError(str(error)) from None
        at = 0
        for span in request.segments:
            if span.start < at or span.end > len(request.prompt):
                raise RequestError(
                    f"a segment from token {span.start} to {span.end} does not follow the one before, which ends at "
                    f"{at}, within the prompt's {len(request.prompt)} tokens"
                )
            at = span.end
        if past is not None and choices > 1:
            raise RequestError(f"continue_from is for one continuation, and n={choices}; add several requests with n=1")
        if past is not None and request.compression is not None:
            raise RequestError("a request that continues a row keeps that row's budget; leave compression as None")

    def _blocks(self, slots: int) -> int:
        return ceil_div(slots, self.cache.block_size)


def _seen(past: Kept | None) -> int:
    return 0 if past is None else len(past.tokens)
