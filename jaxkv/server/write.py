"""What the engine says, as answers and as events of a stream, in the shapes that OpenAI's clients read."""

from __future__ import annotations

import codecs
import dataclasses
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from jaxkv.request import Report
from jaxkv.server.errors import ApiError
from jaxkv.server.protocol import ChatRequest, CompletionRequest
from jaxkv.server.token_text import TokenText
from jaxkv.server.worker import Call, Piece

_OURS = (
    "blocks_peak",
    "blocks_peak_uncompressed",
    "blocks_returned",
    "blocks_dropped",
    "tokens_evicted",
    "compactions",
    "preemptions",
    "position",
    "length",
    "history",
    "prefill",
    "reached_context",
)
"""What of a report a client is told that sent a ``jaxkv`` object."""


class Writer:
    """Writes what becomes of one call.

    Args:
      body: what was asked for.
      call: whose pieces it takes.
      token_text: how to spell tokens in ``logprobs``.
    """

    def __init__(self, body: CompletionRequest | ChatRequest, call: Call, token_text: TokenText) -> None:
        self._body, self._call, self._token_text = body, call, token_text
        self._chat = isinstance(body, ChatRequest)
        # 0 is a wish for the chosen token's, and None and False are none.
        self._logprobs = body.logprobs is not None and body.logprobs is not False
        self._created = int(time.time())
        self._offsets: dict[int, _Offset] = {}
        self._reports: dict[int, tuple[bool, Report]] = {}

    async def whole(self) -> dict[str, Any]:
        """Return the answer, when all of it is there."""
        texts: dict[int, str] = {}
        logprobs: dict[int, list[dict[str, Any]]] = {}
        async for index, piece in self._pieces():
            texts[index] = texts.get(index, "") + piece.delta.text
            if piece.delta.token_ids and self._logprobs:
                logprobs.setdefault(index, []).append(self._written_logprobs(index, piece))
        choices = [self._choice(index, text, _joined(logprobs.get(index))) for index, text in sorted(texts.items())]
        return {**self._head("chat.completion" if self._chat else "text_completion", choices), "usage": self._usage()}

    async def events(self) -> AsyncIterator[str]:
        """Yield the answer as server-sent events, piece by piece as it is made."""
        try:
            if self._chat:
                for index in range(self._call.choices):
                    yield self._event([self._delta(index, {"role": "assistant", "content": ""})])
            async for index, piece in self._pieces():
                for choice in self._deltas(index, piece):
                    yield self._event([choice])
        except ApiError as error:
            # Too late for a status. Without [DONE] it is no answer.
            yield _sse(error.body())
            return
        if self._includes_usage:
            yield self._event([], usage=self._usage())
        yield "data: [DONE]\n\n"

    # -- pieces --------------------------------------------------------------------------------------------------

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        while len(self._reports) < self._call.choices:
            piece = await self._call.next_piece()
            index = piece.delta.index * self._body.n + piece.delta.choice
            if piece.report is not None:
                self._reports[index] = piece.delta.choice == 0, piece.report
            yield index, piece

    def _deltas(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        text, choices = piece.delta.text, []
        logprobs = self._written_logprobs(index, piece) if self._logprobs and piece.delta.token_ids else None
        if text or logprobs:
            choices.append(self._delta(index, {"content": text} if self._chat else text, logprobs))
        if piece.report is not None:
            last = self._delta(index, {} if self._chat else "")
            choices.append({**last, "finish_reason": piece.report.finish_reason, **self._ours(piece.report)})
        return choices

    def _delta(self, index: int, new: dict[str, str] | str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"index": index, "delta" if self._chat else "text": new, "logprobs": logprobs, "finish_reason": None}

    def _choice(self, index: int, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        report = self._reports[index][1]
        said: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text, "refusal": None}} if self._chat else {"text": text}
        )
        return {
            "index": index,
            **said,
            "logprobs": logprobs,
            "finish_reason": report.finish_reason,
            **self._ours(report),
        }

    def _ours(self, report: Report) -> dict[str, Any]:
        if self._body.jaxkv is None:
            return {}
        documents = [dataclasses.asdict(one) for one in report.documents]
        return {"jaxkv": {**{name: getattr(report, name) for name in _OURS}, "documents": documents}}

    # -- logprobs and usage --------------------------------------------------------------------------------------

    def _written_logprobs(self, index: int, piece: Piece) -> dict[str, Any]:
        # At -inf there is no JSON; OpenAI's own floor is as good.
        pairs = [
            (token, max(logprob, -9999.0))
            for token, logprob in zip(piece.delta.token_ids, piece.delta.logprobs, strict=True)
        ]
        if self._chat:
            content = [
                {**self._token_text.spelled(token), "logprob": logprob, "top_logprobs": []} for token, logprob in pairs
            ]
            return {"content": content, "refusal": None}
        offset = self._offsets.setdefault(index, _Offset())
        return {
            "tokens": [self._token_text.spelled(token)["token"] for token, _ in pairs],
            "token_logprobs": [logprob for _, logprob in pairs],
            "top_logprobs": None,
            "text_offset": [offset.before(self._token_text.raw(token)) for token, _ in pairs],
        }

    def _usage(self) -> dict[str, Any]:
        firsts = [report for is_first, report in self._reports.values() if is_first]
        prompt = sum(report.prompt_tokens + report.continued_tokens for report in firsts)
        generated = sum(report.generated_tokens for _, report in self._reports.values())
        cached = sum(report.cached_tokens + report.continued_tokens for report in firsts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    # -- envelopes -----------------------------------------------------------------------------------------------

    @property
    def _includes_usage(self) -> bool:
        return self._body.stream_options is not None and self._body.stream_options.include_usage

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._call.name,
            "object": kind,
            "created": self._created,
            "model": self._body.model,
            "choices": choices,
        }

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> str:
        event = self._head("chat.completion.chunk" if self._chat else "text_completion", choices)
        return _sse({**event, "usage": usage} if self._includes_usage else event)


@dataclasses.dataclass
class _Offset:
    """Where in a text a token begins, in characters. A character belongs to the token that completes it."""

    _utf8: Any = dataclasses.field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    _so_far: int = 0

    def before(self, raw: bytes) -> int:
        at = self._so_far
        self._so_far += len(self._utf8.decode(raw))
        return at


def _joined(parts: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    """Return the logprobs of one choice's pieces as one."""
    if not parts:
        return None
    return {
        name: [one for part in parts for one in part[name]] if isinstance(value, list) else value
        for name, value in parts[0].items()
    }


def _sse(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"
