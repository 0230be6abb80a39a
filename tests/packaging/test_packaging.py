"""The wheel and the sdist hold what they must and nothing else, and work outside the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

import pagegen
from pagegen.cli.main import main

ROOT = Path(__file__).parents[2]
STEM = f"pagegen_attention-{pagegen.__version__}"
EMIT = ("emit", "--model", "llama-3.1-8b", "--block-size", "16", "--target", "sm_90")


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Standard output of a command; a failing one fails the test with all that it said."""
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the sdist, built from the checkout without a download."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", folder, cwd=ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture(scope="module")
def wheel_names(built: dict[str, Path]) -> set[str]:
    with zipfile.ZipFile(built["wheel"]) as archive:
        return set(archive.namelist())


def test_the_wheel_claims_no_foreign_top_level_name(wheel_names):
    top = {name.split("/")[0] for name in wheel_names}
    assert top == {"pagegen", "pagegen_autotune", f"{STEM}.dist-info"}


def test_the_wheel_is_for_every_machine(built):
    assert built["wheel"].name == f"{STEM}-py3-none-any.whl"


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("templates", "pagegen/_data/templates"),
        ("cache_db", "pagegen/_data/cache_db"),
        ("autotune/profiles", "pagegen/_data/profiles"),
        ("pagegen/spec", "pagegen/spec"),
    ],
)
def test_the_data_folders_are_in_the_wheel_whole(source, target, wheel_names):
    files = [p.relative_to(ROOT / source) for p in (ROOT / source).rglob("*") if p.is_file()]
    wanted = {f"{target}/{p.as_posix()}" for p in files if "__pycache__" not in p.parts}
    assert wanted
    assert wanted <= wheel_names


def test_both_packages_tell_type_checkers_that_they_are_typed(wheel_names):
    assert {"pagegen/py.typed", "pagegen_autotune/py.typed"} <= wheel_names


def test_neither_archive_holds_what_a_build_or_a_run_leaves_behind(built, wheel_names):
    with tarfile.open(built["sdist"]) as archive:
        names = wheel_names | set(archive.getnames())
    litter = ("__pycache__", ".venv", ".git/", ".pytest_cache", ".pyc", ".so", ".db-wal", ".egg-info")
    assert not [name for name in names if any(part in name for part in litter)]


def test_the_licence_is_apache_and_in_both_archives(built, wheel_names):
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert text.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert f"{STEM}.dist-info/licenses/LICENSE" in wheel_names
    with tarfile.open(built["sdist"]) as archive:
        assert f"{STEM}/LICENSE" in archive.getnames()


def test_the_sdist_holds_the_tests_and_the_means_to_run_them(built):
    with tarfile.open(built["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Makefile", "constraints.txt", "README.md", "docs/design.md", "tests/conftest.py"} <= names


@pytest.fixture(scope="module", params=["wheel", pytest.param("sdist", marks=pytest.mark.nightly)])
def installed(request, built, tmp_path_factory) -> Path:
    """A Python in a fresh environment with the archive installed. What pagegen needs comes from this environment,
    through a path file: appended, so that the fresh environment's own pagegen comes first."""
    folder = tmp_path_factory.mktemp(request.param)
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    places = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", vars=places))
    (site / "parent.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-qq", "--disable-pip-version-check")
    run(*pip, "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed", built[request.param], cwd=folder)
    return python


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict[str, object]:
    """A working folder outside the checkout and an environment that leads to nothing in it."""
    keep = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    return {"cwd": tmp_path, "env": {**keep, "PAGEGEN_CACHE_DIR": str(tmp_path / "cache")}}


def test_an_installed_pagegen_finds_its_own_code_and_data(installed, elsewhere):
    code = (
        "import json, pagegen, pagegen_autotune, pagegen.paths as p;"
        "print(json.dumps([pagegen.__file__, pagegen_autotune.__file__, "
        "*(str(p.data(n)) for n in ('templates', 'cache_db', 'profiles'))]))"
    )
    for path in json.loads(run(installed, "-c", code, **elsewhere)):
        assert Path(path).is_relative_to(installed.parents[1]), f"{path} is not the installed one"


def test_the_installed_command_renders_the_kernel_that_the_checkout_renders(installed, elsewhere):
    kernel = run(installed.parent / "pagegen", *EMIT, **elsewhere)
    compile(kernel, "kernel.py", "exec")
    assert "HEAD_DIM = tl.constexpr(128)" in kernel
    assert kernel == CliRunner().invoke(main, EMIT, catch_exceptions=False).stdout
