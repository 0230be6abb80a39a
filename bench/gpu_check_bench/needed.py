"""What the check needs to import, asked before anything is imported. The standard library only."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence

RUNTIME = ("torch", "numpy")
GPU = ("triton",)
# pagegen's own dependencies: pure Python, but libcst (its parser is compiled) and parts of SQLAlchemy
OWN = ("sympy", "networkx", "libcst", "sqlalchemy", "alembic", "click", "tqdm", "tabulate", "platformdirs")
FOLDER = "gpu-site"
PREPARE = (
    "python3 -m pip install --no-compile --target {folder} --only-binary=:all: --python-version {version} "
    "--implementation cp --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 {names}"
)


def missing(names: Sequence[str]) -> list[str]:
    """Those of `names` that cannot be imported."""
    return [name for name in names if not _found(name)]


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def advice(names: Sequence[str], version: str) -> str:
    """What to do about missing packages: two lines to run."""
    own = [name for name in names if name in OWN]
    said = [f"missing here: {', '.join(names)}"]
    if own:
        command = PREPARE.format(folder=FOLDER, version=version, names=" ".join(own))
        said += [
            f"on a machine with network: {command}",
            f"then here: python3 bench/gpu_check.py --site {FOLDER}",
        ]
    if len(own) < len(names):
        others = ", ".join(name for name in names if name not in own)
        said.append(f"{others}: use an image that has torch 2.10 or newer with its triton and numpy")
    return "\n".join(said)


def versions(names: Sequence[str]) -> dict[str, str]:
    """The release of each, "absent" for what is not installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "release not known" if _found(name.replace("-", "_")) else "absent"
    return found
