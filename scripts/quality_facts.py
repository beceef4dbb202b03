"""Facts planted in a prompt and asked for at its end: how many come back, with the whole cache and with a part of it.

    python scripts/quality_facts.py --text pydoc_data.topics --text anarchism=FOLDER --out facts.jsonl

Four sentences of the form "The code of the red door is 7142." stand in a text of some 2,000 tokens. The chat asks for
one of them. The prompt is prefilled densely and compressed once, question and all, as the engine does; then the model
is given "The code of the red door is " and has to come up with the digits. A fact is recovered where every digit is the
most likely token. Nothing protects the prompt.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import quality_report
import quality_steps as steps
from quality import Case, Reader
from quality_steps import CHUNK, Row
from quality_texts import PYTHON, named

THINGS = ("red door", "silver box", "north gate", "old safe")
DEPTHS = (0.1, 0.35, 0.6, 0.85)
CASES = (
    "triattention:per_head:sinks=4",
    "triattention:per_layer_head:sinks=4",
    "snapkv:per_head:sinks=4",
    "streaming:per_head:sinks=4",
)


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt that asks for one fact: its ids, those of the answer's beginning, and of the digits."""

    thing: str
    depth: float
    prompt: np.ndarray
    opening: np.ndarray
    digits: np.ndarray


def questions(reader: Reader, text: str, index: int, count: int, words: int, seed: int) -> list[Question]:
    """Return the prompts of a passage, one a fact; all are the same up to the question."""
    start = text.find("\n\n", len(text) * (2 * index + 1) // (2 * count)) + 2
    pieces = text[start : start + 20 * words].split(" ")[:words]
    codes = [str(code) for code in np.random.default_rng(seed).integers(1000, 10000, len(THINGS))]
    facts = [f"The code of the {thing} is {code}." for thing, code in zip(THINGS, codes, strict=True)]
    for depth, fact in sorted(zip(DEPTHS, facts, strict=True), reverse=True):
        pieces.insert(int(depth * words), f"\n\n{fact}\n\n")
    encode = reader.tokenizer.backend.encode
    out = []
    for thing, depth, code in zip(THINGS, DEPTHS, codes, strict=True):
        content = " ".join(pieces) + f"\n\nWhat is the code of the {thing}?"
        prompt = reader.tokenizer.encode_chat([{"role": "user", "content": content}])
        opening = encode(f"The code of the {thing} is ", add_special_tokens=False).ids
        whole = encode(f"The code of the {thing} is {code}", add_special_tokens=False).ids
        if whole[: len(opening)] != opening:
            raise ValueError(f"the tokenizer joins digits to what stands before them in {code!r}; use another model")
        arrays = (np.asarray(ids, np.int32) for ids in (prompt, opening, whole[len(opening) :]))
        out.append(Question(thing, depth, *arrays))
    return out


def common(asked: list[Question]) -> int:
    """Return how many whole chunks of tokens all prompts begin with, in tokens."""
    shortest = min(one.prompt.size for one in asked)
    same = np.all([one.prompt[:shortest] == asked[0].prompt[:shortest] for one in asked], axis=0)
    return int(np.argmin(same) if not same.all() else shortest) // CHUNK * CHUNK


def recovered(reader: Reader, row: Row, question: Question) -> tuple[bool, float]:
    """Return whether every digit is the most likely token after what is in ``row``, and their mean nll."""
    ids = np.concatenate([question.opening, question.digits])
    _, hidden = steps.run(reader.weights, reader.config, row, ids[:-1])
    log_p = np.asarray(steps.log_probabilities(reader.weights, hidden[-question.digits.size :]))
    right = log_p.argmax(axis=-1) == question.digits
    return bool(right.all()), float(-log_p[np.arange(right.size), question.digits].mean())


def lines(
    reader: Reader, texts: dict[str, str], cases: list[Case], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield a line for each fact and way to compress, full attention first."""
    for index in range(args.passages):
        for seed, (name, text) in enumerate(texts.items()):
            asked = questions(reader, text, index, args.passages, args.words, 100 * seed + index)
            shared = common(asked)
            row = Row.empty(reader.config, max(one.prompt.size for one in asked) + CHUNK)
            for start in range(0, shared, CHUNK):
                row, _ = steps.run(reader.weights, reader.config, row, asked[0].prompt[start : start + CHUNK])
            for one in asked:
                own = row
                for start in range(shared, one.prompt.size, CHUNK):
                    own, _ = steps.run(reader.weights, reader.config, own, one.prompt[start : start + CHUNK])
                about = {"text": name, "passage": index, "fact": one.thing, "depth": one.depth}
                about |= {"prompt": int(one.prompt.size)}
                found, nll = recovered(reader, own, one)
                yield {**about, "way": "full attention", "share": 1.0, "recovered": found, "nll": nll}
                for case in cases:
                    for share in args.shares:
                        sized = dataclasses.replace(case, budget=int(share * one.prompt.size))
                        budget = sized.config(seed).resolve(one.prompt.size, 1, steps.BLOCK)
                        cut = steps.compress(own, budget, sized.policy(reader, seed), sized.mode)
                        found, nll = recovered(reader, cut, one)
                        way = quality_report.name(dataclasses.asdict(case))
                        yield {**about, "way": way, "share": share, "recovered": found, "nll": nll}


def table(found: list[dict[str, Any]]) -> str:
    """Return a Markdown table of facts recovered, by way and share of the cache, and of depth."""
    groups: dict[tuple[float, str], list[dict[str, Any]]] = defaultdict(list)
    for line in found:
        groups[-line["share"], line["way"]].append(line)
    depths = sorted({line["depth"] for line in found})
    head = ["cache", "way", "recovered", *(f"at {depth:.0%}" for depth in depths), "nll of a digit"]
    rows = [head, ["---"] * len(head)]
    for (share, way), own in sorted(
        groups.items(), key=lambda item: (item[0][0], -sum(x["recovered"] for x in item[1]))
    ):
        by_depth = [[line["recovered"] for line in own if line["depth"] == depth] for depth in depths]
        counts = [f"{sum(part)} of {len(part)}" for part in by_depth]
        total = f"{sum(line['recovered'] for line in own)} of {len(own)}"
        rows.append([f"{-share:.0%}", way, total, *counts, f"{np.mean([line['nll'] for line in own]):.2f}"])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(prog="python scripts/quality_facts.py", description=__doc__.splitlines()[0])
    made.add_argument("--model", help="as for jaxkv.generate; the demo model by default")
    made.add_argument("--dtype", default="bfloat16", help="of the weights; the pool is float32")
    made.add_argument("--text", action="append", help="as for quality.py")
    made.add_argument("--passages", type=int, default=2, help="of each text; four facts stand in each")
    made.add_argument("--words", type=int, default=1200, help="words of text around the facts")
    made.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.25], help="of the prompt, kept")
    made.add_argument("--cases", nargs="+", default=CASES, help="METHOD[:MODE[:FIELD=VALUE]..]")
    made.add_argument("--out", type=Path, required=True, help="JSON lines")
    return made


def main() -> int:
    """Plant, ask and count."""
    args = parser().parse_args()
    reader = Reader.load(args.model, args.dtype)
    found = []
    with args.out.open("w") as file:
        for line in lines(reader, named(args.text or [PYTHON]), [Case.parse(text) for text in args.cases], args):
            file.write(json.dumps(line) + "\n")
            file.flush()
            found.append(line)
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
