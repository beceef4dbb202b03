"""Bytes and operations of a decode round by the shapes of its arrays, and what chips do of them in a second.

A round is an interval: so many decode steps a row, then, with a budget, one compaction. Every byte is counted as often
as it has to cross the memory bus if nothing is read twice.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxkv.config import ModelConfig, RopeConfig
from jaxkv.dims import ceil_div

QWEN3_8B = ModelConfig(
    "qwen3",
    vocab_size=151936,
    width=4096,
    mlp_width=12288,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    norm_eps=1e-6,
    context=40960,
    rope=RopeConfig(theta=1e6),
    qk_norm=True,
    name="Qwen3-8B",
)
BLOCK = 16
ITEM = 2
"""Bytes of a bfloat16."""
FLOAT = 4
"""Bytes of a float32: logits and scores."""
SELECT_PASSES = 4
"""Times that scores cross the bus: written, read for their mean, for their spread, and to be normalised and pooled."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """A chip's public figures.

    Attributes:
      name: as people say it.
      kind: as ``pallas_kernels.device`` names it.
      bandwidth: bytes a second.
      bfloat16: operations a second of dense bfloat16 products summed in float32; a multiply-add is two.
      float32: operations a second in float32; on a TPU of products that are made of six bfloat16 ones.
      memory: bytes.
      source: where the figures stand.
      compiled_as: the chip whose compiled program stands for this one's, where none can be made for it.
    """

    name: str
    kind: str
    bandwidth: float
    bfloat16: float
    float32: float
    memory: int
    source: str
    compiled_as: str = ""


def _tpu(name: str, kind: str, bandwidth: float, bfloat16: float, memory: int, source: str) -> Chip:
    return Chip(name, kind, bandwidth, bfloat16, bfloat16 / 6, memory, source)


_GIB, _MIB = 2**30, 2**20
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            *("RTX 4090", "NVIDIA GeForce RTX 4090", 1008e9, 165.2e12, 82.6e12, 24564 * _MIB),
            source="NVIDIA Ada GPU architecture whitepaper, appendix A",
        ),
        Chip(
            *("A100-80G", "NVIDIA A100", 2039e9, 312e12, 19.5e12, 80 * _GIB),
            source="NVIDIA A100 datasheet, SXM",
            compiled_as="NVIDIA GeForce RTX 4090",
        ),
        Chip(
            *("H100", "NVIDIA H100", 3350e9, 989e12, 67e12, 80 * _GIB),
            source="NVIDIA H100 datasheet, SXM, without sparsity",
            compiled_as="NVIDIA H200",
        ),
        Chip(
            *("H200", "NVIDIA H200", 4800e9, 989e12, 67e12, 143771 * _MIB),
            source="NVIDIA H200 datasheet, SXM, without sparsity",
        ),
        _tpu("v5e", "TPU v5 lite", 819e9, 197e12, 16 * _GIB, "Google Cloud documentation, TPU v5e"),
        _tpu("v6e", "TPU v6 lite", 1600e9, 918e12, 32 * _GIB, "Google Cloud documentation, TPU v6e"),
        _tpu("v5p", "TPU v5", 2765e9, 459e12, 95 * _GIB, "Google Cloud documentation, TPU v5p"),
    )
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows that decode a round.

    Attributes:
      rows: B.
      start: slots that each row holds when the round begins.
      steps: decode steps of the round; with a budget, its interval.
      budget: slots that the compaction at the round's end leaves; None is none.
    """

    rows: int
    start: int
    steps: int = 128
    budget: int | None = None

    def __post_init__(self) -> None:
        for field in ("rows", "start", "steps"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")

    @property
    def end(self) -> int:
        """Slots of a row after the last step."""
        return self.start + self.steps

    @property
    def seen(self) -> float:
        """Slots that attention reads of a row in a step, on average: a token sees itself too."""
        return self.start + (self.steps + 1) / 2


@dataclasses.dataclass(frozen=True)
class Part:
    """Bytes and operations of one part of a round; ``rate`` names the field of ``Chip`` that its operations go by."""

    bytes: float
    operations: float = 0.0
    rate: str = "bfloat16"

    def seconds(self, chip: Chip) -> float:
        """Return the least time that the part takes."""
        return max(self.bytes / chip.bandwidth, self.operations / getattr(chip, self.rate))

    def bound(self, chip: Chip) -> str:
        """Return what the part waits for: bytes or operations."""
        operations = self.operations / getattr(chip, self.rate)
        return "operations" if operations > self.bytes / chip.bandwidth else "bytes"


def matrix_weights(model: ModelConfig) -> int:
    """Return how many weights a step reads: every matrix and the output head, and no row of the embedding."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = model.width * (2 * queries + 2 * keys)
    return model.layers * (attention + 3 * model.width * model.mlp_width) + model.vocab_size * model.width


def slot_bytes(model: ModelConfig) -> int:
    """Return bytes of K and V of one token over all layers."""
    return 2 * model.layers * model.kv_heads * model.head_dim * ITEM


def held_bytes(model: ModelConfig, case: Case) -> int:
    """Return bytes of the weights, the embedding included, and of the blocks that the rows hold at the round's end."""
    embedding = 0 if model.tied_head else model.vocab_size * model.width
    weights = (matrix_weights(model) + embedding) * ITEM
    return weights + case.rows * row_bytes(model, case)


def row_bytes(model: ModelConfig, case: Case) -> int:
    """Return bytes of the blocks that a row holds at the round's end."""
    return ceil_div(case.end, BLOCK) * BLOCK * slot_bytes(model)


def parts(model: ModelConfig, case: Case) -> dict[str, Part]:
    """Return the parts of a round: model, attention, and with a budget scoring, selection and moving."""
    weights = matrix_weights(model)
    # Logits are written, and read once to draw from them.
    logits = 2 * case.rows * model.vocab_size * FLOAT
    model_part = Part(case.steps * (weights * ITEM + logits), case.steps * 2 * case.rows * weights)
    found = {"model": model_part, **kernel_parts(model, case)}
    if case.budget is not None:
        scores = case.rows * model.layers * model.heads * case.end * FLOAT
        found["selection"] = Part(SELECT_PASSES * scores)
    return found


def kernel_parts(model: ModelConfig, case: Case) -> dict[str, Part]:
    """Return the parts that the kernels take, of whose bytes a compiler knows nothing.

    At most every survivor moves, but for the few before the first one that goes: that much is counted.
    """
    slot, rows = slot_bytes(model), case.rows
    per_query = model.layers * model.heads
    reads = rows * case.seen * slot
    # Queries come in and outputs go out, and the new token's K and V are written.
    small = rows * (2 * per_query * model.head_dim * ITEM + slot)
    attention = 4 * rows * case.seen * per_query * model.head_dim
    found = {"attention": Part(case.steps * (reads + small), case.steps * attention)}
    if case.budget is not None:
        if not 0 < case.budget < case.end:
            raise ValueError(f"budget={case.budget} must be below the {case.end} slots that a row ends the round with")
        # A query head multiplies D and F numbers a slot, a KV head makes F magnitudes of three operations each.
        bands = model.frequencies
        slots = rows * case.end * model.layers
        scoring = slots * (2 * model.heads * (model.head_dim + bands) + 3 * model.kv_heads * bands)
        found["scoring"] = Part(rows * case.end * slot / 2, scoring, "float32")
        found["moving"] = Part(2 * rows * case.budget * slot)
    return found


def predict(chip: Chip, case: Case, found: dict[str, Part]) -> dict[str, Any]:
    """Return tokens/s and what they come from: seconds of the round by part, and what each part waits for."""
    seconds = {name: part.seconds(chip) for name, part in found.items()}
    whole = sum(seconds.values())
    compaction = sum(seconds.get(name, 0.0) for name in ("scoring", "selection", "moving"))
    return {
        "tokens_per_second": case.rows * case.steps / whole,
        "seconds": seconds,
        "bound": {name: part.bound(chip) for name, part in found.items()},
        "compaction_share": compaction / whole,
    }


def most_rows(model: ModelConfig, chip: Chip, case: Case, spare: float = 0.05) -> int:
    """Return how many such rows the chip has memory for beside the weights, with a share of it left to the compiler."""
    alone = held_bytes(model, case) - case.rows * row_bytes(model, case)
    return max(0, int((chip.memory * (1 - spare) - alone) // row_bytes(model, case)))
