"""``python -m jaxkv.serve`` in a process of its own: what it says, what it refuses, how it ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
import tiny_folder

from jaxkv import serve

ROOT = Path(__file__).parents[1]
SIZES = ("--rows", "2", "--pool-blocks", "700", "--block-size", "4", "--prefill-chunk", "32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "tiny-model"
    made.mkdir()
    return tiny_folder.make(made, max_position_embeddings=20_000)


@contextlib.contextmanager
def running(*words: str | Path, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """Start the command; yield it, its address and what it had said when it began to listen."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxkv.serve", "--port", "0", *SIZES, *words],
        cwd=ROOT,
        env=os.environ | environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"http://\S+", line):
                break
        else:
            raise AssertionError("".join(said))
        wait_until_it_listens(found[0])
        yield process, found[0], said
    finally:
        process.kill()
        process.communicate()


def wait_until_it_listens(url: str) -> None:
    for _ in range(200):
        with contextlib.suppress(httpx.TransportError):
            assert httpx.get(url + "/health").status_code == 200
            return
        time.sleep(0.05)
    raise AssertionError("it does not listen")


def test_it_says_what_it_serves_and_drains_at_sigterm(folder: Path) -> None:
    compression = ("--method", "knorm", "--budget", "128", "--interval", "32", "--window", "16")
    with running("--model", folder, *compression, JAXKV_API_KEY="from-outside") as (process, url, said):
        text = "".join(said)
        assert "model: tiny-model; context 20000" in text
        assert str(folder) not in text
        assert "pool: 700 blocks of 4 slots, 2800 tokens" in text
        assert "method: knorm, budget 128, compacted every 32 tokens" in text
        assert httpx.get(url + "/v1/models").status_code == 401
        headers = {"Authorization": "Bearer from-outside"}
        (model,) = httpx.get(url + "/v1/models", headers=headers).json()["data"]
        assert model["id"] == "tiny-model"

        body = {"model": "tiny-model", "prompt": "a secret", "max_tokens": 600, "ignore_eos": True, "stream": True}
        lines: list[str] = []
        begun = threading.Event()

        def read() -> None:
            with httpx.stream("POST", url + "/v1/completions", json=body, headers=headers, timeout=60) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    begun.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(20)
        process.send_signal(signal.SIGTERM)
        reader.join(60)
        assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"
        with pytest.raises(httpx.TransportError):
            httpx.get(url + "/health")
        _, rest = process.communicate(timeout=30)
        assert process.returncode == 0
        assert rest.strip() == "stopped"


def test_a_stream_that_does_not_end_is_cut_off_when_the_time_to_drain_is_over(folder: Path) -> None:
    with running("--model", folder, "--drain-timeout", "1", "--method", "knorm", "--budget", "256") as (
        process,
        url,
        _,
    ):
        body = {"model": "tiny-model", "prompt": "a secret", "max_tokens": 19_000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as answer:
            chunks = answer.iter_raw()
            next(chunks)
            process.send_signal(signal.SIGTERM)
            begun = time.monotonic()
            _, rest = process.communicate(timeout=30)
        assert time.monotonic() - begun < 15
        assert process.returncode == 0
        # What is logged has neither the prompt nor a traceback.
        assert "Traceback" not in rest and "secret" not in rest and ".py" not in rest


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--api-key", ""], "API key"),
        (["--port", "70000"], "--port 70000"),
        (["--host", "not an address"], "cannot be resolved"),
        (["--max-body", "nothing"], "memory size"),
        (["--max-n", "0"], "n=0"),
        (["--max-n", "1000"], "at most 128"),
        (["--request-timeout", "0"], "request_seconds=0"),
        (["--drain-timeout", "0"], "--drain-timeout 0"),
        (["--budget", "9"], "--budget is for a method"),
        (["--model", "./absent"], "absent"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert serve.main(["--port", "0", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_a_port_that_is_taken_is_refused_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert serve.main(["--model", "./absent", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


def test_it_stays_on_this_machine_unless_told() -> None:
    args = serve.parser().parse_args([])
    assert args.host == "127.0.0.1"
    hosts = ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "a.b")
    assert [serve._is_loopback(host) for host in hosts] == [True] * 3 + [False] * 3
    assert serve._name(args) == "SmolLM2-135M-Instruct"
