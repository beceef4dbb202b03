"""``LLM``: a model, its tokenizer and an engine that fits the requests it is given."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxkv import cli, sizing, weights
from jaxkv.blend import RATIO
from jaxkv.completion import Completion, Delta, RunningText
from jaxkv.compression import CompressionConfig
from jaxkv.config import CacheConfig
from jaxkv.documents import DocumentsConfig
from jaxkv.encoding import Plain, PromptLike, encode, plain
from jaxkv.engine import Engine
from jaxkv.pool import block_bytes
from jaxkv.request import Report, Request, RequestError
from jaxkv.sampling import SamplingParams
from jaxkv.segments import Prompt, Ratio
from jaxkv.stats_packaged import query_stats
from jaxkv.store import Store
from jaxkv.terms import KEEP_EVERYTHING, Terms
from jaxkv.text import TextStream
from jaxkv.tokenizer import Tokenizer
from jaxkv.weights.digest import digest

MOST_ROWS = 8
"""Rows of an engine whose size nobody chose."""


class LLM:
    """A model that completes prompts.

    Args:
      model: a folder with config.json and safetensors, a ``.gguf`` file, a hub id, or None: the demo model.
      dtype: of the weights; None is float32 on a CPU and bfloat16 elsewhere.
      quantize: int4 or int8 to round the layers' matrices of a checkpoint that is not quantised; see ``weights.read``.
      packed: whether quantised matrices stay packed; None is no on a CPU and yes elsewhere.
      kv_dtype: of the pool; None is float32 on a CPU and the weights' elsewhere.
      rows: texts that decode at once; None is as many as are asked for, up to 8.
      block_size: slots in a block.
      pool_blocks: the pool's size in blocks; None leaves it to ``pool_memory``.
      pool_memory: the pool's size in bytes, at most; None is what the requests need, up to half of the free host
        memory, or 85 % of the free memory of an accelerator less temporaries.
      prefill_chunk: tokens of a prompt that one call takes; None is 128 on a CPU and 512 elsewhere.
      context: most tokens of prompt and answer; None is the model's own. More is at the caller's risk.
      compression: how requests are kept within a budget, unless one has its own; None keeps every token. TriAttention
        takes its query statistics from ``compression.stats``: a file, ``online`` for each request's own, or None for
        those that come with the package.
      implementation: as for ``pallas_kernels.attend``.
      store: where the KV of documents is; needed for prompts that have some. The caller closes it.
      recompute_ratio: share of a document's tokens that is recomputed where its KV is reused, or ``auto``; see
        ``jaxkv.documents``.

    Raises:
      ValueError: an option makes no sense, the model is not supported, or there are no query statistics for it.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        dtype: str | None = None,
        quantize: str | None = None,
        packed: bool | None = None,
        kv_dtype: str | None = None,
        rows: int | None = None,
        block_size: int = 16,
        pool_blocks: int | None = None,
        pool_memory: int | None = None,
        prefill_chunk: int | None = None,
        context: int | None = None,
        compression: CompressionConfig | None = None,
        implementation: pallas_kernels.Implementation | None = None,
        store: Store | None = None,
        recompute_ratio: Ratio = RATIO,
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
        self._documents = None if store is None else DocumentsConfig(store, recompute_ratio)
        self._rows, self._pool_blocks, self._pool_memory = rows, pool_blocks, pool_memory
        self.implementation = implementation
        path = weights.locate(model)
        start = time.perf_counter()
        self.compression = compression or KEEP_EVERYTHING
        self._stats = query_stats(self.compression, weights.read_config(path))
        transpose = on_cpu and dtype == "float32"
        loaded = weights.read(path, jnp.dtype(dtype), quantize=quantize, packed=packed, transpose=transpose)
        self.config, self.weights, self.weights_report = loaded.config, loaded.weights, loaded.report
        # Stored KV outlives the process, and belongs to these weights.
        self._digest = "" if store is None else f"{digest(path, cli.cache_folder() / 'digests')} {dtype} {quantize}"
        self.tokenizer = Tokenizer.load(path)
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

    def encode(self, prompt: PromptLike, *, raw: bool = False, system_prompt: str | None = None) -> list[int]:
        """Return the token ids of a prompt.

        A text is one user message of a chat, after ``system_prompt``, unless ``raw``; then it is tokenised as it is.

        Raises:
          RequestError: it is no prompt, or has no place for what it is to be combined with.
          ValueError: the tokenizer has no chat template, or its template refuses the messages.
        """
        return encode(self.tokenizer, prompt, raw=raw, system_prompt=system_prompt)[0]

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        *,
        raw: bool = False,
        system_prompt: str | None = None,
        compression: CompressionConfig | Sequence[CompressionConfig] | None = None,
    ) -> list[Completion]:
        """Complete prompts and return them in order, the n continuations of a prompt one after the other.

        Args:
          prompts: a list of prompts, or one text or ``Prompt``.
          params: for all prompts, or one for each.
          raw: tokenise texts as they are, without the chat template.
          system_prompt: put before each text as the chat's system message.
          compression: for all prompts, or one for each, in place of the LLM's own. The budget and what goes with it may
            differ, and ``method="none"`` keeps every token; the method and its statistics are the LLM's.

        Raises:
          RequestError: a prompt can never be served; none was started.
        """
        deltas = self._start(self._requests(prompts, params, raw, system_prompt, compression), round_steps=None)
        done = {(delta.index, delta.choice): delta.completion for delta in deltas if delta.completion is not None}
        return [done[name] for name in sorted(done)]

    def stream(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        *,
        raw: bool = False,
        system_prompt: str | None = None,
        compression: CompressionConfig | Sequence[CompressionConfig] | None = None,
    ) -> Generator[Delta]:
        """Do as ``generate`` does, but yield text as it is made.

        What can be refused is refused here, before the first piece is asked for. Closing the iterator cancels what has
        not ended.
        """
        return self._start(self._requests(prompts, params, raw, system_prompt, compression), round_steps=8)

    # -- running -------------------------------------------------------------------------------------------------

    def _requests(
        self, prompts: Any, params: Any, raw: bool, system_prompt: str | None, compression: Any
    ) -> list[_Job]:
        sources = [plain(prompt) for prompt in ([prompts] if isinstance(prompts, str | Prompt) else prompts)]
        if not sources:
            raise ValueError("there is no prompt; give at least one")
        every = _each("sampling params", params, SamplingParams, len(sources))
        own = _each("compressions", compression, CompressionConfig | None, len(sources))
        jobs = []
        for at, (source, one) in enumerate(zip(sources, every, strict=True)):
            try:
                ids, spans = encode(self.tokenizer, source, raw=raw, system_prompt=system_prompt)
            except ValueError as error:
                raise RequestError(f"prompt {at + 1} of {len(sources)}: {error}") from error
            texts = [RunningText(TextStream(self.tokenizer, one.stop, one.min_tokens)) for _ in range(one.n)]
            watch = texts[0].push if one.n == 1 else [text.push for text in texts]
            jobs.append(_Job(source, Request(ids, one, own[at], watch, segments=spans), texts))
        return jobs

    @property
    def has_store(self) -> bool:
        """Whether prompts may have documents."""
        return self._documents is not None

    def engine(self, requests: Sequence[Request]) -> Engine:
        """Return the engine that serves these requests, warm: the present one if it will do.

        Raises:
          RequestError: a request can never be served.
        """
        shape = self._shape_for(requests)
        terms = self._terms(shape)
        for at, request in enumerate(requests, 1):
            try:
                terms.check(request)
            except RequestError as error:
                raise RequestError(f"prompt {at} of {len(requests)}: {error}") from None
        return self._engine_of(shape)

    def serving_engine(self) -> Engine:
        """Return a warm engine for requests that are not known yet.

        It has the rows and the pool that were asked for. Without a size the pool has room for every row's whole
        context, as far as memory goes; without rows there are 8.
        """
        rows = self._rows or MOST_ROWS
        shape = dataclasses.replace(self._shape, rows=rows)
        if self._pool_blocks is not None or self._pool_memory is not None:
            shape = self._shape_for([Request([0])] * rows)
        else:
            replaced = 0 if self._engine is None else self._engine.device.pool.nbytes
            room = sizing.most_blocks(
                self.weights, self.config, shape, replaced=replaced, implementation=self.implementation
            )
            shape = dataclasses.replace(shape, blocks=max(1, min(rows * shape.table_width, room)))
        return self._engine_of(shape)

    def _start(self, jobs: list[_Job], round_steps: int | None) -> Generator[Delta]:
        if self._busy:
            raise RuntimeError("another stream of this LLM is still open; read it to its end or close it first")
        return self._run(self.engine([job.request for job in jobs]), jobs, round_steps)

    def _run(self, engine: Engine, jobs: list[_Job], round_steps: int | None) -> Generator[Delta]:
        if self._busy or engine is not self._engine:
            raise RuntimeError("another stream of this LLM was opened before this one was read")
        ids = {engine.add(job.request): at for at, job in enumerate(jobs)}
        self._busy, sound = True, False
        try:
            while engine.has_work:
                for event in engine.step(round_steps):
                    at = ids[event.request_id]
                    delta = jobs[at].texts[event.choice].delta(at, event)
                    if event.report is not None:
                        completion = self._completion(engine, jobs[at], event.choice, event.report)
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

    def _completion(self, engine: Engine, job: _Job, choice: int, report: Report) -> Completion:
        text, params = job.texts[choice], job.request.params
        if text.stopped:
            report = dataclasses.replace(report, finish_reason="stop", reached_context=False)
        return Completion(
            prompt=job.source.question if isinstance(job.source, Prompt) else job.source,
            text=text.text,
            token_ids=list(text.token_ids),
            choice=choice,
            seed=(params.seed + choice) % 2**32,
            compile_seconds=self._compile_seconds,
            block_size=engine.cache.block_size,
            pool_blocks=engine.cache.blocks,
            pool_bytes=engine.device.pool.nbytes,
            model=self.config.name,
            implementation=engine.device.implementation,
            logprobs=list(text.logprobs) if params.logprobs else None,
            **dataclasses.asdict(report),
        )

    # -- the engine's size ---------------------------------------------------------------------------------------

    def _shape_for(self, requests: Sequence[Request]) -> CacheConfig:
        """Return the shape of an engine that can serve the requests: the present one's if it will do."""
        current = None if self._engine is None else self._engine.cache
        rows = self._rows or min(MOST_ROWS, sum(request.params.n for request in requests))
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
            self.weights,
            self._terms(shape),
            requests,
            present=current.blocks if current is not None and current.rows == rows else 0,
            replaced=0 if self._engine is None else self._engine.device.pool.nbytes,
            implementation=self.implementation,
        )
        return dataclasses.replace(shape, blocks=blocks)

    def _terms(self, shape: CacheConfig) -> Terms:
        return Terms(self.config, shape, self._eos, self.compression)

    def _engine_of(self, shape: CacheConfig) -> Engine:
        """Return a warm engine of this shape: the present one, or a new one in its place."""
        if self._engine is None or self._engine.cache != shape:
            # The old pool goes before the new one comes.
            self._engine = None
            engine = Engine(
                self.weights,
                self.config,
                shape,
                eos_token_ids=self._eos,
                compression=self.compression,
                stats=self._stats,
                implementation=self.implementation,
                documents=self._documents,
                weights_digest=self._digest,
            )
            self._compile_seconds = engine.warmup().seconds
            self._engine = engine
        return self._engine


@dataclasses.dataclass(frozen=True)
class _Job:
    """A prompt as it was given, its request, and the texts that it becomes."""

    source: Plain
    request: Request
    texts: list[RunningText]


def _each(name: str, given: Any, kind: Any, count: int) -> list[Any]:
    """Return one for each prompt, of what was given for all or for each."""
    every = [given] * count if isinstance(given, kind) else list(given)
    if len(every) != count:
        raise ValueError(f"{len(every)} {name} were given for {count} prompts")
    return every
