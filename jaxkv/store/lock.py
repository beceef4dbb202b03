"""The lock of a folder, and a table that says which of its parts have changed since a process last looked."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator

FILE = ".jaxkv-store"
SHARDS = 256
_TABLE = struct.Struct(f"<{SHARDS}Q")
_PATIENCE = 5.0


class BusyError(OSError):
    """The lock was held by others for too long."""


class FolderLock:
    """An exclusive ``flock``, which the kernel takes back from a process that dies, and one counter a shard.

    A counter is raised before its shard is changed, so that whoever finds the same value as last time knows the shard
    unchanged, and a process that dies in between costs others one look for nothing. The counters are a hint: they
    begin at random values and may be lost.
    """

    def __init__(self, root: int, writable: bool) -> None:
        self._root = root
        self._flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY)
        # A flock is of an open file, which threads share: among themselves they need a lock of their own.
        self._threads = threading.Lock()
        self._file = os.open(FILE, self._flags, 0o600, dir_fd=root)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lock.

        Raises:
          BusyError: it could not be had within five seconds.
        """
        deadline = time.monotonic() + _PATIENCE
        if not self._threads.acquire(timeout=_PATIENCE):
            raise BusyError("the store's lock is held by other threads")
        try:
            self._acquire(deadline)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def counters(self) -> tuple[int, ...]:
        """Return the counters of all shards. Hold the lock."""
        table = os.pread(self._file, _TABLE.size, 0)
        if len(table) != _TABLE.size:
            table = os.urandom(_TABLE.size)
            os.pwrite(self._file, table, 0)
        return _TABLE.unpack(table)

    def announce(self, shard: int) -> int:
        """Raise a shard's counter and return it. Hold the lock, and change the shard afterwards."""
        counter = (self.counters()[shard] + 1) % (1 << 64)
        os.pwrite(self._file, counter.to_bytes(8, "little"), 8 * shard)
        return counter

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _acquire(self, deadline: float) -> None:
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BusyError("the store's lock is held by another process") from None
                time.sleep(0.0005)
                continue
            if os.fstat(self._file).st_nlink:
                return
            # Somebody removed the file, and whoever opens it now locks another one.
            file = os.open(FILE, self._flags, 0o600, dir_fd=self._root)
            os.close(self._file)
            self._file = file
