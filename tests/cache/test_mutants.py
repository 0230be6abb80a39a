"""The state machine sees faults: each of these, put into a copy of the cache, makes it fail."""

from __future__ import annotations

import shutil

import pytest
from mutant_run import SOURCE, changed_copy, verdict
from mutants import MUTANTS

EXAMPLES = 400  # of 40 operations at most; most faults are found in the first 20
NAMES = [mutant.name for mutant in MUTANTS]


def test_the_faults_are_a_dozen_at_least_and_have_names_of_their_own():
    assert len(NAMES) >= 12 and len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("mutant", MUTANTS, ids=NAMES)
def test_the_place_of_every_fault_is_in_the_source_just_once(mutant):
    assert (SOURCE / mutant.module).read_text().count(mutant.text) == 1


@pytest.mark.parametrize("mutant", MUTANTS, ids=NAMES)
def test_the_state_machine_catches(mutant, tmp_path, nightly):
    if not nightly and NAMES.index(mutant.name) % 4:
        pytest.skip("every fourth fault: all of them with --nightly")
    copy = changed_copy(tmp_path, mutant.module, mutant.text, mutant.replacement)
    options = {"focus": mutant.focus, "tensors": mutant.tensors, "examples": EXAMPLES, "limit_s": 120}
    options["compiled"] = mutant.module not in ("prefix.py", "growth.py", "steps.py")
    said = verdict(copy, **options)
    assert said.ended == "failed", f"{mutant.name}: {said.ended}, {said.detail}"
    if nightly:  # by what sequences read and what the numbers say alone, without the cache's own checks of itself
        said = verdict(copy, invariants=False, **options)
        assert said.ended == "failed", f"{mutant.name}, without invariants: {said.ended}, {said.detail}"


@pytest.mark.parametrize(("focus", "tensors"), sorted({(mutant.focus, mutant.tensors) for mutant in MUTANTS}))
def test_the_state_machine_passes_an_unchanged_copy(focus, tensors, tmp_path, nightly):
    copy = shutil.copytree(SOURCE, tmp_path / "cache", ignore=shutil.ignore_patterns("__pycache__"))
    said = verdict(copy, focus=focus, tensors=tensors, examples=50 if nightly else 8, limit_s=60)
    assert said.ended == "passed", said.detail
