"""What a request becomes for its caller: pieces of a stream, and a completion."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxkv.request import Event
from jaxkv.text import TextStream


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished request. Its fields are those of the command's ``--json``, and their names stay.

    Seconds of prefill and decoding are those of the calls that the request took part in; neighbours share them, and
    compilation is in neither. ``compile_seconds`` is the warm-up of its
    engine, which other requests may have shared. ``blocks_now`` is what it held when it finished, before release.
    """

    prompt: str | list[int] | list[dict[str, str]]
    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    position: int
    length: int
    tokens_evicted: int
    compactions: int
    seed: int
    prefill: str
    queued_seconds: float
    prefill_seconds: float
    decode_seconds: float
    compaction_seconds: float
    compile_seconds: float
    cached_tokens: int
    continued_tokens: int
    history: str
    preemptions: int
    documents: tuple[dict[str, Any], ...]
    """What became of each document: ``name``, ``tokens``, ``source``, ``tokens_reused`` and ``tokens_recomputed``."""
    first_token_seconds: float
    full_prefill_seconds: float
    """What a full prefill was predicted to take, where documents were blended; else 0."""
    blocks_returned: int
    blocks_dropped: int
    blocks_now: int
    blocks_peak: int
    blocks_peak_uncompressed: int
    block_size: int
    pool_blocks: int
    pool_bytes: int
    model: str
    implementation: str
    choice: int = 0
    """Which of the prompt's n continuations it is."""
    reached_context: bool = False
    logprobs: list[float] | None = None
    blocks_history: tuple[tuple[int, int], ...] = ()
    """Blocks held, as (tokens generated, blocks), each time that the number changed; not in the JSON."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields for ``json.dumps``; ``logprobs`` is there when they were asked for."""
        fields = dataclasses.asdict(self)
        del fields["blocks_history"]
        if self.logprobs is None:
            del fields["logprobs"]
        return fields


@dataclasses.dataclass(frozen=True)
class Delta:
    """A piece of a stream: what one continuation of request ``index`` has new, and its completion when it has ended."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    completion: Completion | None = None
    choice: int = 0


class RunningText:
    """What a request has generated so far, as tokens and as text that is safe to show."""

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
        self._pending = ""
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text, if need be with its very last bytes."""
        return self._stream.stopped

    def push(self, token: int) -> bool:
        """Take a token; return whether it completed a stop string."""
        self._pending += self._stream.push(token)
        return self._stream.stopped

    def delta(self, index: int, event: Event) -> Delta:
        """Return what is new since the last call."""
        if event.report is not None:
            self._pending += self._stream.finish()
        new, self._pending = self._pending, ""
        self.text += new
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        return Delta(index, new, event.token_ids, event.logprobs, choice=event.choice)
