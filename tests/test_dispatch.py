"""Which implementation serves a call, what is said when none does, and a package without its Triton folder."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import textwrap

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
    with pytest.raises(NotImplementedError, match=r"triton: platform=cpu \(cpu\).*; mosaic_tpu: not installed$"):
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


def test_an_unknown_target_is_named():
    with pytest.raises(ValueError, match="kind='GTX 1080' is unknown; one of NVIDIA A100, "), device.target("GTX 1080"):
        pass


def test_the_package_works_without_the_triton_folder(tmp_path):
    source = pathlib.Path(pallas_kernels.__file__).parent
    shutil.copytree(source, tmp_path / "pallas_kernels", ignore=shutil.ignore_patterns("triton", "__pycache__"))
    program = """
        import jax.numpy as jnp, pallas_kernels
        from pallas_kernels import device

        k, table, slots = jnp.zeros((3, 2, 16, 64)), jnp.ones((1, 2), int), jnp.zeros((1, 1), int)
        print(pallas_kernels.__file__)
        with device.target("NVIDIA H200"):
            print(pallas_kernels.candidates())
            print(pallas_kernels.attend(jnp.ones((1, 1, 4, 64)), k, k, table, slots).shape)
            try:
                pallas_kernels.attend(jnp.ones((1, 1, 4, 64)), k, k, table, slots, implementation="triton")
            except NotImplementedError as error:
                print(error)
    """
    assert run(program, cwd=tmp_path).splitlines() == [
        str(tmp_path / "pallas_kernels" / "__init__.py"),
        "('xla',)",
        "(1, 1, 4, 64)",
        "attend has no implementation for this call: triton: not installed",
    ]


def test_pallas_kernels_imports_nothing_of_jaxkv():
    program = "import sys, pallas_kernels.triton; print([m for m in sys.modules if m.split('.')[0] == 'jaxkv'])"
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
