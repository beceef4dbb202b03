"""What a config.json says of memory: the matrices of each layer, and what each layer keeps of a token.

Shapes alone, so it also reads models that ``jaxkv.weights`` refuses: a mixture of experts, sliding windows, latent
attention, linear attention. What is counted of those is what their weights and caches need, whoever runs them.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

Kind = Literal["full", "sliding", "latent", "linear"]

_NAMES: Mapping[str, Kind] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "linear_attention": "linear",
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_ABSENT = {"gemma3_text": {"sliding_window_pattern": 6}, "mistral": {"sliding_window": 4096}}
"""Keys that a config.json may leave out, and what transformers gives them."""


@dataclasses.dataclass(frozen=True)
class Array:
    """Some arrays of one shape. ``[outputs, inputs]`` of a layer is what is packed; inputs 0 is a vector."""

    outputs: int
    inputs: int = 0
    count: int = 1
    packs: bool = True


@dataclasses.dataclass(frozen=True)
class Facts:
    """A model's config.json, its language model alone, with the questions that a planner has.

    Attributes:
      raw: the object, or its ``text_config``.
      name: what the model is called.
    """

    raw: Mapping[str, Any]
    name: str = ""

    def __post_init__(self) -> None:
        absent = [key for key in _NEEDED if not isinstance(self.raw.get(key), int)]
        if absent:
            raise ValueError(
                f"{self.name}: config.json lacks {', '.join(absent)}, without which nothing can be planned"
            )
        unknown = sorted({kind for kind in self.raw.get("layer_types") or () if kind not in _NAMES})
        if unknown or any(key in self.raw for key in ("hybrid_override_pattern", "attn_layer_period", "mamba_d_state")):
            what = f"layer_types {', '.join(unknown)}" if unknown else "state-space layers"
            raise ValueError(f"{self.name} has {what}, which this planner cannot count; it counts {', '.join(_NAMES)}")

    @property
    def model_type(self) -> str:
        """The architecture's name."""
        return str(self.raw.get("model_type"))

    @property
    def context(self) -> int:
        """Tokens that the model was made for."""
        return int(self.raw["max_position_embeddings"])

    @property
    def width(self) -> int:
        """E."""
        return int(self.raw["hidden_size"])

    @property
    def vocabulary(self) -> int:
        """V."""
        return int(self.raw["vocab_size"])

    @property
    def heads(self) -> int:
        """H."""
        return int(self.raw["num_attention_heads"])

    @property
    def kv_heads(self) -> int:
        """K."""
        return int(self.raw.get("num_key_value_heads") or self.heads)

    @property
    def head_dim(self) -> int:
        """D; 128 where a Qwen3 does not say, as transformers has it."""
        given = self.raw.get("head_dim") or (128 if self.model_type.startswith("qwen3") else 0)
        return int(given or self.width // self.heads)

    @property
    def tied_head(self) -> bool:
        """Whether the output head is the embedding; Gemma's is, where it does not say."""
        return bool(self.raw.get("tie_word_embeddings", self.model_type.startswith("gemma")))

    @property
    def window(self) -> int | None:
        """Tokens that a layer with a sliding window sees."""
        given = self._get("sliding_window")
        return None if given is None else int(given)

    @property
    def latent(self) -> int:
        """Numbers that a layer of latent attention (MLA) keeps of a token, for all heads; 0 without."""
        rank = self.raw.get("kv_lora_rank") or 0
        return int(rank + self.raw.get("qk_rope_head_dim", 0)) if rank else 0

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What each layer's attention is."""
        layers = int(self.raw["num_hidden_layers"])
        named = self.raw.get("layer_types")
        if named:
            return tuple(_NAMES[kind] for kind in named)
        if self.latent:
            return self._after(0, "latent")
        period = self.raw.get("full_attention_interval")
        if period:
            return self._every(period, "linear")
        qwen = self.model_type.startswith(("qwen2", "qwen3"))
        if self.window is None or not self.raw.get("use_sliding_window", not qwen):
            return self._after(layers, "full")
        pattern = self._get("sliding_window_pattern")
        if pattern:
            return self._every(pattern, "sliding")
        # Qwen's first layers see everything. A window as long as the context leaves nothing out.
        first = int(self.raw.get("max_window_layers", 0)) if qwen else 0
        return self._after(layers if self.window >= self.context else first, "sliding")

    def _after(self, first: int, other: Kind) -> tuple[Kind, ...]:
        """Return some full layers and then another kind."""
        layers = int(self.raw["num_hidden_layers"])
        full: list[Kind] = ["full"] * min(first, layers)
        return (*full, *[other] * (layers - first))

    def _every(self, period: int, other: Kind) -> tuple[Kind, ...]:
        """Return full layers at the end of each period, and another kind before."""
        layers = range(int(self.raw["num_hidden_layers"]))
        kinds: list[Kind] = [other if (at + 1) % period else "full" for at in layers]
        return tuple(kinds)

    def layers_of(self, kind: Kind) -> int:
        """Return how many layers are of a kind."""
        return Counter(self.kinds)[kind]

    @property
    def experts(self) -> int:
        """Routed experts of a layer that has them; 0 without."""
        return next((int(self.raw[key]) for key in _EXPERTS if self.raw.get(key)), 0)

    @property
    def expert_width(self) -> int:
        """Width of one expert."""
        return int(self.raw.get("moe_intermediate_size") or self.raw["intermediate_size"])

    @property
    def mlp_width(self) -> int:
        """I of a layer without experts; of the experts that a token goes through where all layers have them."""
        if self.experts and not self._dense_layers:
            return self.expert_width * int(self.raw.get("num_experts_per_tok", 1))
        return int(self.raw["intermediate_size"])

    @property
    def refused(self) -> str:
        """Why jaxkv does not run this model; empty where it does."""
        others: tuple[Kind, ...] = ("sliding", "latent", "linear")
        reasons = [f"{kind} attention" for kind in others if kind in self.kinds]
        reasons += ["a mixture of experts"] if self.experts else []
        if not reasons and self.model_type not in ("llama", "mistral", "qwen2", "qwen3"):
            reasons = [f"model_type {self.model_type}"]
        return ", ".join(reasons)

    # -- weights ---------------------------------------------------------------------------------------------------

    def arrays(self) -> Iterator[Array]:
        """Yield every array of the model."""
        yield Array(self.vocabulary, self.width, 1 if self.tied_head else 2, packs=False)
        yield Array(self.width)
        for index, kind in enumerate(self.kinds):
            yield from self._attention(kind)
            yield from self._mlp(index)
            yield Array(self.width, count=4 if self.model_type.startswith("gemma") else 2)

    @property
    def parameters(self) -> int:
        """How many numbers the weights are."""
        return sum(one.count * one.outputs * max(1, one.inputs) for one in self.arrays())

    def _attention(self, kind: Kind) -> Iterator[Array]:
        width, dim = self.width, self.head_dim
        if kind == "latent":
            yield from self._latent_attention()
            return
        if kind == "linear":
            yield from self._linear_attention()
            return
        q, kv = self.heads * dim, self.kv_heads * dim
        gated = 2 if self.model_type == "qwen3_next" else 1
        yield from (Array(gated * q, width), Array(kv, width, 2), Array(width, q))
        bias = bool(self.raw.get("attention_bias"))
        if bias or self.model_type == "qwen2":
            yield from (Array(q), Array(kv, count=2))
        if bias:
            yield Array(width)
        if self.model_type.startswith(("qwen3", "gemma3")):
            yield Array(dim, count=2)
        if self.model_type == "gpt_oss":
            yield Array(self.heads)  # sinks

    def _latent_attention(self) -> Iterator[Array]:
        nope, rope, value = (int(self.raw[f"{name}_head_dim"]) for name in ("qk_nope", "qk_rope", "v"))
        rank, low = int(self.raw["kv_lora_rank"]), self.raw.get("q_lora_rank")
        q = self.heads * (nope + rope)
        if low:
            yield from (Array(low, self.width), Array(low), Array(q, low))
        else:
            yield Array(q, self.width)
        yield from (Array(rank + rope, self.width), Array(rank), Array(self.heads * (nope + value), rank))
        yield Array(self.width, self.heads * value)

    def _linear_attention(self) -> Iterator[Array]:
        """Gated delta nets, as Qwen3-Next has them."""
        heads, keys, values, taps = self._linear()
        yield from (Array(2 * keys + 2 * values, self.width), Array(2 * heads, self.width), Array(self.width, values))
        yield from (Array(2 * keys + values, taps, packs=False), Array(heads, count=2), Array(values // heads))

    def _linear(self) -> tuple[int, int, int, int]:
        """Value heads, widths of keys and values, and taps of the convolution, of linear attention."""
        try:
            keys = self.raw["linear_num_key_heads"] * self.raw["linear_key_head_dim"]
            heads = self.raw["linear_num_value_heads"]
            return heads, keys, heads * self.raw["linear_value_head_dim"], self.raw["linear_conv_kernel_dim"]
        except KeyError as error:
            raise ValueError(f"{self.name} has linear attention without {error} in its config.json") from None

    @property
    def state_numbers(self) -> tuple[int, int]:
        """What the linear layers keep of a row, however long: numbers in float32, and numbers in the cache's dtype."""
        count = self.layers_of("linear")
        if not count:
            return 0, 0
        _, keys, values, taps = self._linear()
        return count * values * int(self.raw["linear_key_head_dim"]), count * (2 * keys + values) * taps

    @property
    def _dense_layers(self) -> int:
        return int(self.raw.get("first_k_dense_replace", 0))

    def _mlp(self, index: int) -> Iterator[Array]:
        width, step = self.width, int(self.raw.get("decoder_sparse_step", 1))
        sparse = self.experts and index >= self._dense_layers and (index + 1) % step == 0
        if not sparse or index in self.raw.get("mlp_only_layers", ()):
            inner, biased = int(self.raw["intermediate_size"]), bool(self.raw.get("mlp_bias"))
            yield from (Array(inner, width, 2), Array(width, inner))
            if biased:
                yield from (Array(inner, count=2), Array(width))
            return
        inner, count = self.expert_width, self.experts
        yield from (Array(inner, width, 2 * count), Array(width, inner, count), Array(count, width, packs=False))
        if self.model_type == "gpt_oss":
            yield from (Array(inner, count=2 * count), Array(width, count=count), Array(count))
        shared = self.raw.get("shared_expert_intermediate_size") or inner * self.raw.get("n_shared_experts", 0)
        if shared:
            yield from (Array(shared, width, 2), Array(width, shared))
        if self.raw.get("shared_expert_intermediate_size"):
            yield Array(1, width, packs=False)

    def _get(self, key: str) -> Any:
        return self.raw.get(key, _ABSENT.get(self.model_type, {}).get(key))


def shipped() -> dict[str, dict[str, Any]]:
    """Return the config.json of models that come with the package, by hub id: shapes, and nothing else."""
    text = (resources.files("jaxkv") / "data" / "models.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found


def read(model: str) -> Facts:
    """Return the facts of a model: a shipped id or the last part of one, a config.json or a folder with one, or
    a .gguf file, or the id of a model on the hub, of which nothing but that file is fetched.

    Raises:
      FileNotFoundError, ValueError: it cannot be found or read; the message has the way out.
    """
    known = shipped()
    wanted = [name for name in known if model.lower() in (name.lower(), name.lower().rpartition("/")[2])]
    if wanted and not Path(model).exists():
        return of_json(known[wanted[0]], wanted[0])
    path = Path(model).expanduser()
    if not path.exists() and "/" not in model:
        raise ValueError(f"model {model!r} is no path and no model known by name; known are {', '.join(known)}")
    if not path.exists():
        path = _of_hub(model)
    if path.is_dir() and (path / "config.json").is_file():
        path /= "config.json"
    if path.suffix == ".json":
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON ({error}); give a model's config.json") from error
        return of_json(content, model if "/" in model and not Path(model).exists() else path.resolve().parent.name)
    return _of_weights(path)


def _of_hub(model: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # the hub's client, its HTTP library and the disk share no narrower base
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FileNotFoundError(
            f"model {model} is no path here, and the hub did not give its config.json ({reason}); give a config.json, "
            f"or one of {', '.join(shipped())}"
        ) from error


def of_json(content: Any, name: str) -> Facts:
    """Return the facts in a config.json; of a model with pictures, those of its language model."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{name}: config.json holds a {type(content).__name__}, not an object")
    return Facts(content.get("text_config", content), name)


def _of_weights(path: Path) -> Facts:
    from jaxkv import weights

    config = weights.read_config(path)
    bias = {"attention_bias": config.output_bias, "mlp_bias": config.mlp_bias}
    return Facts(
        {
            "model_type": "qwen2" if config.qkv_bias and not config.output_bias else config.architecture,
            "vocab_size": config.vocab_size,
            "hidden_size": config.width,
            "intermediate_size": config.mlp_width,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "max_position_embeddings": config.context,
            "tie_word_embeddings": config.tied_head,
            "sliding_window": None,
            **bias,
        },
        config.name,
    )
