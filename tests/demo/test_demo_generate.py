"""The command on the demo model, each time in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROMPT = "What is the capital of France?"
MOST_SECONDS = 10


def start(*words: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "jaxkv.generate", *words],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def generate(*words: str) -> list[dict[str, Any]]:
    out, err = (process := start("--json", *words)).communicate()
    assert (process.returncode, err) == (0, "")
    return [json.loads(line) for line in out.split("\n")[:-1]]


def test_the_demo_model_knows_the_capital_of_france() -> None:
    (found,) = generate("--prompt", PROMPT, "--max-tokens", "32")
    assert "Paris" in found["text"]
    assert found["finish_reason"] == "stop"
    assert found["generated_tokens"] == len(found["token_ids"]) < 32
    assert found["position"] == found["prompt_tokens"] + found["generated_tokens"] - 1


def test_a_seeded_batch_is_the_same_in_every_process() -> None:
    words = ("-p", PROMPT, "-p", "Write a line about the sea.", "--temp", "0.7", "--seed", "0", "-m", "24")
    first, second = generate(*words), generate(*words)
    assert [one["seed"] for one in first] == [0, 1]
    for one, other in zip(first, second, strict=True):
        assert (one["text"], one["token_ids"]) == (other["text"], other["token_ids"])
        assert one["text"]


def test_cold_start_with_a_warm_compilation_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("-p", PROMPT, "-m", "8")
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    out, err = start(*words, **cache).communicate()
    assert any(tmp_path.iterdir()), err

    begin = time.perf_counter()
    with start(*words, **cache) as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - begin
        assert first + process.stdout.read() == out
        footer = process.stderr.read()
    loading, compiling = (float(found) for found in re.findall(r"(?:loaded|compiled) in ([\d.]+) s", footer))
    tokens, speed = (float(found) for found in re.findall(r"prompt: (\d+) tokens, ([\d.]+) tokens/s", footer)[0])
    prefill = tokens / speed
    rest = seconds - loading - compiling - prefill
    with capsys.disabled():
        print(
            f"\nfrom start to first token: {seconds:.1f} s (loading {loading:.1f}, programs from the cache "
            f"{compiling:.1f}, prefill {prefill:.1f}, imports and all else {rest:.1f})"
        )
    assert seconds < MOST_SECONDS
