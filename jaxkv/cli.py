"""What the ``python -m jaxkv.*`` commands share: exit codes, the compilation cache, progress."""

from __future__ import annotations

import dis
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.status import Status

BAD_USAGE = 2
INTERRUPTED = 130


def cache_folder() -> Path:
    """Return the user's cache folder for this project."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxkv"


def keep_compiled_programs() -> None:
    """Switch JAX's persistent compilation cache on, unless the user has placed it or switched it off.

    A program that takes seconds to compile is loaded in tenths of one the next time.
    """
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def run(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code: 2 for what the user can mend, 130 for Ctrl-C.

    An error that this library raises on purpose names the value and the way out, so it is shown without a traceback,
    and so is a file that cannot be read. Anything else is a fault of ours and keeps its traceback. What is printed is
    UTF-8, wherever it goes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    try:
        return command() or 0
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`| head`). Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_USAGE
    except (ValueError, NotImplementedError) as error:
        if not _is_ours(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return BAD_USAGE


def _is_ours(error: BaseException) -> bool:
    """Whether a ``raise`` in a module of this project made the error, rather than something that it called.

    What C code raises (NumPy's, say) has no frame of its own, so the caller's frame must stand at a ``raise``.
    """
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or last.tb_frame.f_code.co_code[last.tb_lasti] != dis.opmap["RAISE_VARARGS"]:
        return False
    module = last.tb_frame.f_globals.get("__name__", "")
    return module == "__main__" or module.partition(".")[0] in ("jaxkv", "pallas_kernels")


class Progress:
    """One line on stderr that says what is going on, when stderr is a terminal and the user wants it.

    While it stands, rich leads all that is printed to stderr, stdout too. So close it before printing.
    """

    def __init__(self, wanted: bool = True) -> None:
        self._wanted = wanted and sys.stderr.isatty()
        self._status: Status | None = None

    def say(self, text: str) -> None:
        """Show the line, or replace it."""
        if not self._wanted:
            return
        if self._status is None:
            from rich.console import Console

            self._status = Console(stderr=True).status("")
            self._status.start()
        self._status.update(text)

    def close(self) -> None:
        """Take the line away, until something is said again."""
        if self._status is not None:
            self._status.stop()
            self._status = None
