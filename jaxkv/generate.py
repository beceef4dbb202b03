"""``python -m jaxkv.generate``: complete prompts from a paged pool."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxkv import cli

if TYPE_CHECKING:
    from jaxkv.completion import Completion
    from jaxkv.compression import CompressionConfig
    from jaxkv.llm import LLM, Prompt
    from jaxkv.sampling import SamplingParams

DTYPES = ("auto", "float32", "bfloat16", "float16")
_NUMBER = (int, float)
_PER_REQUEST: dict[str, type | tuple[type, ...]] = {
    "max_tokens": int,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": int,
    "min_p": _NUMBER,
    "seed": int,
    "stop": (str, list),
    "ignore_eos": bool,
}
"""What a line of a JSONL file may set for its own request, and as what."""


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
    add("--system-prompt", metavar="TEXT", help="the chat's system message")
    add("--raw", "--ignore-chat-template", action="store_true", help="tokenise prompts without a chat template")
    add = parser.add_argument_group("how to sample").add_argument
    add("--max-tokens", "--max-new-tokens", "-m", type=int, default=256, metavar="N", help="default: %(default)s")
    add("--temperature", "--temp", type=float, default=0.0, metavar="X", help="0 is greedy (default)")
    add("--top-p", type=float, default=1.0, metavar="X", help="keep the likeliest tokens that reach this share")
    add("--top-k", type=int, default=0, metavar="N", help="keep this many likeliest tokens; 0 keeps all (default)")
    add("--min-p", type=float, default=0.0, metavar="X", help="drop tokens below this share of the likeliest one's")
    add("--seed", type=int, default=0, metavar="N", help="of the first prompt; each further one has the next number")
    add("--stop", action="append", default=[], metavar="TEXT", help="end at this text; repeatable")
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
    add("--kv-dtype", choices=DTYPES, default="auto", help="of the pool (default: float32 on a CPU, else the weights')")
    add("--implementation", metavar="NAME", help="kernels: xla, triton, mosaic_gpu, mosaic_tpu (default: by platform)")
    _add_compression(parser.add_argument_group("compression"))
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON object a request on stdout, and nothing else there")
    add("--plot", metavar="FILE", help="draw blocks held against tokens generated: .png, .svg or .pdf")
    add("--quiet", "-q", action="store_true", help="no report and no progress on stderr")
    return parser


def _add_compression(group: Any) -> None:
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
    lines = _lines(args)
    prompts, params, compression = [line.prompt for line in lines], _params(args, lines), _compression(args)
    from jaxkv import plots, sizing
    from jaxkv.llm import LLM

    memory = None if args.pool_memory is None else sizing.parse_bytes(args.pool_memory)
    if args.plot is not None:
        plots.check(args.plot)
    cli.keep_compiled_programs()
    progress = cli.Progress(not args.quiet)
    try:
        progress.say("loading the model")
        llm = LLM(
            args.model,
            dtype=_dtype(args.dtype),
            kv_dtype=_dtype(args.kv_dtype),
            rows=args.rows,
            block_size=args.block_size,
            pool_blocks=args.pool_blocks,
            pool_memory=memory,
            prefill_chunk=args.prefill_chunk,
            context=args.context,
            compression=compression,
            implementation=args.implementation,
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
            completions = show(stream, progress, len(lines))
        finally:
            stream.close()
    finally:
        progress.close()
    if args.plot is not None:
        plots.blocks_held(completions, args.plot)
    if not args.quiet:
        _report(completions, llm, args.json)


# -- input -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Line:
    """A prompt, what it sets for itself, and where it was read, which is empty for an option."""

    prompt: Prompt
    own: dict[str, Any] = dataclasses.field(default_factory=dict)
    where: str = ""


def _lines(args: argparse.Namespace) -> list[_Line]:
    texts = args.prompt or []
    if texts.count("-") > 1:
        raise ValueError("--prompt - is given twice, and stdin can be read once; give it once")
    lines = [_Line(_read("stdin") if text == "-" else text) for text in texts]
    if args.prompts_file is not None:
        # Not splitlines, which also cuts at U+2028 and others that JSON strings may hold.
        found = [(at, text) for at, text in enumerate(_read(args.prompts_file).split("\n"), 1) if text.strip()]
        is_json = Path(args.prompts_file).suffix in (".jsonl", ".ndjson") or (
            found and found[0][1].lstrip().startswith("{")
        )
        for at, text in found:
            where = f"{args.prompts_file}:{at}"
            lines.append(_json_line(text, where) if is_json else _Line(text, where=where))
    if not lines:
        raise ValueError("there is no prompt; give --prompt TEXT (- reads stdin) or --prompts-file FILE")
    return lines


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "stdin" else Path(name).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not text in {error.encoding}: {error.reason} at byte {error.start}") from None


def _json_line(line: str, where: str) -> _Line:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if isinstance(value, str):
        return _Line(value, where=where)
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise ValueError(f"{where} must be a string, or an object with either prompt or messages")
    key = "prompt" if "prompt" in value else "messages"
    prompt = value.pop(key)
    if not (_are_messages(prompt) or (key == "prompt" and (isinstance(prompt, str) or _are_tokens(prompt)))):
        raise ValueError(
            f"{where}: prompt must be a text or a list of token ids, and messages a list of objects with role and "
            "content, both texts"
        )
    unknown = sorted(set(value) - set(_PER_REQUEST))
    if unknown:
        raise ValueError(
            f"{where} has {', '.join(unknown)}; besides the prompt a line may set {', '.join(_PER_REQUEST)}"
        )
    for name, own in value.items():
        # A bool is an int to Python, and is not to JSON.
        if not isinstance(own, _PER_REQUEST[name]) or (isinstance(own, bool) and _PER_REQUEST[name] is not bool):
            raise ValueError(f"{where}: {name}={json.dumps(own)} has the wrong type")
    if not all(isinstance(text, str) for text in value.get("stop", [])):
        raise ValueError(f"{where}: stop={json.dumps(value['stop'])} must be a text or a list of texts")
    return _Line(prompt, value, where)


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content")) for m in value)
    )


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _params(args: argparse.Namespace, lines: list[_Line]) -> list[SamplingParams]:
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
    )
    params = []
    for index, line in enumerate(lines):
        try:
            params.append(dataclasses.replace(common, **{"seed": (common.seed + index) % 2**32, **line.own}))
        except ValueError as error:
            raise ValueError(f"{line.where}: {error}") from None
    return params


def _compression(args: argparse.Namespace) -> CompressionConfig:
    from jaxkv.compression import CompressionConfig

    names = ("budget", "interval", "window", "sinks", "mode", "prompt_policy", "stats", "compact_prefill")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if given and args.method == "none":
        option = next(iter(given)).replace("_", "-")
        raise ValueError(f"--{option} is for a method that compresses; give --method triattention, or leave it out")
    return CompressionConfig(method=args.method, **given)


def _dtype(name: str) -> str | None:
    return None if name == "auto" else name


# -- output ------------------------------------------------------------------------------------------------------------


def _show_text(stream: Any, progress: cli.Progress, count: int) -> list[Completion]:
    """Print texts in the order of the prompts: the first that is not done streams, those behind it wait."""
    texts = [""] * count
    done: list[Completion | None] = [None] * count
    turn, begun = 0, False
    for delta in stream:
        texts[delta.index] += delta.text
        done[delta.index] = delta.completion or done[delta.index]
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


def _show_json(stream: Any, progress: cli.Progress, count: int) -> list[Completion]:
    """Print a line a request, in the order of the prompts, each as soon as those before it are out."""
    waiting: dict[int, Any] = {}
    completions: list[Completion] = []
    tokens = 0
    for delta in stream:
        tokens += len(delta.token_ids)
        if delta.completion is not None:
            waiting[delta.index] = delta.completion
        while len(completions) in waiting:
            progress.close()
            completions.append(waiting[len(completions)])
            print(json.dumps(completions[-1].to_json(), ensure_ascii=False), flush=True)
        progress.say(f"{len(completions)} of {count} requests, {tokens} tokens")
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


def _footer(done: Completion) -> str:
    # The first token comes out of prefill.
    decoded = done.generated_tokens - 1
    speed = f"{decoded / done.decode_seconds:.1f} tokens/s" if decoded and done.decode_seconds else "no decode step"
    prefill = f"{done.prompt_tokens / done.prefill_seconds:.1f} tokens/s" if done.prefill_seconds else "not started"
    text = (
        f"prompt: {done.prompt_tokens} tokens, {prefill}; generated: {done.generated_tokens} tokens, {speed}; "
        f"blocks: {done.blocks_now} at the end, {done.blocks_peak} at the peak; finish: {done.finish_reason}"
    )
    if done.compactions:
        text += (
            f"; compacted {done.compactions} times in {done.compaction_seconds:.2f} s ({done.prefill} prefill): "
            f"{done.tokens_evicted} of {done.position} tokens evicted, {done.blocks_returned} blocks returned, "
            f"{done.blocks_peak_uncompressed} blocks at the peak without"
        )
    if done.logprobs:
        text += f"; mean log probability: {sum(done.logprobs) / len(done.logprobs):.3f}"
    return text


if __name__ == "__main__":
    sys.exit(main())
