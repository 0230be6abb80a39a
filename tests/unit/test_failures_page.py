"""docs/failures.md names tests that exist, and has a test for all that applies."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "failures.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith(("| symptom", "| ---"))
]
APPLY = [row for row in ROWS if len(row) == 4]
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def names_in(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"}


def test_every_failure_that_applies_has_a_test_that_exists():
    assert len(APPLY) >= 40 and all(len(row) in (3, 4) for row in ROWS)
    for symptom, reported, applies, named in APPLY:
        assert applies.split(":")[0].split(",")[0] in ("yes", "partly"), symptom
        assert "https://github.com/" in reported, symptom
        found = NAMED.findall(named)
        assert found and NAMED.sub("", named).strip(" ,") == "", symptom
        for file, test in found:
            assert test in names_in(file), f"{symptom}: {file} has no {test}"


def test_every_failure_that_does_not_apply_says_why():
    rest = [row for row in ROWS if len(row) == 3]
    assert rest and all(all(row) for row in rest)


def test_no_symptom_is_listed_twice():
    symptoms = [row[0] for row in ROWS]
    assert len(symptoms) == len(set(symptoms))


def test_every_test_named_after_a_symptom_is_on_the_page():
    """So that the page and the files of failures do not drift apart."""
    named = {test for row in APPLY for _, test in NAMED.findall(row[3])}
    files = sorted(TESTS.glob("unit/test_failures_*.py"))
    written = {test for file in files if file != Path(__file__) for test in names_in(str(file.relative_to(TESTS)))}
    extra = {
        # the other half of a failure that is on the page
        "test_a_candidate_that_writes_its_operands_and_then_raises_leaves_them_whole",
        "test_where_the_default_does_not_compile_either_the_dense_path_serves",
    }
    assert written - named == extra
