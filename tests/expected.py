"""Expected values in tests/data, and the plain attention that a forward pass is compared through."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import model
from jaxkv.dims import Array

DATA = Path(__file__).parent / "data"


def load(name: str) -> dict[str, dict[str, np.ndarray]]:
    """Return the arrays of a file that scripts/make_reference.py made, grouped by what stands before the slash."""
    groups: dict[str, dict[str, np.ndarray]] = {}
    with np.load(DATA / f"{name}.npz") as file:
        for key in file.files:
            group, _, rest = key.partition("/")
            groups.setdefault(group, {})[rest] = file[key]
    return groups


def dense(state: None, layer: int, heads: model.Heads) -> tuple[None, Array]:
    """Attend causally over the row itself, in float32, with nothing cached: a callback for ``model.forward``."""
    del layer
    q, k = (x.astype(jnp.float32) for x in heads.rotated())
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, heads.v.astype(jnp.float32)))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(np.tri(q.shape[1], dtype=bool), scores, -jnp.inf)
    return state, jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
