"""Safetensors that are quantised already: what config.json says of it, and several tensors taken as one matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from jaxkv.quant import Int4
from jaxkv.weights import awq, gptq
from jaxkv.weights.names import Tensor

METHODS: Mapping[str, ModuleType] = {"awq": awq, "gptq": gptq}

_TYPES = {"qweight": ("I32",), "qzeros": ("I32",), "scales": ("F16", "BF16", "F32"), "g_idx": ("I32",)}


def refusals(given: Mapping[str, Any]) -> list[str]:
    """Return every reason why weights with this quantization_config are not read."""
    method = given.get("quant_method", "unnamed")
    if method not in METHODS:
        return [f"quantization_config with quant_method={method!r}: packed weights other than {', '.join(METHODS)}"]
    return [f"quantization_config of {method} with {reason}" for reason in METHODS[method].refusals(given)]


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How the matrices of a folder are packed.

    Attributes:
      given: its quantization_config, which ``refusals`` has nothing against.
      read: returns a tensor by name.
    """

    given: Mapping[str, Any]
    read: Callable[[str], np.ndarray]

    @property
    def name(self) -> str:
        """The method's name, which is also the type of its matrices."""
        return str(self.given["quant_method"])

    def folded(self, tensors: Mapping[str, Tensor], wanted: Collection[str], origin: str) -> dict[str, Tensor]:
        """Return the tensors with the parts of each matrix taken together as its ``weight``.

        Args:
          tensors: what the files list.
          wanted: what the model has.
          origin: what messages call the folder.

        Raises:
          ValueError: parts are missing, mis-shaped or of another type: all of them in one message.
        """
        method, faults = METHODS[self.name], []
        folded = dict(tensors)
        for stem in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
            expected = method.shapes(tensors[f"{stem}.qweight"].shape, method.group_of(self.given))
            for part in (*method.PARTS, *method.OPTIONAL):
                found = folded.pop(f"{stem}.{part}", None)
                wanted = f"{stem}.{part}: expected {list(expected[part])} of {' or '.join(_TYPES[part])}"
                if found is None:
                    faults += [f"{wanted}, found none"] if part in method.PARTS else []
                elif found.shape != expected[part] or found.kind not in _TYPES[part]:
                    faults.append(f"{wanted}, found {list(found.shape)} of {found.kind}")
            folded[f"{stem}.weight"] = Tensor(expected["weight"], self.name)
            bias = f"{stem}.bias"
            # AutoGPTQ wrote biases of zeros for models that have none.
            if bias in folded and bias not in wanted and not self.read(bias).any():
                del folded[bias]
        if faults:
            raise ValueError(f"{origin} is not packed as its quantization_config says:\n  " + "\n  ".join(faults))
        return folded

    def matrix(self, name: str, held: Mapping[str, Any]) -> Int4:
        """Return the matrix whose ``weight`` is called ``name``; ``held`` are the names that there are.

        Raises:
          ValueError: with the name, if the method cannot place its inputs in groups.
        """
        method, stem = METHODS[self.name], name.removesuffix(".weight")
        names = {part: f"{stem}.{part}" for part in (*method.PARTS, *method.OPTIONAL)}
        parts = {part: self.read(full) for part, full in names.items() if full in held}
        try:
            return method.matrix(parts, self.given)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
