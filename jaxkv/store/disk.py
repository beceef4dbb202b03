"""The disk tier: files that many processes share, under one cap of bytes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import zlib
from collections.abc import Iterator

from jaxkv.store import file_format
from jaxkv.store.counters import Tally
from jaxkv.store.file_format import DamagedError
from jaxkv.store.folder import Folder, ForeignError, pread_all, pwrite_all
from jaxkv.store.index import Index
from jaxkv.store.key import Key
from jaxkv.store.lock import BusyError, FolderLock

_NO_MORE_WRITES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
_FIRST_READ = 1 << 13
_PIECE = 1 << 20


class OpenFile:
    """A file whose header has been read and checked. It stays readable if its name goes."""

    def __init__(self, file: int) -> None:
        self._file = file
        self.size = os.fstat(file).st_size
        begin = os.pread(file, _FIRST_READ, 0)
        length = file_format.header_bytes(begin, self.size)
        if length > len(begin):
            begin += os.pread(file, length - len(begin), len(begin))
        self.header = file_format.decode(begin[:length], self.size)

    def read_layer(self, buffer: memoryview, layer: int) -> int:
        """Read one layer of all arrays into its place, check it, and return its bytes.

        Raises:
          DamagedError: it is not what was written.
        """
        spans = self.header.layout.layer(layer)
        for start, stop in spans:
            if not pread_all(self._file, buffer[start:stop], self.header.start + start):
                raise DamagedError(f"the file ends within layer {layer}")
        if file_format.layer_crc(buffer, spans) != self.header.crcs[layer]:
            raise DamagedError(f"layer {layer} was changed")
        return sum(stop - start for start, stop in spans)

    def pin(self) -> None:
        """Keep every process from evicting the file until it is closed."""
        # A file that is being evicted right now has lost its name and not its data: nothing to wait for.
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def check(self) -> None:
        """Read all layers and check them, in pieces that take little memory.

        Raises:
          DamagedError: one is not what was written.
        """
        piece = memoryview(bytearray(_PIECE))
        for layer, expected in enumerate(self.header.crcs):
            crc = 0
            for start, stop in self.header.layout.layer(layer):
                for at in range(start, stop, _PIECE):
                    part = piece[: min(_PIECE, stop - at)]
                    if not pread_all(self._file, part, self.header.start + at):
                        raise DamagedError(f"the file ends within layer {layer}")
                    crc = zlib.crc32(part, crc)
            if crc != expected:
                raise DamagedError(f"layer {layer} was changed")

    @property
    def inode(self) -> tuple[int, int]:
        """Device and inode."""
        found = os.fstat(self._file)
        return found.st_dev, found.st_ino

    def close(self) -> None:
        """Close it, and end its pin."""
        os.close(self._file)


class DiskTier:
    """Reads take no lock. Room is made, and names are given, under the folder's lock; data is written without it.

    Attributes:
      writes_off: why nothing is written any more, or None. A full or read-only disk is why, until the store is opened
        again.
    """

    def __init__(self, path: str | os.PathLike[str], cap: int, tally: Tally) -> None:
        self.cap = cap
        self.writes_off: str | None = None
        self._tally = tally
        self.folder = Folder(path, create=True)
        try:
            self._lock = self._open_lock()
            self._index = Index(self.folder, self._lock)
            with contextlib.suppress(BusyError):
                self._trim()
        except BaseException:
            self.folder.close()
            raise

    def close(self) -> None:
        """Close folder and lock."""
        self._lock.close()
        self.folder.close()

    def find(self, key: Key) -> OpenFile | None:
        """Return the open file of a key, or None. What cannot be trusted is counted, and removed if it is a file."""
        try:
            file = self.folder.open(key.digest)
        except FileNotFoundError:
            return None
        except (ForeignError, OSError):
            self._tally.add(foreign_files=1)
            return None
        try:
            opened = OpenFile(file)
            if opened.header.key.digest != key.digest:
                raise DamagedError(f"the file is of key {opened.header.key.name}")
            # One that cannot be kept is not read either: it may be a sparse file of terabytes.
            if opened.size > self.cap and self.writes_off is None:
                raise DamagedError(f"the file has {opened.size} bytes, and the whole store {self.cap}")
        except (DamagedError, OSError) as error:
            found = os.fstat(file)
            os.close(file)
            self.report(key.digest, (found.st_dev, found.st_ino), remove=isinstance(error, DamagedError))
            return None
        if opened.header.key != key:
            # One digest, other tokens: a collision, or a forged key. The file is somebody's.
            opened.close()
            return None
        return opened

    def touch(self, key: Key) -> None:
        """Mark the file of a key as used now, for all processes."""
        self.folder.touch(key.digest, time.time_ns())

    def has(self, key: Key) -> bool:
        """Whether there is a file of this name."""
        return self.folder.inode(key.digest) is not None

    def report(self, digest: bytes, inode: tuple[int, int], remove: bool = True) -> None:
        """Count a damaged file, and remove it unless another one has its name by now."""
        self._tally.add(corrupt_files=1)
        if not remove:
            return
        with contextlib.suppress(OSError):
            self._index.discard(digest, inode)

    def write(self, key: Key, header: bytes, data: memoryview) -> bool:
        """Write a file unless there is one; return whether there is one now."""
        if self.writes_off is not None:
            return False
        size = len(header) + len(data)
        try:
            with self._index.locked() as index:
                if self.has(key):
                    return True
                if not self._make_room(index, size):
                    return False
                file, part = self.folder.create_part(key.digest, size)
            with self._writing(file, part):
                pwrite_all(file, memoryview(header), 0)
                pwrite_all(file, data, len(header))
                os.fsync(file)
                self._publish(file, part, key)
            self.folder.sync(key.digest[0])
        except OSError as error:
            if error.errno in _NO_MORE_WRITES:
                self.writes_off = str(error)
            return False
        self._tally.add(written_bytes=size)
        return True

    def _publish(self, file: int, part: str, key: Key) -> None:
        with self._index.locked() as index:
            if self.has(key):
                # Another process was faster, with the same bytes.
                self.folder.remove_part(part)
                return
            os.utime(file, ns=(time.time_ns(),) * 2)
            # As a part it was locked so that nobody took it for a dead writer's; from here on that would be a lease.
            fcntl.flock(file, fcntl.LOCK_UN)
            index.announce(key.digest[0])
            self.folder.publish(part, key.digest)
            index.add(key.digest, os.fstat(file))

    @contextlib.contextmanager
    def _writing(self, file: int, part: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                self.folder.remove_part(part)
            raise
        finally:
            os.close(file)

    def _make_room(self, index: Index, size: int) -> bool:
        """Evict what is least recently used and unleased until ``size`` bytes fit; return whether they do."""
        if size > self.cap:
            return False
        parts, _ = self.folder.living_parts()
        allowed = self.cap - size - parts
        self._evict(index, allowed)
        return index.total <= allowed

    def _evict(self, index: Index, allowed: int) -> None:
        self._tally.add(disk_evicted_bytes=index.evict(allowed))

    def _trim(self) -> None:
        """Bring the files that are there at the start under the cap, and remove what dead writers left."""
        try:
            with self._index.locked() as index:
                parts, _ = self.folder.living_parts()
                if self.writes_off is None:
                    self._evict(index, self.cap - parts)
        except OSError as error:
            if error.errno not in _NO_MORE_WRITES:
                raise
            self.writes_off = str(error)

    def _open_lock(self) -> FolderLock:
        try:
            return FolderLock(self.folder.root, writable=True)
        except OSError as error:
            if error.errno not in _NO_MORE_WRITES:
                raise
            # A folder that others fill: it can be read all the same, if it is a store.
            self.writes_off = str(error)
            return FolderLock(self.folder.root, writable=False)
