"""Compaction on the demo model, by the command a user types."""

from __future__ import annotations

import json

import pytest

from jaxkv import LLM, SamplingParams, generate
from jaxkv.compression import CompressionConfig

PROMPT = "Write a very long story about a lighthouse keeper."


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    code = generate.main(["--prompt", PROMPT, "--json", *options])
    out, err = capsys.readouterr()
    return code, out, err


def test_4096_tokens_in_a_pool_of_40_blocks(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    options = ["--ignore-eos", "--max-tokens", "4096", "--pool-blocks", "40"]
    code, out, _ = run(capsys, *options, "--method", "triattention", "--budget", "384", "--temperature", "0.7")
    assert code == 0
    report = json.loads(out)
    assert report["generated_tokens"] == len(report["token_ids"]) == 4096
    assert report["position"] == report["prompt_tokens"] + 4095
    assert report["compactions"] == (report["position"] - 384) // 128
    assert report["tokens_evicted"] == report["position"] - report["length"] == 128 * report["compactions"]
    assert report["blocks_returned"] == 8 * report["compactions"]
    assert report["blocks_peak"] == 32
    assert report["blocks_peak_uncompressed"] == -(-report["position"] // 16)
    assert report["prefill"] == "dense"
    # Refused without, with the two numbers, before anything runs.
    code, out, err = run(capsys, *options)
    assert (code, out) == (2, "")
    assert f"needs {report['blocks_peak_uncompressed']} blocks" in err
    assert "the pool has 40" in err


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(rows=1, compression=CompressionConfig(method="triattention", budget=256))


def test_a_budget_above_the_request_changes_no_token(llm: LLM) -> None:
    params = SamplingParams(max_tokens=96, logprobs=True)
    (plain,) = llm.generate(PROMPT, params, compression=CompressionConfig())
    (kept,) = llm.generate(PROMPT, params, compression=CompressionConfig(method="triattention", budget=1.0))
    assert (kept.token_ids, kept.logprobs) == (plain.token_ids, plain.logprobs)
    assert kept.compactions == 0


def test_the_answer_survives_a_compaction(llm: LLM) -> None:
    """The same text up to the first compaction, and text that is still likely to the model after it."""
    params = SamplingParams(max_tokens=450, ignore_eos=True, logprobs=True)
    (plain,) = llm.generate(PROMPT, params, compression=CompressionConfig())
    (kept,) = llm.generate(PROMPT, params)
    first = 256 + 128 - kept.prompt_tokens + 1
    assert kept.token_ids[:first] == plain.token_ids[:first]
    assert kept.compactions == 1
    assert kept.logprobs is not None
    assert plain.logprobs is not None
    after = sum(kept.logprobs[first:]) / len(kept.logprobs[first:])
    assert after > sum(plain.logprobs[first:]) / len(plain.logprobs[first:]) - 0.5


def test_online_statistics_need_no_file() -> None:
    online = LLM(rows=1, compression=CompressionConfig(method="triattention", budget=256, stats="online"))
    (done,) = online.generate(PROMPT, SamplingParams(max_tokens=450, ignore_eos=True))
    assert done.compactions == 1
    assert len(done.token_ids) == 450
