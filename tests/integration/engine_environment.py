"""The environment that `make engines` installs: a Python with the serving engines, apart from pagegen's own."""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-engines"
PYTHON = FOLDER / "bin" / "python"
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Engine:
    """One release of an engine: in the environment itself, or in a `folder` of its own beside it."""

    name: str
    version: str
    checks: str
    folder: str | None = None

    def __str__(self) -> str:
        return f"{self.name}-{self.version}"

    def need(self) -> None:
        """Skips the test where the engine is not installed."""
        if not PYTHON.exists() or (self.folder is not None and not (FOLDER / self.folder).is_dir()):
            pytest.skip(f"{self.name} {self.version} is not installed in {FOLDER.name}: make engines")

    def run(self, script: str, *arguments: str, timeout_s: float = 300, **environment: str) -> str:
        """What the script printed, run by the engine's Python on this checkout."""
        paths = [str(ROOT), str(ROOT / "autotune")]
        if self.folder is not None:
            paths.insert(0, str(FOLDER / self.folder))
        done = subprocess.run(
            [str(PYTHON), str(HERE / script), *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_WAIT_POLICY": "passive", **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        assert done.returncode == 0, f"{script} ended with {done.returncode}:\n{done.stderr[-4000:]}"
        return done.stdout

    def checked(self, check: str) -> None:
        """Fails with the traceback of `check` where the engine's process had one."""
        self.need()
        document = _outcome(self)
        assert document[self.name] == self.version
        assert document["outcome"][check] == "ok", document["outcome"][check]

    def cases(self) -> list[Any]:
        """(engine, check) of each check there is, read off the script, which cannot be imported here."""
        tree = ast.parse((HERE / self.checks).read_text(encoding="utf-8"))
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        return [
            pytest.param(self, name, id=f"{self}-{name}", marks=pytest.mark.compat(self.name, _sentence(name)))
            for name in functions
            if name.startswith("check_")
        ]


def _sentence(check: str) -> str:
    return check.removeprefix("check_").replace("_", " ")


@functools.cache  # all checks of an engine in one process: importing it takes longer than they do
def _outcome(engine: Engine) -> dict[str, Any]:
    last: dict[str, Any] = json.loads(engine.run(engine.checks).splitlines()[-1])
    return last


# vLLM's own build for the CPU, which serves; and the Python sources of the next release, whose kernels need a GPU
VLLM = (Engine("vllm", "0.32.0", "vllm_checks.py"), Engine("vllm", "0.33.0", "vllm_checks.py", "vllm-0.33.0"))
SGLANG = Engine("sglang", "0.5.23", "sglang_checks.py", "sglang-0.5.23")
