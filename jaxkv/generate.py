"""``python -m jaxkv.generate``: complete prompts from a paged pool."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxkv import cli
from jaxkv.prompts import Line, documents, read
from jaxkv.segments import REUSES

if TYPE_CHECKING:
    from jaxkv.completion import Completion
    from jaxkv.compression import CompressionConfig
    from jaxkv.encoding import PromptLike
    from jaxkv.llm import LLM
    from jaxkv.sampling import SamplingParams
    from jaxkv.store import Store

DTYPES = ("auto", "float32", "bfloat16", "float16")


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxkv.generate",
        description="Complete prompts from a paged KV pool. Text goes to stdout, reports to stderr.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("what to complete").add_argument
    add("--model", help="folder with safetensors, .gguf file or hub id (default: SmolLM2-135M-Instruct)")
    add("--prompt", "-p", action="append", metavar="TEXT", help="a prompt; repeat for a batch; - reads stdin")
    add("--prompts-file", metavar="FILE", help="prompts one a line, or JSONL objects with prompt or messages")
    add(
        "--document",
        action="append",
        default=[],
        metavar="FILE",
        help="read before each prompt, its KV stored and reused",
    )
    add("--system-prompt", metavar="TEXT", help="the chat's system message")
    add("--raw", "--ignore-chat-template", action="store_true", help="tokenise prompts without a chat template")
    add = parser.add_argument_group("how to sample").add_argument
    add("--max-tokens", "--max-new-tokens", "-m", type=int, default=256, metavar="N", help="default: %(default)s")
    add("--temperature", "--temp", type=float, default=0.0, metavar="X", help="0 is greedy (default)")
    add("--top-p", type=float, default=1.0, metavar="X", help="keep the likeliest tokens that reach this share")
    add("--top-k", type=int, default=0, metavar="N", help="keep this many likeliest tokens; 0 keeps all (default)")
    add("--min-p", type=float, default=0.0, metavar="X", help="drop tokens below this share of the likeliest one's")
    add("--seed", type=int, default=0, metavar="N", help="of the first text; each further one has the next number")
    add("--stop", action="append", default=[], metavar="TEXT", help="end at this text; repeatable")
    add("--n", type=int, default=1, metavar="N", help="continuations of each prompt, with seeds one after the other")
    add("--min-tokens", type=int, default=0, metavar="N", help="tokens before which nothing ends the text")
    add("--presence-penalty", type=float, default=0.0, metavar="X", help="off the logit of what was generated before")
    add("--frequency-penalty", type=float, default=0.0, metavar="X", help="the same, for each time")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1: what the text has is less likely")
    add("--ignore-eos", action="store_true", help="go on after the model's end-of-text tokens")
    add("--logprobs", action="store_true", help="report log probabilities: each with --json, else their mean")
    add = parser.add_argument_group("the engine").add_argument
    add("--rows", "--max-num-seqs", type=int, metavar="N", help="requests that decode at once (default: up to 8)")
    add("--block-size", type=int, default=16, metavar="N", help="token slots in a block (default: %(default)s)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--pool-blocks", type=int, metavar="N", help="the pool's size in blocks")
    size.add_argument("--pool-memory", metavar="SIZE", help="the pool's size, as 512M or 2G")
    add("--prefill-chunk", type=int, metavar="N", help="prompt tokens a call takes (default: 128 on a CPU, else 512)")
    add("--context", "--max-model-len", type=int, metavar="N", help="most tokens of prompt and answer, at your risk")
    add("--dtype", choices=DTYPES, default="auto", help="of the weights (default: float32 on a CPU, else bfloat16)")
    add("--quantize", choices=("int4", "int8"), help="round the layers' matrices of a float checkpoint")
    add("--kv-dtype", choices=DTYPES, default="auto", help="of the pool (default: float32 on a CPU, else the weights')")
    add("--implementation", metavar="NAME", help="kernels: xla, triton, mosaic_gpu, mosaic_tpu (default: by platform)")
    add_compression(parser.add_argument_group("compression"))
    _add_documents(parser.add_argument_group("documents"))
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON object a request on stdout, and nothing else there")
    add("--plot", metavar="FILE", help="draw blocks held against tokens generated: .png, .svg or .pdf")
    add("--quiet", "-q", action="store_true", help="no report and no progress on stderr")
    return parser


def add_compression(group: Any) -> None:
    """Add the options that ``compression_of`` reads."""
    add = group.add_argument
    add(
        "--method",
        default="none",
        metavar="NAME",
        help="none (default), triattention, streaming, snapkv, h2o, knorm, keydiff, random",
    )
    add("--budget", type=_budget, metavar="N", help="slots a request keeps, or a ratio of it as 0.25 (default: 2048)")
    add("--interval", type=int, metavar="N", help="decoded tokens between two compactions (default: 128)")
    add("--window", type=int, metavar="N", help="newest slots always kept (default: 128)")
    add("--sinks", type=int, metavar="N", help="oldest slots always kept (default: 4)")
    add("--mode", metavar="NAME", help="per_head (default), per_layer_head, union or shared")
    add("--prompt-policy", metavar="NAME", help="evict (default), or pin: the prompt is kept")
    add("--stats", metavar="FILE", help="query statistics, or online (default: the package's)")
    add("--compact-prefill", action="store_true", default=None, help="compact a long prompt between its chunks")


def _add_documents(group: Any) -> None:
    add = group.add_argument
    add("--reuse", choices=REUSES, default="blend", help="their KV anywhere (blend, default), as a prefix, or never")
    add("--recompute-ratio", type=ratio, metavar="X", help="share of their tokens that is recomputed, or auto (0.15)")
    add("--store", metavar="DIR", help="keep their KV in this folder, for later runs")
    add("--store-memory", metavar="SIZE", help="most host memory for it (default: 1G)")
    add("--store-disk", metavar="SIZE", help="most bytes of the folder (default: 10G)")


def ratio(text: str) -> float | str:
    """Read ``--recompute-ratio``."""
    return text if text == "auto" else float(text)


def _budget(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parser().parse_args(argv)
    return cli.run(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    lines = read(args.prompt or [], args.prompts_file)
    prompts = documents(lines, args.document, args.reuse)
    params, compression = _params(args, lines), compression_of(args)
    from jaxkv import sizing

    memory = None if args.pool_memory is None else sizing.parse_bytes(args.pool_memory)
    with _store(args) as store:
        _complete(args, prompts, params, compression, memory, store)


def _complete(
    args: argparse.Namespace,
    prompts: Sequence[PromptLike],
    params: Sequence[SamplingParams],
    compression: CompressionConfig,
    memory: int | None,
    store: Store | None,
) -> None:
    from jaxkv import plots
    from jaxkv.llm import LLM

    if args.plot is not None:
        plots.check(args.plot)
    cli.keep_compiled_programs()
    progress = cli.Progress(not args.quiet)
    try:
        progress.say("loading the model")
        llm = LLM(
            args.model,
            dtype=dtype_of(args.dtype),
            quantize=args.quantize,
            kv_dtype=dtype_of(args.kv_dtype),
            rows=args.rows,
            block_size=args.block_size,
            pool_blocks=args.pool_blocks,
            pool_memory=memory,
            prefill_chunk=args.prefill_chunk,
            context=args.context,
            compression=compression,
            implementation=args.implementation,
            store=store,
            **({} if args.recompute_ratio is None else {"recompute_ratio": args.recompute_ratio}),
        )
        if llm.context > llm.config.context and not args.quiet:
            print(
                f"note: --context {llm.context} is beyond the {llm.config.context} tokens that the model was made for",
                file=sys.stderr,
            )
        progress.say("compiling")
        stream = llm.stream(prompts, params, raw=args.raw, system_prompt=args.system_prompt)
        try:
            show = _show_json if args.json else _show_text
            completions = show(stream, progress, [one.n for one in params])
        finally:
            stream.close()
    finally:
        progress.close()
    if args.plot is not None:
        plots.blocks_held(completions, args.plot)
    if not args.quiet:
        _report(completions, llm, args.json)


@contextlib.contextmanager
def _store(args: argparse.Namespace) -> Iterator[Store | None]:
    """Give the store that documents need, and close it when all of it is written; None without documents."""
    names = ("store", "store_memory", "store_disk", "recompute_ratio")
    given = [name.replace("_", "-") for name in names if getattr(args, name) is not None]
    if not args.document:
        if given:
            raise ValueError(f"--{given[0]} is for documents; give --document FILE, or leave it out")
        yield None
        return
    with store_of(args) as store:
        yield store


def store_of(args: argparse.Namespace) -> Store:
    """Return the store that ``--store``, ``--store-memory`` and ``--store-disk`` describe."""
    if args.store_disk is not None and args.store is None:
        raise ValueError("--store-disk needs a folder; give --store DIR")
    from jaxkv.sizing import parse_bytes
    from jaxkv.store import Store

    disk = parse_bytes(args.store_disk or "10G") if args.store is not None else 0
    return Store(args.store, memory=parse_bytes(args.store_memory or "1G"), disk=disk)


# -- options ----------------------------------------------------------------------------------------------------------


def _params(args: argparse.Namespace, lines: list[Line]) -> list[SamplingParams]:
    from jaxkv.sampling import SamplingParams

    common = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
        logprobs=args.logprobs,
        n=args.n,
        min_tokens=args.min_tokens,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        repetition_penalty=args.repetition_penalty,
    )
    params = []
    for index, line in enumerate(lines):
        try:
            seed = (common.seed + index * args.n) % 2**32
            params.append(dataclasses.replace(common, **{"seed": seed, **line.own}))
        except ValueError as error:
            raise ValueError(f"{line.where}: {error}") from None
    return params


def compression_of(args: argparse.Namespace) -> CompressionConfig:
    """Return what the options of ``add_compression`` ask for.

    Raises:
      ValueError: they make no sense together.
    """
    from jaxkv.compression import CompressionConfig

    names = ("budget", "interval", "window", "sinks", "mode", "prompt_policy", "stats", "compact_prefill")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if given and args.method == "none":
        option = next(iter(given)).replace("_", "-")
        raise ValueError(f"--{option} is for a method that compresses; give --method triattention, or leave it out")
    return CompressionConfig(method=args.method, **given)


def dtype_of(name: str) -> str | None:
    """Return what ``LLM`` takes for ``--dtype`` and ``--kv-dtype``."""
    return None if name == "auto" else name


# -- output ------------------------------------------------------------------------------------------------------------


def _places(choices: Sequence[int]) -> list[tuple[int, int]]:
    """Return (prompt, continuation) of each text, in the order in which they are shown."""
    return [(index, choice) for index, count in enumerate(choices) for choice in range(count)]


def _show_text(stream: Any, progress: cli.Progress, choices: Sequence[int]) -> list[Completion]:
    """Print texts in the order of the prompts: the first that is not done streams, those behind it wait."""
    place = {name: at for at, name in enumerate(_places(choices))}
    count = len(place)
    texts = [""] * count
    done: list[Completion | None] = [None] * count
    turn, begun = 0, False
    for delta in stream:
        at = place[delta.index, delta.choice]
        texts[at] += delta.text
        done[at] = delta.completion or done[at]
        while turn < count and (texts[turn] or done[turn] is not None):
            progress.close()
            if count > 1 and not begun:
                print(f"--- {turn + 1} of {count} ---")
            print(texts[turn], end="", flush=True)
            texts[turn], begun = "", True
            if done[turn] is None:
                break
            print(flush=True)
            turn, begun = turn + 1, False
    return [completion for completion in done if completion is not None]


def _show_json(stream: Any, progress: cli.Progress, choices: Sequence[int]) -> list[Completion]:
    """Print a line a text, in the order of the prompts, each as soon as those before it are out."""
    place = {name: at for at, name in enumerate(_places(choices))}
    waiting: dict[int, Any] = {}
    completions: list[Completion] = []
    tokens = 0
    for delta in stream:
        tokens += len(delta.token_ids)
        if delta.completion is not None:
            waiting[place[delta.index, delta.choice]] = delta.completion
        while len(completions) in waiting:
            progress.close()
            completions.append(waiting[len(completions)])
            print(json.dumps(completions[-1].to_json(), ensure_ascii=False), flush=True)
        progress.say(f"{len(completions)} of {len(place)} texts, {tokens} tokens")
    return completions


def _report(completions: list[Completion], llm: LLM, as_json: bool) -> None:
    for number, done in enumerate(completions, 1):
        name = f"[{number}] " if len(completions) > 1 else ""
        if done.reached_context:
            print(
                f"{name}ended at the context of {llm.context} tokens; --context N raises it, at your risk",
                file=sys.stderr,
            )
        if not as_json:
            print(name + _footer(done), file=sys.stderr)
    if not as_json and completions:
        first = completions[0]
        print(
            f"pool: {first.pool_blocks} blocks of {first.block_size} slots, {first.pool_bytes / 2**20:.1f} MiB; "
            f"{first.model}; attention: {first.implementation}; loaded in {llm.load_seconds:.1f} s, "
            f"compiled in {first.compile_seconds:.1f} s",
            file=sys.stderr,
        )
        if llm.weights_report.quantized:
            print(f"weights: {llm.weights_report}", file=sys.stderr)


def _footer(done: Completion) -> str:
    # The first token comes out of prefill.
    decoded = done.generated_tokens - 1
    speed = f"{decoded / done.decode_seconds:.1f} tokens/s" if decoded and done.decode_seconds else "no decode step"
    computed = done.prompt_tokens - done.cached_tokens
    prefill = f"{computed / done.prefill_seconds:.1f} tokens/s" if done.prefill_seconds else "shared or not started"
    found = f" ({done.cached_tokens} of them found in the pool)" if done.cached_tokens else ""
    text = (
        f"prompt: {done.prompt_tokens} tokens{found}, {prefill}; generated: {done.generated_tokens} tokens, {speed}; "
        f"blocks: {done.blocks_now} at the end, {done.blocks_peak} at the peak; finish: {done.finish_reason}"
    )
    if done.compactions:
        text += (
            f"; compacted {done.compactions} times in {done.compaction_seconds:.2f} s ({done.prefill} prefill): "
            f"{done.tokens_evicted} of {done.position} tokens evicted, {done.blocks_returned} blocks returned, "
            f"{done.blocks_peak_uncompressed} blocks at the peak without"
        )
    if done.documents:
        known = "; ".join(
            f"{one['name']}: {one['source']}, {one['tokens_reused']} of {one['tokens']} tokens reused, "
            f"{one['tokens_recomputed']} computed"
            for one in done.documents
        )
        text += f"; first token after {done.first_token_seconds:.2f} s"
        if done.full_prefill_seconds:
            text += f" (full prefill: predicted {done.full_prefill_seconds:.2f} s)"
        text += f"; documents: {known}"
    if done.preemptions:
        text += f"; gave way to older requests {done.preemptions} times"
    if done.logprobs:
        text += f"; mean log probability: {sum(done.logprobs) / len(done.logprobs):.3f}"
    return text


if __name__ == "__main__":
    sys.exit(main())
