"""The planner, against sums done by hand in here and against the arrays that a model has."""

from __future__ import annotations

import json

import huggingface_hub
import jax
import jax.numpy as jnp
import pytest
import tiny_folder
from hypothesis import given
from hypothesis import strategies as st

from jaxkv import facts, plan, planner, quant
from jaxkv.compression import CompressionConfig
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.model import weight_shapes
from jaxkv.planner import Plan, device
from jaxkv.pool import KVPool
from pallas_kernels.device import target

QWEN = "Qwen/Qwen3-32B"
GIB = 2**30
# A layer of Qwen3-32B: q and o, k and v, gate and up and down.
MATRICES = 2 * 8192 * 5120 + 2 * 1024 * 5120 + 3 * 25600 * 5120
VECTORS = 64 * (2 * 5120 + 2 * 128) + 5120
EMBEDDINGS = 2 * 151936 * 5120
# Half a byte a weight; two bytes of scale and one of zero point for each 128.
INT4 = 64 * (MATRICES // 2 + MATRICES // 128 * 3) + 2 * (VECTORS + EMBEDDINGS)
TOKEN = 64 * 2 * 8 * 128 * 2


def qwen(weights="int4", device_name="24GiB", reserve=None, budget=None, **options):
    method = {} if budget is None else {"method": "triattention", "budget": budget}
    compression = CompressionConfig(**method)
    return Plan(facts.read(QWEN), device(device_name, reserve), weights, compression=compression, **options)


def test_the_bytes_of_the_story():
    sizes = qwen(context=32768).sizes(1, 32768)
    assert sizes.weights == INT4 == 19447195648
    assert qwen().cache.per_token == TOKEN == 262144
    # 2,048 blocks of 16, and the null block.
    assert sizes.pool == 2049 * 16 * TOKEN


def test_when_24_gib_are_full():
    assert 20_000 <= qwen().tokens_until_full <= 25_000
    assert 23_000 <= qwen(reserve=0).tokens_until_full <= 25_000
    for reserve in (None, 0):
        plan = qwen(reserve=reserve)
        full = plan.tokens_until_full
        left = 24 * GIB - INT4 - plan.device.reserve - plan.sizes(1, full).scratch
        # What is left is whole blocks and the null block.
        assert full == (left // (16 * TOKEN) - 1) * 16
        assert plan.max_trace_tokens == full
        assert plan.max_batch == 0


@pytest.mark.parametrize("context", [32_768, 131_072])
@pytest.mark.parametrize("budget", [2048, 12000])
@pytest.mark.parametrize("name", ["24GiB", "rtx4090", "rtx3090"])
def test_a_budget_never_fills_it(name, budget, context):
    plan = qwen(device_name=name, budget=budget, context=context)
    assert plan.max_trace_tokens is None
    assert plan.max_batch >= 1
    blocks = (budget + 128) // 16
    assert plan.sizes(1, context).pool == (blocks + 1) * 16 * TOKEN
    # Below the trigger nothing has been compacted.
    assert plan.sizes(1, 1000).pool == (63 + 1) * 16 * TOKEN


def test_the_largest_batch_is_the_largest():
    plan = qwen(budget=2048, context=32768)
    most = plan.max_batch
    assert plan.sizes(most, 32768).total <= 24 * GIB < plan.sizes(most + 1, 32768).total
    # Each row 2,176 slots, and 2,048 for a compaction out of shared blocks.
    assert plan.sizes(most, 32768).blocks == most * 136 + 128
    assert plan.sizes(1, 32768).blocks == 136


@pytest.mark.parametrize("name", facts.shipped())
def test_shipped_models_have_the_parameters_of_transformers(name):
    # Of each config.json: AutoModelForCausalLM.from_config on torch's meta device, transformers 5, counted.
    counted = {
        "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
        "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
        "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
        "Qwen/Qwen3-0.6B": 596_049_920,
        "Qwen/Qwen3-4B": 4_022_468_096,
        "Qwen/Qwen3-8B": 8_190_735_360,
        "Qwen/Qwen3-14B": 14_768_307_200,
        "Qwen/Qwen3-32B": 32_762_123_264,
        "Qwen/Qwen3-30B-A3B": 30_532_122_624,
        "Qwen/Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": 8_030_261_248,
        "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
        "google/gemma-3-27b-it": 27_009_346_304,
        "meta-llama/Llama-3.1-8B": 8_030_261_248,
        "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
        "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
        "openai/gpt-oss-20b": 20_914_757_184,
    }
    assert facts.read(name).parameters == counted[name]


NAMES = st.sampled_from(["llama", "qwen2", "qwen3"])


@given(
    NAMES,
    st.integers(1, 3),
    st.sampled_from([(4, 4), (6, 2), (8, 1)]),
    st.sampled_from([16, 80, 128]),
    st.sampled_from([48, 64, 320, 256]),
    st.sampled_from([96, 100, 640]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(planner.WEIGHTS),
    st.sampled_from(["NVIDIA H200", "TPU v5 lite"]),
)
def test_bytes_are_those_of_the_arrays(kind, layers, heads, dim, width, inner, tied, bias, weights, chip):
    raw = {
        "model_type": kind,
        "vocab_size": 77,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": dim,
        "max_position_embeddings": 500,
        "tie_word_embeddings": tied,
    }
    if kind == "llama":
        raw |= {"attention_bias": bias, "mlp_bias": not bias}
    else:
        bias = kind == "qwen2"
    config = ModelConfig(
        kind,
        77,
        width,
        inner,
        layers,
        *heads,
        dim,
        tied_head=tied,
        qkv_bias=bias,
        output_bias=bias and kind == "llama",
        mlp_bias=kind == "llama" and not bias,
        qk_norm=kind == "qwen3",
    )
    shapes = weight_shapes(config, jnp.bfloat16 if weights in quant.KINDS else jnp.dtype(weights))
    if weights in quant.KINDS:
        shapes = quant.abstract(shapes, weights)
    expected = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    assert planner.weights_bytes(facts.of_json(raw, "tiny"), weights) == expected
    with target(chip) as found:
        pool = KVPool.shapes(config, CacheConfig(blocks=3, context=48, dtype="float16"))
        held = planner.cache(facts.of_json(raw, "tiny"), "float16", found.platform)
    assert held.slot * 4 * 16 == pool.nbytes
    bare = 2 * layers * heads[1] * dim * 2
    assert held.slot - held.padding == bare


def test_layers_that_compaction_does_not_help():
    gemma = Plan(facts.read("google/gemma-3-27b-it"), device("h200"))
    # 62 layers, one in six without a window; 16 KV heads of 128, bfloat16.
    each = 2 * 16 * 128 * 2
    assert (gemma.cache.slot, gemma.cache.windowed, gemma.cache.window) == (10 * each, 52 * each, 1024)
    assert gemma.cache.row(5000, 100) == 100 * 10 * each + 1024 * 52 * each
    assert gemma.cache.row(300, 300) == 300 * 62 * each
    said = " ".join(planner.without_help(gemma))
    assert "52 of 62 layers have a sliding window of 1024 tokens: they hold 416.0 MiB a row" in said
    assert "does not run this model (sliding attention)" in said
    mla = Plan(facts.read("DeepSeek-V2-Lite"), device("v5e"), "int4")
    # 512 + 64 numbers a layer; a TPU makes them 640.
    assert (mla.cache.slot, mla.cache.token, mla.cache.padding) == (0, 27 * 640 * 2, 27 * 64 * 2)
    assert "27 of 27 layers have latent attention (kv_lora_rank=512)" in planner.without_help(mla)[0]
    hybrid = Plan(facts.read("qwen3-next-80b-a3b-instruct"), device("h200"), "int4")
    # 12 layers of 2 KV heads of 256; 36 states of 32 heads, 128 x 128 in float32, and 4 taps of 8,192.
    assert hybrid.cache.slot == 12 * 2 * 2 * 256 * 2
    assert hybrid.cache.state == 36 * (32 * 128 * 128 * 4 + 4 * 8192 * 2)
    assert "36 of 48 layers have linear attention" in planner.without_help(hybrid)[0]
    assert planner.without_help(qwen()) == []


def test_kinds_of_layers():
    base = {**facts.shipped()[QWEN], "num_hidden_layers": 4, "max_position_embeddings": 9000}
    cases = [
        ({}, "ffff"),
        ({"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 3}, "fffs"),
        ({"use_sliding_window": False, "sliding_window": 100}, "ffff"),
        ({"model_type": "mistral"}, "ssss"),
        ({"model_type": "mistral", "sliding_window": 9000}, "ffff"),
        ({"model_type": "gemma3_text", "sliding_window": 100, "sliding_window_pattern": 2}, "sfsf"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 100}, "fsfs"),
    ]
    for changes, kinds in cases:
        assert "".join(kind[0] for kind in facts.of_json(base | changes, "x").kinds) == kinds, changes


def test_what_cannot_be_planned_is_refused():
    base = dict(facts.shipped()[QWEN])
    with pytest.raises(ValueError, match="layer_types mamba, which this planner cannot count"):
        facts.of_json(base | {"layer_types": ["mamba", "full_attention"]}, "x")
    with pytest.raises(ValueError, match="lacks vocab_size"):
        facts.of_json({key: value for key, value in base.items() if key != "vocab_size"}, "x")
    narrow = CompressionConfig(method="triattention", budget=512)
    with pytest.raises(ValueError, match="has a sliding window of 1024 slots"):
        Plan(facts.read("google/gemma-3-27b-it"), device("h200"), compression=narrow).to_json()
    with pytest.raises(ValueError, match="weights='int3' is unknown"):
        planner.weights_bytes(facts.read(QWEN), "int3")
    with pytest.raises(ValueError, match="device 'gtx' is unknown: give rtx3090, .* or a GPU's memory as 24GiB"):
        device("gtx")


def test_the_share_that_jax_is_given():
    assert planner.memory_fraction(qwen(budget=2048, context=32768)) == 0.97
    assert planner.memory_fraction(qwen(device_name="h200", context=32768)) is None
    assert planner.memory_fraction(qwen(context=32768)) is None  # nothing would do
    small = Plan(facts.read("SmolLM2-135M-Instruct"), device("v5e"))
    assert planner.memory_fraction(small) is None


def run(capsys, *argv):
    assert plan.main(["--model", *argv]) == 0
    return capsys.readouterr().out


def test_the_command(capsys, tmp_path):
    options = ("--device", "24GiB", "--weights", "int4", "--context", "32768")
    found = json.loads(run(capsys, QWEN, *options, "--json"))
    names = ["weights_bytes", "kv_bytes_per_token", "reserve_bytes", "tokens_until_full", "max_batch"]
    assert [found[name] for name in names] == [INT4, TOKEN, 640 * 2**20, qwen().tokens_until_full, 0]
    assert found["max_trace_tokens"] == found["tokens_until_full"]
    found = json.loads(run(capsys, QWEN, *options, "--json", "--method", "triattention", "--budget", "12000"))
    assert found["max_trace_tokens"] is None
    assert found["tokens_until_full"] == qwen().tokens_until_full
    text = run(capsys, QWEN, *options, "--reserve", "0", "--plot", str(tmp_path / "plan.png"))
    assert f"full without compression: at {qwen(reserve=0).tokens_until_full:,} tokens a row" in text
    assert "JAX takes 75% of the card" in text
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    text = run(capsys, "smollm2-135m-instruct", "--device", "v5e")
    assert "a token: 46,080 bytes, 23,040 of them padding" in text


def test_the_command_reads_what_is_there(capsys, tmp_path):
    folder = tiny_folder.make(tmp_path)
    for path in (folder, folder / "config.json"):
        found = json.loads(run(capsys, str(path), "--device", "24GiB", "--weights", "float32", "--json"))
        shapes = weight_shapes(tiny_folder.CONFIG)
        assert found["weights_bytes"] == sum(4 * leaf.size for leaf in jax.tree.leaves(shapes))
        assert found["context"] == tiny_folder.CONTEXT


def test_of_a_model_on_the_hub_only_the_configuration_is_fetched(capsys, tmp_path, monkeypatch):
    folder, asked = tiny_folder.make(tmp_path), []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *what: asked.append(what) or folder / what[1])
    found = json.loads(run(capsys, "owner/name", "--device", "24GiB", "--json"))
    assert (found["model"], found["context"], asked) == ("owner/name", 256, [("owner/name", "config.json")])
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_: {}["offline"])
    with pytest.raises(FileNotFoundError, match=r"the hub did not give its config.json \('offline'\); give a config"):
        facts.read("owner/name")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "100"], "--budget is for a method that compresses"),
        (["--batch", "0"], "batch=0 must be at least 1"),
        (["--weights", "int3"], "weights='int3' is unknown"),
        (["--kv-dtype", "int8"], "kv dtype='int8' is not supported"),
        (["--reserve", "much"], "'much' is not a memory size"),
        (["--plot", "plan.txt"], "must end in .png"),
    ],
)
def test_the_command_refuses(capsys, options, message):
    assert plan.main(["--model", QWEN, "--device", "h200", *options]) == 2
    assert message in capsys.readouterr().err
