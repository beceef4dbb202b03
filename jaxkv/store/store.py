"""The store: lookups, puts and leases over a host tier and a disk tier."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as futures_done
from typing import Any

import numpy as np

from jaxkv.store import file_format, reader
from jaxkv.store.counters import Counters, Tally
from jaxkv.store.disk import DiskTier
from jaxkv.store.entry import Entry, LostError, Tier, View
from jaxkv.store.file_format import DamagedError
from jaxkv.store.key import Key
from jaxkv.store.memory import MemoryTier
from jaxkv.store.reader import Load

MOST_PINNED = 256
"""Files that leases hold open at once. Beyond that a file is read whole when it is leased, and not pinned."""


class Store:
    """KV by key, in memory, on disk or both. Threads may share one; a process opens its own on the same folder.

    A put copies the arrays into memory and returns; a thread writes the file. A lease holds its copy in place: no tier
    evicts it, and no process evicts its file.

    Args:
      path: folder of the disk tier, made if it is not there; None for memory alone.
      memory: most bytes of the host tier; 0 for none.
      disk: most bytes of all files in the folder, whoever wrote them; 0 for no disk tier. Files that are there count,
        and the least recently used go at once if they are too many.
      queue: most bytes of puts that wait to be written, in memory and on top of ``memory``; a single larger one may
        wait alone.

    Raises:
      ValueError: sizes are negative, there is room nowhere, or ``disk`` has no path.
      OSError: the folder cannot be made or read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        memory: int = 0,
        disk: int = 0,
        queue: int = 256 << 20,
    ) -> None:
        for name, size in (("memory", memory), ("disk", disk), ("queue", queue)):
            if size < 0:
                raise ValueError(f"{name}={size} must be at least 0 bytes")
        if not memory and not disk:
            raise ValueError("memory=0 and disk=0 leave no room; give one of them some bytes")
        if disk and path is None:
            raise ValueError(f"disk={disk} needs a path; give a folder, or disk=0")
        self._tally = Tally()
        self._lock = threading.Lock()
        self._memory = MemoryTier(memory)
        self._disk = None if path is None or not disk else DiskTier(path, disk, self._tally)
        self._queue = queue
        self._pending: dict[bytes, tuple[Entry, Future[bool]]] = {}
        self._fault: BaseException | None = None
        self._pinned = 0
        self._writer = ThreadPoolExecutor(1, "jaxkv-store-writer")
        self._readers = ThreadPoolExecutor(2, "jaxkv-store-reader")
        self._process = os.getpid()
        self._closed = False

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counters(self) -> Counters:
        """What was done since the store was opened."""
        return self._tally.read()

    @property
    def memory_bytes(self) -> int:
        """Bytes in the host tier."""
        return self._memory.bytes

    @property
    def writes_off(self) -> str | None:
        """Why nothing is written to disk any more (it is full, or read-only), or None. Reading goes on."""
        return None if self._disk is None else self._disk.writes_off

    def lookup(self, keys: Sequence[Key]) -> list[Tier | None]:
        """Return for each key the tier that has it, or None: a miss in the middle says nothing about the rest.

        It reads at most the header of a file, and marks nothing as used.
        """
        self._check()
        self._tally.add(lookups=len(keys))
        return [self._where(key) for key in keys]

    def put(self, key: Key, arrays: Mapping[str, Any], *, wait: bool = False) -> bool:
        """Store a copy of arrays; where the key is there already, do nothing.

        Args:
          arrays: by name, each ``[L, ...]`` in float32, bfloat16, float16, int8 or uint8, NumPy's or JAX's. For a
            segment: ``k`` before RoPE and ``v``, ``[L, T, K, D]``. That they are what the key says is the caller's
            to know: under a content key only KV that was computed from those tokens alone.
          wait: return after the file has its name, rather than while a thread writes it.

        Returns:
          whether it is in some tier or on its way there. A put that the last tier has no room for is refused, not
          blocked, and counted.

        Raises:
          ValueError: the arrays cannot be stored.
        """
        self._check()
        self._tally.add(puts=1)
        with self._lock:
            entry = self._known(key)
        if self._disk is not None and self._disk.has(key):
            return True
        if entry is not None and (self._disk is None or not entry.complete):
            return True
        if entry is None:
            entry = Entry.copy(key, arrays)
            with self._lock:
                kept = self._keep(entry)
        else:
            kept = True
        if self._disk is None:
            self._tally.add(refused_puts=not kept)
            return kept
        written = self._write(entry) if wait else self._enqueue(entry)
        return kept or written

    def get(self, key: Key) -> dict[str, np.ndarray] | None:
        """Return the arrays of a key by name, read-only, or None. They stay valid, and are then the caller's memory."""
        with self._leased([key], self._read) as (view,):
            try:
                return None if view is None else view.arrays()
            except LostError:
                return None

    @contextlib.contextmanager
    def lease(self, keys: Sequence[Key]) -> Iterator[list[View | None]]:
        """Hold the KV of keys in place for the time of a ``with`` block; None stands for a miss.

        Files are read in the background, layer 0 of all keys first, then layer 1: ``view.layer(l)`` waits for what it
        returns and no longer. The lease ends with the block, however that ends.
        """
        with self._leased(keys, lambda loads: self._readers.submit(self._read, loads)) as views:
            yield views

    @contextlib.contextmanager
    def _leased(self, keys: Sequence[Key], start: Callable[[list[Load]], Any]) -> Iterator[list[View | None]]:
        self._check()
        self._tally.add(lookups=len(keys))
        views: list[View | None] = []
        loads: list[Load] = []
        with contextlib.ExitStack() as stack:
            try:
                for key in keys:
                    view = self._acquire(key, loads)
                    views.append(view)
                    if view is not None:
                        stack.callback(view.close)
                if loads:
                    start(loads)
            except BaseException:
                for load in loads:
                    if not load.finished:
                        self._finish(load, None)
                raise
            yield views

    def flush(self) -> None:
        """Wait until every put so far is written or refused."""
        self._check()
        with self._lock:
            futures = [future for _, future in self._pending.values()]
        futures_done(futures)
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Write what waits, end the threads and let go of the folder. A lease that is open keeps what it has."""
        if self._closed:
            return
        self._closed = True
        if self._process != os.getpid():
            return
        self._writer.shutdown()
        self._readers.shutdown()
        if self._disk is not None:
            self._disk.close()
        if self._fault is not None:
            raise self._fault

    def _check(self) -> None:
        if self._closed:
            raise ValueError("the store is closed; open another one")
        if self._process != os.getpid():
            raise RuntimeError(f"the store was opened by process {self._process}; open one here: threads do not fork")

    def _known(self, key: Key) -> Entry | None:
        """Return what is in memory of a key, in the host tier or waiting to be written. Hold the lock."""
        entry = self._memory.get(key)
        if entry is None and key.digest in self._pending:
            entry = self._pending[key.digest][0]
        return entry if entry is not None and entry.key == key else None

    def _keep(self, entry: Entry) -> bool:
        """Put an entry into the host tier if it fits. Hold the lock."""
        kept, evicted = self._memory.add(entry)
        self._tally.add(memory_evicted_bytes=evicted)
        return kept

    def _where(self, key: Key) -> Tier | None:
        with self._lock:
            entry = self._known(key)
            if entry is not None:
                return "memory" if entry.complete else "disk"
        file = None if self._disk is None else self._disk.find(key)
        if file is None:
            return None
        file.close()
        return "disk"

    # -- reading -------------------------------------------------------------------------------------------------------

    def _acquire(self, key: Key, loads: list[Load]) -> View | None:
        with self._lock:
            view = self._joined(key)
        if self._disk is not None:
            # A hit in memory too: what is used most must not be the first file to go.
            self._disk.touch(key)
        if view is not None:
            return view
        file = None if self._disk is None else self._disk.find(key)
        if file is None:
            self._tally.add(miss_tokens=key.tokens)
            return None
        try:
            entry = Entry(key, file.header.layout, 0)
            load = Load(entry, file)
            with self._lock:
                view = self._joined(key)
                if view is None:
                    entry.leases = entry.waiting = 1
                    self._keep(entry)
                    load.pinned = self._pinned < MOST_PINNED
                    self._pinned += load.pinned
        except BaseException:
            file.close()
            raise
        if view is not None:
            file.close()
            return view
        if load.pinned:
            file.pin()
            load.holders += 1
            loads.append(load)
        else:
            self._read([load])
        return View(entry, "disk", lambda: self._end(entry, load))

    def _joined(self, key: Key) -> View | None:
        """Return a view of what is in memory, or None. Hold the lock."""
        entry = self._known(key)
        if entry is None:
            return None
        entry.leases += 1
        self._memory.touch(key)
        if entry.complete:
            self._tally.add(memory_hit_tokens=key.tokens)
        else:
            entry.waiting += 1
        return View(entry, "memory" if entry.complete else "disk", lambda: self._end(entry, None))

    def _end(self, entry: Entry, load: Load | None) -> None:
        with self._lock:
            entry.leases -= 1
        if load is not None and load.pinned:
            self._let_go(load)

    def _read(self, loads: list[Load]) -> None:
        reader.read(loads, self._tally, self._wanted, self._finish)

    def _wanted(self, load: Load) -> bool:
        with self._lock:
            return load.entry.leases > 0 or load.entry.kept

    def _finish(self, load: Load, fault: DamagedError | OSError | None) -> None:
        entry = load.entry
        if fault is not None and self._disk is not None:
            self._disk.report(entry.key.digest, load.file.inode, remove=isinstance(fault, DamagedError))
        with self._lock:
            complete, tokens, entry.waiting = entry.complete, entry.waiting * entry.key.tokens, 0
            if not complete:
                self._memory.remove(entry)
            hit = fault is None and (complete or not entry.leases)
        if not complete:
            entry.lose()
        self._tally.add(**{"disk_hit_tokens" if hit else "miss_tokens": tokens})
        self._let_go(load)

    def _let_go(self, load: Load) -> None:
        """Close a file when both its reader and its lease are done with it."""
        with self._lock:
            load.holders -= 1
            last = not load.holders
            self._pinned -= last and load.pinned
        if last:
            load.file.close()

    # -- writing -------------------------------------------------------------------------------------------------------

    def _enqueue(self, entry: Entry) -> bool:
        """Hand an entry to the writer if the queue has room."""
        with self._lock:
            if entry.key.digest in self._pending:
                return True
            bytes_waiting = sum(other.nbytes for other, _ in self._pending.values())
            room = not bytes_waiting or bytes_waiting + entry.nbytes <= self._queue
            if room:
                # The writer cannot be done with it before it is noted: it needs the lock for that.
                self._pending[entry.key.digest] = entry, self._writer.submit(self._write_waiting, entry)
        self._tally.add(refused_puts=not room)
        return room

    def _write_waiting(self, entry: Entry) -> bool:
        try:
            return self._write(entry)
        except BaseException as error:
            self._fault = error
            raise
        finally:
            with self._lock:
                del self._pending[entry.key.digest]

    def _write(self, entry: Entry) -> bool:
        assert self._disk is not None
        data = memoryview(entry.buffer)  # type: ignore[arg-type]
        layout = entry.layout
        crcs = [file_format.layer_crc(data, layout.layer(layer)) for layer in range(layout.layers)]
        written = self._disk.write(entry.key, file_format.encode(entry.key, layout, crcs), data)
        self._tally.add(refused_puts=not written)
        return written
