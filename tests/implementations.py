"""The implementations that the suites of the kernels run over, and how each runs on a machine without its chip."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import pytest

from pallas_kernels import device

IMPLEMENTATIONS = ["xla", "triton", "mosaic_tpu"]


def present(implementation):
    """Return a context in which an implementation works here: kernels cut for one of its chips, and interpreted."""
    if implementation == "triton":
        return device.target("NVIDIA H200", interpret=True)
    if implementation == "mosaic_tpu":
        return device.target("TPU v5 lite", interpret=True)
    return contextlib.nullcontext()


def compiled(implementation, function):
    """Return a jitted function, the interpreter's programs without optimisation: they run once, and on little."""
    options = {"xla_backend_optimization_level": 0} if implementation == "mosaic_tpu" else None
    return jax.jit(function, compiler_options=options)


def skip_what_is_padded_alike(implementation, dim, groups):
    """Skip shapes that a kernel for TPUs is given padded as it is given others that the suite has."""
    if implementation == "mosaic_tpu" and (dim in (64, 80) or groups in (3, 4)):
        pytest.skip("padded to 128 columns and 8 heads, as D = 96 and G = 7 are")


def refused(implementation, reason):
    """Return a context that expects a call to be refused for a reason, a regular expression."""
    return pytest.raises(NotImplementedError, match=f"{implementation}: {reason}")


def widened(implementation, pages):
    """Return pages as wide as an implementation takes them: zeros past D where a slot is held, NaN where none is."""
    if implementation != "mosaic_tpu":
        return pages
    shape = (*pages.shape[:3], -pages.shape[3] % 128)
    padding = np.broadcast_to(np.where(np.isnan(pages[..., :1]), np.nan, 0), shape)
    return np.concatenate([pages, padding.astype(pages.dtype)], axis=3)
