"""Failures that users of other tuners reported, where a key said too little or too much. docs/failures.md lists all."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import database_fakes as fakes
import pytest
from database_fakes import CPU, H100, LAYOUT, SM_90, SPEC, TUNED, rule, trial

from pagegen import costs, selection, targets
from pagegen.db import keys, open_db
from pagegen.db.staleness import staleness
from pagegen.spec import DispatchRule, Target, Variant

CODE = targets.code_hash(SM_90)


@pytest.fixture(autouse=True)
def _no_device_of_this_machine(monkeypatch):
    def absent(target):
        raise ValueError(f"no {target} here")

    monkeypatch.setattr(targets, "current_device", absent)


@pytest.fixture
def db(tmp_path):
    with open_db(tmp_path / "tuned.db", shipped=False) as database:
        yield database


def save(db, device, saved=None):
    db.save_portfolio(
        spec=SPEC, layout=LAYOUT, device=device, profile=fakes.PROFILE, rule=saved or rule(), code_hash=CODE
    )


def grade(db, target, *, device=None, monkeypatch=None):
    if device is not None:
        monkeypatch.setattr(targets, "current_device", lambda target: device)
    return selection.rule_for(SPEC, LAYOUT, target, db).evidence["grade"]


def test_a_kernel_for_sm_120_is_not_taken_for_one_of_sm_121(db, monkeypatch):
    """An artefact of the one ran on the other, which answered with garbage until somebody wiped the cache."""
    devices = {n: replace(H100, name="one name", target=Target.parse(f"sm_{n}")) for n in (120, 121)}
    save(db, devices[120])
    assert grade(db, "sm_120", device=devices[120], monkeypatch=monkeypatch) == "exact"
    assert grade(db, "sm_121", device=devices[121], monkeypatch=monkeypatch) not in ("exact", "near", "arch")
    assert keys.device_identity(devices[120]) != keys.device_identity(devices[121])
    found = {target: trial(target=d.target, device=d) for target, d in devices.items()}
    assert db.record(found[120]) and db.record(found[121])
    assert db.trials(target=devices[121].target) == [found[121]]


def test_a_pcie_card_is_not_given_the_choice_of_its_sxm_sibling_as_its_own(db, monkeypatch):
    """Names were cut to "h100", so one product's table served another's, 114 units and a third of the power less."""
    pcie = replace(H100, name="NVIDIA H100 PCIe", units=114, bandwidth_gb_s=2039.0)
    save(db, H100)
    found = selection.rule_for(SPEC, LAYOUT, SM_90, db)
    assert found.evidence["grade"] == "exact"
    monkeypatch.setattr(targets, "current_device", lambda target: pcie)
    found = selection.rule_for(SPEC, LAYOUT, SM_90, db)
    assert (found.evidence["grade"], found.evidence["confidence"]) == ("arch", "low")
    assert "which is not the device here" in found.reason


def test_a_choice_for_256_units_is_not_that_of_the_part_with_128(db, monkeypatch):
    whole = replace(H100, target=Target.parse("gfx950"), name="AMD Instinct", units=256, shared_memory_kib=160.0)
    half = replace(whole, units=128)
    save(db, whole)
    assert grade(db, "gfx950", device=whole, monkeypatch=monkeypatch) == "exact"
    assert grade(db, "gfx950", device=half, monkeypatch=monkeypatch) == "arch"


def test_an_upgrade_that_reorders_the_candidates_changes_no_stored_choice(db):
    """A choice kept as a position in a list meant another candidate after the list had changed."""
    stored = rule().to_dict()
    named = stored["clauses"][0]["variant"]
    names = list(named)
    random.Random(1).shuffle(names)
    stored["clauses"][0]["variant"] = {name: named[name] for name in names}
    assert DispatchRule.from_dict(json.loads(json.dumps(stored))).variants == (TUNED,)
    assert Variant.parse(TUNED.name) == TUNED
    assert not [value for value in named.values() if isinstance(value, dict)]


def test_a_stored_choice_with_a_field_that_is_not_known_here_is_never_half_read(db):
    stored = rule().to_dict()
    stored["clauses"][0]["variant"]["cluster_size"] = 2
    with pytest.raises(ValueError, match="cluster_size"):
        DispatchRule.from_dict(stored)


def test_a_compilers_cache_that_moves_does_not_move_the_database(tmp_path, monkeypatch):
    """A second run tuned again and a third did not: a library had moved the cache folder in between."""
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "PAGEGEN_CACHE_DIR"):
        with open_db() as before:
            monkeypatch.setenv(name, str(tmp_path / name))
            with open_db() as after:
                assert after.name == before.name and str(tmp_path / "tuning.db") in after.name


def test_another_pagegen_with_the_same_templates_calls_for_measuring_again(db):
    """What makes the code was not in the key: a restored choice ran as other code than the one that had been timed. The
    templates have a hash; the generator and the compiler's flags are told by the version of pagegen."""
    save(db, H100)
    db.record(trial(code_hash=CODE, environment={"pagegen": "0.1", "driver": "570"}))

    def state(**environment):
        (found,) = staleness(db, code_hash=lambda target: CODE, environment=lambda target: environment)
        return found.state, dict(found.changed)

    assert state(pagegen="0.1", driver="570") == ("valid", {})
    assert state(pagegen="0.2", driver="570") == ("revalidate", {"pagegen": ("0.1", "0.2")})


def test_records_of_another_target_never_answer(db):
    """The argument that named the target was ignored, and the fastest record of any target came back."""
    save(db, CPU, rule(fakes.CppVariant()))
    db.record(fakes.cpu_trial(samples_us=(500.0, 500.0, 500.0)))
    found = selection.rule_for(SPEC, LAYOUT, SM_90, db)
    assert found.evidence["kind"] == "predicted" and all(v.family == "triton" for v in found.variants)
    assert db.trials(target=SM_90) == [] and len(db.trials(target=CPU.target)) == 1
    assert db.best_block_size(SPEC, SM_90, fakes.PROFILE)[0].kind == "predicted"


def test_a_choice_tuned_with_more_shared_memory_is_refused_before_anything_is_launched():
    """106,496 bytes were asked of a device with 101,376, at the first launch of a model."""
    wide = replace(TUNED, tile_kv=256, page_walk="any", num_stages=4)
    small = costs.shipped_device(Target.parse("sm_120"))
    reasons = selection.feasibility.infeasible(SPEC, LAYOUT, wide, small)
    assert any("bytes of shared memory" in reason for reason in reasons)
