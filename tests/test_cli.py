"""What the commands share: exit codes and tracebacks, the compilation cache, and progress; partly in real processes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_folder

import pallas_kernels
from jaxkv import RequestError, SamplingParams, cli, decode, generate, prompts

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Long enough to be decoding still when a signal comes.
    return tiny_folder.make(tmp_path_factory.mktemp("tiny"), max_position_embeddings=20_000)


# -- exit codes --------------------------------------------------------------------------------------------------------


def fail(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    "command",
    [
        lambda: SamplingParams(max_tokens=0),
        lambda: pallas_kernels.candidates("cuda"),  # type: ignore[arg-type]
        lambda: prompts._json_line("{}", "file:1"),
    ],
)
def test_what_a_module_of_ours_raises_is_one_line(
    capsys: pytest.CaptureFixture[str], command: Callable[[], Any]
) -> None:
    assert cli.run(command) == cli.BAD_USAGE == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1


def broken_inside_jax() -> None:
    jax.jit(lambda x: jnp.broadcast_to(x, (3,)))(jnp.zeros(2))


def broken_inside_numpy() -> None:
    np.broadcast_to(np.zeros(2), (3,))


def broken_in_c() -> None:
    # NumPy's C code has no frame: the innermost is this one.
    np.zeros(2) + np.zeros(3)


@pytest.mark.parametrize("broken", [broken_inside_jax, broken_inside_numpy, broken_in_c])
def test_a_fault_inside_a_library_keeps_its_traceback(
    broken: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(broken.__globals__, "__name__", "jaxkv.fake")
    with pytest.raises(ValueError, match="broadcast"):
        cli.run(broken)


def test_a_fault_inside_a_step_keeps_its_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode, "prefill_chunk", lambda *_, **__: np.zeros(2) + np.zeros(3))
    with pytest.raises(ValueError, match="could not be broadcast"):
        generate.main(["--model", str(folder), "-p", "a", "-m", "9"])
    assert capsys.readouterr().out == ""


def test_other_errors() -> None:
    def missing() -> None:
        Path("./absent").read_text()

    assert cli.run(lambda: None) == 0
    assert cli.run(lambda: 7) == 7
    assert cli.run(missing) == 2
    for error in (RuntimeError("ours or not"), TypeError("a fault"), RequestError("raised by a test, not by us")):
        with pytest.raises(type(error)):
            cli.run(fail(error))


def test_output_is_utf8_whatever_the_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert cli.run(lambda: print("naïve 日本 😀", flush=True)) == 0
    assert raw.getvalue().decode() == "naïve 日本 😀\n"


def test_control_c_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(fail(KeyboardInterrupt())) == cli.INTERRUPTED == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


# -- the compilation cache ---------------------------------------------------------------------------------------------


@pytest.fixture
def restored() -> Iterator[None]:
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("restored")
def test_compiled_programs_are_kept_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cli.keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "jaxkv" / "xla")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/nowhere/somebody")
    assert cli.cache_folder() == Path("/nowhere/somebody/.cache/jaxkv")


@pytest.mark.usefixtures("restored")
def test_a_cache_that_the_user_has_placed_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    cli.keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir == before


# -- processes ---------------------------------------------------------------------------------------------------------


def start(folder: Path, *words: str, **options: Any) -> subprocess.Popen[bytes]:
    command = (sys.executable, "-m", "jaxkv.generate", "--model", str(folder), *words)
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "200", "PYTHONWARNINGS": "default"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **{**streams, **options})


def test_help_and_bad_options_do_not_wait_for_jax() -> None:
    code = "import sys, jaxkv.generate as g; g.parser().format_help(); assert not {'jax', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_control_c_while_decoding(folder: Path) -> None:
    with start(folder, "-p", "the cat", "-m", "19000", "--ignore-eos") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.stderr.read().decode() == "\ninterrupted\n"
    assert process.returncode == 130


def test_a_reader_that_goes_away_is_no_fault(folder: Path) -> None:
    with start(folder, "-p", "the cat", "-m", "19000", "--ignore-eos") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.parametrize("as_json", [False, True])
def test_progress_on_a_terminal_leaves_stdout_and_the_footer_alone(folder: Path, as_json: bool) -> None:
    here, there = pty.openpty()
    words = ("-p", "the cat", "-p", "x", "-m", "20", *(("--json",) if as_json else ()))
    with start(folder, *words, stderr=there) as process:
        os.close(there)
        shown = b""
        # Linux answers the end of a terminal with an error.
        with contextlib.suppress(OSError):
            while piece := os.read(here, 4096):
                shown += piece
        os.close(here)
        assert process.stdout is not None
        out = process.stdout.read().decode()
    assert process.returncode == 0
    assert b"loading the model" in shown
    assert b"compiling" in shown
    if as_json:
        assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["the cat", "x"]
        assert b"texts, " in shown
        assert b"token_ids" not in shown
        # The last thing is to take the line away.
        assert shown.endswith(b"\x1b[2K")
    else:
        assert [line[:3] for line in out.splitlines()][::2] == ["---", "---"]
        first, second, pool = shown.decode().split("\x1b[2K")[-1].splitlines()
        assert first.startswith("[1] prompt: 22 tokens, ")
        assert second.startswith("[2] prompt: 21 tokens, ")
        assert pool.startswith("pool: ") and pool.endswith(" s")
