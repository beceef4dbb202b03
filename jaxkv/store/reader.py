"""Reading files layer by layer, in the background."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from jaxkv.store.counters import Tally
from jaxkv.store.disk import OpenFile
from jaxkv.store.entry import Entry
from jaxkv.store.file_format import DamagedError


class Load:
    """An entry and the file that it comes from.

    Attributes:
      pinned: whether the lease holds the file too.
      holders: of the file: its reader, and the lease if pinned. The last one closes it; guarded by the store's lock.
      finished: whether the reader is done with it.
    """

    def __init__(self, entry: Entry, file: OpenFile) -> None:
        self.entry, self.file = entry, file
        self.buffer = memoryview(entry.buffer)  # type: ignore[arg-type]
        self.pinned = False
        self.holders = 1
        self.finished = False


def read(
    loads: Sequence[Load],
    tally: Tally,
    wanted: Callable[[Load], bool],
    finish: Callable[[Load, DamagedError | OSError | None], None],
) -> None:
    """Read layer 0 of all files, then layer 1 of all, as a forward pass wants them.

    Args:
      loads: what to read.
      tally: where bytes and seconds are counted.
      wanted: whether a load is worth going on with.
      finish: called once for each load, with what was wrong with it, if anything.
    """
    begin, done = time.perf_counter(), 0
    try:
        for layer in range(max(load.entry.layout.layers for load in loads)):
            for load in loads:
                if load.finished:
                    continue
                fault: DamagedError | OSError | None = None
                try:
                    if wanted(load):
                        done += load.file.read_layer(load.buffer, layer)
                        load.entry.advance()
                except (DamagedError, OSError) as error:
                    fault = error
                if fault is not None or load.entry.complete or not wanted(load):
                    load.finished = True
                    finish(load, fault)
    finally:
        # Whatever happened, nobody waits for a layer that does not come.
        for load in loads:
            if not load.finished:
                load.finished = True
                finish(load, None)
        tally.add(read_bytes=done, load_seconds=time.perf_counter() - begin)
