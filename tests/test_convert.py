"""Converted folders: the same bits as what they were made from, in one process or over several devices."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_folder
import tiny_tokenizers
from safetensors.numpy import load_file, save_file

from jaxkv import convert, model, quant, weights
from jaxkv.llm import LLM
from jaxkv.tokenizer import Tokenizer
from jaxkv.weights import converted

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_folder.make(tmp_path_factory.mktemp("tiny"))


def bits(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): (leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()) for path, leaf in leaves}


def logits(loaded):
    """Of a full attention in float32, written here."""
    tokens = jnp.asarray([[5, 9, 2, 40, 7]])

    def attend(state, layer, heads):
        q, k = heads.rotated()
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, heads.v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        scores = jnp.where(np.tril(np.ones((5, 5), bool)), scores, -jnp.inf)
        return state, jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    _, hidden = model.forward(loaded.weights, loaded.config, tokens, jnp.arange(5)[None], attend, None)
    return np.asarray(model.logits(loaded.weights, hidden))


def as_bfloat16(folder, to):
    """A copy whose weights are bfloat16."""
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    arrays = load_file(folder / "model.safetensors")
    save_file({name: array.astype(jnp.bfloat16) for name, array in arrays.items()}, to / "model.safetensors")
    return to


@pytest.mark.parametrize(("quantize", "plain"), [(None, False), ("int4", False), ("int8", False), ("int4", True)])
def test_the_same_bits(source, tmp_path, quantize, plain):
    out = tmp_path / "out"
    convert.convert(source, out, quantize=quantize, plain=plain)
    cases = [(jnp.float32, False), (jnp.bfloat16, False)]
    if quantize is not None and not plain:
        cases.append((jnp.bfloat16, True))
    for dtype, packed in cases:
        before = weights.read(source, dtype, quantize=quantize, packed=packed)
        after = weights.read(out, dtype, packed=packed)
        assert dataclasses.replace(after.config, eos_token_ids=before.config.eos_token_ids) == before.config
        assert bits(after.weights) == bits(before.weights)
        assert after.report.nbytes == before.report.nbytes
        assert sum(after.report.kept.values()) == sum(before.report.kept.values())
        np.testing.assert_array_equal(logits(after), logits(before))
        assert np.ptp(logits(after)) > 0


def test_sixteen_bits_stay_sixteen_bits(source, tmp_path):
    folder = tmp_path / "bfloat16"
    folder.mkdir()
    as_bfloat16(source, folder)
    assert weights.plain_dtype(source) == "float32"
    assert weights.plain_dtype(folder) == "bfloat16"
    convert.convert(folder, tmp_path / "out")
    described = json.loads((tmp_path / "out" / "jaxkv.json").read_text())
    assert {dtype for dtype, _ in described["arrays"].values()} == {"bfloat16"}
    for dtype in (jnp.float32, jnp.bfloat16):
        assert bits(weights.read(tmp_path / "out", dtype).weights) == bits(weights.read(folder, dtype).weights)


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_matrices_that_lie_by_input_are_the_same_ones(source, tmp_path, quantize):
    plain = weights.read(source, quantize=quantize, packed=False)
    turned = weights.read(source, quantize=quantize, packed=False, transpose=True)
    convert.convert(source, tmp_path / "out", quantize=quantize)
    restored = weights.read(tmp_path / "out", packed=False, transpose=True)
    # What was turned is written as it was before.
    (tmp_path / "again").mkdir()
    converted.save(tmp_path / "again", turned.config, turned.weights)
    assert bits(weights.read(tmp_path / "again").weights) == bits(plain.weights)
    for loaded in (turned, restored):
        kinds = {type(getattr(layer, name)) for layer in loaded.weights.layers for name in ("q", "k", "v", "o", "down")}
        assert kinds == {quant.Transposed}
        assert loaded.report.nbytes == plain.report.nbytes
        back = jax.tree.map(
            lambda x: x.values.T if isinstance(x, quant.Transposed) else x, loaded.weights, is_leaf=quant.is_matrix
        )
        assert bits(back) == bits(plain.weights)
        np.testing.assert_allclose(logits(loaded), logits(plain), rtol=1e-4, atol=1e-5)


def test_texts_are_the_same(source, tmp_path):
    assert convert.main(["--model", str(source), "--output", str(tmp_path / "out"), "--quiet"]) == 0
    made = [LLM(str(path), rows=1).generate(["the cat"], raw=True)[0] for path in (source, tmp_path / "out")]
    assert made[0].token_ids == made[1].token_ids
    assert len(made[0].token_ids) > 3
    llm = LLM(str(tmp_path / "out"))
    ends = {tiny_folder.TOKENIZER_EOS, tiny_folder.CONFIG_EOS, tiny_folder.GENERATION_EOS}
    assert set(llm.config.eos_token_ids) == ends


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    "template", [tiny_tokenizers.TEMPLATE, tiny_tokenizers.TEMPLATE.replace("{{ bos_token }}", "")]
)
def test_the_tokenizer_of_a_gguf_file(tmp_path, adds, template):
    fields = {**tiny_tokenizers.byte_level_fields(), "tokenizer.ggml.add_bos_token": adds}
    before = Tokenizer.from_gguf({**fields, "tokenizer.chat_template": template})
    convert._save(before, tmp_path)
    after = Tokenizer.from_folder(tmp_path)
    chat = [{"role": "user", "content": "12 cats"}]
    for text in ("", "the cat's hat", "<|bos|>a", "naïve 日本 1234"):
        assert after.encode(text) == before.encode(text)
    assert after.encode_chat(chat) == before.encode_chat(chat)
    assert (after.encode_chat(chat)[0] == before.fast.bos_token_id) == (adds or "bos_token" in template)
    assert before.fast.chat_template == template


MESH = """
import sys, jax, numpy as np
from jaxkv import quant, weights
assert jax.device_count() == 4
mesh = jax.make_mesh((4,), ("model",))
folder, packed = sys.argv[1], sys.argv[2] == "packed"
whole, cut = weights.read(folder, packed=packed), weights.read(folder, packed=packed, mesh=mesh)
for a, b in zip(jax.tree.leaves(whole.weights), jax.tree.leaves(cut.weights), strict=True):
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes() and len(b.sharding.device_set) == 4
layer = cut.weights.layers[0]
parts = {"q": layer.q, "o": layer.o, "norm": layer.attention_norm, "embedding": cut.weights.embedding}
first = lambda leaf: list(leaf.addressable_shards[0].data.shape)
print({name: [first(leaf) for leaf in jax.tree.leaves(part)] for name, part in parts.items()})
"""


@pytest.mark.parametrize("packed", [False, True])
def test_a_mesh_gets_each_its_part(source, tmp_path, packed):
    convert.convert(source, tmp_path / "out", quantize="int4" if packed else None)
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", MESH, str(tmp_path / "out"), "packed" if packed else "plain"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = len(tiny_folder.TOKENS)
    # E = 64 and 4 heads of 16. Packed, q has a byte for two inputs, one group of 64, and o is everywhere whole.
    q, o = ([[16, 32], [1, 16], [1, 16]], [[64, 32], [1, 64], [1, 64]]) if packed else ([[16, 64]], [[64, 16]])
    embedding = [[rows // 4 if rows % 4 == 0 else rows, 64]]
    assert eval(done.stdout) == {"q": q, "o": o, "norm": [[64]], "embedding": embedding}


PEAK = r"""
import re, sys, jax
import orbax.checkpoint
from jaxkv import weights
jax.block_until_ready(jax.device_put(1))
# Not ru_maxrss: that a process takes over from the one that started it.
peak = lambda: 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1])
before = peak()
loaded = weights.read(sys.argv[1])
jax.block_until_ready(loaded.weights)
print((peak() - before) / loaded.report.nbytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_peak_memory_of_loading(tmp_path):
    config = weights.ModelConfig("llama", 4096, 512, 2048, 12, 8, 4, 64, tied_head=True)
    (tmp_path / "big").mkdir()
    converted.save(tmp_path / "big", config, model.init_weights(config))
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / "big")], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert 1 <= float(done.stdout) < 1.5


def test_what_is_refused(source, tmp_path, capsys):
    out = tmp_path / "out"
    convert.convert(source, out)
    assert convert.main(["--model", str(source), "--output", str(out)]) == 2
    assert "exists already; name a folder that is to be made" in capsys.readouterr().err
    with pytest.raises(ValueError, match="converted already; give the original"):
        convert.convert(out, tmp_path / "again")
    with pytest.raises(ValueError, match="converted already; convert the original with quantize='int4'"):
        weights.read(out, quantize="int4")
    with pytest.raises(ValueError, match="cannot be read onto a mesh; convert it"):
        weights.read(source, mesh=jax.make_mesh((1,), ("model",)))
    described = json.loads((out / "jaxkv.json").read_text())
    del described["arrays"]["layers.1.q"]
    (out / "jaxkv.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"does not hold the llama model that it describes: layers\.1\.q; convert it"):
        weights.read(out)
    (out / "jaxkv.json").write_text(json.dumps(described | {"format": "jaxkv weights 9"}))
    with pytest.raises(ValueError, match="format 'jaxkv weights 9', and this version reads"):
        weights.read_config(out)


def test_nothing_is_left_of_a_failure(source, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(converted, "save", fail)
    assert convert.main(["--model", str(source), "--output", str(tmp_path / "out")]) == 2
    assert list(tmp_path.iterdir()) == []
