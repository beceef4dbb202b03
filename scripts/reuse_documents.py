"""How much of a prompt is reused by blending and by prefixes: documents in random orders, and an edited history.

    python scripts/reuse_documents.py                      # the demo model and text of Python's manual
    python scripts/reuse_documents.py --orders 20 --documents 6 --tokens 96 --json

Orders: the same documents are asked about again and again, each time in another order. Through the engine, once with
``blend`` and once with ``exact``, which is prefix caching. History: a dialogue of several turns of which one is edited;
its turns are the segments. There the KL to a full prefill of the edited dialogue is measured too, over the tokens of a
last turn that follows it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv import cli, weights
from jaxkv.blend_quality import Judge, Way
from jaxkv.config import CacheConfig
from jaxkv.dims import ceil_div
from jaxkv.documents import DocumentsConfig
from jaxkv.engine import Engine
from jaxkv.request import Request
from jaxkv.sampling import SamplingParams
from jaxkv.segments import Reuse, Span
from jaxkv.store import Store
from jaxkv.tokenizer import Tokenizer

QUESTION = 16
"""Tokens after the documents."""


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(prog="python scripts/reuse_documents.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="as for jaxkv.generate (default: the demo model)")
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--orders", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=96, help="of a document, and of a turn of the history")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--edited", type=int, default=5, help="which turn is edited, counted from 1")
    parser.add_argument("--seed", type=int, default=0, help="of the orders")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parser().parse_args(argv)
    return cli.run(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    import pydoc_data.topics

    if not 1 <= args.edited <= args.turns:
        raise ValueError(f"--edited {args.edited} is not one of the turns, 1 to {args.turns}")
    cli.keep_compiled_programs()
    path = weights.locate(args.model)
    config, loaded = weights.load(path, jnp.float32)
    text = Tokenizer.load(path).encode_plain("\n".join(pydoc_data.topics.topics.values()))
    needed = (max(args.documents, args.turns + 1) + 1) * args.tokens + QUESTION
    if needed > len(text):
        raise ValueError(f"{needed} tokens of text are needed, and there are {len(text)}; ask for fewer")
    parts = [text[at * args.tokens : (at + 1) * args.tokens] for at in range(max(args.documents, args.turns + 2))]
    result = {"orders": orders(loaded, config, parts[: args.documents], text[-QUESTION:], args.orders, args.seed)}
    result["history"] = history(loaded, config, parts, args.turns, args.edited)
    if args.json:
        print(json.dumps(result))
    else:
        print(table(result))


def orders(
    loaded: Any, config: Any, documents: Sequence[list[int]], question: list[int], count: int, seed: int
) -> dict[str, Any]:
    """Return the share of document tokens that were reused, over all orders and over those after the first."""
    rng = np.random.default_rng(seed)
    drawn = [rng.permutation(len(documents)).tolist() for _ in range(count)]
    total = sum(map(len, documents))
    found: dict[str, Any] = {"documents": len(documents), "tokens": total, "orders": count}
    size = total + len(question) + 2
    cache = CacheConfig(blocks=4 * ceil_div(size, 16), context=size, rows=1)
    for reuse in ("blend", "exact"):
        with Store(memory=2**32) as store:
            engine = Engine(loaded, config, cache, documents=DocumentsConfig(store, 0.15))
            shares = [_share(engine, [documents[at] for at in order], question, reuse) for order in drawn]
            # Reused means not computed from the first layer on: recomputed tokens of a document that was there count.
            found[reuse] = {"share": float(np.mean(shares)), "after_the_first": float(np.mean(shares[1:]))}
            found[reuse]["entries"] = store.counters.puts
    return found


def _share(engine: Engine, documents: Sequence[list[int]], question: list[int], reuse: Reuse) -> float:
    """Ask once; return the share of document tokens whose KV was there."""
    prompt: list[int] = []
    spans = []
    for ids in documents:
        spans.append(Span(len(prompt), len(prompt) + len(ids), reuse))
        prompt += ids
    engine.add(Request([*prompt, *question], SamplingParams(max_tokens=1), segments=tuple(spans)))
    report = None
    while engine.has_work:
        report = next((event.report for event in engine.step() if event.report is not None), report)
    assert report is not None
    there = sum(one.tokens if one.source in ("host", "disk") else one.tokens_reused for one in report.documents)
    return there / len(prompt)


def history(loaded: Any, config: Any, parts: Sequence[list[int]], turns: int, edited: int) -> dict[str, Any]:
    """Return what of a dialogue with one edited turn can be reused, and the KL of doing so."""
    old, new = list(parts[:turns]), list(parts[:turns])
    # Half of the turn is another text: an edit, not an insertion.
    new[edited - 1] = [*new[edited - 1][: len(new[edited - 1]) // 2], *parts[turns + 1][: -(-len(parts[0]) // 2)]]
    follows = np.asarray(parts[turns], np.int32)
    total = sum(map(len, new))
    prefix = sum(map(len, new[: edited - 1])) + len(new[edited - 1]) // 2
    known = sum(len(turn) for turn, was in zip(new, old, strict=True) if turn == was)
    judge = Judge(loaded, config, most=total + follows.size, bos=None, behind_bos=False)
    passages = [np.asarray(turn, np.int32) for turn in new]
    full = judge.full(passages, follows)
    found: dict[str, Any] = {"turns": turns, "edited": edited, "tokens": total}
    found |= {"prefix_share": prefix / total, "blend_share": known / total, "ways": []}
    for ratio in (0.0, 0.15, 0.3):
        score = judge.score(passages, follows, full, Way(ratio))
        found["ways"].append({"ratio": ratio, **dataclasses.asdict(score)})
    return found


def table(result: dict[str, Any]) -> str:
    """Return both as text."""
    orders, past = result["orders"], result["history"]
    lines = [f"{orders['documents']} documents of {orders['tokens']} tokens together, in {orders['orders']} orders:"]
    for reuse in ("blend", "exact"):
        one = orders[reuse]
        lines.append(
            f"  {reuse:6} {one['share']:6.1%} of document tokens there, {one['after_the_first']:6.1%} after the first"
        )
    lines.append(f"{past['turns']} turns, {past['tokens']} tokens, turn {past['edited']} edited:")
    lines.append(f"  prefix {past['prefix_share']:6.1%} reused, without loss")
    for way in past["ways"]:
        share = past["blend_share"]
        lines.append(
            f"  blend  {share:6.1%} known, {way['ratio']:4.0%} recomputed: KL {way['kl']:.4f}, top-1 {way['top1']:.1%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
