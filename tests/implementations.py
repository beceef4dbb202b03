"""The implementations that the suites of the kernels run over, and how each runs on a machine without its chip."""

from __future__ import annotations

import contextlib

from pallas_kernels import device

IMPLEMENTATIONS = ["xla", "triton"]


def present(implementation):
    """Return a context in which an implementation works here: kernels cut for an H200, and interpreted."""
    if implementation == "triton":
        return device.target("NVIDIA H200", interpret=True)
    return contextlib.nullcontext()
