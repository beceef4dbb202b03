"""From JSON lines of ``quality.py`` to a table: means over passages, standard errors, and ratios of KL."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

Line = dict[str, Any]
Kind = tuple[int, str]
"""A budget and the name of what compressed."""


def read(path: Path) -> list[Line]:
    """Return the lines of a file; none where there is no file. A last line that was cut off is left out."""
    if not path.exists():
        return []
    out = []
    for text in path.read_text().splitlines():
        try:
            out.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return out


def name(line: Line) -> str:
    """Return what a table calls the way that a line was compressed."""
    parts = [line["method"], line["mode"]]
    if line["stats"] not in ("", "packaged"):
        parts.append(line["stats"])
    return " ".join([*parts, f"sinks {line['sinks']}"])


def grouped(lines: list[Line]) -> dict[Kind, dict[tuple[str, int], Line]]:
    """Return lines by budget and way, then by passage."""
    out: dict[Kind, dict[tuple[str, int], Line]] = defaultdict(dict)
    for line in lines:
        out[line["budget"], name(line)][line["text"], line["passage"]] = line
    return out


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return the mean over passages and its standard error (ddof 1); NaN of one passage."""
    array = np.asarray(values, np.float64)
    error = array.std(ddof=1) / math.sqrt(array.size) if array.size > 1 else math.nan
    return float(array.mean()), float(error)


def kl_ratio(own: dict[Any, Line], other: dict[Any, Line]) -> float:
    """Return the geometric mean over the passages of both of how many times the KL of ``other`` is that of ``own``."""
    common = sorted(own.keys() & other.keys())
    if not common:
        return math.nan
    return float(np.exp(np.mean([math.log(own[p]["kl"] / other[p]["kl"]) for p in common])))


def table(lines: list[Line]) -> str:
    """Return a Markdown table, a row for each budget and way, ordered by KL within a budget."""
    groups = grouped(lines)
    head = ["budget", "way", "passages", "KL", "top-1", "perplexity ratio", "KL / streaming", "KL / random"]
    rows = []
    for (budget, way), own in groups.items():
        cells = [mean_and_error([line[field] for line in own.values()]) for field in ("kl", "top1", "ppl_ratio")]
        ratios = [
            kl_ratio(own, groups.get((budget, base), {}))
            for base in ("streaming per_head sinks 4", "random per_head sinks 4")
        ]
        shown = [f"{mean:.3f} ± {error:.3f}" for mean, error in cells] + [f"{ratio:.2f}" for ratio in ratios]
        rows.append((-budget, cells[0][0], [str(budget), way, str(len(own)), *shown]))
    text = [head, ["---"] * len(head)] + [row for _, _, row in sorted(rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in text)
