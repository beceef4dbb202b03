#!/usr/bin/env bash
# Make an environment that compiles for NVIDIA GPUs and TPUs without one: scripts/aot_env.sh DIRECTORY [PYTHON]
# PYTHON is that of an environment with jaxkv's dependencies; the new one sees its packages, and adds JAX's CUDA plugin
# in the same version and NVIDIA's assembler, without the gigabytes that they depend on to run, and libtpu, without which
# it still compiles for GPUs. Prints its python.
set -euo pipefail

directory=${1:?usage: scripts/aot_env.sh DIRECTORY [PYTHON]}
base=${2:-.venv/bin/python}
constraints=$(dirname "${BASH_SOURCE[0]}")/../constraints.txt
assembler=$(sed -n "s/^nvidia-cuda-nvcc==//p" "$constraints")

jax=$("$base" -c 'import importlib.metadata; print(importlib.metadata.version("jax"))')
base=$("$base" -c 'import sys; print(sys.executable)')
python=$directory/bin/python
wanted="$base jax==$jax nvidia-cuda-nvcc==$assembler"
libtpu=$(grep "^libtpu==" "$constraints")
install=("$python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps)

if [ "$(cat "$directory/.made-of" 2>/dev/null)" != "$wanted" ]; then
    "$base" -m venv --clear "$directory"
    "${install[@]}" \
        "jax-cuda13-plugin==$jax" "jax-cuda13-pjrt==$jax" "nvidia-cuda-nvcc==$assembler" "nvidia-nvvm==$assembler" >&2
    packages='import sysconfig; print(sysconfig.get_paths()["purelib"])'
    "$base" -c "$packages" >"$("$python" -c "$packages")/base.pth"
    echo "$wanted" >"$directory/.made-of"
fi
if [ "$(cat "$directory/.libtpu" 2>/dev/null)" != "$libtpu" ]; then
    # The constraints know which one goes with this Python's JAX.
    if "${install[@]}" -c "$constraints" libtpu >&2; then
        echo "$libtpu" >"$directory/.libtpu"
    else
        echo "libtpu cannot be installed: there will be no compiles for TPUs" >&2
    fi
fi
echo "$python"
