"""What is to be taken off a TPU compiler's count: bytes in vector memory, which never cross the memory bus.

The compiler puts what has room into vector memory, weights on their way to a product included, and its count of bytes
accessed has them all: where one array goes through vector memory, its read, its write there and its read there. In the
module's text such arrays have ``S(1)`` in their layouts.
"""

from __future__ import annotations

import dataclasses
import math
import re

_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}
_NAMES_ONLY = {
    *("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "while", "conditional", "call"),
    *("copy-done", "slice-done", "async-done"),
}
"""Operations that access nothing themselves."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a module's text."""

    name: str
    shape: str
    operation: str
    operands: tuple[str, ...]
    line: str


def vector_memory_bytes(text: str) -> int:
    """Return bytes that a module reads and writes in vector memory, counted as XLA counts a program's bytes.

    The body of a loop counts once, of a conditional the branch with the most, and a fusion by its operands and results.
    """
    computations = _computations(text)
    entry = re.search(r"^ENTRY %([\w.-]+)", text, re.MULTILINE)
    if entry is None:
        raise ValueError("the text has no ENTRY computation: it is not a module of XLA's")
    return _of(entry[1], computations)


def known_seconds(analysis: dict[str, float]) -> float | None:
    """Return ``optimal_seconds`` without the -1 that each unknown instruction adds; None where nothing is known."""
    value = analysis.get("optimal_seconds")
    # Whole numbers are what is left where all are unknown.
    return None if value is None or value == math.floor(value) else value - math.floor(value)


def _of(name: str, computations: dict[str, list[Instruction]]) -> int:
    total = 0
    shapes = {instruction.name: instruction.shape for instruction in computations[name]}
    for instruction in computations[name]:
        if instruction.operation not in _NAMES_ONLY:
            # XLA counts no operand of a custom call, be it a kernel or the seam of slices that are one array already.
            read = () if instruction.operation == "custom-call" else instruction.operands
            total += sum(map(_vector_bytes, (instruction.shape, *(shapes.get(operand, "") for operand in read))))
        if instruction.operation in ("while", "call"):
            called = re.search(r"(?:body|to_apply)=%([\w.-]+)", instruction.line)
            assert called is not None, instruction.line
            total += _of(called[1], computations)
        if instruction.operation == "conditional":
            listed = re.search(r"branch_computations=\{(.*?)\}", instruction.line)
            found = re.findall(r"%([\w.-]+)", listed[1]) if listed else []
            found += re.findall(r"(?:true|false)_computation=%([\w.-]+)", instruction.line)
            total += max(_of(branch, computations) for branch in found)
    return total


def _computations(text: str) -> dict[str, list[Instruction]]:
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%([\w.-]+) .*\{$", line):
            current = found.setdefault(header[1], [])
        elif parsed := re.match(r"\s+(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)", line):
            operands = tuple(re.findall(r"%([\w.-]+)", parsed[4]))
            current.append(Instruction(parsed[1], parsed[2], parsed[3], operands, line))
    return found


def _vector_bytes(shape: str) -> int:
    total = 0
    for kind, dims, layout in re.findall(r"(\w+)\[([\d,]*)\]\{([^}]*)\}", shape):
        if "S(1)" in layout:
            total += _SIZES[kind] * math.prod(int(dim) for dim in dims.split(",") if dim)
    return total
