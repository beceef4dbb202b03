"""Which implementation serves a call, what is said when none does, and a package without one of its folders."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import textwrap
import types

import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import device
from pallas_kernels.device import Device


def zeros(dim=64, heads=4, block=16, dtype=jnp.float32, queries=1):
    k = jnp.zeros((3, 2, block, dim), dtype)
    return jnp.ones((1, queries, heads, dim)), k, k, jnp.ones((1, 2), int), jnp.zeros((1, queries), int)


def chip(monkeypatch, platform, capability=(0, 0)):
    monkeypatch.setattr(device, "current", lambda: Device("a chip", platform, capability))


@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [
        ("cpu", (0, 0), ("xla",)),
        ("tpu", (0, 0), ("mosaic_tpu", "xla")),
        ("gpu", (7, 5), ("xla",)),
        ("gpu", (8, 0), ("triton", "xla")),
        ("gpu", (8, 9), ("triton", "xla")),
        ("gpu", (9, 0), ("mosaic_gpu", "triton", "xla")),
        ("gpu", (12, 0), ("mosaic_gpu", "triton", "xla")),
    ],
)
def test_the_chip_picks_among_those_that_are_installed(monkeypatch, platform, capability, expected):
    chip(monkeypatch, platform, capability)
    monkeypatch.setattr(pallas_kernels, "_installed", lambda name: True)
    assert pallas_kernels.candidates() == expected
    monkeypatch.setattr(pallas_kernels, "_installed", lambda name: name in ("xla", "triton"))
    assert pallas_kernels.candidates() == tuple(name for name in expected if name in ("xla", "triton"))


def test_a_call_falls_through_to_one_that_serves_it(monkeypatch):
    with device.target("NVIDIA H200", interpret=True):
        assert "triton" in pallas_kernels.candidates()
        q, *rest = zeros(dim=288)
        out = pallas_kernels.attend(q, *rest)
        assert out.shape == q.shape
        with pytest.raises(NotImplementedError, match=r"for this call: triton: head_dim=288 is more than 256$"):
            pallas_kernels.attend(q, *rest, implementation="triton")
    monkeypatch.setattr(pallas_kernels, "candidates", lambda _: ("triton", "mosaic_tpu"))
    with pytest.raises(NotImplementedError, match=r"triton: platform=cpu \(cpu\).*; mosaic_tpu: .* run on TPUs$"):
        pallas_kernels.attend(*zeros())


@pytest.mark.parametrize("op", ["attend", "score", "compact"])
def test_kernels_say_which_chip_they_need(monkeypatch, op):
    q, k, _, table, slots = zeros()
    args = {
        "attend": (q, k, k, table, slots),
        "score": (k, table, jnp.ones(1, int), q, jnp.ones((1, 4, 32))),
        "compact": (k, jnp.zeros((1, 2, 32), int), jnp.ones(1, int), table, table),
    }[op]
    call = getattr(pallas_kernels, op)
    with pytest.raises(NotImplementedError, match=r"triton: platform=cpu \(cpu\); these kernels run on NVIDIA GPUs"):
        call(*args, implementation="triton")
    with pytest.raises(NotImplementedError, match=r"mosaic_tpu: platform=cpu \(cpu\); these kernels run on TPUs"):
        call(*args, implementation="mosaic_tpu")
    chip(monkeypatch, "gpu", (7, 5))
    with pytest.raises(NotImplementedError, match=r"a chip has compute capability 7\.5; these kernels need 8\.0"):
        call(*args, implementation="triton")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": jnp.int8}, "pages of int8; these kernels read bfloat16, float16, float32"),
        ({"block": 24}, "block_size=24 is not a power of two"),
        ({"dim": 320}, "head_dim=320 is more than 256"),
        ({"heads": 34}, "17 query heads a KV head are more than 16"),
    ],
)
def test_what_the_kernels_cannot_read_is_named(change, message):
    with (
        device.target("NVIDIA GeForce RTX 4090", interpret=True),
        pytest.raises(NotImplementedError, match=f"triton: {message}"),
    ):
        pallas_kernels.attend(*zeros(**change), implementation="triton")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 128, "dtype": jnp.float16}, "pages of float16; these kernels take bfloat16, float32"),
        ({"dim": 80}, "pages are 80 wide, .* no multiple of 128; make them 128 wide"),
        ({"dim": 128, "block": 4}, "block_size=4 is not a power of two from 8 on, the rows of a tile of float32"),
        ({"dim": 128, "block": 8, "dtype": jnp.bfloat16}, "block_size=8 is not a power of two from 16 on"),
        ({"dim": 128, "block": 24}, "block_size=24 is not a power of two"),
    ],
)
def test_what_the_tpu_kernels_cannot_take_is_named(change, message):
    q, k, v, table, slots = zeros(**change)
    keep = jnp.zeros((1, 2, 2 * k.shape[2]), int)
    calls = {
        "attend": (q, k, v, table, slots),
        "score": (k, table, jnp.ones(1, int), q, q[:, 0, :, ::2]),
        "compact": (k, keep, jnp.ones(1, int), table, table),
    }
    with device.target("TPU v5 lite", interpret=True):
        for op, args in calls.items():
            with pytest.raises(NotImplementedError, match=f"{op} has no .*: mosaic_tpu: {message}"):
                getattr(pallas_kernels, op)(*args, implementation="mosaic_tpu")
            getattr(pallas_kernels, op)(*args)


def test_what_does_not_fit_into_a_tpus_memories_is_named():
    q, k, v, _, slots = zeros(dim=128)
    length = jnp.ones(1, int)
    with device.target("TPU v5 lite", interpret=True):
        wide = jnp.ones((1, 200_000), int)
        with pytest.raises(NotImplementedError, match=r"tables of 8000\d\d bytes; these kernels hold 524288 in scalar"):
            pallas_kernels.attend(q, k, v, wide, slots, implementation="mosaic_tpu")
        w, table = jnp.ones((1, 1000, 4, 128)), jnp.ones((1, 2), int)
        with pytest.raises(NotImplementedError, match="1000 offsets of 16 heads take .* bytes of vector memory"):
            pallas_kernels.score(k, table, length, w, jnp.ones((1, 4, 64)), implementation="mosaic_tpu")
        args = (k[..., 0], jnp.zeros((1, 2, 32), int), length, table, table)
        with pytest.raises(NotImplementedError, match=r"pages of shape \(3, 2, 16\); these kernels take \[N, K, P, D"):
            pallas_kernels.compact(*args, implementation="mosaic_tpu")


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        ("TPU v5 lite", "TPU v5 lite"),
        ("TPU v5", "TPU v5"),
        ("TPU v5p", "TPU v5"),
        ("TPU v6 lite", "TPU v6 lite"),
        ("TPU7x", "TPU7x"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100"),
    ],
)
def test_chips_are_known_by_the_names_that_jax_has_for_them(monkeypatch, kind, known):
    there = types.SimpleNamespace(device_kind=kind, platform=kind.split()[0].lower()[:3])
    monkeypatch.setattr(device.jax, "local_devices", lambda: [there])
    assert device.current() is device.DEVICES[known]


def test_an_unknown_target_is_named():
    with pytest.raises(ValueError, match="kind='GTX 1080' is unknown; one of NVIDIA A100, "), device.target("GTX 1080"):
        pass


@pytest.mark.parametrize(
    ("folder", "kind", "left"),
    [("triton", "NVIDIA H200", "('mosaic_gpu', 'xla')"), ("mosaic_tpu", "TPU v5 lite", "('xla',)")],
)
def test_the_package_works_without_a_folder(tmp_path, folder, kind, left):
    source = pathlib.Path(pallas_kernels.__file__).parent
    shutil.copytree(source, tmp_path / "pallas_kernels", ignore=shutil.ignore_patterns(folder, "__pycache__"))
    program = f"""
        import jax.numpy as jnp, pallas_kernels
        from pallas_kernels import device

        k, table, slots = jnp.zeros((3, 2, 16, 64)), jnp.ones((1, 2), int), jnp.zeros((1, 1), int)
        print(pallas_kernels.__file__)
        with device.target("{kind}"):
            print(pallas_kernels.candidates())
            print(pallas_kernels.attend(jnp.ones((1, 1, 4, 64)), k, k, table, slots).shape)
            try:
                pallas_kernels.attend(jnp.ones((1, 1, 4, 64)), k, k, table, slots, implementation="{folder}")
            except NotImplementedError as error:
                print(error)
    """
    assert run(program, cwd=tmp_path).splitlines() == [
        str(tmp_path / "pallas_kernels" / "__init__.py"),
        left,
        "(1, 1, 4, 64)",
        f"attend has no implementation for this call: {folder}: not installed",
    ]


def test_pallas_kernels_imports_nothing_of_jaxkv():
    program = """
        import sys, pallas_kernels.triton, pallas_kernels.mosaic_tpu
        print([name for name in sys.modules if name.split('.')[0] == 'jaxkv'])
    """
    assert run(program) == "[]"


def test_the_lowering_warns_nobody():
    """In a process of its own: pytest sets filters of its own round a test."""
    program = """
        import warnings
        warnings.simplefilter("error")
        import pallas_kernels.triton
        warnings.warn("The Pallas Triton backend is deprecated and will be removed", DeprecationWarning)
        try:
            warnings.warn("something else", DeprecationWarning)
        except DeprecationWarning:
            print("others are heard")
    """
    assert run(program) == "others are heard"


def run(program, cwd=None):
    """Return what a program prints, in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
