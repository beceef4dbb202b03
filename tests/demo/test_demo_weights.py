"""The demo model's GGUF file, against the gguf package and against what transformers makes of the file."""

from __future__ import annotations

import gguf
import jax
import numpy as np
import pytest

from jaxkv import weights
from jaxkv.config import ModelConfig, RopeConfig
from jaxkv.model import Weights, weight_shapes

# Values that transformers 5.24 gave: AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=float32).
# All 272 arrays were equal, bit for bit. Of q and k, rows that llama.cpp's order moves are among them.
Q3 = {
    (0, 0): 0.077911376953125,
    (1, 5): 0.040283203125,
    (31, 100): 0.01708984375,
    (32, 7): 0.044677734375,
    (33, 7): -0.008056640625,
    (63, 575): 0.172119140625,
    (64, 3): -0.076202392578125,
    (575, 575): 0.306640625,
}
K3 = {
    (0, 0): 0.1629638671875,
    (1, 5): -0.08782958984375,
    (32, 100): 0.02227783203125,
    (65, 9): -0.00994873046875,
    (191, 575): -0.5703125,
}
V0 = {(0, 0): 0.10547637939453125, (1, 1): 0.0028076171875, (191, 575): -0.052337646484375}
DOWN29 = {(0, 0): -0.2733154296875, (575, 1535): 0.056640625, (100, 200): -0.12060546875}
EMBEDDING = {(0, 0): -0.10654449462890625, (2, 17): 0.736083984375, (49151, 575): -0.0417022705078125}


@pytest.fixture(scope="module")
def demo() -> tuple[ModelConfig, Weights]:
    return weights.load(weights.locate())


def test_configuration(demo: tuple[ModelConfig, Weights]) -> None:
    expected = ModelConfig(
        architecture="llama",
        vocab_size=49152,
        width=576,
        mlp_width=1536,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        norm_eps=float(np.float32(1e-5)),
        context=8192,
        rope=RopeConfig(theta=100000.0),
        tied_head=True,
        bos_token_id=1,
        eos_token_ids=(2,),
        name="Smollm2 135M 8k Lc100K Mix1 Ep2",
    )
    assert demo[0] == expected == weights.read_config(weights.locate())


def test_shapes(demo: tuple[ModelConfig, Weights]) -> None:
    config, loaded = demo
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), loaded)
    assert shapes == weight_shapes(config)


def test_values_are_those_of_transformers(demo: tuple[ModelConfig, Weights]) -> None:
    _, loaded = demo
    layers = loaded.layers
    for array, values in (
        (layers[3].q, Q3),
        (layers[3].k, K3),
        (layers[0].v, V0),
        (layers[29].down, DOWN29),
        (loaded.embedding, EMBEDDING),
    ):
        rows, columns = np.array(list(values)).T
        np.testing.assert_array_equal(np.asarray(array)[rows, columns], list(values.values()))
    np.testing.assert_array_equal(loaded.final_norm[:3], [1.7578125, 1.8203125, 1.78125])
    np.testing.assert_array_equal(layers[7].attention_norm[np.array([0, 575])], [0.361328125, 0.34375])


def test_an_unpermuted_tensor_is_what_gguf_dequantises(demo: tuple[ModelConfig, Weights]) -> None:
    reader = gguf.GGUFReader(weights.locate())
    (tensor,) = (tensor for tensor in reader.tensors if tensor.name == "blk.11.ffn_up.weight")
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    assert tensor.tensor_type == gguf.GGMLQuantizationType.Q4_1
    np.testing.assert_array_equal(demo[1].layers[11].up, values)
