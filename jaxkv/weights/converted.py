"""Folders that ``python -m jaxkv.convert`` writes: an Orbax checkpoint of the arrays, ``jaxkv.json`` and a tokenizer.

Arrays lie there in the form in which they are used, packed matrices as ``jaxkv.quant`` has them, and are restored to
where they belong without a pass over them on the host; with a mesh each device reads its own part.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxkv import quant
from jaxkv.config import ModelConfig, RopeConfig
from jaxkv.model import Weights, weight_shapes
from jaxkv.weights.placement import Report, fill

FORMAT = "jaxkv weights 1"
DESCRIPTION, ARRAYS = "jaxkv.json", "weights"
_PACKED: Mapping[str, type[quant.Int4] | type[quant.Int8]] = {"int4": quant.Int4, "int8": quant.Int8}
_TURNS, _LEAST = 4, 2**24
_BY_INPUTS = ("o", "down")
"""Matrices whose inputs are what another matrix gave out, so that they are cut along them."""


def is_converted(path: Path) -> bool:
    """Whether a folder is one of these."""
    return (path / DESCRIPTION).is_file()


def read_config(folder: Path) -> ModelConfig:
    """Return the configuration in a folder.

    Raises:
      ValueError: the folder was written by another version, or is damaged.
    """
    given = dict(_description(folder)["config"])
    rope = RopeConfig(**given.pop("rope"))
    return ModelConfig(**{**given, "rope": rope, "eos_token_ids": tuple(given["eos_token_ids"])})


def save(folder: Path, config: ModelConfig, weights: Weights) -> None:
    """Write weights into a folder that has none yet.

    Args:
      folder: exists.
      config: their model.
      weights: arrays of NumPy or JAX, matrices of the layers packed or plain.
    """
    arrays, kinds = {}, {}
    for path, found in jax.tree_util.tree_leaves_with_path(weights, is_leaf=quant.is_matrix):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        leaf = found.values.T if isinstance(found, quant.Transposed) else found
        if not quant.is_packed(leaf):
            arrays[name] = leaf
            continue
        kinds[name] = "int4" if isinstance(leaf, quant.Int4) else "int8"
        parts = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
        arrays.update({f"{name}.{part}": array for part, array in parts.items() if array is not None})
    import orbax.checkpoint as ocp  # type: ignore[import-untyped]  # a second to import

    # Weights hardly get smaller by compression, and are slower to read.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        checkpointer.save((folder / ARRAYS).resolve(), args=ocp.args.PyTreeSave(arrays))
    description = {
        "format": FORMAT,
        "config": dataclasses.asdict(config),
        "packed": kinds,
        "arrays": {name: [str(array.dtype), list(array.shape)] for name, array in arrays.items()},
    }
    # Last: without it a folder that was left half-written is none of these.
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=1), encoding="utf-8")


def load(
    folder: Path, dtype: np.dtype, packed: bool, transpose: bool = False, mesh: Mesh | None = None
) -> tuple[ModelConfig, Weights, Report]:
    """Restore a folder.

    Args:
      folder: as ``save`` leaves it.
      dtype: of what is not packed.
      packed: whether packed matrices stay so.
      transpose: whether those of the layers that are plain then become ``quant.Transposed``.
      mesh: where the arrays go, cut along its last axis: the outputs of a layer's first matrices and the inputs of its
        last ones, and the rows of embedding and head, where they can be divided; the rest is everywhere. None is the
        default device.

    Raises:
      ValueError: the folder is damaged, or does not hold what its configuration asks for.
    """
    config, description = read_config(folder), _description(folder)
    kinds = description["packed"]
    wanted = _wanted(config, kinds, description["arrays"], folder)
    target = {}
    for name, (stored, shape) in description["arrays"].items():
        matrix, _, part = name.rpartition(".")
        whole = part if matrix in kinds else ""
        # What is written out plain passes through the host.
        place = None if matrix in kinds and not packed else _place(mesh, matrix if whole else name, whole, shape)
        target[name] = jax.ShapeDtypeStruct(tuple(shape), np.dtype(stored) if whole else dtype, sharding=place)
    plain_ones = {name for name in target if name.startswith("layers.") and name.rpartition(".")[0] not in kinds}
    matrices = {name for name in plain_ones if len(target[name].shape) == 2}
    arrays = _restore(folder, target, matrices if transpose else set())
    kept: collections.Counter[str] = collections.Counter()
    plain: collections.Counter[str] = collections.Counter()

    def matrix_of(path: Any, shape: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name not in kinds:
            return arrays.pop(name)
        kind = kinds[name]
        parts = {field.name: arrays.pop(f"{name}.{field.name}", None) for field in dataclasses.fields(_PACKED[kind])}
        matrix = _PACKED[kind](**parts)
        if packed:
            kept[kind] += 1
            return matrix
        plain[kind] += 1
        values = fill(shape.shape, dtype, quant.host_values(matrix))
        matrix = jax.device_put(values, _place(mesh, name, "", shape.shape))
        return quant.transposed(matrix) if transpose else matrix

    weights = jax.tree_util.tree_map_with_path(matrix_of, wanted)
    count = sum(leaf.ndim == 2 for leaf in jax.tree.leaves(wanted.layers))
    report = Report(
        dtype=dtype.name,
        kept=dict(kept),
        dequantized=dict(plain),
        plain=count - len(kinds),
        left=(),
        packs=packed,
        nbytes=sum(leaf.nbytes for leaf in jax.tree.leaves(weights)),
    )
    return config, weights, report


def _restore(folder: Path, target: Mapping[str, jax.ShapeDtypeStruct], turned: set[str]) -> dict[str, Any]:
    """Return the arrays, those of some names transposed. Some are read at a time: all at once would be held twice."""
    import orbax.checkpoint as ocp

    sizes = {name: math.prod(leaf.shape) * leaf.dtype.itemsize for name, leaf in target.items()}
    most, groups = max(sum(sizes.values()) / _TURNS, _LEAST), [dict[str, Any]()]
    room = most
    for name, leaf in target.items():
        if groups[-1] and sizes[name] > room:
            groups.append({})
            room = most
        groups[-1][name] = leaf
        room -= sizes[name]
    found: dict[str, Any] = {}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        for group in groups:
            how = ocp.checkpoint_utils.construct_restore_args(group)
            args = ocp.args.PyTreeRestore(item=group, restore_args=how, partial_restore=True)
            arrays = checkpointer.restore((folder / ARRAYS).resolve(), args=args)
            for name in turned & arrays.keys():
                # While the next ones are read.
                arrays[name] = quant.transposed(arrays[name])
            found.update(arrays)
    return found


def _wanted(config: ModelConfig, kinds: Mapping[str, str], arrays: Mapping[str, Any], folder: Path) -> Weights:
    """Return the shapes that a model has, having found that the arrays are those."""
    wanted = weight_shapes(config)
    leaves = jax.tree_util.tree_leaves_with_path(wanted)
    shapes = {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in leaves}
    found = {name: tuple(shape) for name, (_, shape) in arrays.items() if name.rpartition(".")[0] not in kinds}
    for name, kind in kinds.items():
        rows, columns = arrays[f"{name}.{'packed' if kind == 'int4' else 'q'}"][1]
        found[name] = (rows, 2 * columns if kind == "int4" else columns)
    if found != shapes:
        differ = sorted(name for name in {*found, *shapes} if found.get(name) != shapes.get(name))
        raise ValueError(
            f"{folder} does not hold the {config.architecture} model that it describes: {', '.join(differ[:20])}; "
            "convert it again"
        )
    return wanted


def _place(mesh: Mesh | None, name: str, part: str, shape: list[int] | tuple[int, ...]) -> Any:
    """Return where an array goes, or a part of a packed matrix."""
    if mesh is None:
        (default,) = jax.device_put(np.int8(0)).devices()
        return SingleDeviceSharding(default)
    axis = mesh.axis_names[-1]
    field = name.rpartition(".")[2]
    spec: list[str | None] = [None] * len(shape)
    at = _cut(field, part, len(shape))
    if at is not None and shape[at] % mesh.shape[axis] == 0:
        spec[at] = axis
    return NamedSharding(mesh, PartitionSpec(*spec))


def _cut(field: str, part: str, dims: int) -> int | None:
    """Return which dimension of an array is cut, or None.

    A packed matrix is cut along its outputs alone: a cut through its inputs would have to fall between groups, and
    between columns in their own order.
    """
    if field.endswith("norm") or part == "permutation":
        return None
    if part in ("scale", "offset", "units"):
        return dims - 1 if field not in _BY_INPUTS else None
    if field in _BY_INPUTS:
        return None if part else 1
    if field in ("o_bias", "down_bias"):
        return None
    return 0


def _description(folder: Path) -> dict[str, Any]:
    path = folder / DESCRIPTION
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version = found["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); convert the model again") from error
    if version != FORMAT:
        raise ValueError(f"{path} is of format {version!r}, and this version reads {FORMAT!r}; convert the model again")
    return found
