"""A connection that waits for nobody for ever: for a request to come in, or for an answer to be taken."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxkv.server.limits import Limits


def connection_class(limits: Limits) -> type[H11Protocol]:
    """Return uvicorn's HTTP protocol with deadlines, and with a bound on how many connections there are."""

    class Connection(H11Protocol):
        _request_deadline: asyncio.TimerHandle | None = None
        _write_deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.abort()
            self._wait_for_request()

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self._request_deadline, self._write_deadline):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._wait_for_request()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._wait_for_request()

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._write_deadline is None:
                self._write_deadline = self.loop.call_later(limits.write_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._write_deadline is not None:
                self._write_deadline.cancel()
                self._write_deadline = None

        def _wait_for_request(self) -> None:
            # From the first byte of a request's headers to the last, or of a body that was refused.
            answering = self.cycle is not None and not self.cycle.response_complete
            if answering and self._request_deadline is not None:
                self._request_deadline.cancel()
                self._request_deadline = None
            elif not answering and self._request_deadline is None and not self.transport.is_closing():
                self._request_deadline = self.loop.call_later(limits.request_seconds, self.transport.abort)

    return Connection
