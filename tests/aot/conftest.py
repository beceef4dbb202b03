"""The environment of the ahead-of-time tests, and how they start programs in it.

JAX's CUDA plugin would be found by every test if it were installed beside them, and a compiler that gives up may take
its process with it. So it has an environment of its own, and each compile a process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class AheadOfTime:
    """Starts scripts in the environment that has the compilers."""

    python: str

    def start(self, script: str, *args: str) -> subprocess.Popen[str]:
        """Start a script of the repository."""
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'scripts'}{os.pathsep}{ROOT}"}
        command = [self.python, str(ROOT / script), *args]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def finish(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        """Return its exit status, output and errors."""
        out, errors = process.communicate(timeout=600)
        return process.returncode, out, errors

    def json(self, script: str, *args: str) -> Any:
        """Run a script that has to succeed, and return its last line of output, parsed."""
        status, out, errors = self.finish(self.start(script, *args))
        assert status == 0, errors[-4000:]
        return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="session")
def aot() -> AheadOfTime:
    command = [
        str(ROOT / "scripts" / "aot_env.sh"),
        os.environ.get("AOT_VENV", str(ROOT / ".venv-aot")),
        sys.executable,
    ]
    made = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert made.returncode == 0, made.stderr
    return AheadOfTime(made.stdout.strip())
