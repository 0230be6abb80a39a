"""A machine without a C++ compiler that works: the reference path serves, every answer says so and why, once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# What a user's process does: attention of two specs, a write, a copy; then what it is told about the choice.
SESSION = """
import io, json, logging, sys
import torch, pagegen
from pagegen import selection
from pagegen.spec import AttentionSpec, CacheLayout, Workload
from click.testing import CliRunner
from pagegen.cli.main import main

torch.manual_seed(0)
k, v = torch.randn(2, 5, 16, 2, 64)
table, lens = torch.tensor([[3, 0], [1, 4]], dtype=torch.int32), torch.tensor([20, 5], dtype=torch.int32)
q = torch.randn(2, 4, 64)
errors = []
for _ in range(2):
    for window in (None, 7):
        out = pagegen.paged_attention(q, k, v, table, lens, window=window)
        exact = pagegen.reference_attention(q.double(), k, v, table, lens, window=window)
        errors.append((out.double() - exact).abs().max().item())
new = torch.randn(1, 2, 64)
pagegen.write_kv(new, new, k, v, torch.tensor([5]))
pagegen.copy_blocks(k, v, [(0, 2)])

spec, layout = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64, q_dtype="float32"), CacheLayout(block_size=16)
chosen = selection.select(spec, layout, "cpu", Workload(context_lens=(20, 5)))
asked = ["--model", "llama-3.1-8b", "--block-size", "16", "--batch", "2", "--context", "64", "--target", "cpu"]
run = lambda *arguments: CliRunner().invoke(main, arguments, catch_exceptions=False)
print(json.dumps({
    "error": max(errors),
    "written": torch.equal(k[2, 5], new[0]),
    "prepared": pagegen.prepare(spec, layout) is not None,
    "kind": chosen.evidence["kind"],
    "reason": chosen.reason,
    "explain": run("explain", *asked).stdout,
    "explained": json.loads(run("explain", *asked, "--json").stdout),
    "doctor": run("doctor").stdout,
}))
"""


def compiler_that_fails(path: Path, error: str) -> str:
    path.write_text(f"""#!/bin/sh
[ "$1" = --version ] && {{ echo "c++ 9.9"; exit 0; }}
echo "{error}" >&2
exit 1
""")
    path.chmod(0o755)
    return str(path)


def session(cxx: str, tmp_path: Path) -> tuple[dict[str, Any], str]:
    """What the session printed, and its standard error."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "autotune"), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"CXX": cxx, "PAGEGEN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": path, "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", SESSION], env={**os.environ, **own}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (None, "the compiler '/nonexistent' does not run"),
        (
            "kernel.cpp:31:10: fatal error: omp.h: No such file or directory",
            "31:10: fatal error: omp.h: No such file or directory: c++ 9.9 comes without OpenMP",
        ),
        pytest.param(  # tests/unit/test_cpp_build.py has what is said of it
            "c++: error: unrecognized command line option '-std=c++20'",
            "unrecognized command line option '-std=c++20': c++ 9.9 knows no C++20",
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["missing", "without OpenMP", "too old"],
)
def test_without_a_compiler_the_reference_path_serves_and_everything_says_so(
    error: str | None, why: str, tmp_path: Path
) -> None:
    cxx = "/nonexistent" if error is None else compiler_that_fails(tmp_path / "c++", error)
    found, stderr = session(cxx, tmp_path)

    assert found["error"] < 1e-5
    assert found["written"]
    assert not found["prepared"]
    assert found["kind"] == "reference"
    for text in (found["reason"], found["explain"], found["doctor"], stderr):
        assert why in text
        assert "apt-get install g++" in text
    assert found["reason"].startswith("the reference path serves: no C++ compiler works here")
    assert found["explained"]["served_by"] == "reference"
    assert "none, the reference path" in found["explain"]
    assert "for which the reference path serves until then" in found["doctor"]
    assert stderr.count("gathers its blocks and computes densely") == 1, "said once, whatever the number of calls"
