"""The names in a store's folder, reached through file descriptors so that no link leads out of it.

    .jaxkv-store                    the lock
    parts/<digest>.<random>         files that are being written; each is locked by its writer
    <first two digits>/<digest>.safetensors

Digests are 64 hexadecimal digits. Anything else is foreign and never touched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxkv.store.lock import SHARDS

PARTS = "parts"
_SUFFIX = ".safetensors"
_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
_PART = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}")
# A FIFO under one of our names must not block its reader, hence O_NONBLOCK.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY


class ForeignError(Exception):
    """Something that is no regular file stands in the place of one."""


class Seen(NamedTuple):
    """Size in bytes and time of last use, in nanoseconds, of a file."""

    size: int
    used: int


def pwrite_all(file: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    while data:
        done = os.pwrite(file, data, offset)
        data, offset = data[done:], offset + done


def pread_all(file: int, data: memoryview, offset: int) -> bool:
    """Fill ``data`` from ``offset`` on; return False if the file ends before."""
    while data:
        done = os.preadv(file, [data], offset)
        if not done:
            return False
        data, offset = data[done:], offset + done
    return True


class Folder:
    """Files by digest.

    Raises:
      OSError: the folder cannot be opened, or made where ``create`` asks for it.
    """

    def __init__(self, path: str | os.PathLike[str], create: bool) -> None:
        self.path = Path(path)
        if create and not self.path.is_dir():
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.root = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)

    def close(self) -> None:
        """Close the folder. Open files stay open."""
        os.close(self.root)

    def open(self, digest: bytes) -> int:
        """Open a file for reading.

        Raises:
          FileNotFoundError: there is none.
          ForeignError: it is a link, a folder or the like, or stands behind one.
        """
        try:
            with self._shard(digest[0]) as shard:
                file = os.open(digest.hex() + _SUFFIX, _READ, dir_fd=shard)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK, errno.ENXIO):
                raise ForeignError(f"{digest.hex()} is no file, or lies behind a link") from error
            raise
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise ForeignError(f"{digest.hex()} is no file")
        return file

    def touch(self, digest: bytes, now: int) -> None:
        """Set the time of last use of a file, in nanoseconds, if it is there."""
        with contextlib.suppress(OSError), self._shard(digest[0]) as shard:
            os.utime(digest.hex() + _SUFFIX, ns=(now, now), dir_fd=shard, follow_symlinks=False)

    def inode(self, digest: bytes) -> tuple[int, int] | None:
        """Return device and inode of the regular file of this digest, or None."""
        try:
            with self._shard(digest[0]) as shard:
                found = os.stat(digest.hex() + _SUFFIX, dir_fd=shard, follow_symlinks=False)
        except OSError:
            return None
        return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None

    def scan(self, shard: int) -> tuple[dict[bytes, Seen], int]:
        """Return what files a shard has, and how many foreign things."""
        files, foreign = {}, 0
        try:
            with self._shard(shard) as folder, os.scandir(folder) as entries:
                for entry in entries:
                    digest = bytes.fromhex(entry.name[:64]) if _NAME.fullmatch(entry.name) else b""
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        if digest[:1] == bytes([shard]) and stat.S_ISREG(found.st_mode):
                            files[digest] = Seen(found.st_size, found.st_mtime_ns)
                        else:
                            foreign += 1
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            foreign += 1
        return files, foreign

    def shards(self) -> range:
        """Return the numbers of all shards."""
        return range(SHARDS)

    def create_part(self, digest: bytes, size: int) -> tuple[int, str]:
        """Return a new locked file of ``size`` bytes in ``parts``, open for writing, and its name."""
        name = f"{digest.hex()}.{os.urandom(8).hex()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with self._made(PARTS) as parts:
            file = os.open(name, flags, 0o600, dir_fd=parts)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                # Its whole size counts from now on, for every process that looks at the cap.
                os.ftruncate(file, size)
            except BaseException:
                os.close(file)
                os.unlink(name, dir_fd=parts)
                raise
        return file, name

    def publish(self, part: str, digest: bytes) -> None:
        """Give a finished part its name, in one step. Fsync the shard afterwards."""
        with self._open(PARTS) as parts, self._made(f"{digest[0]:02x}") as shard:
            os.rename(part, digest.hex() + _SUFFIX, src_dir_fd=parts, dst_dir_fd=shard)

    def sync(self, shard: int) -> None:
        """Make the names of a shard last through a power cut."""
        with self._shard(shard) as folder:
            os.fsync(folder)

    def remove_part(self, name: str) -> None:
        """Remove a part, if it is there."""
        with contextlib.suppress(FileNotFoundError), self._open(PARTS) as parts:
            os.unlink(name, dir_fd=parts)

    def remove(self, digest: bytes) -> bool:
        """Remove a file; return whether it was there."""
        try:
            with self._shard(digest[0]) as shard:
                os.unlink(digest.hex() + _SUFFIX, dir_fd=shard)
        except FileNotFoundError:
            return False
        return True

    def living_parts(self) -> tuple[int, int]:
        """Return the bytes of parts that have a living writer, and how many others were removed. Hold the lock."""
        total = removed = 0
        try:
            with self._open(PARTS) as parts:
                for name in os.listdir(parts):
                    if _PART.fullmatch(name) is None:
                        continue
                    size = _abandoned(name, parts)
                    removed += size is None
                    total += size or 0
        except (FileNotFoundError, NotADirectoryError):
            pass
        return total, removed

    def _shard(self, shard: int) -> contextlib.AbstractContextManager[int]:
        return self._open(f"{shard:02x}")

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[int]:
        folder = os.open(name, _FOLDER, dir_fd=self.root)
        try:
            yield folder
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _made(self, name: str) -> Iterator[int]:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self.root)
        with self._open(name) as folder:
            yield folder


def _abandoned(name: str, parts: int) -> int | None:
    """Return the size of a part, or None if no writer holds it and it was removed."""
    try:
        file = os.open(name, _READ, dir_fd=parts)
    except OSError:
        return 0
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.fstat(file).st_size
    else:
        os.unlink(name, dir_fd=parts)
        return None
    finally:
        os.close(file)
