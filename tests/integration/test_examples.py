"""Every example runs as it stands, checks its own answers, and is named in the README."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_environment import PYTHON, VLLM

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
# test_parallel.py and test_continuous_batching.py do what these show: they are run by night.
TESTED_OTHERWISE = ("tensor_parallel.py", "hf_continuous_batching.py")


def python_of(name: str) -> str:
    """The Python that an example needs; skips where it is not installed."""
    if not name.startswith("vllm"):
        return sys.executable
    VLLM[0].need()
    return str(PYTHON)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.nightly) if n in TESTED_OTHERWISE else n for n in EXAMPLES]
)
def test_an_example_runs_and_checks_itself(name):
    python = python_of(name)
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [python, str(ROOT / "examples" / name)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_readme_names_every_example(name):
    assert f"examples/{name}" in (ROOT / "README.md").read_text(encoding="utf-8")
