"""The thread that owns the engine: it alone adds, steps and cancels, and it tells the event loop what happened."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from jaxkv.completion import Delta, RunningText
from jaxkv.engine import Engine
from jaxkv.request import Event, Report, Request, RequestError
from jaxkv.server.errors import ApiError, bad_request
from jaxkv.server.metrics import Metrics

T = TypeVar("T")
ROUND_SECONDS = 0.1
"""What a round should take, so that nobody who comes, goes or looks waits for longer."""
_UNKNOWN = (
    "continue_from: no row is kept by this id. It was not asked for with keep, has not ended, or had to go for others; "
    "send the whole text"
)
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one continuation of prompt ``delta.index`` has new, and its report when it has ended."""

    delta: Delta
    report: Report | None


@dataclasses.dataclass
class Kept:
    """A request whose row is kept, by what a client needs to go on from it."""

    request_id: int
    last_token: int
    tokens: int
    """All that it has seen."""


class Call:
    """What one client asked for: requests of the engine, and the pieces of their texts as they come.

    Args:
      name: the id that the client is told.
      requests: without their watches.
      texts: of each request, one a continuation.
    """

    def __init__(self, name: str, requests: Sequence[Request], texts: Sequence[Sequence[RunningText]]) -> None:
        self.name, self.texts = name, texts
        self.requests = [_watched(*pair) for pair in zip(requests, texts, strict=True)]
        self.choices = sum(request.params.n for request in requests)
        self.arrived = time.perf_counter()
        self.ids: list[int] = []
        self.loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece | ApiError] = asyncio.Queue()
        self._accepted: asyncio.Future[None] = self.loop.create_future()
        self._last: dict[tuple[int, int], float] = {}

    async def accepted(self) -> None:
        """Wait until the engine has taken the call on.

        Raises:
          ApiError: it has not.
        """
        await self._accepted

    async def next_piece(self) -> Piece:
        """Return the next piece. There is one with a report for each continuation, and none after the last.

        Raises:
          ApiError: the engine has failed.
        """
        piece = await self._pieces.get()
        if isinstance(piece, ApiError):
            raise piece
        return piece

    def tell(self, news: Sequence[Piece | ApiError | None]) -> None:
        """Take news, in the event loop. None is that the engine has taken the call on."""
        for one in news:
            if not self._accepted.done():
                self._accepted.set_exception(one) if isinstance(one, ApiError) else self._accepted.set_result(None)
                # A client that has gone does not ask for it.
                self._accepted.exception()
            if one is not None:
                self._pieces.put_nowait(one)

    def since_last(self, index: int, choice: int, now: float) -> tuple[bool, float]:
        """Return whether a continuation has its first tokens now, and the seconds since its last ones or its start."""
        first = (index, choice) not in self._last
        seconds = now - self._last.get((index, choice), self.arrived)
        self._last[index, choice] = now
        return first, seconds


class Worker:
    """An engine in a thread of its own. Its methods are for the event loop's thread.

    Args:
      engine: warm. Nobody else may touch it from here on.
      metrics: what is counted.
      most: continuations that may be in work and waiting.
      failed: called from the worker's thread when the engine has a fault; it serves nobody any more.
    """

    def __init__(self, engine: Engine, metrics: Metrics, most: int, failed: Callable[[], None] = lambda: None) -> None:
        self._engine, self._metrics, self._most, self._failed = engine, metrics, most, failed
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._calls: dict[int, tuple[Call, int]] = {}
        self._live: set[Call] = set()
        self._pace = _Pace(engine.cache.round_steps)
        self.kept: dict[str, Kept] = {}
        """Rows that clients can go on from, by the ids that they were told."""
        self.healthy = False
        self._thread = threading.Thread(target=self._run, name="jaxkv-engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self.healthy = True
        self._thread.start()

    def stop(self) -> None:
        """End what is still running, and the thread."""
        self.healthy = False
        self._inbox.put(None)
        self._thread.join()

    def submit(self, call: Call) -> None:
        """Hand a call over; ``call.accepted`` says what became of it. ``release`` has to follow, whatever happens.

        Raises:
          ApiError: 503 where the engine has failed, 429 where too much is waiting, 400 where it could never be taken.
        """
        if not self.healthy:
            raise ApiError(503, "the engine is not running; ask again later")
        if call.choices > self._most:
            raise bad_request(f"prompts and n make {call.choices} continuations, and the server takes {self._most}")
        if call.choices + sum(one.choices for one in self._live) > self._most:
            raise ApiError(
                429, "too many requests are waiting; ask again later", code="queue_full", headers={"Retry-After": "1"}
            )
        self._live.add(call)
        self._inbox.put(lambda: self._add(call))

    def release(self, call: Call) -> None:
        """Forget a call. What of it has not ended is cancelled, and its blocks are given back."""
        if call in self._live:
            self._live.remove(call)
            self._inbox.put(lambda: self._cancel(call))

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """Return what a function finds when it looks at the engine between two steps.

        Raises:
          ApiError: 503 where the engine has failed.
        """
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def put() -> None:
            try:
                answer.set_result(question(self._engine))
            except Exception as error:
                answer.set_exception(error)

        if not self.healthy:
            raise ApiError(503, "the engine is not running; ask again later")
        self._inbox.put(put)
        return await asyncio.wrap_future(answer)

    def known_kept(self, name: str) -> Kept:
        """Return the row that a client may go on from by this id.

        Raises:
          ApiError: there is none.
        """
        if name not in self.kept:
            raise bad_request(_UNKNOWN, "jaxkv", "continue_from_unknown")
        return self.kept[name]

    def names(self) -> dict[int, str]:
        """Return the ids that clients were told, by the engine's. For questions, in the engine's thread."""
        return {request_id: call.name for request_id, (call, _) in self._calls.items()}

    # -- in the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_in():
                if self._engine.has_work:
                    self._step()
        except Exception as error:
            self.healthy = False
            _log.error("the engine has failed: %s (--log-level debug shows more)", type(error).__name__)
            _log.debug("traceback of the failure", exc_info=error)
            self._refuse_all(ApiError(503, "the engine has failed; ask again later"))
            self._failed()

    def _take_in(self) -> bool:
        """Do what the loop has asked for; wait for it where there is nothing else to do. False is the end."""
        while True:
            try:
                command = self._inbox.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                self._refuse_all(ApiError(503, "the server stops; ask again later"))
                return False
            command()

    def _refuse_all(self, error: ApiError) -> None:
        """End every call with an error, those that are still on their way in too."""
        while not self._inbox.empty():
            command = self._inbox.get()
            if command is not None:
                with contextlib.suppress(Exception):
                    command()
        for call in {call for call, _ in self._calls.values()}:
            self._tell(call, error)
        self._calls.clear()

    def _step(self) -> None:
        start = time.perf_counter()
        events = self._engine.step(self._pace.steps)
        now = time.perf_counter()
        self._pace.note(events, now - start)
        self._deliver(events, now)
        self._metrics.after_step(self._engine)

    def _add(self, call: Call) -> None:
        try:
            for index, request in enumerate(call.requests):
                self._check_kept(request)
                request_id = self._engine.add(request)
                call.ids.append(request_id)
                self._calls[request_id] = call, index
        except RequestError as error:
            self._cancel(call)
            self._tell(call, bad_request(str(error)))
            return
        self._tell(call, None)

    def _check_kept(self, request: Request) -> None:
        if request.continue_from is not None and request.continue_from not in self._engine.memory.kept:
            raise RequestError(_UNKNOWN)

    def _cancel(self, call: Call) -> None:
        now = time.perf_counter()
        for request_id in call.ids:
            if request_id in self._calls:
                self._deliver(self._engine.cancel(request_id), now)
                self._calls.pop(request_id, None)
        self._metrics.after_step(self._engine)

    def _deliver(self, events: Sequence[Event], now: float) -> None:
        news: dict[Call, list[Piece]] = {}
        for event in events:
            call, index = self._calls[event.request_id]
            text = call.texts[index][event.choice]
            report = event.report
            delta = text.delta(index, event)
            if report is not None and text.stopped:
                report = dataclasses.replace(report, finish_reason="stop")
            self._count(call, delta, report, now)
            news.setdefault(call, []).append(Piece(delta, report))
            if report is not None and call.requests[index].keep:
                self._remember(call, event.request_id, text, report)
        for call, pieces in news.items():
            self._tell(call, *pieces)
        here = {row.request_id for row in self._engine.rows} | set(self._engine.queued)
        for event in events:
            if event.report is not None and event.request_id not in here:
                self._calls.pop(event.request_id, None)

    def _count(self, call: Call, delta: Delta, report: Report | None, now: float) -> None:
        if delta.token_ids:
            first, seconds = call.since_last(delta.index, delta.choice, now)
            self._metrics.tokens(len(delta.token_ids), seconds, first=first)
        if report is not None:
            self._metrics.finished(report, now - call.arrived, choice=delta.choice)

    def _remember(self, call: Call, request_id: int, text: RunningText, report: Report) -> None:
        seen = report.continued_tokens + report.prompt_tokens + report.generated_tokens
        kept = {name: one for name, one in self.kept.items() if one.request_id in self._engine.memory.kept}
        if report.finish_reason != "cancelled":
            kept[call.name] = Kept(request_id, text.token_ids[-1], seen)
        # Replaced whole: the loop's thread reads it.
        self.kept = kept

    def _tell(self, call: Call, *news: Piece | ApiError | None) -> None:
        # A loop that has closed has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            call.loop.call_soon_threadsafe(call.tell, news)


class _Pace:
    """How many steps a round may have to take about ``ROUND_SECONDS``, by what rounds took lately."""

    def __init__(self, most: int) -> None:
        self.steps, self._most = min(most, 8), most

    def note(self, events: Sequence[Event], seconds: float) -> None:
        """Learn from a step. One that gave a token a row may have been prefill, and tells nothing."""
        longest = max((len(event.token_ids) for event in events), default=0)
        if longest > 1 or self.steps == 1:
            wanted = ROUND_SECONDS * max(longest, 1) / max(seconds, 1e-6)
            self.steps = max(1, min(self._most, round((self.steps + wanted) / 2)))


def _watched(request: Request, texts: Sequence[RunningText]) -> Request:
    watch = texts[0].push if len(texts) == 1 else [text.push for text in texts]
    return dataclasses.replace(request, watch=watch)
