"""Statistics of queries before RoPE: from a file, or summed up while the model runs.

TriAttention (arXiv 2604.04921) predicts how much future queries will want a key from two means a head and band, taken
over queries after q-norm and before RoPE: ``mu_f = E[q_f]``, complex, and ``nu_f = E[|q_f|]``.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import struct
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from jaxkv import rope
from jaxkv.config import ModelConfig
from jaxkv.dims import Array, Bool, Float, Int
from jaxkv.stats_pt import read_pt

_ARRAYS = ("q_mean_real", "q_mean_imag", "q_abs_mean")
_FREQUENCY_TOLERANCE = 1e-5
_PT_KEY = re.compile(r"layer(\d+)_head(\d+)")


@dataclasses.dataclass(frozen=True)
class StatsInfo:
    """Where query statistics come from. Empty or 0 where the file does not say.

    Attributes:
      model, revision: the model's name and the revision of its weights.
      tokens: how many tokens the means are over.
      inv_freq: omega, radians a token, one a band. Without it the frequencies cannot be checked.
      attention_scaling: s of the rotary embedding.
      rope_theta: base of the frequencies; all that some of the authors' files say of them.
      dtype: dtype of the forward pass.
    """

    model: str = ""
    revision: str = ""
    tokens: int = 0
    inv_freq: tuple[float, ...] = ()
    attention_scaling: float = 0.0
    rope_theta: float = 0.0
    dtype: str = ""

    @classmethod
    def of_model(cls, config: ModelConfig, *, revision: str = "", tokens: int = 0, dtype: str = "") -> StatsInfo:
        """Return the description of statistics taken from a model."""
        return cls(
            model=config.name,
            revision=revision,
            tokens=tokens,
            inv_freq=tuple(rope.inverse_frequencies(config.rope, config.head_dim).tolist()),
            attention_scaling=rope.attention_scaling(config.rope),
            rope_theta=config.rope.theta,
            dtype=dtype,
        )


@struct.dataclass
class LayerMeans:
    """mu and nu of one layer. The leading axis is 1 where all rows share them, else B."""

    real: Float[Array, "R H F"]
    imag: Float[Array, "R H F"]
    magnitude: Float[Array, "R H F"]


@struct.dataclass
class QueryStats:
    """mu and nu of every query head of a model, float32. They do not change while it runs."""

    q_mean_real: Float[Array, "L H F"]
    q_mean_imag: Float[Array, "L H F"]
    q_abs_mean: Float[Array, "L H F"]
    info: StatsInfo = struct.field(pytree_node=False, default=StatsInfo())

    def layer(self, index: int) -> LayerMeans:
        """Return one layer's means, for all rows alike."""
        return LayerMeans(
            real=self.q_mean_real[index][None],
            imag=self.q_mean_imag[index][None],
            magnitude=self.q_abs_mean[index][None],
        )

    def concentration(self) -> np.ndarray:
        """Return R = |mu| / nu, float64 [L, H, F]: 1 where all queries point one way, 0 where none prevails."""
        real, imag, magnitude = (np.asarray(getattr(self, name), np.float64) for name in _ARRAYS)
        return np.hypot(real, imag) / np.maximum(magnitude, np.finfo(np.float64).tiny)

    @classmethod
    def from_sums(cls, sums: Sequence[QuerySums], info: StatsInfo) -> QueryStats:
        """Return the means of all rows together, taken on the host in float64.

        Raises:
          ValueError: no token was summed.
        """
        layers = []
        for layer in sums:
            count = np.asarray(layer.count, np.int64).sum()
            if not count:
                raise ValueError("query statistics need at least one token, and none was seen")
            total = np.asarray(layer.total, np.float64) + np.asarray(layer.residue, np.float64)
            layers.append(total.sum(axis=1) / count)
        real, imag, magnitude = np.stack(layers, axis=1).astype(np.float32)
        return cls(q_mean_real=real, q_mean_imag=imag, q_abs_mean=magnitude, info=info)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file: three float32 arrays [L, H, F], and the description as its metadata."""
        arrays = {name: np.ascontiguousarray(getattr(self, name), np.float32) for name in _ARRAYS}
        fields = dataclasses.asdict(self.info)
        metadata = {name: json.dumps(value) for name, value in fields.items()}
        # `save_file` would make it unreadable for everybody else.
        Path(path).write_bytes(save(arrays, metadata=metadata))

    @classmethod
    def load(cls, path: str | Path, config: ModelConfig) -> QueryStats:
        """Read statistics, ours (``.safetensors``) or the authors' (``.pt``), and check them against a model.

        Raises:
          ValueError: the file cannot be read, or was made from another model.
        """
        path = Path(path)
        stats = _read_pt(path) if path.suffix == ".pt" else _read_safetensors(path)
        try:
            stats.check(config)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return stats

    def check(self, config: ModelConfig) -> None:
        """Refuse a model that these statistics do not belong to.

        Names are not compared: one model has many. What is compared is what scores depend on.

        Raises:
          ValueError: shape, values, frequencies or attention scaling do not fit; the message has every reason.
        """
        faults = []
        wanted = (config.layers, config.heads, config.frequencies)
        for name in _ARRAYS:
            array = np.asarray(getattr(self, name))
            if array.shape != wanted:
                faults.append(f"{name} is {list(array.shape)} and the model's [L, H, F] is {list(wanted)}")
            elif not np.isfinite(array).all():
                faults.append(f"{name} has values that are not finite")
        omega = rope.inverse_frequencies(config.rope, config.head_dim)
        given = np.asarray(self.info.inv_freq, np.float64)
        if given.size and given.size != omega.size:
            faults.append(f"{given.size} frequencies, and the model has {omega.size}")
        elif given.size and not np.allclose(given, omega, rtol=_FREQUENCY_TOLERANCE, atol=0):
            band = int(np.argmax(np.abs(given / omega - 1)))
            faults.append(f"inv_freq[{band}]={given[band]:.6g} and the model's is {omega[band]:.6g}")
        scaling = rope.attention_scaling(config.rope)
        if self.info.attention_scaling and abs(self.info.attention_scaling - scaling) > _FREQUENCY_TOLERANCE * scaling:
            faults.append(f"attention scaling {self.info.attention_scaling:.6g} and the model's is {scaling:.6g}")
        if self.info.rope_theta and self.info.rope_theta != config.rope.theta:
            faults.append(f"rope theta {self.info.rope_theta:.6g} and the model's is {config.rope.theta:.6g}")
        if faults:
            raise ValueError(
                f"query statistics of {self.info.model or 'an unnamed model'} do not fit {config.name or 'the model'}: "
                + "; ".join(faults)
                + ". Make them with python -m jaxkv.calibrate, or use stats='online'"
            )


@struct.dataclass
class QuerySums:
    """Running sums of one layer's queries, row by row, on the device.

    A float32 sum over 100,000 tokens loses what the means need, so the rounding error of every addition is kept in
    ``residue`` (Knuth's two-sum): total + residue is good to about 2^-48.
    """

    total: Float[Array, "3 B H F"]
    """Sums of the real part, the imaginary part and the magnitude."""
    residue: Float[Array, "3 B H F"]
    count: Int[Array, "B"]
    """Tokens summed, int32."""

    @classmethod
    def create(cls, rows: int, heads: int, frequencies: int) -> QuerySums:
        """Return empty sums of B rows."""
        zeros = jnp.zeros((3, rows, heads, frequencies), jnp.float32)
        return cls(total=zeros, residue=zeros, count=jnp.zeros(rows, jnp.int32))

    def add(self, q: Float[Array, "B T H D"], real: Bool[Array, "B T"]) -> QuerySums:
        """Return the sums with queries before RoPE added, those where ``real`` is False left out."""
        x, y = jnp.split(q.astype(jnp.float32), 2, axis=-1)
        parts = jnp.stack([x, y, jnp.sqrt(x * x + y * y)])
        # A select, not a product: padding may hold NaN.
        chunk = jnp.sum(jnp.where(real[None, :, :, None, None], parts, 0), axis=2)
        total = self.total + chunk
        shadow = total - self.total
        residue = (self.total - (total - shadow)) + (chunk - shadow)
        return QuerySums(
            total=total, residue=self.residue + residue, count=self.count + jnp.sum(real, axis=1, dtype=jnp.int32)
        )

    def cleared(self, rows: Bool[Array, "B"]) -> QuerySums:
        """Return the sums with those of some rows at zero, as when another request takes the row."""
        keep = ~rows[None, :, None, None]
        return QuerySums(
            total=jnp.where(keep, self.total, 0),
            residue=jnp.where(keep, self.residue, 0),
            count=jnp.where(rows, 0, self.count),
        )

    def at(self, rows: Array) -> QuerySums:
        """Return the sums of some rows."""
        return QuerySums(total=self.total[:, rows], residue=self.residue[:, rows], count=self.count[rows])

    def put(self, rows: Int[Array, "R"], other: QuerySums) -> QuerySums:
        """Return the sums with those of some rows taken from another's; a row past the last is dropped."""
        return QuerySums(
            total=self.total.at[:, rows].set(other.total, mode="drop"),
            residue=self.residue.at[:, rows].set(other.residue, mode="drop"),
            count=self.count.at[rows].set(other.count, mode="drop"),
        )

    def means(self) -> LayerMeans:
        """Return each row's own means; zeros for a row that has seen nothing."""
        count = jnp.maximum(self.count, 1).astype(jnp.float32)[:, None, None]
        real, imag, magnitude = (self.total + self.residue) / count
        return LayerMeans(real=real, imag=imag, magnitude=magnitude)


def _read_safetensors(path: Path) -> QueryStats:
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: np.asarray(file.get_tensor(name), np.float32) for name in _ARRAYS}
            metadata = file.metadata() or {}
        fields = {f.name: json.loads(metadata[f.name]) for f in dataclasses.fields(StatsInfo) if f.name in metadata}
        fields["inv_freq"] = tuple(float(x) for x in fields.get("inv_freq", ()))
        info = StatsInfo(**fields)
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} holds no query statistics: {error}") from error
    return QueryStats(**arrays, info=info)  # type: ignore[arg-type]


def _read_pt(path: Path) -> QueryStats:
    """Read the authors' format: one entry a head, which must be all heads of all layers."""
    content = read_pt(path)
    try:
        heads, metadata = content["stats"], dict(content.get("metadata", {}))
        found = [tuple(map(int, _PT_KEY.fullmatch(key).groups())) for key in heads]  # type: ignore[union-attr]
        layers, count = (max(index) + 1 for index in zip(*found, strict=True))
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} holds no query statistics: {error!r}") from error
    keys = [[f"layer{i:02d}_head{j:02d}" for j in range(count)] for i in range(layers)]
    missing = [key for row in keys for key in row if key not in heads]
    if missing:
        raise ValueError(f"{path} has no statistics of {len(missing)} heads, {missing[0]} the first; all are needed")
    style = metadata.get("rope_style", "half")
    if style != "half":
        raise ValueError(f"{path} has rope_style={style!r}; only 'half' (band f pairs f with f + F) is supported")
    stacked = [np.asarray([[heads[key][name] for key in row] for row in keys], np.float32) for name in _ARRAYS]
    info = StatsInfo(
        model=str(metadata.get("model_name", "")),
        rope_theta=float(metadata.get("rope_theta", 0)),
        dtype=str(metadata.get("dtype", "")),
    )
    return QueryStats(**dict(zip(_ARRAYS, stacked, strict=True)), info=info)  # type: ignore[arg-type]
