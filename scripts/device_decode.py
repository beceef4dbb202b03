"""Decoding a random model of Qwen3-8B's shapes on the device: every token kept, and within a budget."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import roofline_arithmetic as arithmetic
from device_timing import Report, Times, clock
from roofline_arithmetic import Case, Chip

from jaxkv import model as models
from jaxkv import policies
from jaxkv.compact import compaction_widths
from jaxkv.compression import CompressionConfig
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.decode import Rows, compact_round, decode_round
from jaxkv.dims import ceil_div
from jaxkv.pool import KVPool
from jaxkv.select import Budgets
from jaxkv.stats import QueryStats

BLOCK = arithmetic.BLOCK
SPARE = 0.07
"""Share of the memory that is left to the compiler."""
LOGIT_COPIES = 8
"""Arrays of all logits that drawing a token takes at once, at most."""

SCORE_COPIES = 2


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is decoded: the model, the context that every row has, and the budget."""

    model: ModelConfig
    context: int
    budget: int
    interval: int
    repeats: int

    def case(self, method: str, rows: int) -> Case:
        """Return a round of one interval."""
        if method == "none":
            return Case(rows, self.context, self.interval)
        return Case(rows, self.budget, self.interval, self.budget)


FULL = Setting(arithmetic.QWEN3_8B, 32768, 3072, 128, 5)
_TOY = dataclasses.replace(
    arithmetic.QWEN3_8B, vocab_size=97, width=64, mlp_width=96, layers=1, heads=4, kv_heads=2, head_dim=16, context=2048
)
DRY = Setting(_TOY, 992, 48, 16, 2)
DRY_MEMORY = 240 * 2**10


class Decoding:
    """The model on the device, and how many rows it has memory for."""

    def __init__(self, report: Report, dry: bool) -> None:
        self.report = report
        self.dry = dry
        self.setting = DRY if dry else FULL
        stats = jax.local_devices()[0].memory_stats() or {}
        self.memory = DRY_MEMORY if dry else int(stats["bytes_limit"])
        self.case_seconds = 90.0
        self.weights: Any = None

    def load(self) -> None:
        """Make random weights on the device; where 36 layers have no room, as many as take two thirds of the memory."""
        model = self.setting.model
        for layers in range(model.layers, 0, -1):
            model = dataclasses.replace(model, layers=layers)
            if arithmetic.held_bytes(model, self.setting.case("none", 1)) < self.memory * (1 - SPARE):
                break
        self.setting = dataclasses.replace(self.setting, model=model)
        makers: dict[Any, Callable[[Any], Any]] = {}
        keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(models.weight_shapes(model)))))

        def make(path: Any, x: Any) -> Any:
            if path[-1].name.endswith("norm"):
                return jnp.ones(x.shape, x.dtype)
            scale = x.shape[-1] ** -0.5
            maker = makers.setdefault(x.shape, jax.jit(lambda key: scale * jax.random.normal(key, x.shape, x.dtype)))
            return maker(next(keys))

        shapes = models.weight_shapes(model, jnp.bfloat16)
        self.weights = jax.block_until_ready(jax.tree_util.tree_map_with_path(make, shapes))
        size = sum(x.nbytes for x in jax.tree.leaves(self.weights))
        self.report.put("model", {"layers": model.layers, "weights_bytes": size, "memory_bytes": self.memory})

    def largest(self, method: str) -> int:
        """Return how many rows there is memory for."""
        case, model = self.setting.case(method, 1), self.setting.model
        weights = sum(x.nbytes for x in jax.tree.leaves(self.weights))
        row = arithmetic.row_bytes(model, case) + LOGIT_COPIES * model.vocab_size * 4
        if method != "none":
            # A compaction holds the scores of all layers, and makes others of them.
            slots = compaction_widths(ceil_div(case.end, BLOCK), BLOCK)[-1] * BLOCK
            row += SCORE_COPIES * model.layers * model.heads * slots * 4
        return max(1, int((self.memory * (1 - SPARE) - weights) // row))

    def run(self) -> None:
        """Decode with every token kept and within the budget, at one batch, then at the largest, then alone."""
        self.report.run("random weights", 20, self.load)
        if self.weights is None:
            return
        same, most = self.largest("none"), self.largest("triattention")
        cases = [("none", same), ("triattention", same), ("triattention", most), ("none", 1), ("triattention", 1)]
        for method, rows in dict.fromkeys(cases):
            self.report.run(
                f"decode {method}, {rows} rows",
                self.case_seconds,
                lambda m=method, r=rows: self._case(m, r),  # type: ignore[misc]
            )
        self.weights = None

    def _case(self, method: str, rows: int) -> None:
        start = time.perf_counter()
        prepared = Prepared(self.setting, method, rows)
        programs, compile_seconds = prepared.compile(self.weights)
        spare = self.memory - prepared.program_bytes
        # The toy's memory is made up.
        if spare < 0 and not self.dry:
            self.report.add(
                "decode", {"method": method, "rows": rows, "refused": f"{-spare} bytes of memory are missing"}
            )
            return
        entry = prepared.measure(self.weights, programs, compile_seconds)
        chip = Chip("this", "", 1e9 * self.report.found["copy"]["copy_gb_per_second"], *(float("inf"),) * 2, 0, "")
        case = self.setting.case(method, rows)
        floor = arithmetic.predict(chip, case, arithmetic.parts(self.setting.model, case))
        entry |= {"predicted_tokens_per_second": floor["tokens_per_second"]}
        entry |= {"predicted_compaction_share": floor["compaction_share"]}
        self.report.add("decode", entry)
        self.report.add("checks", prepared.checked(method, rows))
        self.case_seconds = 1.2 * (time.perf_counter() - start)
        said = f"{entry['tokens_per_second']:.0f} tok/s, by bytes {floor['tokens_per_second']:.0f}"
        self.report.say(f"decode {method}, {rows} rows: {said}")


class Prepared:
    """One case: arguments on the device and programs compiled for them."""

    def __init__(self, setting: Setting, method: str, rows: int) -> None:
        self.setting, self.method, self.rows = setting, method, rows
        self.case = setting.case(method, rows)
        width = ceil_div(self.case.end, BLOCK)
        self.cache = CacheConfig(
            blocks=rows * width, context=width * BLOCK, block_size=BLOCK, rows=rows, dtype="bfloat16"
        )
        ids = 1 + np.random.default_rng(0).permutation(rows * width).reshape(rows, width).astype(np.int32)
        each = np.full(rows, self.case.start, np.int32)
        at = np.full(rows, setting.context, np.int32)
        idle = Rows.idle(self.cache)
        made: Any = idle.replace(table=ids, length=each, position=at, active=np.ones(rows, bool))  # type: ignore[attr-defined]
        self.state = jax.device_put(made)
        self.steps = jax.device_put(np.int32(setting.interval))
        self.compaction = jax.device_put(self._compaction(ids)) if method != "none" else ()
        self.program_bytes = 0
        self.out: Any = None

    def _compaction(self, ids: np.ndarray) -> tuple[Any, ...]:
        setting, model = self.setting, self.setting.model
        wide = compaction_widths(ids.shape[1], BLOCK)[-1]
        table = np.pad(ids, ((0, 0), (0, wide - ids.shape[1])))
        rng = np.random.default_rng(1)
        shape = (model.layers, model.heads, model.frequencies)
        real, imag = rng.standard_normal((2, *shape)).astype(np.float32)
        stats = QueryStats(real, imag, np.hypot(real, imag) * 1.2)
        window = min(128, setting.budget // 4)
        config = CompressionConfig(self.method, setting.budget, setting.interval, window)
        row = config.resolve(setting.context, setting.interval, BLOCK)
        rows = self.rows
        end, at = np.full((2, rows), [[self.case.end], [setting.context + setting.interval]], np.int32)
        budgets = Budgets.stack([row] * rows)
        return table, table, end, at, np.ones(rows, bool), budgets, policies.make(config, model, stats)

    def compile(self, weights: Any) -> tuple[tuple[Any, Any], float]:
        """Return the round, the compaction or None, and the seconds that they took."""
        model, start = self.setting.model, time.perf_counter()
        pool = KVPool.shapes(model, self.cache)
        options: dict[str, Any] = {"config": model, "max_steps": self.setting.interval}
        step = decode_round.lower(weights, pool, self.state, self.steps, **options).compile()
        programs = [step]
        if self.compaction:
            lowered = compact_round.lower(pool, *self.compaction, mode="per_head", lanes=self.rows)
            programs.append(lowered.compile())
        for program in programs:
            memory: Any = program.memory_analysis()
            outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
            whole = memory.argument_size_in_bytes + memory.temp_size_in_bytes + outputs
            self.program_bytes = max(self.program_bytes, whole)
        return (step, programs[1] if self.compaction else None), time.perf_counter() - start

    def measure(self, weights: Any, programs: tuple[Any, Any], compile_seconds: float) -> dict[str, Any]:
        """Time whole rounds with their compaction, then compactions alone. Nothing goes to the device meanwhile."""
        step, compact = programs
        held = [self._pool()]

        def move() -> Any:
            held[0] = compact(held[0], *self.compaction)
            return held[0]

        def cycle() -> Any:
            with jax.transfer_guard("disallow"):
                held[0], _, self.out = step(weights, held[0], self.state, self.steps)
                return self.out, move() if compact else held[0]

        repeats = self.setting.repeats
        times = clock(cycle, 1, compile_seconds, repeats, warm=1)
        tokens = self.rows * self.setting.interval
        entry = {"method": self.method, "rows": self.rows, "start": self.case.start, "steps": self.setting.interval}
        entry |= {"round_seconds": dataclasses.asdict(times), "tokens_per_second": tokens / times.median}
        entry |= {"tokens_per_second_p10": tokens / times.p90, "tokens_per_second_p90": tokens / times.p10}
        if compact:
            alone: Times = clock(move, 1, 0, repeats, warm=1)
            entry |= {"compaction_seconds": dataclasses.asdict(alone)}
            entry |= {"compaction_share": alone.median / times.median}
        return entry

    def checked(self, method: str, rows: int) -> dict[str, Any]:
        """Return whether every row drew all of its tokens, with finite log probabilities, and no transfer was tried."""
        count, logprobs = np.asarray(self.out.count), np.asarray(self.out.logprobs)
        sound = bool((count == self.setting.interval).all() and np.isfinite(logprobs).all())
        status = "passed" if sound else "failed"
        return {"op": "decode_round", "heads": method, "implementation": f"{rows} rows", "status": status}

    def _pool(self) -> KVPool:
        shapes: Any = KVPool.shapes(self.setting.model, self.cache)
        shape, dtype = shapes.k[0].shape, shapes.k[0].dtype
        make = jax.jit(lambda key: jax.random.normal(key, shape, dtype))
        keys = jax.random.split(jax.random.key(2), 2 * len(shapes.k))
        arrays = [make(key) for key in keys]
        return KVPool(k=tuple(arrays[::2]), v=tuple(arrays[1::2]))
