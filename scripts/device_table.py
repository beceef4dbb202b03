"""What the device check found, as a table for people, and whether the goals are met."""

from __future__ import annotations

from typing import Any

ATTENTION_GOAL, SCORING_GOAL, COMPACTION_GOAL = 0.85, 0.80, 0.02
SMALLEST_ROWS = 8
"""Of the loads that the goal of attention is for: 8 x 8192 and those with more rows."""


def chosen(entries: list[dict[str, Any]], order: list[str]) -> dict[str, Any] | None:
    """Return the entry of the implementation that is picked where none is named: the first in order that was timed."""
    timed = {entry["implementation"]: entry for entry in entries if "share" in entry}
    return next((timed[name] for name in order if name in timed), None)


def goals(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what was aimed at, what was measured, and whether it is met: None at toy sizes or where it did not run."""
    made = []
    for section, goal in (("attention", ATTENTION_GOAL), ("scoring", SCORING_GOAL)):
        for heads, load in _loads(found, section):
            if int(load.split(" x ")[0]) < SMALLEST_ROWS and section == "attention":
                continue
            entries = [e for e in found.get(section, []) if (e["heads"], e["load"]) == (heads, load)]
            best = chosen(entries, found["candidates"])
            made.append(_goal(found, f"{section} {heads} {load}", f">= {goal:.0%} of a copy", best, "share", goal))
    decodes = [entry for entry in found.get("decode", []) if entry.get("method") != "none"]
    for entry in decodes or [None]:
        name = "compaction" if entry is None else f"compaction, {entry['rows']} rows"
        text = f"< {COMPACTION_GOAL:.0%} of decode time"
        made.append(_goal(found, name, text, entry, "compaction_share", COMPACTION_GOAL, below=True))
    return made


def _goal(
    found: dict[str, Any],
    name: str,
    goal: str,
    entry: dict[str, Any] | None,
    field: str,
    bound: float,
    below: bool = False,
) -> dict[str, Any]:
    value = None if entry is None else entry.get(field)
    met = None
    if value is not None and not found["dry_run"]:
        met = value < bound if below else value >= bound
    return {"name": name, "goal": goal, "measured": value, "met": met}


def _loads(found: dict[str, Any], section: str) -> list[tuple[str, str]]:
    return list(dict.fromkeys((entry["heads"], entry["load"]) for entry in found.get(section, [])))


def failed(found: dict[str, Any]) -> list[str]:
    """Return the checks that failed, and the cases that broke off."""
    wrong = [e for e in found.get("checks", []) if e["status"] == "failed"]
    names = [" ".join(str(e[k]) for k in ("op", "heads", "dtype", "implementation") if k in e) for e in wrong]
    return names + [entry["case"] for entry in found.get("failures", [])]


def table(found: dict[str, Any]) -> str:
    """Return everything, section by section."""
    lines = [f"{found['chip']}, JAX {found['jax']}" + (", DRY RUN: no number means anything" * found["dry_run"])]
    if copy := found.get("copy"):
        lines.append(f"copy {copy['copy_gb_per_second']:.0f} GB/s, read {copy['read_gb_per_second']:.0f} GB/s")
    lines += _checks(found)
    for section in ("attention", "scoring", "moving"):
        lines += _shares(found, section)
    lines += _decode(found)
    lines += ["", f"{'goal':<44} {'aimed at':<24} {'measured':>9}  met"]
    for goal in found["goals"]:
        measured = "-" if goal["measured"] is None else f"{goal['measured']:.1%}"
        verdict = {True: "yes", False: "NO", None: "not judged"}[goal["met"]]
        lines.append(f"{goal['name']:<44} {goal['goal']:<24} {measured:>9}  {verdict}")
    for entry in found.get("skipped", []):
        lines.append(f"skipped for lack of time: {entry['case']}")
    for entry in found.get("failures", []):
        lines.append(f"broke off: {entry['case']}: {entry['reason'][:200]}")
    return "\n".join(lines)


def _checks(found: dict[str, Any]) -> list[str]:
    lines = ["", f"{'checked against XLA':<18} {'heads':<12} {'dtype':<9} {'implementation':<14} result"]
    for e in found.get("checks", []):
        said = e["status"] if "error" not in e else f"{e['status']}, error {e['error']:.1e} of {e['bound']:.1e}"
        said += f": {e['reason'][:90]}" if "reason" in e else ""
        lines.append(f"{e['op']:<18}  {e['heads']:<12} {e.get('dtype', ''):<9} {e['implementation']:<14} {said}")
    return lines


def _shares(found: dict[str, Any], section: str) -> list[str]:
    lines = [
        "",
        f"{section:<12} {'load':<20} {'implementation':<17} {'us':>9} {'p10':>9} {'p90':>9} {'floor':>9} share",
    ]
    for e in found.get(section, []):
        start = f"{e['heads']:<12} {e['load']:<20} {e['implementation']:<17} "
        if "seconds" not in e:
            lines.append(start + "refused: " + "; ".join(str(e[k])[:90] for k in e if k.endswith("refused")))
            continue
        seconds = e["seconds"]
        cells = [1e6 * x for x in (seconds["median"], seconds["p10"], seconds["p90"], e["floor_seconds"])]
        lines.append(start + " ".join(f"{cell:>9.1f}" for cell in cells) + f" {e['share']:>5.0%}")
    return lines


def _decode(found: dict[str, Any]) -> list[str]:
    lines = [
        "",
        f"{'decode':<14} {'rows':>5} {'tok/s':>9} {'p10':>9} {'p90':>9} {'by bytes':>9} {'x none':>7} compaction",
    ]
    none = [e for e in found.get("decode", []) if e["method"] == "none" and "tokens_per_second" in e]
    for e in found.get("decode", []):
        start = f"{e['method']:<14} {e['rows']:>5} "
        if "refused" in e:
            lines.append(f"{start}{e['refused']}")
            continue
        # The same batch where there is one, else the largest without a budget.
        peer = next((n for n in none if n["rows"] == e["rows"]), none[0] if none else None)
        ratio = f"{e['tokens_per_second'] / peer['tokens_per_second']:>7.2f}" if peer else f"{'-':>7}"
        names = ("tokens_per_second", "tokens_per_second_p10", "tokens_per_second_p90", "predicted_tokens_per_second")
        cells = " ".join(f"{e[name]:>9.0f}" for name in names)
        share = "-"
        if "compaction_share" in e:
            share = f"{e['compaction_share']:.2%} (by bytes {e['predicted_compaction_share']:.2%})"
        lines.append(f"{start}{cells} {ratio} {share}")
    return lines
