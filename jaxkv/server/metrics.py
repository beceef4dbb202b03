"""What Prometheus reads: vLLM's names, so that its dashboards work, and ours for what compaction gives back."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jaxkv.engine import Engine
from jaxkv.request import Report
from jaxkv.server.recent import Recent

_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_WHOLE = (0.1, 0.3, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300)
_COMPACTION = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_LIVE = {
    "tokens_evicted": ("jaxkv:tokens_evicted", "Slots that compaction took away."),
    "blocks_returned": ("jaxkv:blocks_returned", "Blocks that compaction gave back to the pool."),
    "blocks_dropped": ("jaxkv:blocks_dropped_shared", "References that compaction dropped to blocks others hold."),
}
"""Counts of a row that stand in the engine's totals once it has ended: both together are counted as they grow."""


class Metrics:
    """Counters of one server. The engine's thread writes them.

    Args:
      model: its served name, the label ``model_name``.
    """

    def __init__(self, model: str) -> None:
        self.recent = Recent()
        self._registry, self._model = CollectorRegistry(), model
        self._running = self._gauge("vllm:num_requests_running", "Continuations that have a row.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Continuations that wait for a row or for blocks.")
        self._usage = self._gauge("vllm:kv_cache_usage_perc", "Share of the pool's blocks that are held, 0 to 1.")
        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked for in the pool.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the pool.")
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that ended.")
        self._generated = self._counter("vllm:generation_tokens", "Generated tokens.")
        self._success = Counter(
            "vllm:request_success",
            "Continuations that ended: stop, length or abort.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort"):
            self._success.labels(model, reason)
        self._first = self._histogram("vllm:time_to_first_token_seconds", "From arrival to first token.", _FIRST_TOKEN)
        self._between = self._histogram("vllm:inter_token_latency_seconds", "Between two tokens.", _BETWEEN)
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", _WHOLE)
        self._live = {field: self._counter(*named) for field, named in _LIVE.items()}
        self._compactions = self._counter("jaxkv:compactions", "Rows compacted.")
        self._compaction_seconds = self._histogram(
            "jaxkv:compaction_seconds", "Compacting the rows that were due in one step.", _COMPACTION
        )
        self._preemptions = self._counter("jaxkv:preemptions", "Rows that had to give way to older ones.")
        self._known: dict[str, float] = {}

    def render(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def returned(self) -> int:
        """Return how many blocks compaction has given back so far."""
        return int(self._known.get("blocks_returned", 0))

    def tokens(self, count: int, seconds: float, *, first: bool) -> None:
        """Count tokens of one continuation that came together, some seconds after those before them or its arrival."""
        self.recent.tokens(count)
        if first:
            self._first.observe(seconds)
            self.recent.first_token(seconds)
            return
        self.recent.between(seconds / count)
        for _ in range(count):
            self._between.observe(seconds / count)

    def finished(self, report: Report, seconds: float, *, choice: int) -> None:
        """Count a continuation that ended, as many seconds after its call came."""
        reason = "abort" if report.finish_reason == "cancelled" else report.finish_reason
        self._success.labels(self._model, reason).inc()
        self._whole.observe(seconds)
        if choice == 0:
            # The other choices share this one's prompt.
            self._prompt.inc(report.prompt_tokens)
            self._queries.inc(report.prompt_tokens)
            self._hits.inc(report.cached_tokens)

    def after_step(self, engine: Engine) -> None:
        """Bring gauges and the engine's own counts up to date."""
        waiting = engine.scheduler.queue
        rows = engine.rows
        self._running.set(len(rows))
        self._waiting.set(len(waiting))
        self._usage.set(engine.blocks.in_use / engine.blocks.blocks)
        totals = engine.totals
        for field, counter in self._live.items():
            so_far = getattr(totals, field) + sum(getattr(row, field) for row in (*rows, *waiting))
            counter.inc(self._grown(field, so_far))
        self._generated.inc(self._grown("generated_tokens", totals.generated_tokens))
        self._compactions.inc(self._grown("compactions", totals.compactions))
        self._preemptions.inc(self._grown("preemptions", totals.preemptions))
        seconds = self._grown("compaction_seconds", totals.compaction_seconds)
        if seconds:
            self._compaction_seconds.observe(seconds)

    def _grown(self, name: str, so_far: float) -> float:
        # A prompt that is begun again has counts that go back to 0 for a while; a counter never does.
        before = self._known.get(name, 0)
        self._known[name] = max(before, so_far)
        return self._known[name] - before

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ("model_name",), registry=self._registry).labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ("model_name",), registry=self._registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ("model_name",), registry=self._registry, buckets=buckets).labels(self._model)
