"""Clients that mean harm, or no good, or are just slow: the engine lives on, and nothing is told that should not be."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
import tiny_folder
from serving import MODEL, Served, eventually, served

from jaxkv import LLM
from jaxkv.server import errors
from jaxkv.server.limits import Limits

KEY = "a-key-of-this-test"
SECRET = "xyzzy-of-the-prompt"
LIMITS = Limits(body_bytes=100_000, request_seconds=1.0, write_seconds=1.0)
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tiny_folder.make(tmp_path_factory.mktemp("tiny"), max_position_embeddings=20_000)
    return LLM(str(folder), rows=4, pool_blocks=5200, block_size=4, prefill_chunk=32)


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Served]:
    with served(llm, limits=LIMITS) as running:
        yield running


def body(**changes: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "abc", "max_tokens": 2, "ignore_eos": True, **changes}).encode()


def request(content: bytes, length: int | None = None) -> bytes:
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content) if length is None else length}\r\n\r\n".encode() + content


def connect(server: Served) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", server.port))
    made.settimeout(10)
    return made


def read_all(connection: socket.socket) -> bytes:
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def works(server: Served) -> bool:
    answer = server.post(PATH, content=body(), headers={"Content-Type": "application/json"})
    return answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2


# -- bodies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe\x00",
        b'{"model": "tiny", "prompt": "\xff\xfe"}',
        b"[" * 50_000,
        b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "a", "temperature": Infinity}',
        b'{"model": "tiny", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"model": "tiny", "prompt": "a", "max_tokens": 1e400}',
        b'{"model": "tiny", "model": 7, "prompt": "a"}',
    ],
    ids=lambda content: repr(content[:30]),
)
def test_bad_bodies_are_400(server: Served, content: bytes) -> None:
    answer = server.post(PATH, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert works(server)


def test_a_body_of_100_mb_is_refused_before_it_is_read(server: Served) -> None:
    answer = server.post(PATH, content=b" " * 10**8, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert "100000 bytes" in answer.json()["error"]["message"]

    def endless() -> Iterator[bytes]:
        for _ in range(10_000):
            yield b" " * 10_000

    # Its length is not said beforehand. The connection may be closed under a client that goes on and on.
    with contextlib.suppress(httpx.TransportError):
        assert server.post(PATH, content=endless()).status_code == 413
    assert works(server)
    for length in ("-5", "9" * 30, "five"):
        with connect(server) as raw:
            raw.sendall(request(b"", 0).replace(b"Length: 0", f"Length: {length}".encode()))
            assert read_all(raw)[9:12] in (b"400", b"413")
    assert works(server)


def test_what_is_no_http_is_400(server: Served) -> None:
    with connect(server) as raw:
        raw.sendall(b"\x16\x03\x01\x02\x00\x01\r\n\r\n")
        assert read_all(raw).startswith(b"HTTP/1.1 400")
    with connect(server) as raw:
        raw.sendall(b"GET /" + b"a" * 200_000)
        assert read_all(raw)[9:12] in (b"400", b"")
    assert works(server)


# -- slow and idle -----------------------------------------------------------------------------------------------------


def test_a_thousand_idle_connections_are_closed_and_hold_nobody_up(server: Served) -> None:
    idle = [connect(server) for _ in range(1000)]
    assert works(server)
    begun = time.monotonic()
    try:
        for connection in idle:
            assert connection.recv(1) == b""
        assert time.monotonic() - begun < 8
    finally:
        for connection in idle:
            connection.close()
    assert works(server)


def test_a_request_that_comes_in_drop_by_drop_is_not_waited_for(server: Served) -> None:
    whole = request(body())
    for sent in (10, len(whole) - 10):
        with connect(server) as raw:
            raw.sendall(whole[:sent])
            begun = time.monotonic()
            for byte in whole[sent : sent + 8]:
                time.sleep(0.05)
                raw.sendall(bytes([byte]))
            answer = read_all(raw)
            assert time.monotonic() - begun < 5
            assert answer == b"" or answer.startswith(b"HTTP/1.1 408")
    assert works(server)


def test_a_body_that_was_refused_is_not_read_for_ever(server: Served) -> None:
    with connect(server) as raw:
        raw.sendall(request(b"x", 10**9))
        begun = time.monotonic()
        assert read_all(raw).startswith(b"HTTP/1.1 413")
        assert time.monotonic() - begun < 5


def test_a_reader_that_does_not_read_is_let_go(server: Served) -> None:
    # Buffers of both sides are small, or the whole text would fit in there.
    server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", server.port))
        aborted = server.metric("vllm:request_success_total", finished_reason="abort")
        raw.sendall(request(body(max_tokens=19_000, stream=True, logprobs=0)))
        assert eventually(lambda: server.engine.blocks.in_use > 0)
        assert eventually(lambda: not server.engine.has_work, 20)
        assert server.holds_nothing()
        assert server.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1
    assert works(server)


# -- clients that go ---------------------------------------------------------------------------------------------------


def test_200_clients_vanish_in_the_middle_of_a_stream(server: Served) -> None:
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")

    def vanish(at: int) -> None:
        with connect(server) as raw:
            raw.sendall(request(body(max_tokens=15_000, stream=True, n=1 + at % 3, seed=at)))
            if at % 4:
                assert raw.recv(1000).startswith(b"HTTP/1.1 200")
            if at % 2:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    for first in range(0, 200, 8):
        threads = [threading.Thread(target=vanish, args=(at,)) for at in range(first, first + 8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert server.holds_nothing(1.0)
    assert eventually(lambda: server.metric("vllm:num_requests_running") == 0, 1)
    assert server.metric("vllm:request_success_total", finished_reason="abort") > aborted + 100
    assert not server.service.worker._live and not server.service.worker._calls
    assert works(server)


def test_a_client_that_does_not_stream_is_missed_as_well(server: Served) -> None:
    with connect(server) as raw:
        raw.sendall(request(body(max_tokens=15_000)))
        assert eventually(lambda: server.engine.blocks.in_use > 0)
    assert server.holds_nothing(1.0)


# -- the key -----------------------------------------------------------------------------------------------------------


def test_without_the_key_there_is_nothing_but_health_and_an_empty_page(llm: LLM, server: Served) -> None:
    # The engine is served twice, and the first of the two is not asked meanwhile.
    del server
    with served(llm, api_key=KEY) as locked:
        paths = ["/v1/models", "/metrics", "/pool", "/openapi.json", "/nothing"]
        wrong = ["", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY, "Bearer é"]
        for header in wrong:
            headers = {"Authorization": header.encode()} if header else {}
            for path in paths:
                answer = httpx.get(locked.url + path, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
            answer = locked.post(PATH, content=body(), headers={**headers, "Content-Type": "application/json"})
            assert answer.status_code == 401
        for path in ("/health", "/", "/page.js"):
            answer = httpx.get(locked.url + path)
            assert answer.status_code == 200
            assert MODEL not in answer.text
        assert [one.id for one in locked.client(KEY).models.list()] == [MODEL]
        right = {"Authorization": f"Bearer {KEY}"}
        assert all(httpx.get(locked.url + path, headers=right).status_code == 200 for path in paths[:-1])
        # Refused by its headers alone, unread.
        with connect(locked) as raw:
            raw.sendall(request(b"x", 10**9))
            assert raw.recv(1000).startswith(b"HTTP/1.1 401")


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxkv.server import guard

    compared: list[tuple[bytes, bytes]] = []
    real = guard.hmac.compare_digest
    monkeypatch.setattr(guard.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    made = guard.Guard(lambda *_: None, LIMITS, KEY)  # type: ignore[arg-type, return-value]
    for given in ("", "k", KEY * 9):
        with pytest.raises(errors.ApiError):
            made._check_key("/v1/models", guard.Headers({"authorization": f"Bearer {given}"}))
    assert [len(a) == len(b) == 32 for a, b in compared] == [True] * 3


# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_fault_tells_no_one_of_prompts_paths_or_code(
    llm: LLM, server: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError(SECRET)

    monkeypatch.setattr(type(server.service.reader), "requests", broken)
    with caplog.at_level(logging.WARNING):
        answer = server.post(PATH, json={"model": MODEL, "prompt": SECRET})
        # The client has its answer first.
        assert eventually(lambda: bool(caplog.records))
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    said = answer.text + "".join(record.getMessage() + str(record.exc_text or "") for record in caplog.records)
    assert "KeyError in broken" in said
    assert SECRET not in said and ".py" not in said and "Traceback" not in said
    assert not any(record.exc_info for record in caplog.records)
    monkeypatch.undo()
    assert works(server)


def test_refusals_do_not_repeat_what_was_sent(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for wrong in ({"max_tokens": SECRET}, {"prompt": [SECRET, 1]}, {"stop": [SECRET] * 99}, {"n": 10**6}):
            answer = server.post(PATH, json={"model": MODEL, "prompt": SECRET, **wrong})
            assert answer.status_code == 400
            assert SECRET not in answer.text
    assert not caplog.records


def test_a_broken_engine_is_not_healthy_any_more(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(llm) as server:
        failed = threading.Event()
        server.service.worker._failed = failed.set

        def broken(*_: Any) -> None:
            raise RuntimeError(SECRET)

        monkeypatch.setattr(server.engine, "step", broken)
        answer = server.post(PATH, content=body(), headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        assert failed.wait(5)
        assert SECRET not in answer.text
        for path in ("/health", "/pool"):
            assert httpx.get(server.url + path).status_code == 503
        assert server.post(PATH, content=body(), headers={"Content-Type": "application/json"}).status_code == 503
        for request_id in server.engine.queued:
            server.engine.cancel(request_id)
