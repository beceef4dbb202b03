"""The endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp

import jaxkv
from jaxkv.engine import Engine
from jaxkv.llm import LLM
from jaxkv.server import errors, protocol
from jaxkv.server.errors import ApiError
from jaxkv.server.guard import CLEANUP, Guard
from jaxkv.server.limits import Limits
from jaxkv.server.metrics import Metrics
from jaxkv.server.read import Body, Reader
from jaxkv.server.token_text import TokenText
from jaxkv.server.view import pool_view
from jaxkv.server.worker import Call, Worker
from jaxkv.server.write import Writer

_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_DESCRIPTIONS = {
    400: "The request is refused as it is.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    405: "The endpoint has another method.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    429: "Too many requests are waiting.",
    500: "The server has a fault.",
    503: "The engine is not running.",
}


class Service:
    """What the endpoints share.

    Args:
      llm: whose tokenizer, context and compression are used.
      engine: of that LLM, warm. The service's own thread has it from the start on.
      model: the name that clients give.
      limits: of what they may ask for.
      api_key: that they have to send; None is none.
      failed: called from the engine's thread when it has a fault.
    """

    def __init__(
        self,
        llm: LLM,
        engine: Engine,
        model: str,
        *,
        limits: Limits | None = None,
        api_key: str | None = None,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self.llm, self.model, self.api_key = llm, model, api_key
        self.limits = limits or Limits()
        cache = engine.cache
        self.metrics = Metrics(model)
        self.worker = Worker(engine, self.metrics, cache.rows + self.limits.queue, failed)
        self.reader = Reader(llm, self.limits, cache.blocks, cache.block_size)
        self.token_text = TokenText(llm.tokenizer)
        self.started = int(time.time())
        # One thread: tokenising is quick, and a long prompt must not hold the event loop up.
        self.reading = ThreadPoolExecutor(1, "jaxkv-reading")

    async def begin(self, body: Body, request: Request, prefix: str) -> Writer:
        """Read what a client sent and give it to the engine.

        Raises:
          ApiError: it is refused.
        """
        if body.model != self.model:
            raise ApiError(
                404, f"there is no such model; {self.model} is served", param="model", code="model_not_found"
            )
        self.reader.check(body)
        kept = None
        if body.jaxkv is not None and body.jaxkv.continue_from is not None:
            kept = self.worker.known_kept(body.jaxkv.continue_from)
        loop = asyncio.get_running_loop()
        requests = await loop.run_in_executor(self.reading, self.reader.requests, body, kept)
        call = Call(f"{prefix}-{uuid.uuid4().hex}", requests, self.reader.texts(requests))
        request.scope[CLEANUP].callback(self.worker.release, call)
        self.worker.submit(call)
        await call.accepted()
        return Writer(body, call, self.token_text)

    async def answer(self, body: Body, request: Request, prefix: str) -> Response:
        """Complete what a client sent, as a stream if it wants one."""
        writer = await self.begin(body, request, prefix)
        if body.stream:
            return StreamingResponse(
                writer.events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
            )
        return JSONResponse(await writer.whole())


def create_app(service: Service) -> ASGIApp:
    """Return the ASGI app of a service. Its lifespan starts the engine's thread, and ends it."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        try:
            yield
        finally:
            await asyncio.to_thread(service.worker.stop)
            service.reading.shutdown()

    app = FastAPI(
        title="jaxkv",
        version=jaxkv.__version__,
        description="OpenAI's completions and chat completions over a paged, compacting KV cache.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    errors.install(app)
    _add_completions(app, service)
    _add_state(app, service)
    _add_page(app)
    _describe(app, with_key=service.api_key is not None)
    return Guard(app, service.limits, service.api_key)


def _add_completions(app: FastAPI, service: Service) -> None:
    answers: dict[int | str, dict[str, Any]] = {
        200: {
            "model": protocol.Answer,
            "content": {
                "text/event-stream": {"schema": {"description": "An event, with a chunk as JSON for its data."}}
            },
            "description": "The answer; with stream, as events that end with [DONE].",
        },
        **_errors(400, 401, 404, 408, 413, 429, 500, 503),
    }

    @app.post("/v1/completions", responses=answers, response_class=JSONResponse)
    async def completions(body: protocol.CompletionRequest, request: Request) -> Response:
        """Continue prompts: texts as they are, or token ids."""
        return await service.answer(body, request, "cmpl")

    @app.post("/v1/chat/completions", responses=answers, response_class=JSONResponse)
    async def chat_completions(body: protocol.ChatRequest, request: Request) -> Response:
        """Answer a chat."""
        return await service.answer(body, request, "chatcmpl")


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", responses=_errors(401))
    async def models() -> dict[str, Any]:
        """Return the one model."""
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{model:path}", responses=_errors(401, 404))
    async def model(model: str) -> dict[str, Any]:
        """Return a model by its name."""
        if model != service.model:
            raise ApiError(
                404, f"there is no such model; {service.model} is served", param="model", code="model_not_found"
            )
        return _model(service)

    @app.get("/health", responses=_errors(503))
    async def health() -> dict[str, str]:
        """Return 200 while the engine runs. Needs no key."""
        if not service.worker.healthy:
            raise ApiError(503, "the engine is not running")
        return {"status": "ok"}

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **_errors(401)},
    )
    async def metrics() -> Response:
        """Return the metrics, for Prometheus."""
        return Response(service.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.get("/pool", responses=_errors(401, 503))
    async def pool() -> dict[str, Any]:
        """Return what the live page shows: blocks, rows at work, tokens a second, latencies."""
        compression = service.llm.compression
        view = await service.worker.ask(
            lambda engine: {
                **pool_view(engine, service.worker.names()),
                "speed": service.metrics.recent.to_json(),
                "blocks_returned": service.metrics.returned(),
            }
        )
        return {
            "model": service.model,
            "method": compression.method,
            "budget": None if compression.method == "none" else compression.budget,
            **view,
        }


def _add_page(app: FastAPI) -> None:
    files = resources.files("jaxkv.server")
    page, script = (files.joinpath(name).read_bytes() for name in ("page.html", "page.js"))

    @app.get("/", include_in_schema=False)
    async def live_page() -> Response:
        """Return the live page. Needs no key; what it shows does."""
        return Response(page, media_type="text/html", headers=_PAGE_HEADERS)

    @app.get("/page.js", include_in_schema=False)
    async def live_page_script() -> Response:
        """Return its script."""
        return Response(script, media_type="text/javascript", headers=_PAGE_HEADERS)


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.started,
        "owned_by": "jaxkv",
        "max_model_len": service.llm.context,
    }


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": protocol.Error, "description": _DESCRIPTIONS[status]} for status in statuses}


def _describe(app: FastAPI, *, with_key: bool) -> None:
    """Make the OpenAPI document say what this server does: 400 where FastAPI has 422, and a key where there is one."""
    document = app.openapi()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            operation["responses"].pop("422", None)
            if with_key and path != "/health":
                operation["security"] = [{"key": []}]
    document["components"]["schemas"] = {
        name: schema
        for name, schema in document["components"]["schemas"].items()
        if name not in ("HTTPValidationError", "ValidationError")
    }
    if with_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    app.openapi_schema = document
