"""``LLM``: a model, its tokenizer and an engine that fits the requests it is given."""

from __future__ import annotations

import dataclasses
import operator
import re
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxkv import sizing, weights
from jaxkv.config import CacheConfig
from jaxkv.engine import Engine
from jaxkv.pool import block_bytes
from jaxkv.request import Event, Report, Request, RequestError
from jaxkv.sampling import SamplingParams
from jaxkv.terms import Terms
from jaxkv.text import TextStream
from jaxkv.tokenizer import Tokenizer
from jaxkv.weights.gguf_metadata import read_metadata

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A text, token ids, or the messages of a chat."""

MOST_ROWS = 8
"""Rows of an engine whose size nobody chose."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished request. Its fields are those of the command's ``--json``, and their names stay.

    Seconds of prefill and decoding are those of the calls that the request took part in; neighbours share them, and
    compilation is in neither. ``blocks_now`` is what it held when it finished, before release.
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
    blocks_returned: int
    blocks_now: int
    blocks_peak: int
    blocks_peak_uncompressed: int
    block_size: int
    pool_blocks: int
    pool_bytes: int
    model: str
    implementation: str
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
    """A piece of a stream: what request ``index`` has new, and its completion when it has ended."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    completion: Completion | None = None


class LLM:
    """A model that completes prompts.

    Args:
      model: a folder with config.json and safetensors, a ``.gguf`` file, a hub id, or None: the demo model.
      dtype: of the weights; None is float32 on a CPU and bfloat16 elsewhere.
      kv_dtype: of the pool; None is float32 on a CPU and the weights' elsewhere.
      rows: requests that decode at once; None is as many as are given, up to 8.
      block_size: slots in a block.
      pool_blocks: the pool's size in blocks; None leaves it to ``pool_memory``.
      pool_memory: the pool's size in bytes, at most; None is what the requests need, up to half of the free host
        memory, or 85 % of the free memory of an accelerator less temporaries.
      prefill_chunk: tokens of a prompt that one call takes; None is 128 on a CPU and 512 elsewhere.
      context: most tokens of prompt and answer; None is the model's own. More is at the caller's risk.
      implementation: as for ``pallas_kernels.attend``.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        dtype: str | None = None,
        kv_dtype: str | None = None,
        rows: int | None = None,
        block_size: int = 16,
        pool_blocks: int | None = None,
        pool_memory: int | None = None,
        prefill_chunk: int | None = None,
        context: int | None = None,
        implementation: pallas_kernels.Implementation | None = None,
    ) -> None:
        if pool_blocks is not None and pool_memory is not None:
            raise ValueError(f"pool_blocks={pool_blocks} and pool_memory={pool_memory} both size the pool; give one")
        on_cpu = jax.default_backend() == "cpu"
        dtype = dtype or ("float32" if on_cpu else "bfloat16")
        # Everything that can be refused is refused before gigabytes are read.
        self._shape = CacheConfig(
            blocks=1 if pool_blocks is None else pool_blocks,
            context=1 if context is None else context,
            block_size=block_size,
            dtype=kv_dtype or ("float32" if on_cpu else dtype),
            rows=1 if rows is None else rows,
            prefill_chunk=(128 if on_cpu else 512) if prefill_chunk is None else prefill_chunk,
        )
        pallas_kernels.candidates(implementation)
        self._rows, self._pool_blocks, self._pool_memory = rows, pool_blocks, pool_memory
        self.implementation = implementation
        path = weights.locate(model)
        start = time.perf_counter()
        self.config, self._weights = weights.load(path, jnp.dtype(dtype))
        self.tokenizer = _tokenizer(path)
        self._eos = self.tokenizer.eos_union(self.config.eos_token_ids)
        self.load_seconds = time.perf_counter() - start
        self._shape = dataclasses.replace(self._shape, context=context or self.config.context)
        self._engine: Engine | None = None
        self._compile_seconds = 0.0
        self._busy = False

    @property
    def context(self) -> int:
        """Most tokens of prompt and answer."""
        return self._shape.context

    def encode(self, prompt: Prompt, *, raw: bool = False, system_prompt: str | None = None) -> list[int]:
        """Return the token ids of a prompt.

        A text is one user message of a chat, after ``system_prompt``, unless ``raw``; then it is tokenised as it is.

        Raises:
          RequestError: the prompt is none of the three, or has no place for what it is to be combined with.
          ValueError: the tokenizer has no chat template, or its template refuses the messages.
        """
        prompt = _plain(prompt)
        if isinstance(prompt, str):
            if not prompt.isascii() and (half := re.search("[\ud800-\udfff]", prompt)):
                raise RequestError(f"the text has {half[0]!r}, which is no character; give text that was UTF-8")
            if raw:
                if system_prompt is not None:
                    raise RequestError("a raw prompt has no place for a system prompt; write it into the prompt")
                return self.tokenizer.encode(prompt)
            system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
            return self.tokenizer.encode_chat([*system, {"role": "user", "content": prompt}])
        if system_prompt is not None:
            raise RequestError("a system prompt goes before a text; write it into the token ids or the messages")
        if prompt and isinstance(prompt[0], dict):
            if raw:
                raise RequestError("messages need the chat template, which raw leaves out; give a text or token ids")
            return self.tokenizer.encode_chat(prompt)
        return prompt  # type: ignore[return-value]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        *,
        raw: bool = False,
        system_prompt: str | None = None,
    ) -> list[Completion]:
        """Complete prompts and return them in order.

        Args:
          prompts: a list of prompts, or one text.
          params: for all prompts, or one for each.
          raw: tokenise texts as they are, without the chat template.
          system_prompt: put before each text as the chat's system message.

        Raises:
          RequestError: a prompt can never be served; none was started.
        """
        deltas = self._start(prompts, params, raw, system_prompt, round_steps=None)
        done = {delta.index: delta.completion for delta in deltas if delta.completion is not None}
        return [done[index] for index in sorted(done)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        *,
        raw: bool = False,
        system_prompt: str | None = None,
    ) -> Generator[Delta]:
        """Do as ``generate`` does, but yield text as it is made.

        What can be refused is refused here, before the first piece is asked for. Closing the iterator cancels what has
        not ended.
        """
        return self._start(prompts, params, raw, system_prompt, round_steps=8)

    # -- running -------------------------------------------------------------------------------------------------

    def _start(
        self, prompts: Any, params: Any, raw: bool, system_prompt: str | None, round_steps: int | None
    ) -> Generator[Delta]:
        if self._busy:
            raise RuntimeError("another stream of this LLM is still open; read it to its end or close it first")
        sources = [_plain(prompt) for prompt in ([prompts] if isinstance(prompts, str) else prompts)]
        every = [params] * len(sources) if isinstance(params, SamplingParams) else list(params)
        if len(every) != len(sources):
            raise ValueError(f"{len(every)} sampling params were given for {len(sources)} prompts")
        encoded = []
        for at, source in enumerate(sources, 1):
            try:
                encoded.append(self.encode(source, raw=raw, system_prompt=system_prompt))
            except ValueError as error:
                raise RequestError(f"prompt {at} of {len(sources)}: {error}") from error
        texts = [_Text(TextStream(self.tokenizer, one.stop)) for one in every]
        requests = [Request(ids, one, watch=text.push) for ids, one, text in zip(encoded, every, texts, strict=True)]
        if not requests:
            raise ValueError("there is no prompt; give at least one")
        shape = self._shape_for(requests)
        terms = Terms(self.config, shape, self._eos)
        for at, request in enumerate(requests, 1):
            try:
                terms.check(request)
            except RequestError as error:
                raise RequestError(f"prompt {at} of {len(requests)}: {error}") from None
        return self._run(self._engine_of(shape), requests, texts, sources, round_steps)

    def _run(
        self,
        engine: Engine,
        requests: list[Request],
        texts: list[_Text],
        sources: list[Any],
        round_steps: int | None,
    ) -> Generator[Delta]:
        if self._busy or engine is not self._engine:
            raise RuntimeError("another stream of this LLM was opened before this one was read")
        ids = {engine.add(request): at for at, request in enumerate(requests)}
        self._busy, sound = True, False
        try:
            while engine.has_work:
                for event in engine.step(round_steps):
                    at = ids[event.request_id]
                    delta = texts[at].delta(at, event)
                    if event.report is not None:
                        completion = self._completion(engine, sources[at], requests[at], texts[at], event.report)
                        delta = dataclasses.replace(delta, completion=completion)
                    sound = True
                    yield delta
                    sound = False
            sound = True
        finally:
            self._busy = False
            if sound:
                for request_id in ids:
                    engine.cancel(request_id)
            else:
                # A step was torn in the middle, and with it the pool that it had been given.
                self._engine = None

    def _completion(self, engine: Engine, source: Any, request: Request, text: _Text, report: Report) -> Completion:
        return Completion(
            prompt=source,
            text=text.text,
            token_ids=list(text.token_ids),
            seed=request.params.seed,
            compile_seconds=self._compile_seconds,
            block_size=engine.cache.block_size,
            pool_blocks=engine.cache.blocks,
            pool_bytes=engine.device.pool.nbytes,
            model=self.config.name,
            implementation=engine.device.implementation,
            logprobs=list(text.logprobs) if request.params.logprobs else None,
            **{**dataclasses.asdict(report), **({"finish_reason": "stop"} if text.stopped else {})},
        )

    # -- the engine's size ---------------------------------------------------------------------------------------

    def _shape_for(self, requests: list[Request]) -> CacheConfig:
        """Return the shape of an engine that can serve the requests: the present one's if it will do."""
        current = None if self._engine is None else self._engine.cache
        rows = self._rows or min(MOST_ROWS, len(requests))
        if current is not None and self._rows is None:
            rows = max(rows, current.rows)
        shape = dataclasses.replace(self._shape, rows=rows)
        if self._pool_blocks is not None:
            return shape
        if self._pool_memory is not None:
            blocks = self._pool_memory // block_bytes(self.config, shape.block_size, shape.dtype) - 1
            if blocks < 1:
                raise ValueError(f"pool_memory={self._pool_memory} bytes hold no block beside the null block; raise it")
            return dataclasses.replace(shape, blocks=blocks)
        blocks = sizing.choose_blocks(
            self._weights,
            self.config,
            shape,
            [min(len(one.prompt) + one.params.max_tokens - 1, shape.context) for one in requests],
            present=current.blocks if current is not None and current.rows == rows else 0,
            replaced=0 if self._engine is None else self._engine.device.pool.nbytes,
            implementation=self.implementation,
        )
        return dataclasses.replace(shape, blocks=blocks)

    def _engine_of(self, shape: CacheConfig) -> Engine:
        """Return a warm engine of this shape: the present one, or a new one in its place."""
        if self._engine is None or self._engine.cache != shape:
            # The old pool goes before the new one comes.
            self._engine = None
            engine = Engine(
                self._weights, self.config, shape, eos_token_ids=self._eos, implementation=self.implementation
            )
            self._compile_seconds = engine.warmup().seconds
            self._engine = engine
        return self._engine


def _plain(prompt: Prompt) -> str | list[int] | list[dict[str, str]]:
    """Return a prompt as JSON can hold it."""
    if isinstance(prompt, str):
        return prompt
    parts: list[Any] = list(prompt) if isinstance(prompt, Iterable) else [None]
    if all(isinstance(part, Mapping) for part in parts):
        return [dict(part) for part in parts]
    try:
        return [operator.index(part) for part in parts]
    except TypeError:
        raise RequestError(
            f"a prompt is a text, a list of token ids or a list of messages, and got {prompt!r:.80}; "
            "one that is not a text stands in a list of prompts"
        ) from None


def _tokenizer(path: Path) -> Tokenizer:
    if path.suffix == ".gguf":
        return Tokenizer.from_gguf(read_metadata(path))
    return Tokenizer.from_folder(path)


class _Text:
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
        return Delta(index, new, event.token_ids, event.logprobs)
