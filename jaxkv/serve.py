"""``python -m jaxkv.serve``: an OpenAI-compatible server over a paged pool that gives its blocks back."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxkv import cli, generate

if TYPE_CHECKING:
    from jaxkv.engine import Engine
    from jaxkv.llm import LLM
    from jaxkv.server.limits import Limits
    from jaxkv.store import Store

KEY_VARIABLE = "JAXKV_API_KEY"
FAILED = 1
"""Exit code after a fault of the engine."""
_DEMO = "SmolLM2-135M-Instruct"


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxkv.serve",
        description="Serve a model over HTTP as OpenAI's API has it, with a live page of the pool at /.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("what to serve, and where").add_argument
    add("--model", help=f"folder with safetensors, .gguf file or hub id (default: {_DEMO})")
    add("--served-model-name", metavar="NAME", help="what clients call it (default: the model's own name)")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on (default: %(default)s, this machine only)")
    add("--port", type=int, default=8000, metavar="N", help="to listen on; 0 takes any (default: %(default)s)")
    add("--api-key", metavar="KEY", help=f"that clients must send; {KEY_VARIABLE} keeps it out of the process list")
    _add_engine(parser.add_argument_group("the engine").add_argument)
    generate.add_compression(parser.add_argument_group("compression, unless a request says otherwise"))
    add = parser.add_argument_group("documents").add_argument
    add("--store", metavar="DIR", help="keep the KV of requests' documents in this folder, shared by processes")
    add(
        "--store-memory",
        metavar="SIZE",
        help="most host memory for it (default: 1G with --store; without both, none)",
    )
    add("--store-disk", metavar="SIZE", help="most bytes of the folder (default: 10G)")
    add("--recompute-ratio", type=generate.ratio, metavar="X", help="unless a request says otherwise (default: 0.15)")
    add = parser.add_argument_group("limits").add_argument
    add("--max-body", default="2M", metavar="SIZE", help="of a request's body (default: %(default)s)")
    add("--max-prompt", type=int, metavar="N", help="tokens of a prompt (default: the context)")
    add("--max-tokens", type=int, metavar="N", help="tokens that a request may ask for (default: the context)")
    add("--max-n", type=int, default=16, metavar="N", help="continuations of a prompt (default: %(default)s)")
    add("--max-queue", type=int, default=256, metavar="N", help="continuations that wait (default: %(default)s)")
    add("--request-timeout", type=float, default=30.0, metavar="S", help="to send a request in (default: %(default)s)")
    add("--write-timeout", type=float, default=60.0, metavar="S", help="for a stuck reader (default: %(default)s)")
    add("--drain-timeout", type=int, default=60, metavar="S", help="for answers at SIGTERM (default: %(default)s)")
    add = parser.add_argument_group("output").add_argument
    add("--log-level", choices=("error", "warning", "info", "debug"), default="warning", help="default: %(default)s")
    return parser


def _add_engine(add: Any) -> None:
    add("--rows", "--max-num-seqs", type=int, metavar="N", help="requests that decode at once (default: 8)")
    add("--block-size", type=int, default=16, metavar="N", help="token slots in a block (default: %(default)s)")
    add("--pool-blocks", type=int, metavar="N", help="the pool's size in blocks (default: every row's whole context)")
    add("--pool-memory", metavar="SIZE", help="the pool's size, as 512M or 2G")
    add("--prefill-chunk", type=int, metavar="N", help="prompt tokens a call takes (default: 128 on a CPU, else 512)")
    add("--context", "--max-model-len", type=int, metavar="N", help="most tokens of prompt and answer, at your risk")
    add("--dtype", choices=generate.DTYPES, default="auto", help="of the weights (default: float32 on a CPU)")
    add("--quantize", choices=("int4", "int8"), help="round the layers' matrices of a float checkpoint")
    add("--kv-dtype", choices=generate.DTYPES, default="auto", help="of the pool (default: float32 on a CPU)")
    add("--implementation", metavar="NAME", help="kernels: xla, triton, mosaic_gpu, mosaic_tpu (default: by platform)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 after SIGTERM, when all answers are out."""
    args = parser().parse_args(argv)
    return cli.run(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise ValueError(f"the server needs {error.name}: pip install 'jaxkv[server]'") from None
    from jaxkv.server.app import Service, create_app
    from jaxkv.server.connection import connection_class

    limits, key, compression = _limits(args), _key(args), generate.compression_of(args)
    if not (args.store or args.store_memory) and (args.store_disk or args.recompute_ratio is not None):
        raise ValueError("--store-disk and --recompute-ratio are for documents; give --store DIR or --store-memory")
    # The port first: that it is taken should not come out after minutes of loading.
    with contextlib.ExitStack() as ends:
        listener = ends.enter_context(contextlib.closing(_listener(args.host, args.port)))
        cli.keep_compiled_programs()
        store = ends.enter_context(generate.store_of(args)) if args.store or args.store_memory else None
        llm, engine = _load(args, compression, store)
        failures: list[bool] = []

        def failed() -> None:
            failures.append(True)
            server.should_exit = True

        service = Service(llm, engine, _name(args), limits=limits, api_key=key, failed=failed)
        server = uvicorn.Server(
            uvicorn.Config(
                create_app(service),
                http=connection_class(limits),
                ws="none",
                log_level=args.log_level,
                log_config=_log_config(args.log_level),
                access_log=args.log_level in ("info", "debug"),
                timeout_keep_alive=max(1, int(limits.request_seconds)),
                timeout_graceful_shutdown=args.drain_timeout,
                server_header=False,
            )
        )
        _say(_introduction(args, service.model, llm, engine, key is not None))
        _say(f"listening on http://{_address(listener)}")
        # uvicorn raises the signal again when it has drained, which would make a clean end look like a killed process.
        signal.signal(signal.SIGTERM, lambda *_: None)
        server.run(sockets=[listener])
    _say("stopped" if not failures else "stopped: the engine has failed")
    return FAILED if failures else 0


# -- options -----------------------------------------------------------------------------------------------------------


def _limits(args: argparse.Namespace) -> Limits:
    from jaxkv import sizing
    from jaxkv.server.limits import Limits

    if args.drain_timeout < 1:
        raise ValueError(f"--drain-timeout {args.drain_timeout} must be at least 1 second")
    return Limits(
        body_bytes=sizing.parse_bytes(args.max_body),
        prompt_tokens=args.max_prompt,
        max_tokens=args.max_tokens,
        n=args.max_n,
        queue=args.max_queue,
        connections=_most_connections(),
        request_seconds=args.request_timeout,
        write_seconds=args.write_timeout,
    )


def _most_connections() -> int:
    """Return how many sockets may be open, after asking the system for as many as it gives."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return 4096
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8192 if hard == resource.RLIM_INFINITY else min(hard, 8192)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return 4096 if soft == resource.RLIM_INFINITY else max(16, min(4096, soft - 256))


def _key(args: argparse.Namespace) -> str | None:
    key = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE)
    if key is None:
        return None
    if not key or not key.isascii() or not key.isprintable() or key != key.strip():
        raise ValueError("the API key must be of printable ASCII without spaces around it, and not empty")
    return str(key)


def _name(args: argparse.Namespace) -> str:
    """Return what clients call the model. Of a path only the last part is shown to them."""
    if args.served_model_name:
        return str(args.served_model_name)
    if args.model is None:
        return _DEMO
    path = Path(args.model)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else str(args.model)


def _listener(host: str, port: int) -> socket.socket:
    """Return a socket that is bound and does not listen yet, so that nobody connects before the engine is warm."""
    if not 0 <= port < 2**16:
        raise ValueError(f"--port {port} must be from 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ValueError(f"--host {host} cannot be resolved: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen on {host} port {port}: {error.strerror}; give another --port") from None
    return listener


def _load(args: argparse.Namespace, compression: Any, store: Store | None) -> tuple[LLM, Engine]:
    from jaxkv import sizing
    from jaxkv.llm import LLM

    progress = cli.Progress()
    try:
        progress.say("loading the model")
        llm = LLM(
            args.model,
            dtype=generate.dtype_of(args.dtype),
            quantize=args.quantize,
            kv_dtype=generate.dtype_of(args.kv_dtype),
            rows=args.rows,
            block_size=args.block_size,
            pool_blocks=args.pool_blocks,
            pool_memory=None if args.pool_memory is None else sizing.parse_bytes(args.pool_memory),
            prefill_chunk=args.prefill_chunk,
            context=args.context,
            compression=compression,
            implementation=args.implementation,
            store=store,
            **({} if args.recompute_ratio is None else {"recompute_ratio": args.recompute_ratio}),
        )
        progress.say("compiling")
        return llm, llm.serving_engine()
    finally:
        progress.close()


# -- output ------------------------------------------------------------------------------------------------------------


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _introduction(args: argparse.Namespace, name: str, llm: LLM, engine: Engine, with_key: bool) -> str:
    cache, compression = engine.cache, llm.compression
    method = "none: every token is kept"
    if compression.method != "none":
        method = f"{compression.method}, budget {compression.budget}, compacted every {compression.interval} tokens"
    pool = (
        f"pool: {cache.blocks} blocks of {cache.block_size} slots, {cache.blocks * cache.block_size} tokens, "
        f"{engine.device.pool.nbytes / 2**20:.1f} MiB; {cache.rows} rows; attention: {engine.device.implementation}"
    )
    model = f"model: {name}; context {llm.context}; loaded in {llm.load_seconds:.1f} s"
    lines = [model, pool, f"method: {method}"]
    if not with_key and not _is_loopback(args.host):
        lines.append(f"warning: anybody who reaches {args.host} is served; set {KEY_VARIABLE} to ask for a key")
    return "\n".join(lines)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _log_config(level: str) -> dict[str, Any]:
    """Return a logging configuration: everything to stderr, a line an event."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(message)s"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}},
        "loggers": {
            name: {"handlers": ["stderr"], "level": level.upper(), "propagate": False}
            for name in ("jaxkv.server", "uvicorn")
        },
    }


if __name__ == "__main__":
    sys.exit(main())
