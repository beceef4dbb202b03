"""python -m jaxkv.generate, called in this process: what it reads, what it prints where, and what it refuses."""

from __future__ import annotations

import io
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_folder

from jaxkv import LLM, Completion, SamplingParams, cli, generate

# Names that scripts rely on. More may join them.
FIELDS = {
    "prompt", "text", "token_ids", "finish_reason", "prompt_tokens", "generated_tokens", "seed", "prefill_seconds",
    "decode_seconds", "compile_seconds", "blocks_now", "blocks_peak", "block_size", "pool_blocks", "pool_bytes",
    "model", "implementation",
}  # fmt: skip
# One shape, so that all these runs share what the first compiles.
SHAPE = ("--rows", "2", "--pool-blocks", "40", "--prefill-chunk", "16")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), rows=2, pool_blocks=40, prefill_chunk=16)


@pytest.fixture
def run(folder: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the command on the tiny model; return its exit code, stdout and stderr."""

    def run(*words: str, shape: tuple[str, ...] = SHAPE) -> tuple[int, str, str]:
        code = generate.main(["--model", str(folder), *shape, *words])
        out = capfd.readouterr()
        return code, out.out, out.err

    return run


@pytest.fixture
def in_tmp_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def json_of(run: Run, *words: str, **options: Any) -> list[dict[str, Any]]:
    code, out, _ = run("--json", *words, **options)
    assert code == 0
    return [json.loads(line) for line in out.split("\n")[:-1]]


def refused(result: tuple[int, str, str]) -> str:
    """Return the one line that a refusal is."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    (line,) = err.splitlines()
    return line.removeprefix("error: ")


# -- output ------------------------------------------------------------------------------------------------------------


def test_one_prompt_prints_its_text_and_a_footer(run: Run, llm: LLM) -> None:
    (done,) = llm.generate("the cat", SamplingParams(max_tokens=20))
    code, out, err = run("-p", "the cat", "-m", "20")
    assert (code, out) == (0, done.text + "\n")
    request, pool = err.splitlines()
    assert request.startswith(f"prompt: {done.prompt_tokens} tokens, ")
    assert f"; generated: {done.generated_tokens} tokens, " in request
    assert request.count(" tokens/s; ") == 2
    assert f"; blocks: {done.blocks_now} at the end, {done.blocks_peak} at the peak; finish: length" in request
    assert pool.startswith(f"pool: 40 blocks of 16 slots, {done.pool_bytes / 2**20:.1f} MiB; {done.model}; ")
    assert "attention: xla; loaded in " in pool
    assert ", compiled in " in pool


@pytest.mark.usefixtures("in_tmp_path")
def test_a_batch_is_printed_in_the_order_of_its_prompts(run: Run, llm: LLM) -> None:
    texts = ["the cat", "x", "one two", "日本"]
    counts = [40, 3, 20, 1]
    params = [SamplingParams(max_tokens=count, temperature=0.8, seed=9 + at) for at, count in enumerate(counts)]
    done = llm.generate(texts, params)
    expected = "".join(f"--- {at} of 4 ---\n{one.text}\n" for at, one in enumerate(done, 1))

    words = [word for text in texts for word in ("-p", text)]
    equal = llm.generate(texts, [SamplingParams(max_tokens=20, temperature=0.8, seed=9 + at) for at in range(4)])
    code, out, err = run(*words, "-m", "20", "--temp", "0.8", "--seed", "9")
    assert (code, out) == (0, "".join(f"--- {at} of 4 ---\n{one.text}\n" for at, one in enumerate(equal, 1)))
    assert [line[:4] for line in err.splitlines()] == ["[1] ", "[2] ", "[3] ", "[4] ", "pool"]

    lines = [{"prompt": text, "max_tokens": count} for text, count in zip(texts, counts, strict=True)]
    # In the same order although the short ones are done first.
    assert expected == run_file(run, lines, "--temperature", "0.8", "--seed", "9")[1]


def run_file(run: Run, lines: list[Any], *words: str) -> tuple[int, str, str]:
    path = Path("prompts.jsonl")
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return run("--prompts-file", str(path), *words)


def test_text_is_printed_as_it_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    """The first that is not done streams, and those behind it wait."""

    def delta(index: int, text: str, last: bool = False) -> Any:
        return types.SimpleNamespace(index=index, choice=0, text=text, completion=last or None)

    steps = [
        (delta(1, "b1"), ""),
        (delta(0, "a1"), "--- 1 of 3 ---\na1"),
        (delta(0, "a2"), "a2"),
        (delta(1, "b2"), ""),
        (delta(0, "", True), "\n--- 2 of 3 ---\nb1b2"),
        (delta(2, "c", True), ""),
        (delta(1, "b3", True), "b3\n--- 3 of 3 ---\nc\n"),
    ]

    def stream() -> Any:
        for at, (piece, _) in enumerate(steps):
            assert at == 0 or capsys.readouterr().out == steps[at - 1][1]
            yield piece

    assert len(generate._show_text(stream(), cli.Progress(False), [1, 1, 1])) == 3
    assert capsys.readouterr().out == steps[-1][1]


def test_json_is_a_line_a_request_and_nothing_else(run: Run, llm: LLM) -> None:
    code, out, err = run("--json", "-p", "the cat", "-p", "日本", "-m", "12", "--seed", "3")
    assert code == 0
    assert err == ""
    first, second = (json.loads(line) for line in out.splitlines())
    assert "日本" in out
    done = llm.generate(["the cat", "日本"], SamplingParams(max_tokens=12))
    for found, one, seed in zip((first, second), done, (3, 4), strict=True):
        assert set(found) >= FIELDS
        assert "logprobs" not in found
        for name in ("prompt", "text", "token_ids", "finish_reason", "prompt_tokens", "generated_tokens", "position"):
            assert found[name] == getattr(one, name)
        for name in ("blocks_now", "blocks_peak", "block_size", "pool_blocks", "pool_bytes", "model", "implementation"):
            assert found[name] == getattr(one, name)
        assert found["seed"] == seed
        assert min(found["prefill_seconds"], found["decode_seconds"], found["compile_seconds"]) > 0


def test_quiet_leaves_stderr_empty(run: Run) -> None:
    code, out, err = run("--quiet", "-p", "the cat", "-m", "300", "--ignore-eos", "--context", "300")
    assert (code, err) == (0, "")
    assert out


def test_log_probabilities(run: Run) -> None:
    (found,) = json_of(run, "-p", "a", "-m", "9", "--ignore-eos", "--logprobs")
    assert len(found["logprobs"]) == 9
    assert max(found["logprobs"]) < 0
    _, _, err = run("-p", "a", "-m", "9", "--ignore-eos", "--logprobs")
    assert f"; mean log probability: {sum(found['logprobs']) / 9:.3f}\n" in err
    assert "log probability" not in run("-p", "a", "-m", "9")[2]


def test_the_context_is_told_of_when_it_ends_a_text(run: Run) -> None:
    (found,) = json_of(run, "-p", "a", "-m", "999", "--ignore-eos")
    assert (found["finish_reason"], found["reached_context"]) == ("length", True)
    for words in (("--json",), ()):
        code, _, err = run("-p", "a", "-m", "999", "--ignore-eos", *words)
        assert code == 0
        assert "ended at the context of 256 tokens; --context N raises it, at your risk\n" in err
    assert "context" not in run("-p", "a", "-m", "9")[2]


def test_a_context_beyond_the_models_is_noted(run: Run) -> None:
    code, _, err = run("-p", "a", "-m", "300", "--ignore-eos", "--context", "300")
    assert code == 0
    assert err.startswith("note: --context 300 is beyond the 256 tokens that the model was made for\n")
    assert "ended at the context of 300" in err


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "other"),
    [
        (["-m", "7"], ["--max-tokens", "7"]),
        (["--max-new-tokens", "7"], ["--max-tokens", "7"]),
        (["--temp", "1.5", "-m", "9"], ["--temperature", "1.5", "-m", "9"]),
        (["--max-num-seqs", "2"], ["--rows", "2"]),
        (["--max-model-len", "256"], ["--context", "256"]),
        (["--ignore-chat-template"], ["--raw"]),
        (["--prompt", "b"], ["-p", "b"]),
        (["-q"], ["--quiet"]),
    ],
)
def test_aliases(words: list[str], other: list[str]) -> None:
    parse = generate.parser().parse_args
    assert parse(words) == parse(other) != parse([])


def test_every_sampling_option_reaches_the_request(run: Run, llm: LLM) -> None:
    options = {"temperature": 1.3, "top_p": 0.9, "top_k": 30, "min_p": 0.01, "seed": 5}
    params = SamplingParams(max_tokens=50, ignore_eos=True, **options)
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words += ["-m", "50", "--ignore-eos", "-p", "the cat"]
    (plain,) = llm.generate("the cat", params)
    assert json_of(run, *words)[0]["token_ids"] == plain.token_ids
    stop = plain.text[5:8]
    (found,) = json_of(run, *words, "--stop", "not there", "--stop", stop)
    assert found["text"] == plain.text.partition(stop)[0]
    assert found["finish_reason"] == "stop"
    (found,) = json_of(run, *words, "--raw")
    assert found["token_ids"] == llm.generate("the cat", params, raw=True)[0].token_ids
    (found,) = json_of(run, *words, "--system-prompt", "be brief")
    assert found["token_ids"] == llm.generate("the cat", params, system_prompt="be brief")[0].token_ids


def test_the_pool_has_the_size_and_the_dtype_that_are_asked_for(run: Run) -> None:
    words = ("-p", "a", "-m", "9")
    (found,) = json_of(run, *words)
    slots = found["pool_bytes"] // 41
    shape = ("--rows", "2", "--prefill-chunk", "16", "--pool-memory", f"{(slots * 41 + 1023) // 1024}K")
    (sized,) = json_of(run, *words, shape=shape)
    assert (sized["pool_blocks"], sized["pool_bytes"]) == (40, found["pool_bytes"])
    (half,) = json_of(run, *words, "--kv-dtype", "bfloat16")
    assert (half["pool_blocks"], half["pool_bytes"]) == (40, found["pool_bytes"] // 2)


# -- input -------------------------------------------------------------------------------------------------------------


def test_stdin_is_one_prompt(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    found = json_of(run, "-p", "first", "-p", "-", "-m", "2")
    assert [one["prompt"] for one in found] == ["first", "two\nlines\n"]
    assert "--prompt - is given twice" in refused(run("-p", "-", "-p", "-"))


@pytest.mark.usefixtures("in_tmp_path")
def test_a_plain_file_has_a_prompt_a_line(run: Run) -> None:
    Path("prompts.txt").write_bytes('\ufeffone\r\n\n  \ntwo\u2028more\n"three"'.encode())
    found = json_of(run, "--prompts-file", "prompts.txt", "-p", "zero", "-m", "2", "--seed", "4294967295")
    assert [one["prompt"] for one in found] == ["zero", "one", "two\u2028more", '"three"']
    assert [one["seed"] for one in found] == [2**32 - 1, 0, 1, 2]


@pytest.mark.usefixtures("in_tmp_path")
def test_a_jsonl_file_has_prompts_of_every_kind_with_options_of_their_own(run: Run, llm: LLM) -> None:
    messages = [{"role": "system", "content": "b"}, {"role": "user", "content": "a\u2028c"}]
    lines: list[Any] = [
        "a text",
        {"prompt": "a text", "max_tokens": 3, "seed": 70, "temperature": 1, "top_p": 0.5, "top_k": 9, "min_p": 0},
        {"messages": messages, "ignore_eos": True, "max_tokens": 30},
        {"prompt": messages, "stop": "q"},
        {"prompt": [5, 6, 7], "stop": ["q", "t"]},
        {"prompt": ""},
    ]
    code, out, _ = run_file(run, lines, "--json", "-m", "8", "--temp", "0.5")
    assert code == 0
    found = [json.loads(line) for line in out.split("\n")[:-1]]
    common = {"max_tokens": 8, "temperature": 0.5}
    own = [
        {"seed": at, **common, **({k: v for k, v in line.items() if k not in ("prompt", "messages")} if at else {})}
        for at, line in enumerate(lines)
    ]
    prompts = ["a text", "a text", messages, messages, [5, 6, 7], ""]
    done: list[Completion] = llm.generate(prompts, [SamplingParams(**one) for one in own])
    assert [one["prompt"] for one in found] == prompts
    assert [one["seed"] for one in found] == [0, 70, 2, 3, 4, 5]
    assert [one["token_ids"] for one in found] == [one.token_ids for one in done]


@pytest.mark.usefixtures("in_tmp_path")
def test_objects_are_known_by_their_braces_whatever_the_file_is_called(run: Run) -> None:
    Path("prompts").write_text('\n {"prompt": "a"}\n"b"\n')
    assert [one["prompt"] for one in json_of(run, "--prompts-file", "prompts", "-m", "1")] == ["a", "b"]


KINDS = "prompt must be a text or a list of token ids, and messages a list of objects with role and content"


@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "is not JSON: Expecting"),
        ("17", "must be a string, or an object with either prompt or messages"),
        ("[1, 2]", "must be a string, or an object"),
        ("{}", "must be a string, or an object"),
        ('{"prompt": "a", "messages": []}', "must be a string, or an object"),
        ('{"prompt": 5}', KINDS),
        ('{"prompt": []}', KINDS),
        ('{"prompt": null}', KINDS),
        ('{"prompt": [1, true]}', KINDS),
        ('{"prompt": [1.5]}', KINDS),
        ('{"messages": "a"}', KINDS),
        ('{"messages": []}', KINDS),
        ('{"messages": [1]}', KINDS),
        ('{"messages": [{"role": "user"}]}', KINDS),
        ('{"messages": [{"role": "user", "content": 5}]}', KINDS),
        (
            '{"prompt": "a", "maxtokens": 5, "best_of": 2}',
            "has best_of, maxtokens; besides the prompt a line may set max",
        ),
        ('{"prompt": "a", "max_tokens": 2.5}', "max_tokens=2.5 has the wrong type"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens=true has the wrong type"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens=0 must be at least 1"),
        ('{"prompt": "a", "temperature": "hot"}', 'temperature="hot" has the wrong type'),
        ('{"prompt": "a", "temperature": NaN}', "temperature=nan must be 0"),
        ('{"prompt": "a", "seed": -1}', "seed=-1 must be from 0 to"),
        ('{"prompt": "a", "ignore_eos": "no"}', 'ignore_eos="no" has the wrong type'),
        ('{"prompt": "a", "stop": null}', "stop=null has the wrong type"),
        ('{"prompt": "a", "stop": ["b", 5]}', 'stop=["b", 5] must be a text or a list of texts'),
        ('{"prompt": "a", "stop": ""}', "a stop string is empty"),
    ],
)
def test_a_bad_line_is_refused_with_its_file_and_number(run: Run, line: str, message: str) -> None:
    Path("bad.jsonl").write_text(f'"good"\n\n{line}\n')
    error = refused(run("--prompts-file", "bad.jsonl"))
    assert error.startswith("bad.jsonl:3")
    assert message in error


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is no prompt; give --prompt TEXT (- reads stdin) or --prompts-file FILE"),
        (["--prompts-file", "empty"], "there is no prompt"),
        (["--prompts-file", "absent"], "No such file or directory: 'absent'"),
        (["--prompts-file", "."], "Is a directory"),
        (["--prompts-file", "latin"], "latin is not text in utf-8: invalid continuation byte at byte 3"),
        (["-p", "a", "-m", "0"], "max_tokens=0 must be at least 1"),
        (["-p", "a", "--temp", "-1"], "temperature=-1.0 must be 0 (greedy) or above"),
        (["-p", "a", "--top-p", "0"], "top_p=0.0 must be above 0"),
        (["-p", "a", "--seed", "-1"], "seed=-1 must be from 0"),
        (["-p", "a", "--stop", ""], "a stop string is empty"),
        (["-p", "a\udcff"], r"the text has '\udcff', which is no character"),
        (["-p", "a", "--raw", "--system-prompt", "b"], "a raw prompt has no place for a system prompt"),
        (["-p", "a", "--context", "9"], "prompt 1 of 1: the prompt has 21 tokens and the context is 9"),
        (["-p", "a", "--context", "0"], "context=0 must be at least 1"),
        (["-p", "a", "--block-size", "5"], "block_size=5 must be a power of two"),
        (["-p", "a", "--implementation", "cuda"], "implementation='cuda' is unknown; one of xla, triton"),
        (["-p", "a", "-p", "b", "-m", "200", "--pool-blocks", "9"], "needs 14 blocks of 16 for 21 prompt tokens"),
        (["-p", "a", "-m", "200", "--pool-blocks", "9"], "max_tokens=200, and the pool has 9; lower max_tokens"),
        (["-p", "a", "--model", "./absent"], "model ./absent does not exist; give a folder, a .gguf file or a hub id"),
        (["-p", "a", "--model", "absent"], "model 'absent' is neither an existing path nor a hub id"),
        (["-p", "a", "--model", "empty"], "empty is neither a folder nor a .gguf file"),
        (["-p", "a", "--model", "."], "has no config.json"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_code_2(run: Run, words: list[str], message: str) -> None:
    Path("empty").touch()
    Path("latin").write_bytes("café\n".encode("latin-1"))
    assert message in refused(run(*words))


@pytest.mark.parametrize(
    ("size", "message"),
    [("lots", "'lots' is not a memory size; write 512M, 1.5G"), ("1K", "pool_memory=1024 bytes hold no block")],
)
def test_a_bad_pool_memory_is_refused(run: Run, size: str, message: str) -> None:
    assert message in refused(run("-p", "a", "--pool-memory", size, shape=()))


def test_an_implementation_that_is_not_for_this_machine_is_refused_by_name(run: Run) -> None:
    assert "triton" in refused(run("-p", "a", "--implementation", "triton"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-tokens", "x"], "argument --max-tokens/--max-new-tokens/-m: invalid int value: 'x'"),
        (["--pool-blocks", "9", "--pool-memory", "1G"], "not allowed with argument"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--prom", "a"], "unrecognized arguments: --prom"),
        (["a prompt"], "unrecognized arguments: a prompt"),
    ],
)
def test_bad_options_exit_with_argparses_own_2(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        generate.main(words)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
