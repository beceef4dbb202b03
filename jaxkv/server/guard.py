"""What stands before every endpoint: the key, the body's size, and an eye on whether the client is still there."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import traceback
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxkv.server.errors import FAULT, ApiError
from jaxkv.server.limits import Limits

OPEN = frozenset({"/", "/page.js", "/health"})
"""Paths that need no key. The page holds nothing: what it shows it asks for with the key."""
CLEANUP = "jaxkv.cleanup"
"""Name in an ASGI scope of an ``ExitStack`` that closes when the call is over, or its client has gone."""
_log = logging.getLogger(__name__)


class Guard:
    """An app behind its limits. It answers what never reaches the app, and hides what goes wrong in there.

    Args:
      app: an ASGI app.
      limits: of body and time.
      api_key: that a client has to send as a bearer token; None is none.
    """

    def __init__(self, app: ASGIApp, limits: Limits, api_key: str | None = None) -> None:
        self._app, self._limits = app, limits
        self._key = None if api_key is None else _digest(api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call, as ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        async def refuse(error: ApiError) -> None:
            # Returning in the middle of a response has uvicorn close the connection.
            if not begun:
                await error.response()(scope, receive, send)

        try:
            headers = Headers(scope=scope)
            self._check_key(scope["path"], headers)
            body = await self._body(headers, receive)
            await self._attended(scope, body, receive, noting)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except asyncio.CancelledError:
            # The time to drain is over. uvicorn would log a traceback of this.
            await refuse(ApiError(503, "the server stops; ask again later"))
        except Exception as error:
            _report(error)
            await refuse(FAULT)

    def _check_key(self, path: str, headers: Headers) -> None:
        if self._key is None or path in OPEN:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Digests are of one length, so that comparing them tells nothing about that of the key either.
        if not hmac.compare_digest(self._key, _digest(key.strip())) or scheme.lower() != "bearer":
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        most = self._limits.body_bytes
        too_large = ApiError(413, f"the body is larger than {most} bytes, the most that this server takes")
        announced = headers.get("content-length", "0")
        # h11 has seen to it that this is a number.
        if len(announced) > 18 or int(announced) > most:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._limits.request_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return b""
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not come in {self._limits.request_seconds:g} seconds",
                headers={"Connection": "close"},
            ) from None

    async def _attended(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the app for as long as its client is there."""
        gone = asyncio.Event()
        unread = True

        async def feed() -> Message:
            nonlocal unread
            if unread:
                unread = False
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        with contextlib.ExitStack() as cleanup:
            work: asyncio.Task[Any] = asyncio.ensure_future(self._app({**scope, CLEANUP: cleanup}, feed, send))
            watcher = asyncio.ensure_future(watch())
            try:
                await asyncio.wait({work, watcher}, return_when=asyncio.FIRST_COMPLETED)
                gone.set()
                if work.done():
                    work.result()
            finally:
                work.cancel()
                watcher.cancel()
                await asyncio.gather(work, watcher, return_exceptions=True)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _report(error: BaseException) -> None:
    """Log a fault of ours: at the default level its kind and place, and no text that may quote a prompt or a path."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].name}, line {frames[-1].lineno}" if frames else "nowhere"
    _log.error("a fault: %s in %s (--log-level debug shows more)", type(error).__name__, place)
    _log.debug("traceback of the fault", exc_info=error)
