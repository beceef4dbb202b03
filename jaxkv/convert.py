"""``python -m jaxkv.convert``: write a model as it is used, to start faster."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxkv import cli

if TYPE_CHECKING:
    from jaxkv.config import ModelConfig
    from jaxkv.tokenizer import Tokenizer
    from jaxkv.weights import Report

DTYPES = ("auto", "float32", "bfloat16", "float16")
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "*.jinja", "vocab.*", "merges.txt")


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxkv.convert",
        description="Write a model as an Orbax checkpoint with its tokenizer, for --model of python -m jaxkv.generate. "
        "Packed matrices stay packed; logits are those of the original, bit for bit.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", help="folder with safetensors, .gguf file or hub id (default: SmolLM2-135M-Instruct)")
    add("--output", "-o", required=True, metavar="FOLDER", help="made by this command; must not exist")
    add("--quantize", choices=("int4", "int8"), help="round the layers' matrices of a float checkpoint")
    add(
        "--plain",
        action="store_true",
        help="write packed matrices out in --dtype: larger, and faster to start on a CPU",
    )
    add("--dtype", choices=DTYPES, default="auto", help="of what is not packed (default: one that holds the original)")
    add("--quiet", "-q", action="store_true", help="no report and no progress on stderr")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parser().parse_args(argv)
    return cli.run(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    output = Path(args.output)
    _check_output(output)
    from jaxkv import weights

    path, progress = weights.locate(args.model), cli.Progress(not args.quiet)
    start = time.perf_counter()
    try:
        progress.say("converting")
        report = convert(path, output, quantize=args.quantize, plain=args.plain, dtype=_dtype(args.dtype))
    finally:
        progress.close()
    if not args.quiet:
        size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
        seconds = time.perf_counter() - start
        print(f"{output}: {size / 2**20:.1f} MiB in {seconds:.1f} s; weights: {report}", file=sys.stderr)


def convert(
    path: Path, output: Path, *, quantize: str | None = None, plain: bool = False, dtype: str | None = None
) -> Report:
    """Write a model into a new folder. A folder that a failure would leave half-written is removed.

    Args:
      path: what ``weights.read`` takes.
      output: where there is nothing yet.
      quantize: as for ``weights.read``.
      plain: write packed matrices out.
      dtype: of what is not packed. None is bfloat16 or float16 where all of that is so in the original, else float32:
        then loading is exact in whatever dtype is asked for. Another one holds for loading in that dtype alone.

    Returns:
      The report of ``weights.read``.

    Raises:
      ValueError: as ``weights.read``, or there is something at ``output``.
    """
    import jax
    import jax.numpy as jnp

    from jaxkv import weights
    from jaxkv.weights import converted

    _check_output(output)
    if path.is_dir() and converted.is_converted(path):
        raise ValueError(f"{path} is converted already; give the original")
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    # In host memory: an accelerator may hold less.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        chosen = dtype or weights.plain_dtype(path, packed=not plain)
        loaded = weights.read(path, jnp.dtype(chosen), quantize=quantize, packed=not plain)
        try:
            part.mkdir()
            config = _write_tokenizer(path, part, loaded.config)
            converted.save(part, config, loaded.weights)
            part.rename(output)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return loaded.report


# -- the tokenizer ----------------------------------------------------------------------------------------------------


def _write_tokenizer(path: Path, folder: Path, config: ModelConfig) -> ModelConfig:
    """Put a model's tokenizer into a folder, and return the configuration with the tokens that end a text."""
    from jaxkv.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(path)
    if path.is_dir():
        names = (*_TOKENIZER_FILES, "config.json", "generation_config.json")
        for file in sorted({file for name in names for file in path.glob(name) if file.is_file()}):
            shutil.copyfile(file, folder / file.name)
    else:
        _save(tokenizer, folder)
    _compare(tokenizer, Tokenizer.load(folder), path)
    return dataclasses.replace(config, eos_token_ids=tokenizer.eos_union(config.eos_token_ids))


def _save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer of a GGUF file, which says beside it whether texts and chats begin with BOS, as a folder that
    does itself what it says.
    """
    from tokenizers import processors

    fast = tokenizer.fast
    bos, backend = fast.bos_token, tokenizer.backend
    before, template = backend.post_processor, fast.chat_template
    if tokenizer.adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, fast.bos_token_id)]
        )
    if template and tokenizer.chat_adds_bos:
        # A template that writes BOS itself keeps its own: what was rendered then begins with it.
        chat = [{"role": "user", "content": "a"}]
        text = fast.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        fast.chat_template = template if text.startswith(bos) else "{{ bos_token }}" + template
    try:
        fast.save_pretrained(str(folder))
    finally:
        backend.post_processor, fast.chat_template = before, template


def _compare(before: Tokenizer, after: Tokenizer, path: Path) -> None:
    """Refuse a tokenizer that would read a text, or begin a chat, in another way than the one it was made from."""
    texts = ("", "a", " two  spaces\n\t1234 naïve 日本語 <|im_start|>")
    same = all(before.encode(text) == after.encode(text) for text in texts)
    if same and before.fast.chat_template:
        chat = [{"role": "user", "content": texts[-1]}]
        same = before.encode_chat(chat) == after.encode_chat(chat)
    if not same:
        raise ValueError(
            f"the tokenizer of {path} does not survive being written as tokenizer.json; use {path} as it is"
        )


def _check_output(output: Path) -> None:
    if output.exists():
        raise ValueError(f"--output {output} exists already; name a folder that is to be made")
    if not output.resolve().parent.is_dir():
        raise ValueError(f"--output {output} cannot be written: {output.resolve().parent} is no folder")


def _dtype(name: str) -> str | None:
    return None if name == "auto" else name


if __name__ == "__main__":
    sys.exit(main())
