"""Query statistics that come with the package, so that the demo model needs no calibration.

``smollm2-135m-instruct.safetensors`` is of SmolLM2-135M-Instruct and of Debian's Developer's Reference 12.18: all
75,625 tokens of it, in float32. Nothing that quality is measured on is part of that text. It was made by

    apt-get download developers-reference=12.18 && dpkg -x developers-reference_12.18_all.deb text
    zcat text/usr/share/developers-reference/developers-reference.txt.gz | \\
        python -m jaxkv.calibrate --input - --output smollm2-135m-instruct.safetensors
"""

from __future__ import annotations

from importlib import resources

from jaxkv.compression import CompressionConfig
from jaxkv.config import ModelConfig
from jaxkv.stats import QueryStats

_FILES = {
    "smollm2-135m-instruct.safetensors": {
        "architecture": "llama",
        "vocab_size": 49152,
        "width": 576,
        "mlp_width": 1536,
        "layers": 30,
        "heads": 9,
        "kv_heads": 3,
        "head_dim": 64,
    },
}


def query_stats(compression: CompressionConfig, config: ModelConfig) -> QueryStats | None:
    """Return the statistics that a compression asks for; None where it has no use for any, or takes each row's own.

    Raises:
      ValueError: the file does not fit the model, or none was named and the package has none for it.
    """
    if compression.method != "triattention" or compression.stats == "online":
        return None
    if compression.stats is not None:
        return QueryStats.load(compression.stats, config)
    stats = packaged(config)
    if stats is None:
        raise ValueError(
            f"no query statistics of {config.name or 'this model'} come with the package: make them with "
            "python -m jaxkv.calibrate and give the file as stats, or give stats='online'"
        )
    return stats


def packaged(config: ModelConfig) -> QueryStats | None:
    """Return the package's statistics of a model, or None where it has none.

    A model is known by its shapes and RoPE frequencies, for its name is not reliable: the demo model's GGUF file calls
    it by its training run. So a model that was trained on from the demo model gets them too.
    """
    for name, shapes in _FILES.items():
        if all(getattr(config, field) == value for field, value in shapes.items()):
            with resources.as_file(resources.files("jaxkv") / "data" / name) as path:
                try:
                    return QueryStats.load(path, config)
                except ValueError:
                    return None  # as SmolLM-135M: the same shapes, other frequencies
    return None
