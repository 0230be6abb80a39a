"""The layers of docs/design.md hold: read from its table, checked against every import in the source."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

import pagegen

ROOT = Path(__file__).parents[2]
PACKAGES = {"pagegen": ROOT / "pagegen", "pagegen_autotune": ROOT / "autotune" / "pagegen_autotune"}
MAX_LINES = 350
FACADE = "pagegen"  # pagegen/__init__.py: forwards names to their homes, so it stands above the library

# Imports that go up a layer, each inside a function, and why there is no better place for what they need.
UPWARD = {
    ("pagegen.db.database", "pagegen.selection"): "asking is a verb of the database, how it is answered stands above",
}
# Modules other than pagegen.settings that touch the environment, and why.
ENVIRONMENT: dict[str, str] = {}


def modules() -> dict[str, Path]:
    """Every module of both packages by its dotted name."""
    found = {}
    for name, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((name, *(p for p in parts if p != "__init__")))] = path
    return found


def layers() -> dict[str, int]:
    """The level of each package in the design document's table, 0 at the bottom."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split("## Layers")[1]
    table = re.search(r"\n\n((?:    .+\n)+)", text)
    assert table is not None
    rows = [re.findall(r"\bpagegen(?:_autotune|\.\w+)", line) for line in table[1].splitlines()]
    level = {name: len(rows) - i for i, row in enumerate(rows) for name in row}
    return {**level, "pagegen.__main__": len(rows), FACADE: level["pagegen.ops"]}


def package_of(module: str) -> str:
    """The row of the table that a module belongs to: pagegen.spec.check is part of pagegen.spec."""
    return "pagegen_autotune" if module.startswith("pagegen_autotune") else ".".join(module.split(".")[:2])


def imported(tree: ast.AST, module: str, known: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """(module, line) of every import of ours in `tree`, those inside functions and type-checking blocks included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively; write the whole name"
            assert node.module is not None
            # pagegen.__version__ is set before anything is imported: a fact that every layer may state
            names = [_resolve(node.module, a.name, known) for a in node.names if a.name != "__version__"]
        else:
            continue
        yield from ((name, node.lineno) for name in names if name.split(".")[0] in PACKAGES)


def _resolve(module: str, name: str, known: dict[str, Path]) -> str:
    """What `from module import name` reaches: a submodule, a forwarded name's home, or the module itself."""
    if f"{module}.{name}" in known:
        return f"{module}.{name}"
    if module == "pagegen" and name in pagegen._HOME_OF:
        return pagegen._HOME_OF[name]
    return module


def edges() -> list[tuple[str, str, int]]:
    """(importer, imported, line) over the whole source."""
    known = modules()
    return [
        (name, target, line)
        for name, path in known.items()
        for target, line in imported(ast.parse(path.read_text(encoding="utf-8")), name, known)
    ]


def crossings() -> list[tuple[str, str, int]]:
    """The imports that leave their package, the documented upward ones apart."""
    return [
        (importer, target, line)
        for importer, target, line in edges()
        if package_of(importer) != package_of(target) and (importer, package_of(target)) not in UPWARD
    ]


def test_the_table_of_layers_names_every_package_there_is_and_no_other():
    on_disk = {package_of(m) for m in modules()}
    written = {name for name in layers() if name not in (FACADE, "pagegen.__main__")}
    assert on_disk - {FACADE, "pagegen.__main__"} == written


def test_imports_go_down_only():
    level = layers()
    wrong = [
        f"{importer}:{line} imports {target}, which is above it"
        for importer, target, line in crossings()
        if importer != FACADE and level[package_of(target)] > level[package_of(importer)]
    ]
    assert not wrong, "\n".join(wrong)


def test_packages_of_one_layer_do_not_import_each_other_in_a_circle():
    graph = networkx.DiGraph((package_of(a), package_of(b)) for a, b, _ in crossings() if FACADE not in (a, b))
    assert networkx.is_directed_acyclic_graph(graph), networkx.find_cycle(graph)


def test_every_exception_to_the_layers_is_still_needed():
    used = {(importer, package_of(target)) for importer, target, _ in edges()}
    assert set(UPWARD) <= used


def test_an_import_that_goes_up_happens_inside_a_function():
    known = modules()
    for importer, package in UPWARD:
        tree = ast.parse(known[importer].read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = [ast.Pass()]
        assert package not in {package_of(target) for target, _ in imported(tree, importer, known)}, importer


def test_only_the_command_line_and_the_tuner_itself_import_the_tuner():
    outside = {
        importer
        for importer, target, _ in edges()
        if package_of(target) == "pagegen_autotune" and package_of(importer) not in ("pagegen_autotune", "pagegen.cli")
    }
    assert not outside


def test_the_environment_is_read_in_settings_only():
    readers = set()
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            attribute = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            imported_name = isinstance(node, ast.ImportFrom) and {a.name for a in node.names} & {"environ", "getenv"}
            if attribute or imported_name:
                readers.add(name)
    assert readers == {"pagegen.settings", *ENVIRONMENT}


def test_no_module_is_longer_than_the_limit():
    long = {m: n for m, p in modules().items() if (n := len(p.read_text(encoding="utf-8").splitlines())) > MAX_LINES}
    assert not long


def test_no_module_is_a_drawer_for_odds_and_ends():
    assert not [m for m in modules() if m.split(".")[-1] in ("utils", "util", "helpers", "common", "misc")]


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh interpreter with the checkout on its path."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "autotune")])
    env = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def loaded_by_import() -> set[str]:
    done = run("import pagegen, sys; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("heavy", ["triton", "sqlalchemy", "libcst", "transformers", "click", "pagegen_autotune"])
def test_importing_pagegen_does_not_load(heavy, loaded_by_import):
    assert heavy not in loaded_by_import


def test_attention_on_the_cpu_needs_neither_triton_nor_the_optional_libraries():
    code = """
import sys
for name in ("triton", "transformers", "gguf", "pagegen_autotune"):
    sys.modules[name] = None  # importing it raises ImportError
import torch, pagegen
q = torch.ones(1, 2, 16)
cache = torch.ones(3, 4, 1, 16)
table, lens = torch.tensor([[2]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
torch.testing.assert_close(pagegen.paged_attention(q, cache, cache, table, lens), torch.ones(1, 2, 16))
"""
    done = run(code, PAGEGEN_TARGET="cpu")
    assert done.returncode == 0, done.stderr
