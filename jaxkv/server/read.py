"""What a client sends, as requests of the engine: options checked against the limits, prompts as tokens."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Sequence

from jaxkv.completion import RunningText
from jaxkv.compression import CompressionConfig
from jaxkv.encoding import encode, encode_documents
from jaxkv.llm import LLM
from jaxkv.request import Request
from jaxkv.sampling import SamplingParams
from jaxkv.segments import Prompt, Segment, Span
from jaxkv.server.continuation import new_turn
from jaxkv.server.errors import bad_request
from jaxkv.server.limits import Limits
from jaxkv.server.protocol import ChatRequest, CompletionRequest, Document, Extra
from jaxkv.server.worker import Kept
from jaxkv.text import TextStream

UNASKED = 16
"""Tokens of a completion that says nothing of ``max_tokens``: OpenAI's number."""
Body = CompletionRequest | ChatRequest
_Encoded = tuple[list[int], tuple[Span, ...]]


@dataclasses.dataclass(frozen=True)
class Reader:
    """Turns bodies into requests. It takes time, and goes into a thread.

    Args:
      llm: tokenizer, context and compression are taken from it.
      limits: what a client may ask for.
      blocks: of the pool.
      block_size: of the pool.
    """

    llm: LLM
    limits: Limits
    blocks: int
    block_size: int

    def check(self, body: Body) -> None:
        """Raise an ``ApiError`` for what cannot be honoured, before any work is done."""
        extra = body.extra
        if extra.documents is not None:
            if not self.llm.has_store:
                raise bad_request("jaxkv.documents: this server keeps no documents (--store, --store-memory)", "jaxkv")
            if extra.continue_from is not None:
                raise bad_request("jaxkv.documents stand in a prompt that begins a text, not one that goes on", "jaxkv")
        elif extra.recompute_ratio is not None:
            raise bad_request("jaxkv.recompute_ratio is for documents; leave it out", "jaxkv")
        if body.n > self.limits.n:
            raise bad_request(f"n={body.n} is more than the {self.limits.n} that this server allows", "n")
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options is for a stream; set stream, or leave it out", "stream_options")
        if isinstance(body, ChatRequest):
            _check_chat(body)
        elif body.logprobs:
            raise bad_request(
                f"logprobs={body.logprobs}: only the chosen token's log probability is known; ask for 0", "logprobs"
            )
        wanted, most = _max_tokens(body), self.limits.max_tokens or self.llm.context
        if wanted is not None and wanted > most:
            raise bad_request(f"max_tokens={wanted} is more than the {most} that this server allows", "max_tokens")

    def requests(self, body: Body, kept: Kept | None) -> list[Request]:
        """Return a request for each prompt.

        Args:
          body: has passed ``check``.
          kept: the row that ``continue_from`` names.

        Raises:
          ApiError: a prompt or an option is refused.
        """
        try:
            prompts = self._prompts(body, kept)
            compression = self._compression(body.extra)
            seed = secrets.randbelow(2**32) if body.seed is None else body.seed
            return [
                self._request(body, kept, prompt, spans, compression, (seed + at * body.n) % 2**32)
                for at, (prompt, spans) in enumerate(prompts)
            ]
        except ValueError as error:
            raise bad_request(str(error)) from None

    def texts(self, requests: Sequence[Request]) -> list[list[RunningText]]:
        """Return where the texts of requests grow, one a continuation."""
        return [
            [
                RunningText(TextStream(self.llm.tokenizer, one.params.stop, one.params.min_tokens))
                for _ in range(one.params.n)
            ]
            for one in requests
        ]

    # -- prompts -------------------------------------------------------------------------------------------------

    def _prompts(self, body: Body, kept: Kept | None) -> list[_Encoded]:
        documents = None if body.extra.documents is None else [_segment(one) for one in body.extra.documents]
        if isinstance(body, ChatRequest):
            messages = [message.plain() for message in body.messages]
            if documents is not None:
                prompts: list[_Encoded] = [encode_documents(self.llm.tokenizer, messages, documents)]
            elif kept is None:
                prompts = [(self.llm.encode(messages), ())]
            else:
                prompts = [(new_turn(self.llm.tokenizer, messages, last_token=kept.last_token), ())]
            field = "messages"
        else:
            prompts = [self._encode(one, kept, documents) for one in body.prompts]
            field = "prompt"
        most = self.limits.prompt_tokens or self.llm.context
        longest = max(len(prompt) for prompt, _ in prompts)
        if longest > most:
            raise bad_request(f"{field}: {longest} tokens are more than the {most} that this server takes", field)
        return prompts

    def _encode(self, prompt: str | list[int], kept: Kept | None, documents: list[Segment] | None) -> _Encoded:
        if documents is not None:
            if isinstance(prompt, list):
                raise bad_request("jaxkv.documents stand before a text; give the prompt as one", "prompt")
            return encode(self.llm.tokenizer, Prompt(documents, prompt), raw=True)
        if isinstance(prompt, list):
            return prompt, ()
        if kept is None:
            return self.llm.encode(prompt, raw=True), ()
        # What goes on in the middle of a text has no BOS.
        return self.llm.tokenizer.backend.encode(prompt, add_special_tokens=False).ids, ()

    # -- options -------------------------------------------------------------------------------------------------

    def _request(
        self,
        body: Body,
        kept: Kept | None,
        prompt: list[int],
        spans: tuple[Span, ...],
        compression: CompressionConfig | None,
        seed: int,
    ) -> Request:
        extra = body.extra
        room = self._room((0 if kept is None else kept.tokens) + len(prompt), compression)
        if isinstance(body, CompletionRequest):
            room = min(room, UNASKED)
        params = SamplingParams(
            max_tokens=_max_tokens(body) or room,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            seed=seed,
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
            stop_token_ids=tuple(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
            n=body.n,
            min_tokens=body.min_tokens,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
        )
        salt = json.dumps([body.user, body.cache_salt]) if body.user or body.cache_salt else ""
        return Request(
            prompt,
            params,
            compression=compression,
            salt=salt,
            keep=extra.keep,
            segments=spans,
            recompute_ratio=extra.recompute_ratio,
            continue_from=None if kept is None else kept.request_id,
        )

    def _room(self, tokens: int, compression: CompressionConfig | None) -> int:
        """Return the most tokens that can follow so many: by the limit, the context, and a pool that keeps them all."""
        most = min(self.limits.max_tokens or self.llm.context, self.llm.context - tokens)
        if (compression or self.llm.compression).method == "none":
            most = min(most, self.blocks * self.block_size - tokens + 1)
        # What cannot be served at all is for the engine to refuse, which has the numbers.
        return max(most, 1)

    def _compression(self, extra: Extra) -> CompressionConfig | None:
        if extra.method is None and extra.budget is None:
            return None
        if extra.continue_from is not None:
            raise bad_request("jaxkv: a request that goes on from a kept row has that row's method and budget", "jaxkv")
        own = self.llm.compression
        method = extra.method or own.method
        if method == "none":
            if extra.budget is not None:
                raise bad_request("jaxkv.budget is for a method that compresses, and the method is none", "jaxkv")
            return CompressionConfig()
        if method != own.method:
            raise bad_request(
                f"jaxkv.method: this server compresses by {own.method} alone; leave it out, or ask for none", "jaxkv"
            )
        return own if extra.budget is None else dataclasses.replace(own, budget=extra.budget)


def _segment(document: Document) -> Segment:
    # A document ends with its own line, so that what follows it is tokenised alike behind any other.
    return Segment(document.text.rstrip("\n") + "\n\n", name=document.name)


def _check_chat(body: ChatRequest) -> None:
    if body.top_logprobs:
        raise bad_request(
            f"top_logprobs={body.top_logprobs}: only the chosen token's log probability is known; leave it out",
            "top_logprobs",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs goes with logprobs; set it, or leave both out", "top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise bad_request("max_tokens and max_completion_tokens differ; give one", "max_completion_tokens")


def _max_tokens(body: Body) -> int | None:
    return body.max_tokens or (body.max_completion_tokens if isinstance(body, ChatRequest) else None)
