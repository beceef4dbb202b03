"""A store's folder looked at and tidied from outside, while processes use it or not."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterator
from typing import Any

from jaxkv.store import lock
from jaxkv.store.disk import OpenFile
from jaxkv.store.file_format import DamagedError, Header
from jaxkv.store.folder import Folder, ForeignError, Seen
from jaxkv.store.index import Index
from jaxkv.store.lock import FolderLock


@dataclasses.dataclass(frozen=True)
class Item:
    """A file by its key's hexadecimal digits; ``used`` is in seconds since 1970. Either header or damage is None."""

    name: str
    inode: tuple[int, int]
    nbytes: int
    used: float
    header: Header | None
    damage: str | None

    def to_json(self) -> dict[str, Any]:
        """Return what there is to say of it; token ids are left out."""
        out: dict[str, Any] = {"key": self.name, "bytes": self.nbytes, "used": self.used}
        if self.header is None:
            return {**out, "damage": self.damage}
        key, layout = self.header.key, self.header.layout
        arrays = {name: {"dtype": dtype, "shape": shape} for name, dtype, shape in layout.arrays}
        out |= {"space": key.space, "tokens": key.tokens, "fingerprint": key.root.hex(), "arrays": arrays}
        return {**out, "damage": self.damage}


@dataclasses.dataclass(frozen=True)
class Tidied:
    """What ``gc`` did: parts of dead writers removed, files and bytes evicted, and the bytes that are left."""

    parts: int
    files: int
    evicted_bytes: int
    bytes: int


class Admin:
    """A folder that is a store already.

    Raises:
      OSError: the folder cannot be opened.
      ValueError: it is no store.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = Folder(path, create=False)
        try:
            try:
                os.stat(lock.FILE, dir_fd=self._folder.root, follow_symlinks=False)
            except FileNotFoundError:
                raise ValueError(f"{path} is no store: it has no {lock.FILE}; give a folder that Store made") from None
            self._lock = FolderLock(self._folder.root, writable=os.access(path, os.W_OK))
        except BaseException:
            self._folder.close()
            raise
        self._index = Index(self._folder, self._lock)

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()
        self._folder.close()

    def items(self, whole: bool = False) -> Iterator[Item]:
        """Look at every file, without the lock: its header, or with ``whole`` all its layers."""
        for digest, seen in self._files():
            try:
                file = self._folder.open(digest)
            except (FileNotFoundError, ForeignError):
                continue
            try:
                found = os.fstat(file)
                header, damage = _looked_at(file, digest, whole)
            finally:
                os.close(file)
            yield Item(digest.hex(), (found.st_dev, found.st_ino), seen.size, seen.used / 1e9, header, damage)

    def verify(self, remove: bool = False) -> Iterator[Item]:
        """Read every file whole; remove those that are damaged if asked to."""
        for item in self.items(whole=True):
            if remove and item.damage is not None:
                self._index.discard(bytes.fromhex(item.name), item.inode)
            yield item

    def foreign(self) -> int:
        """Return how many things in the folders of files are not the store's."""
        return sum(self._folder.scan(shard)[1] for shard in self._folder.shards())

    def gc(self, cap: int | None = None) -> Tidied:
        """Remove what dead writers left, and the least recently used files that nobody leases beyond ``cap`` bytes."""
        with self._index.locked() as index:
            living, removed = self._folder.living_parts()
            before = len(index.files())
            evicted = 0 if cap is None else index.evict(cap - living)
            return Tidied(removed, before - len(index.files()), evicted, index.total + living)

    def remove(self, names: Collection[str]) -> int:
        """Remove files by key, leased ones too, and return their bytes. Who reads one goes on reading."""
        with self._index.locked() as index:
            return sum(index.remove(bytes.fromhex(name)) for name in names)

    def names(self, begin: str = "") -> list[str]:
        """Return the keys of all files whose digits begin so."""
        return [digest.hex() for digest, _ in self._files() if digest.hex().startswith(begin)]

    def _files(self) -> Iterator[tuple[bytes, Seen]]:
        for shard in self._folder.shards():
            yield from sorted(self._folder.scan(shard)[0].items())


def _looked_at(file: int, digest: bytes, whole: bool) -> tuple[Header | None, str | None]:
    """Return a file's header, or what is wrong with the file."""
    try:
        opened = OpenFile(file)
        if opened.header.key.digest != digest:
            raise DamagedError(f"the file is of key {opened.header.key.name}")
        if whole:
            opened.check()
    except DamagedError as error:
        return None, str(error)
    return opened.header, None
