"""Query statistics from text, against means over a plain float64 forward pass, and the command that writes them."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import counted
from tiny_tokenizers import CORPUS, byte_level

from jaxkv import calibrate, calibration, cli, corpus, rope, stats_packaged
from jaxkv import weights as weights_module
from jaxkv.calibration import Concentration
from jaxkv.config import ModelConfig, RopeConfig
from jaxkv.model import Weights, init_weights
from jaxkv.stats import QueryStats, StatsInfo

PLAIN = ModelConfig("llama", 97, 48, 64, 2, 6, 2, 8, context=64, tied_head=True, name="plain")
# As Qwen3 with Qwen2's biases, and a rotary embedding whose s is not 1: s is no part of a query before RoPE.
NORMED = dataclasses.replace(
    PLAIN, qk_norm=True, qkv_bias=True, name="normed", rope=RopeConfig(kind="yarn", factor=4, original_context=32)
)
ARRAYS = ("q_mean_real", "q_mean_imag", "q_abs_mean")


def drawn(config: ModelConfig) -> Weights:
    return jax.tree.map(jnp.asarray, init_weights(config, seed=5))


def windows_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, PLAIN.vocab_size, length).tolist() for length in lengths]


def norm64(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def turned(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Half-split RoPE of [T, heads, D]."""
    phase = np.arange(len(x))[:, None, None] * rope.inverse_frequencies(config.rope, config.head_dim)
    half = x.shape[-1] // 2
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * phase) * rope.attention_scaling(config.rope)
    return np.concatenate([z.real, z.imag], axis=-1)


def queries(weights: Weights, config: ModelConfig, tokens: list[int], with_norm: bool = True) -> np.ndarray:
    """Queries before RoPE of one text by a plain forward pass in float64: [L, T, H, D].

    ``with_norm`` False gives what projecting again without q-norm would give; the forward pass itself is right.
    """
    w = jax.tree.map(lambda array: np.asarray(array, np.float64), weights)
    x, out = w.embedding[tokens], []
    for layer in w.layers:

        def project(name: str, heads: int, layer: Any = layer, x: np.ndarray = x) -> np.ndarray:
            y = norm64(x, layer.attention_norm, config.norm_eps) @ getattr(layer, name).T
            bias = getattr(layer, f"{name}_bias")
            return (y if bias is None else y + bias).reshape(len(x), heads, config.head_dim)

        q, k, v = project("q", config.heads), project("k", config.kv_heads), project("v", config.kv_heads)
        raw = q
        if config.qk_norm:
            q, k = norm64(q, layer.q_norm, config.norm_eps), norm64(k, layer.k_norm, config.norm_eps)
        out.append(q if with_norm else raw)
        q, k = turned(q, config), turned(k, config)
        mixed = np.empty_like(q)
        for head in range(config.heads):
            group = head // config.groups
            scores = q[:, head] @ k[:, group].T / np.sqrt(config.head_dim)
            scores[np.triu_indices(len(x), 1)] = -np.inf
            weight = np.exp(scores - scores.max(-1, keepdims=True))
            mixed[:, head] = weight / weight.sum(-1, keepdims=True) @ v[:, group]
        x = x + mixed.reshape(len(x), -1) @ layer.o.T
        y = norm64(x, layer.mlp_norm, config.norm_eps)
        gate = y @ layer.gate.T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer.up.T)) @ layer.down.T
    return np.stack(out)


def expected(
    weights: Weights, config: ModelConfig, windows: list[list[int]], bos: int | None = None, with_norm: bool = True
) -> dict[str, np.ndarray]:
    """mu and nu [L, H, F], by concatenating every counted query."""
    before = [] if bos is None else [bos]
    all_q = [queries(weights, config, before + w, with_norm)[:, len(before) :] for w in windows]
    q = np.concatenate(all_q, axis=1)
    z = q[..., : config.frequencies] + 1j * q[..., config.frequencies :]
    return {"q_mean_real": z.real.mean(1), "q_mean_imag": z.imag.mean(1), "q_abs_mean": np.abs(z).mean(1)}


def assert_close(stats: QueryStats, wanted: dict[str, np.ndarray], tolerance: float = 2e-6) -> None:
    for name in ARRAYS:
        array = getattr(stats, name)
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, wanted[name], rtol=0, atol=tolerance * wanted["q_abs_mean"].max())


@pytest.mark.parametrize("config", [PLAIN, NORMED], ids=lambda config: config.name)
@pytest.mark.parametrize("bos", [None, 7])
def test_means_equal_those_of_a_plain_forward_pass(config: ModelConfig, bos: int | None) -> None:
    weights, windows = drawn(config), windows_of(32, 32, 31, 9, 1)
    stats = calibration.calibrate(weights, config, windows, context=33, bos=bos, chunk=12)
    assert_close(stats, expected(weights, config, windows, bos))
    assert stats.info == StatsInfo.of_model(config, tokens=105, dtype="float32")
    assert stats.info.inv_freq == tuple(rope.inverse_frequencies(config.rope, config.head_dim))
    stats.check(config)


def test_the_oracle_sees_what_others_got_wrong() -> None:
    """q-norm left out, BOS counted, windows run as one text: each moves the means a hundred tolerances and more."""
    weights, windows = drawn(NORMED), windows_of(32, 9)
    right = expected(weights, NORMED, windows, 7)
    for wrong in (
        expected(weights, NORMED, windows, 7, with_norm=False),
        expected(weights, NORMED, [[7, *window] for window in windows]),
        expected(weights, NORMED, [[token for window in windows for token in window]], 7),
    ):
        off = max(np.abs(wrong[name] - right[name]).max() for name in ARRAYS)
        assert off > 200e-6 * right["q_abs_mean"].max()


@pytest.mark.parametrize("chunk", [1, 20, 1000])
def test_the_chunk_changes_rounding_only(chunk: int | None) -> None:
    weights, windows = drawn(PLAIN), windows_of(40, 17)
    assert_close(
        calibration.calibrate(weights, PLAIN, windows, context=48, chunk=chunk), expected(weights, PLAIN, windows)
    )


@given(lengths=st.lists(st.integers(1, 24), min_size=1, max_size=6), seed=st.integers(0, 2**16))
@settings(max_examples=10)
def test_windows_of_any_lengths_share_one_program(lengths: list[int], seed: int) -> None:
    weights, windows = drawn(PLAIN), windows_of(*lengths, seed=seed)

    def run(windows: list[list[int]]) -> QueryStats:
        return calibration.calibrate(weights, PLAIN, windows, context=24, chunk=8)

    run(windows_of(24))
    stats, programs = counted(lambda: run(windows))
    assert programs == 0
    assert_close(stats, expected(weights, PLAIN, windows))


def test_memory_and_look_ahead_do_not_grow_with_the_text() -> None:
    weights = drawn(PLAIN)
    taken = 0

    def endless() -> Iterator[list[int]]:
        nonlocal taken
        for window in itertools.cycle(windows_of(16, 11)):
            taken += 1
            yield window

    seen: list[tuple[int, int, int]] = []

    def progress(tokens: int) -> None:
        seen.append((tokens, taken, sum(array.nbytes for array in jax.live_arrays())))

    calibration.calibrate(weights, PLAIN, itertools.islice(endless(), 100), context=16, chunk=16, progress=progress)
    assert [row[1] for row in seen] == list(range(1, 101))
    assert seen[-1][0] == 50 * 27
    assert len({row[2] for row in seen[1:]}) == 1


def test_sums_stay_exact_over_many_windows() -> None:
    """5,000 equal windows have the means of one. A plain float32 sum is off by 1e-5 and more by then."""
    weights, (window,) = drawn(PLAIN), windows_of(16)
    once = calibration.calibrate(weights, PLAIN, [window], context=16, chunk=16)
    often = calibration.calibrate(weights, PLAIN, itertools.repeat(window, 5000), context=16, chunk=16)
    assert often.info.tokens == 80_000
    for name in ARRAYS:
        np.testing.assert_allclose(getattr(often, name), getattr(once, name), rtol=2e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("windows", "words"),
    [
        ([], "at least one token"),
        ([[1], []], "no token"),
        ([[1] * 16], r"17 tokens, BOS included, and context=16"),
        ([[1, 97]], "token 97 is not in the vocabulary of 97"),
        ([[-1, 3]], "token -1"),
    ],
)
def test_windows_that_cannot_be_are_refused(windows: list[list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        calibration.calibrate(drawn(PLAIN), PLAIN, windows, context=16, bos=0, chunk=16)


def test_queries_that_are_not_finite_are_refused() -> None:
    weights = drawn(PLAIN)
    weights = weights.replace(embedding=weights.embedding.at[3].set(jnp.inf))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="float32 gave queries that are not finite"):
        calibration.calibrate(weights, PLAIN, [[1, 2, 3]], context=16, chunk=16)


def test_concentration_by_head() -> None:
    generator = np.random.default_rng(1)
    queries = generator.normal(size=(500, 3, 4, 5)) + 1j * generator.normal(size=(500, 3, 4, 5))
    queries += 4 * generator.normal(size=(3, 4, 5))
    mu, nu = queries.mean(0), np.abs(queries).mean(0)
    r = Concentration.of(QueryStats(mu.real, mu.imag, nu))
    assert r.strongest.shape == r.whole.shape == (3, 4)
    for layer, head in np.ndindex(3, 4):
        f = max(range(5), key=lambda f: nu[layer, head, f])
        m, n = mu[layer, head], nu[layer, head]
        np.testing.assert_allclose(r.strongest[layer, head], abs(m[f]) / n[f], rtol=1e-12)
        np.testing.assert_allclose(r.whole[layer, head], np.sqrt((abs(m) ** 2).sum() / (n**2).sum()), rtol=1e-12)
        resultant = np.linalg.norm(m) / np.linalg.norm(queries[:, layer, head], axis=-1).mean()
        assert resultant <= r.whole[layer, head] <= 1
    report = r.to_json()
    assert report["threshold"] == 0.95
    assert 0 < report["whole_vector"] < 1
    assert report["whole_vector"] == sum(value > 0.95 for value in r.whole.flat) / 12
    assert [layer["strongest_band"] for layer in report["layers"]] == [(row > 0.95).mean() for row in r.strongest]


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig, Weights]:
    """Write a model that can be loaded, with a tokenizer that adds no BOS where the model's config has one."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    folder.mkdir()
    bos = byte_level().fast.bos_token_id
    tiny_folder.make(folder, max_position_embeddings=64, bos_token_id=bos)
    config, loaded = weights_module.load(folder)
    assert (config.context, config.bos_token_id) == (64, bos)
    return folder, config, loaded


@pytest.fixture
def command(model: tuple[Path, ModelConfig, Weights], tmp_path: Path) -> Callable[..., int]:
    """Return a function that runs the command on two texts; None takes an option away."""
    (tmp_path / "a.txt").write_text(" ".join(CORPUS), encoding="utf-8")
    (tmp_path / "b.txt").write_text(CORPUS[0], encoding="utf-8")
    inputs = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]

    def run(*more: str, **changes: Any) -> int:
        options = {"model": model[0], "input": inputs, "output": tmp_path / "out.safetensors", "chunk": 16} | changes
        argv = []
        for name, value in options.items():
            argv += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        return calibrate.main([*argv, *more])

    return run


def test_the_command_writes_what_the_library_measures(
    model: tuple[Path, ModelConfig, Weights], command: Callable[..., int], tmp_path: Path, capsys: Any
) -> None:
    _, config, weights = model
    assert command("--json") == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == ""
    stats = QueryStats.load(tmp_path / "out.safetensors", config)
    ids = [byte_level().backend.encode(text, add_special_tokens=False).ids for text in (" ".join(CORPUS), CORPUS[0])]
    size = config.context - 1
    windows = [one[start : start + size] for one in ids for start in range(0, len(one), size)]
    assert len({len(window) for window in windows}) > 2
    assert_close(stats, expected(weights, config, windows, config.bos_token_id))
    assert report["tokens"] == stats.info.tokens == sum(map(len, ids))
    assert (report["texts"], report["windows"], report["context"]) == (2, len(windows), 64)
    assert (report["model"], report["dtype"], report["bos"]) == ("tiny-llama", "float32", config.bos_token_id)
    assert report["seconds"] > 0
    assert report["concentration"] == Concentration.of(stats).to_json()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt", "out.safetensors"]


def test_tokens_and_context_are_limits(command: Callable[..., int], capsys: Any) -> None:
    assert command("--json", tokens=50, context=16) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["tokens"], report["texts"], report["windows"], report["context"]) == (50, 1, 4, 16)


def test_the_report_for_people(command: Callable[..., int], capsys: Any) -> None:
    assert command(dtype="bfloat16", tokens=20) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "20 tokens, texts: 1, windows of up to 64: 1" in err
    assert [line.split(":")[0].strip() for line in err.splitlines()[2:]] == ["strongest band", "whole vector"]
    assert all(len(line.split(":")[1].split()) == 2 for line in err.splitlines()[2:])
    assert command("--quiet") == 0
    assert capsys.readouterr() == ("", "")


def test_stdin_is_a_text(command: Callable[..., int], capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(CORPUS[2].encode()))))
    assert command("--json", input="-") == 0
    ids = byte_level().backend.encode(CORPUS[2], add_special_tokens=False).ids
    assert json.loads(capsys.readouterr().out)["tokens"] == len(ids)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input": "missing.txt"}, "missing.txt cannot be read: No such file"),
        ({"input": "empty.txt"}, "empty.txt holds no text"),
        ({"input": "latin1.txt"}, "latin1.txt is not UTF-8 text: .* at byte 3"),
        ({"input": ["a.txt", "."]}, "cannot be read: Is a directory"),
        ({"input": ["-", "-"]}, "- is given more than once"),
        ({"output": "stats.pt"}, r"must end in \.safetensors"),
        ({"output": "nowhere/stats.safetensors"}, "nowhere is no folder to write in"),
        ({"plot": "r.xyz"}, r"--plot r.xyz must end in \.png"),
        ({"tokens": 0}, "--tokens 0 must be at least 1"),
        ({"chunk": -3}, "--chunk -3 must be at least 1"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_is_looked_for(
    command: Callable[..., int],
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("latin1.txt").write_bytes("caf\u00e9 au lait".encode("latin-1"))
    assert command(**{"model": "/no/such/model", **changes}) == cli.BAD_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(words, line), line


def test_a_context_beyond_the_models_is_refused(command: Callable[..., int], capsys: Any) -> None:
    assert command(context=65) == cli.BAD_USAGE
    assert "--context 65 is beyond the 64 tokens" in capsys.readouterr().err
    assert command(context=1) == cli.BAD_USAGE
    assert "no room for a token after BOS" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_run_leaves_what_was_there(
    command: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    (tmp_path / "out.safetensors").write_bytes(b"before")

    def torn(self: QueryStats, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise error

    monkeypatch.setattr(QueryStats, "save", torn)
    if error is KeyboardInterrupt:
        assert command() == cli.INTERRUPTED
    else:
        with pytest.raises(error):
            command()
    assert (tmp_path / "out.safetensors").read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt", "out.safetensors"]


def test_the_plot_is_a_picture(command: Callable[..., int], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    assert command("--quiet", plot=tmp_path / "r.png") == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_first(
    command: Callable[..., int], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate.importlib.util, "find_spec", lambda name: None)
    assert command(model="/no/such/model", plot=tmp_path / "r.png") == cli.BAD_USAGE
    assert "pip install 'jaxkv[plot]'" in capsys.readouterr().err


def test_a_file_of_another_model_is_refused(command: Callable[..., int], tmp_path: Path) -> None:
    assert command("--quiet") == 0
    for other in (dataclasses.replace(PLAIN, layers=3), dataclasses.replace(PLAIN, rope=RopeConfig(theta=5e5))):
        with pytest.raises(ValueError, match="do not fit plain"):
            QueryStats.load(tmp_path / "out.safetensors", other)


def test_models_without_packaged_statistics() -> None:
    assert stats_packaged.packaged(PLAIN) is None


@pytest.mark.parametrize(("adds", "config_bos", "wanted"), [(True, 9, 0), (False, 9, 9), (False, None, None)])
def test_the_token_before_a_window(adds: bool, config_bos: int | None, wanted: int | None) -> None:
    tokenizer = byte_level(add_bos_token=adds)
    assert tokenizer.fast.bos_token_id == 0
    assert corpus.first_token(tokenizer, dataclasses.replace(PLAIN, bos_token_id=config_bos)) == wanted
