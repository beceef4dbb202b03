"""How good blended answers are: KL and top-1 agreement to a full prefill, on prompts of passages from real texts.

    python scripts/quality_blend.py --text pydoc_data.topics --text anarchism=FOLDER --text jargon=FILE --out
    blend.jsonl

A prompt is BOS, 5 or 6 passages and what follows the last of them in its text, which is scored token by token. Passages
follow each other in the text (``--order consecutive``) or are taken from all over it (``scattered``). They are
prefilled alone in two ways: ``bos`` behind a BOS whose KV is dropped, ``none`` with nothing before them. A line of the
output is one prompt answered in one way; lines that are there already are not computed again. A table of means over
prompts is printed at the end, and what holds of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from quality_texts import PYTHON, Reader, named

from jaxkv import cli, corpus
from jaxkv.blend_quality import Judge, Way

RATIOS = (0, 0.05, 0.15, 0.3, 0.5, 1)
WAYS = (
    *(Way(ratio) for ratio in RATIOS),
    Way(0.15, "random"),
    Way(0, "first"),
    Way(0, rotated=False),
    Way(0.15, rotated=False),
)
PREPARATIONS = ("bos", "none")
ABOUT = ("order", "text", "prompt", "of", "passages", "tokens", "continuation", "dtype", "preparation", "way")
"""What tells a line from all others."""


def parser() -> argparse.ArgumentParser:
    """Return the script's parser."""
    made = argparse.ArgumentParser(prog="python scripts/quality_blend.py", description=__doc__.partition("\n")[0])
    made.add_argument("--model", help="as for jaxkv.generate; the demo model by default")
    made.add_argument("--dtype", default="float32", help="of the weights")
    made.add_argument("--text", action="append", help="NAME=FILE, NAME=FOLDER or pydoc_data.topics; again for more")
    made.add_argument("--prompts", type=int, default=6, help="of each text, evenly spaced")
    made.add_argument("--tokens", type=int, default=128, help="of a passage")
    made.add_argument("--continuation", type=int, default=64, help="tokens that are scored")
    made.add_argument("--order", choices=("consecutive", "scattered"), default="consecutive")
    made.add_argument("--out", type=Path, required=True, help="JSON lines; what is in it is not computed again")
    made.add_argument("--minutes", type=float, default=float("inf"), help="stop after this long")
    made.add_argument("--json", action="store_true", help="the means and what holds as one JSON object")
    made.add_argument("--table", action="store_true", help="measure nothing")
    return made


def main(argv: list[str] | None = None) -> int:
    """Measure what is missing and print the means."""
    args = parser().parse_args(argv)
    return cli.run(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    for name in ("prompts", "tokens", "continuation"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} must be at least 1")
    found = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    if not args.table:
        cli.keep_compiled_programs()
        began, done = time.monotonic(), {identity(line) for line in found}
        reader = Reader.load(args.model, args.dtype)
        with args.out.open("a") as file:
            for line in lines(reader, named(args.text or [PYTHON]), args, done):
                file.write(json.dumps(line) + "\n")
                file.flush()
                found.append(line)
                if time.monotonic() - began > 60 * args.minutes:
                    break
    report = {order: summary([line for line in found if line["order"] == order]) for order in orders(found)}
    print(json.dumps(report) if args.json else "\n\n".join(_text(order, part) for order, part in report.items()))


def lines(reader: Reader, texts: dict[str, str], args: argparse.Namespace, done: set[str]) -> Iterator[dict[str, Any]]:
    """Yield a line for every prompt and way that is not done yet."""
    bos = corpus.first_token(reader.tokenizer, reader.config)
    most = 6 * args.tokens + args.continuation + 1
    for index in range(args.prompts):
        for seed, (name, text) in enumerate(texts.items()):
            passages, continuation = prompt(reader, text, index, args)
            about = {"order": args.order, "text": name, "prompt": index, "of": args.prompts, "passages": len(passages)}
            about |= {"tokens": args.tokens, "continuation": args.continuation, "dtype": args.dtype}
            full = None
            for preparation in PREPARATIONS:
                todo = [way for way in WAYS if identity(about | _named(preparation, way)) not in done]
                if not todo:
                    continue
                judge = Judge(reader.weights, reader.config, most=most, bos=bos, behind_bos=preparation == "bos")
                full = judge.full(passages, continuation) if full is None else full
                for way in todo:
                    score = judge.score(passages, continuation, full, way, seed=100 * seed + index)
                    yield {**about, **_named(preparation, way), **vars(score)}


def prompt(reader: Reader, text: str, index: int, args: argparse.Namespace) -> tuple[list[np.ndarray], np.ndarray]:
    """Return 5 or 6 passages, and what follows the last one with one token more: what the last answer is held against
    is not scored.
    """
    count, size = 5 + index % 2, args.tokens
    bos = corpus.first_token(reader.tokenizer, reader.config) is not None
    more = args.continuation + 1
    if args.order == "consecutive":
        ids = reader.passage(text, index, args.prompts, bos + count * size + more)[bos:]
        return [ids[n * size : (n + 1) * size] for n in range(count)], ids[count * size :]
    # The passages of a prompt are far from each other.
    at = [number * args.prompts + index for number in range(count)]
    whole = [reader.passage(text, place, 6 * args.prompts, bos + size + more)[bos:] for place in at]
    return [ids[:size] for ids in whole], whole[-1][size:]


def identity(line: dict[str, Any]) -> str:
    """Return what tells a line from all others: everything but its results."""
    return json.dumps([line[field] for field in ABOUT])


def _named(preparation: str, way: Way) -> dict[str, Any]:
    return {"preparation": preparation, "way": way.name}


def orders(found: list[dict[str, Any]]) -> list[str]:
    """Return the orders that were measured."""
    return sorted({line["order"] for line in found})


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means over prompts by preparation and way, over all texts and each, and what holds of them."""
    out: dict[str, Any] = {"prompts": len({(line["text"], line["prompt"]) for line in found})}
    texts = sorted({line["text"] for line in found})
    for preparation in PREPARATIONS:
        rows = {}
        for way in WAYS:
            mine = [line for line in found if (line["preparation"], line["way"]) == (preparation, way.name)]
            if not mine:
                continue
            kl = np.array([line["kl"] for line in mine])
            rows[way.name] = {
                "kl": float(kl.mean()),
                "error": float(kl.std(ddof=1) / np.sqrt(kl.size)) if kl.size > 1 else None,
                "top1": float(np.mean([line["top1"] for line in mine])),
                "recomputed": float(np.mean([line["recomputed"] / max(line["eligible"], 1) for line in mine])),
                "texts": {
                    text: float(np.mean([line["kl"] for line in mine if line["text"] == text])) for text in texts
                },
            }
        if len(rows) == len(WAYS):
            out[preparation] = {"ways": rows, "holds": holds(rows)}
    return out


def holds(rows: dict[str, Any]) -> dict[str, Any]:
    """Return what is asked of blending: that KL falls with the ratio (10 % tolerance), and how far, at 15 %."""
    curve = [rows[Way(ratio).name]["kl"] for ratio in RATIOS]
    chosen, random = rows["0.15"], rows["0.15 at random"]
    return {
        "falls": all(later <= 1.1 * earlier for earlier, later in itertools.pairwise(curve)),
        "removed_at_0.15": 1 - chosen["kl"] / curve[0],
        "below_random_in_every_text": all(kl < random["texts"][text] for text, kl in chosen["texts"].items()),
        "not_rotated_costs": rows["0, not rotated"]["kl"] / curve[0],
    }


def _text(order: str, report: dict[str, Any]) -> str:
    out = [f"{order}: {report['prompts']} prompts"]
    for preparation in PREPARATIONS:
        if preparation not in report:
            continue
        rows = report[preparation]["ways"]
        texts = list(rows["0"]["texts"])
        heads = ("preparation", "way", "recomputed", "KL", "error", "top-1", *texts)
        out += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for way, row in rows.items():
            cells = [preparation, way, f"{row['recomputed']:.1%}", f"{row['kl']:.4f}"]
            cells += ["" if row["error"] is None else f"{row['error']:.4f}", f"{row['top1']:.3f}"]
            cells += [f"{row['texts'][text]:.4f}" for text in texts]
            out.append("| " + " | ".join(cells) + " |")
        out.append(json.dumps(report[preparation]["holds"]))
    return "\n".join(out)


if __name__ == "__main__":
    sys.exit(main())
