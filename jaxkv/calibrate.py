"""``python -m jaxkv.calibrate``: query statistics of a model, from text."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from jaxkv import cli

if TYPE_CHECKING:
    from jaxkv.corpus import Text

DTYPES = ("auto", "float32", "bfloat16", "float16")
PICTURES = (".png", ".svg", ".pdf")


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxkv.calibrate",
        description="Measure where the queries of a model point, for --stats of python -m jaxkv.generate. Any clean "
        "text will do; means are stable from some 50,000 tokens on.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("what to measure").add_argument
    add("--model", help="folder with safetensors, .gguf file or hub id (default: SmolLM2-135M-Instruct)")
    add("--input", "-i", nargs="+", required=True, metavar="FILE", help="UTF-8 texts; - reads stdin")
    add("--tokens", type=int, metavar="N", help="stop after this many tokens (default: all)")
    add("--context", type=int, metavar="N", help="tokens of a window (default: the model's context, at most 2048)")
    add("--chunk", type=int, metavar="N", help="tokens of a forward pass (default: 128 on a CPU, else 512)")
    add("--dtype", choices=DTYPES, default="auto", help="of the weights (default: float32 on a CPU, else bfloat16)")
    add = parser.add_argument_group("output").add_argument
    add("--output", "-o", required=True, metavar="FILE", help="the .safetensors file to write")
    add("--plot", metavar="FILE", help="draw the concentration R by layer and head: .png, .svg, .pdf")
    add("--json", action="store_true", help="the report as one JSON object on stdout, and not on stderr")
    add("--quiet", "-q", action="store_true", help="no report and no progress on stderr")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parser().parse_args(argv)
    return cli.run(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    output, plot = _outputs(args)
    for name in ("tokens", "context", "chunk"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value} must be at least 1")
    from jaxkv import corpus

    texts = corpus.open_texts(args.input)
    import jax
    import jax.numpy as jnp

    from jaxkv import calibration, weights
    from jaxkv.tokenizer import Tokenizer

    path = weights.locate(args.model)
    config = weights.read_config(path)
    context = calibration.default_context(config) if args.context is None else args.context
    if context > config.context:
        raise ValueError(f"--context {context} is beyond the {config.context} tokens that the model was made for")
    cli.keep_compiled_programs()
    automatic = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    with _Bar(texts, args.tokens, wanted=not args.quiet) as bar:
        start = time.perf_counter()
        tokenizer = Tokenizer.load(path)
        bos = corpus.first_token(tokenizer, config)
        size = context - (bos is not None)
        if size < 1:
            raise ValueError(f"--context {context} has no room for a token after BOS; raise it")
        config, loaded = weights.load(path, jnp.dtype(automatic if args.dtype == "auto" else args.dtype))
        load_seconds, start = time.perf_counter() - start, time.perf_counter()
        windows = _Counted(corpus.windows(tokenizer, texts, size, args.tokens))
        stats = calibration.calibrate(
            loaded, config, windows, context=context, bos=bos, chunk=args.chunk, progress=bar.show
        )
        seconds = time.perf_counter() - start
    with _replacing(output) as file:
        stats.save(file)
    concentration = calibration.Concentration.of(stats)
    if plot is not None:
        with _replacing(plot) as file:
            concentration.plot(file, title=f"{config.name}, {stats.info.tokens} tokens", format=plot.suffix[1:].lower())
    report = {
        "model": stats.info.model,
        "output": str(output),
        "tokens": stats.info.tokens,
        "texts": sum(text.done > 0 for text in texts),
        "windows": windows.count,
        "context": context,
        "bos": bos,
        "dtype": stats.info.dtype,
        "load_seconds": load_seconds,
        "seconds": seconds,
        "concentration": concentration.to_json(),
    }
    if args.json:
        print(json.dumps(report, ensure_ascii=False), flush=True)
    elif not args.quiet:
        print(_text(report), file=sys.stderr)


def _outputs(args: argparse.Namespace) -> tuple[Path, Path | None]:
    """Return where to write, having found out that it can be done: hours of work may come first."""
    output, plot = Path(args.output), None if args.plot is None else Path(args.plot)
    if output.suffix != ".safetensors":
        raise ValueError(f"--output {output} must end in .safetensors, the format of the file")
    if plot is not None and plot.suffix.lower() not in PICTURES:
        raise ValueError(f"--plot {plot} must end in {', '.join(PICTURES)}")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed; pip install 'jaxkv[plot]' brings it")
    for name, path in (("output", output), ("plot", plot)):
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            reason = "is a folder" if path.is_dir() else f"cannot be written: {path.parent} is no folder to write in"
            raise ValueError(f"--{name} {path} {reason}; give another file")
    return output, plot


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give a file to write beside ``path``, and put it there once it is whole: Ctrl-C leaves what was there."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


class _Counted:
    """Windows, and how many have been taken."""

    def __init__(self, windows: Iterator[list[int]]) -> None:
        self.count = 0
        self._windows = windows

    def __iter__(self) -> Iterator[list[int]]:
        for window in self._windows:
            self.count += 1
            yield window


class _Bar:
    """A progress bar on stderr, when that is a terminal and the user wants it."""

    def __init__(self, texts: Sequence[Text], limit: int | None, wanted: bool) -> None:
        self._texts, self._limit = texts, limit
        sizes = [text.size for text in texts]
        self._bytes = None if None in sizes else sum(size or 0 for size in sizes)
        self._progress: Any = None
        if wanted and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self._progress = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.TaskProgressColumn(),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._progress.add_task("loading the model", total=None)

    def __enter__(self) -> _Bar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, tokens: int) -> None:
        """Move on to this many tokens."""
        if self._progress is not None:
            total = None if self._bytes is None and self._limit is None else 1.0
            part = tokens / self._limit if self._limit else 0.0
            if self._bytes:
                part = max(part, sum(text.done for text in self._texts) / self._bytes)
            self._progress.update(self._task, description=f"{tokens} tokens", total=total, completed=min(part, 1.0))


def _text(report: dict[str, Any]) -> str:
    r = report["concentration"]
    work = (
        f"{report['model']}: {report['tokens']} tokens, texts: {report['texts']}, "
        f"windows of up to {report['context']}: {report['windows']}; {report['seconds']:.1f} s "
        f"({report['tokens'] / report['seconds']:.1f} tokens/s); written to {report['output']}"
    )
    shares = (
        f"concentration R above {r['threshold']}: {r['strongest_band']:.1%} of heads in their strongest band, "
        f"{r['whole_vector']:.1%} over whole vectors; in % of heads, layer by layer:"
    )
    lines = [work, shares]
    for name in ("strongest_band", "whole_vector"):
        by_layer = " ".join(f"{layer[name]:.0%}".rstrip("%") for layer in r["layers"])
        lines.append(f"  {name.replace('_', ' ')}: {by_layer}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
