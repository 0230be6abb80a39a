"""docs/coverage.md says what is so: it is the page of docs/coverage.json, and that is of today's templates, default
variants, features and tests. `make coverage` writes both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import coverage_page
import pytest
from features import FEATURES, TARGETS, Feature

from pagegen.codegen import triton

ROOT = Path(__file__).resolve().parents[2]
STALE = "docs/coverage.json is not current: run `make coverage`"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((ROOT / "docs" / "coverage.json").read_text(encoding="utf-8"))
    return document


def test_the_page_is_what_the_json_says(found: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
    assert coverage_page.render(found) == page, STALE


def test_the_kernels_were_made_from_todays_templates(found: dict[str, Any]) -> None:
    assert found["template_hash"] == triton.template_hash(), STALE


def test_the_features_are_todays(found: dict[str, Any]) -> None:
    assert found["features"] == json.loads(json.dumps(coverage_page.definitions())), STALE


def test_every_kernel_of_every_feature_is_there_in_todays_variant(found: dict[str, Any]) -> None:
    listed = {(k["feature"], k["target"], k["kernel"]): k.get("variant") for k in found["kernels"]}
    wanted = {
        (f.name, str(t), kind): f.variant(kind, t).name if isinstance(f, Feature) else None
        for f in FEATURES
        for t in TARGETS
        for kind in f.kinds
        if str(t) not in f.absent
    }
    assert len(found["kernels"]) == len(listed)
    assert listed == wanted, STALE


def test_no_kernel_spills_or_fails_without_a_reason(found: dict[str, Any]) -> None:
    assert coverage_page.problems(found["kernels"]) == []


def test_no_excuse_is_left_over(found: dict[str, Any]) -> None:
    spilling = {(k["feature"], k["target"]) for k in found["kernels"] if k.get("spills")}
    assert {(f.name, target) for f in FEATURES for target in f.excused} <= spilling


def test_every_default_was_compiled_in_less_than_ten_minutes_of_two_cores(found: dict[str, Any]) -> None:
    assert found["cpu_seconds"] < 2 * 600


def test_every_test_that_the_table_names_is_run_by_default() -> None:
    named = {test for feature in FEATURES for test in (*feature.cpu, *feature.interpreter)}
    files = sorted({test.partition("::")[0] for test in named})
    chosen = ["--collect-only", "-m", "not nightly", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", *chosen, *files]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert named - set(done.stdout.splitlines()) == set()


def test_a_spill_and_a_kernel_that_does_not_compile_are_told() -> None:
    row = {"feature": FEATURES[0].name, "kernel": "decode", "target": "sm_90"}
    good, spilling = {**row, "spills": 0}, {**row, "spills": 8, "variant": "triton:tile_rows=16"}
    assert coverage_page.problems([good]) == []
    assert coverage_page.problems([spilling]) == ["causal, decode, sm_90: spills 8 (triton:tile_rows=16)"]
    assert coverage_page.problems([{**row, "error": "no"}]) == ["causal, decode, sm_90: no"]
