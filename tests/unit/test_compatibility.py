"""docs/compatibility.md is the page of docs/compatibility.json, and that names tests that there are, none failing."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from compatibility_page import DOCS, render

ROOT = Path(__file__).parents[2]
STALE = "docs/compatibility.json is not current: run `make compatibility`"


@pytest.fixture(scope="module")
def rows():
    return json.loads((DOCS / "compatibility.json").read_text(encoding="utf-8"))


def marked(path: Path) -> set[str]:
    """The tests of a file that are marked `compat`, themselves or by their module or class."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    whole = any(
        isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n) and "compat(" in ast.unparse(n) for n in tree.body
    )
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    return {f.name for f in functions if whole or any("mark.compat(" in ast.unparse(d) for d in f.decorator_list)}


def test_the_page_is_what_was_recorded(rows):
    assert (DOCS / "compatibility.md").read_text(encoding="utf-8") == render(rows), STALE


def test_every_marked_test_was_recorded_and_every_recorded_one_is_there(rows):
    recorded = {row["test"] for row in rows}
    files = [p for p in (ROOT / "tests").rglob("test_*.py") if "mark.compat(" in p.read_text(encoding="utf-8")]
    files.remove(Path(__file__))
    assert {f"{p.relative_to(ROOT)}::{name}" for p in files for name in marked(p)} <= recorded, STALE
    for test in recorded:
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), STALE


def test_nothing_that_fails_is_recorded(rows):
    assert [row["test"] for row in rows if row["outcome"] == "failed"] == []


ROW = {
    "host": "torch",
    "version": "2.13",
    "feature": "export",
    "test": "t::a",
    "case": "",
    "outcome": "passed",
    "reason": "",
}


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        ([{}], "| 2.13 | export | passes | `t::a` |"),
        ([{"case": "x"}, {"case": "y"}], "| passes (x, y) |"),
        ([{"case": "x"}, {"case": "y", "outcome": "failed"}], "| **fails** (y) |"),
        ([{"outcome": "skipped", "reason": "no vllm"}], "| not run: no vllm |"),
        ([{"case": "x", "outcome": "skipped", "reason": "no vllm"}, {"case": "y"}], "| passes (y) |"),
        ([{"case": str(i) * 20} for i in range(9)], "| passes (9 cases) |"),
        ([{"case": "a|b"}], "| passes |"),
    ],
)
def test_a_row_says_what_ran(cases, expected):
    assert expected in render([{**ROW, **case} for case in cases])
