#!/usr/bin/env bash
# Print the first Python that runs and can make environments: find_python.sh 3.11 3.12
# Versions are tried in the order given, each on PATH first and then among pyenv's.
set -euo pipefail

usable() { # a pyenv shim may be on PATH with no version behind it, and Debian splits venv off
    "$1" -c "import ensurepip, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$2')" >/dev/null 2>&1
}

shopt -s nullglob
for version in "$@"; do
    for candidate in "python$version" python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python; do
        if usable "$candidate" "$version"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            exit 0
        fi
    done
done
echo "No Python of version $* with venv was found; install one, or name it: make PYTHON=..." >&2
exit 1
