"""A server in this process, in a thread of its own, for tests."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2 as httpx
import openai
import uvicorn

from jaxkv import LLM
from jaxkv.engine import Engine
from jaxkv.server.app import Service, create_app
from jaxkv.server.connection import connection_class
from jaxkv.server.limits import Limits

MODEL = "tiny"


@dataclasses.dataclass
class Served:
    """A running server."""

    service: Service
    engine: Engine
    listener: Any

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, api_key: str = "none", **options: Any) -> openai.OpenAI:
        options = {"max_retries": 0, "timeout": 60, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=60, **options)

    def pool(self) -> dict[str, Any]:
        return httpx.get(self.url + "/pool", timeout=60).json()

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series of /metrics."""
        wanted = ",".join(f'{key}="{value}"' for key, value in sorted({**labels, "model_name": MODEL}.items()))
        for line in httpx.get(self.url + "/metrics", timeout=60).text.splitlines():
            series, _, value = line.rpartition(" ")
            if series == f"{name}{{{wanted}}}":
                return float(value)
        raise AssertionError(f"/metrics has no {name}{{{wanted}}}")

    def holds_nothing(self, seconds: float = 1.0) -> bool:
        """Whether no block is held, now or within some seconds."""
        return eventually(lambda: self.engine.blocks.in_use == 0 and not self.engine.has_work, seconds)


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@contextlib.contextmanager
def served(llm: LLM, *, api_key: str | None = None, limits: Limits | None = None) -> Iterator[Served]:
    """Serve an LLM's engine; it is the LLM's own again afterwards."""
    engine = llm.serving_engine()
    limits = limits or Limits()
    service = Service(llm, engine, MODEL, limits=limits, api_key=api_key)
    config = uvicorn.Config(
        create_app(service),
        port=0,
        http=connection_class(limits),
        ws="none",
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        assert eventually(lambda: server.started, 10)
        yield Served(service, engine, server.servers[0].sockets[0])
    finally:
        server.should_exit = True
        thread.join()
        for name in list(engine.memory.kept):
            engine.forget(name)


def say(engine: Engine, tokens: list[int]) -> contextlib.AbstractContextManager[None]:
    """Have every row generate these tokens, whatever the model says."""

    @contextlib.contextmanager
    def forced() -> Iterator[None]:
        real = engine._take

        @functools.wraps(real)
        def take(row: Any, drawn: list[int], logprobs: list[float]) -> Any:
            wanted = tokens[row.generated : row.generated + len(drawn)]
            return real(row, [*wanted, *drawn[len(wanted) :]], logprobs)

        engine._take = take  # type: ignore[method-assign]
        try:
            yield
        finally:
            del engine._take

    return forced()
