"""What every test runs under; set before JAX is imported, and inherited by the programs that tests start."""

from __future__ import annotations

import gc
import os
import pathlib
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

MOST_MAPPINGS = 20_000
ROOT = pathlib.Path(__file__).resolve().parents[1]

os.environ.setdefault("JAX_PLATFORMS", "cpu")

# A compile that the cache serves still counts as one: JAX's backend_compile event, the size of a jit's own cache and
# memory_analysis() are the same with and without it. So the cache saves time and hides nothing that a test counts.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

# The first example pays for the compile, so neither a deadline nor hypothesis' check of slow data says anything.
settings.register_profile(
    "local", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, database=None, print_blob=True)
settings.register_profile("deep", settings.get_profile("local"), max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "local"))


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_go_with_their_module() -> Iterator[None]:
    """Let go of compiled programs between modules when there are many.

    Each takes several memory mappings, of which Linux gives a process 65,530: some thousands of programs, and the next
    one that is loaded crashes.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    # Tests of tools that need no JAX do not load it for this.
    if "jax" in sys.modules and maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPPINGS:
        sys.modules["jax"].clear_caches()
        gc.collect()
