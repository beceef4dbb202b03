"""The demo model's packaged statistics, against statistics measured here on other text."""

from __future__ import annotations

import dataclasses
import json
import os
import pydoc_data.topics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxkv import weights
from jaxkv.calibration import Concentration
from jaxkv.config import ModelConfig
from jaxkv.stats import QueryStats
from jaxkv.stats_packaged import packaged

TOKENS = 2000


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return weights.read_config(weights.locate())


@pytest.fixture(scope="module")
def stats(config: ModelConfig) -> QueryStats:
    found = packaged(config)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def fresh(config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[QueryStats, dict[str, Any]]:
    """Run the command on Python's manual, which the packaged statistics have not seen."""
    output = tmp_path_factory.mktemp("stats") / "fresh.safetensors"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "jaxkv.calibrate",
            "--input",
            "-",
            "--output",
            output,
            "--tokens",
            str(TOKENS),
            "--json",
        ],
        cwd=Path(__file__).parents[2],
        env=os.environ,
        input="\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return QueryStats.load(output, config), json.loads(done.stdout)


def mu(stats: QueryStats) -> np.ndarray:
    return np.asarray(stats.q_mean_real, np.float64) + 1j * np.asarray(stats.q_mean_imag, np.float64)


def test_packaged_statistics_are_of_much_text_and_concentrated(stats: QueryStats) -> None:
    assert stats.info.tokens > 50_000
    assert stats.info.dtype == "float32"
    assert len(stats.info.inv_freq) == 32
    r = Concentration.of(stats)
    assert r.strongest.shape == (30, 9)
    assert (r.whole <= 1).all()
    assert 0.9 < r.to_json()["strongest_band"] < 1
    assert 0.05 < r.to_json()["whole_vector"] < 0.5
    assert (np.abs(mu(stats)) <= stats.q_abs_mean * (1 + 1e-6)).all()


def test_packaged_statistics_are_for_this_model_alone(config: ModelConfig) -> None:
    assert packaged(dataclasses.replace(config, name="by another name")) is not None
    assert packaged(dataclasses.replace(config, width=640)) is None
    # SmolLM-135M has the same shapes.
    assert packaged(dataclasses.replace(config, rope=dataclasses.replace(config.rope, theta=10_000.0))) is None


def test_other_text_gives_nearly_the_same(stats: QueryStats, fresh: tuple[QueryStats, dict[str, Any]]) -> None:
    measured, report = fresh
    assert report["tokens"] == measured.info.tokens == TOKENS
    ours, theirs = mu(measured), mu(stats)
    lengths = np.linalg.norm(ours, axis=-1) * np.linalg.norm(theirs, axis=-1)
    cosine = (ours * theirs.conj()).sum(-1).real / lengths
    assert (cosine > 0.9).mean() > 0.95
    ratio = measured.q_abs_mean.sum(-1) / stats.q_abs_mean.sum(-1)
    assert (np.abs(ratio - 1) < 0.2).mean() > 0.95
    # It says something: the mean query of one head is nothing like another's.
    others = np.roll(theirs, 1, axis=0)
    unlike = (ours * others.conj()).sum(-1).real / np.linalg.norm(ours, axis=-1) / np.linalg.norm(others, axis=-1)
    assert np.median(unlike) < 0.5
