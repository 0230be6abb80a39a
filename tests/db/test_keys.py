"""The key of a trial's question changes with every field that affects code or timing, and with no other.

The fields are those that the values declare: one that is added fails a test here until it is said what it does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from database_fakes import CPU, H100, cpu_trial, trial

from pagegen.db import codec, open_db, schema
from pagegen.db.rows import Writer
from pagegen.db.schema import trials
from pagegen.spec import (
    AttentionSpec,
    CacheLayout,
    CompileFacts,
    CppVariant,
    Device,
    Measurement,
    Prediction,
    Target,
    TritonVariant,
    Workload,
)
from pagegen.spec.result import PURPOSE, SESSION

ROOT = Path(__file__).parents[2]
BASES = {"triton": trial(), "cpp": cpu_trial()}

# Another legal value of every field: the value is derived from its own where that is enough.
SPEC = {
    "num_q_heads": 16, "num_kv_heads": 4, "head_dim": 64, "v_head_dim": 64, "q_dtype": torch.float16,
    "kv_dtype": torch.int8, "scale": 0.5, "causal": False, "window": 100, "logit_softcap": 30.0, "alibi": True,
    "sinks": True, "kv_scale_granularity": "head", "kv_zero_points": True, "shared_kv": True, "score_mod": "m.f",
    "mask_mod": "m.f", "batch_invariant": True,
}  # fmt: skip
DEVICE = {
    "name": "NVIDIA H100 PCIe", "target": Target("cuda", "sm_100"), "units": 114, "memory_gib": 40.0,
    "last_level_cache_mib": 25.0, "shared_memory_kib": 100.0, "registers_per_unit": 1, "max_threads_per_unit": 1,
    "features": ("tma",), "core_clock_mhz": 1980.0, "memory_clock_mhz": 2619.0, "power_limit_w": 500.0,
    "partition": "MIG 1g.10gb",
}  # fmt: skip
MEASUREMENT = {"regime": "warm", "code_hash": "other", "target": Target("cuda", "sm_100")}
# What a question does not hold: its answer, and what is measured anew from run to run on one device.
ANSWER = {"status", "samples_us", "max_error", "detail", "created_at"}
RATES = {"bandwidth_gb_s", "matrix_tflops"}
NESTED = {"spec", "layout", "device", "variant", "workload", "environment"}


def other_value(value: object) -> object:
    """A value of the same type that differs."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    raise AssertionError(f"say what a {type(value).__name__} may be changed to")


def unchecked(value: object, **changes: object) -> object:
    """A copy with some fields changed, behind the checks: a key must not depend on what is legal."""
    copy = object.__new__(type(value))
    for field in fields(value):
        object.__setattr__(copy, field.name, changes.get(field.name, getattr(value, field.name)))
    return copy


def variant_changes(variant: object) -> dict[str, object]:
    """Each field of a variant with another value."""
    names = [field.name for field in fields(variant)]
    return {name: unchecked(variant, **{name: other_value(getattr(variant, name))}) for name in names}


def mutations() -> dict[str, tuple[Measurement, Measurement]]:
    """(base, changed) by "family value.field": every field of everything that a question is made of."""
    found = {}
    for family, base in BASES.items():
        for field in fields(AttentionSpec):
            changed = base.spec.replace(**{field.name: SPEC[field.name]})
            found[f"{family} spec.{field.name}"] = (base, replace(base, spec=changed))
        for changed in (CacheLayout(block_size=32, order="NHD"), CacheLayout(block_size=16, order="HND")):
            found[f"{family} layout.{'order' if changed.order == 'HND' else 'block_size'}"] = (
                base,
                replace(base, layout=changed),
            )
        for field in fields(Device):
            if field.name not in RATES:
                changed = replace(base.device, **{field.name: DEVICE[field.name]})
                found[f"{family} device.{field.name}"] = (base, unchecked(base, device=changed))
        for name, changed in variant_changes(base.variant).items():
            found[f"{family} variant.{name}"] = (base, replace(base, variant=changed))
        longer = {"context_lens": (1000, 3000, 18), "query_lens": (1, 1, 2)}
        for field in fields(Workload):
            changed = replace(base.workload, **{field.name: longer[field.name]})
            found[f"{family} workload.{field.name}"] = (base, replace(base, workload=changed))
        for field in fields(Measurement):
            if field.name not in NESTED | ANSWER:
                found[f"{family} {field.name}"] = (base, unchecked(base, **{field.name: MEASUREMENT[field.name]}))
        for name in ("pagegen", "torch", "triton", "compiler", "driver", "runtime", "system", "threads", "anything"):
            changed = {**base.environment, name: "other"}
            found[f"{family} environment.{name}"] = (base, replace(base, environment=changed))
    return found


def test_every_declared_field_is_changed_once():
    assert {f.name for f in fields(AttentionSpec)} == set(SPEC)
    assert {f.name for f in fields(Device)} == set(DEVICE) | RATES
    assert {f.name for f in fields(Measurement)} == NESTED | ANSWER | set(MEASUREMENT)
    assert {f.name for f in fields(CacheLayout)} == {"block_size", "order"}
    changed = {name.split(" ", 1)[1] for name in mutations()}
    for kind, prefix in ((TritonVariant, "triton"), (CppVariant, "cpp")):
        assert {f"{prefix} variant.{f.name}" for f in fields(kind)} <= set(mutations())
    assert {f"device.{f.name}" for f in fields(Device)} - changed == {f"device.{name}" for name in RATES}


@pytest.mark.parametrize("change", mutations().values(), ids=mutations())
def test_changing_one_field_changes_the_key(change):
    base, changed = change
    assert codec.trial_key(base) != codec.trial_key(changed)


def test_all_questions_that_differ_in_one_field_have_different_keys():
    keys = {codec.trial_key(changed) for _, changed in mutations().values()}
    # another target of the measurement alone and another target of its device are two things; nothing else coincides
    assert len(keys) == len(mutations())


UNCHANGED = {
    "samples": {"samples_us": (1.0, 2.0)},
    "error": {"max_error": 0.5},
    "detail": {"detail": "x"},
    "time": {"created_at": "2027-01-01"},
    "bandwidth": {"device": replace(H100, bandwidth_gb_s=1.0)},
    "tflops": {"device": replace(H100, matrix_tflops=1.0)},
    "a sliver of memory": {"device": replace(H100, memory_gib=79.6)},
    "a decorated name": {"device": replace(H100, name="H100-80GB hbm3 (TM)")},
    "a tuner's tags": {"environment": {"torch": "2.13.0", "driver": "570", SESSION: "s", PURPOSE: "confirm"}},
    "the order of an environment": {"environment": {"driver": "570", "torch": "2.13.0"}},
}


@pytest.mark.parametrize("change", UNCHANGED.values(), ids=UNCHANGED)
def test_what_affects_neither_code_nor_timing_leaves_the_key(change):
    assert codec.trial_key(trial(**change)) == codec.trial_key(trial())


KEYS = """
import json, sys
sys.path[:0] = ["tests/unit", "tests/db", "autotune"]
import test_keys
from pagegen.db import codec
print(json.dumps({name: codec.trial_key(changed) for name, (_, changed) in test_keys.mutations().items()}))
"""


def test_keys_are_the_same_in_two_processes_with_different_hash_seeds():
    """This process, whose seed is a random one or 0, and another."""
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", KEYS], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    here = {name: codec.trial_key(changed) for name, (_, changed) in mutations().items()}
    assert json.loads(done.stdout) == here


@pytest.mark.parametrize("name", [name for name in mutations() if " variant." not in name])
def test_every_question_is_stored_under_its_own_key_and_read_back(name, tmp_path_factory):
    """One file for all: each mutation must be a row of its own, with its named columns as its data say."""
    path = tmp_path_factory.getbasetemp() / "mutations.db"
    base, changed = mutations()[name]
    with open_db(path) as db:
        with db.atomic() as connection:
            Writer(connection).add_trial(changed)  # not `record`, which judges times by devices that are made up here
            stored = connection.execute(trials.select().where(trials.c.key == codec.trial_key(changed))).all()
        assert len(stored) == 1
        if changed.device.target != changed.target or name.endswith("target"):
            return  # no trial can be so, and none is read back
        found = {codec.trial_key(m) for m in db.trials(code_hash=changed.code_hash, spec=changed.spec)}
        assert codec.trial_key(changed) in found
        assert codec.trial_key(base) not in found


def test_every_scalar_field_of_a_kernel_and_device_has_a_column_of_its_name():
    assert {f.name for f in fields(AttentionSpec)} <= set(schema.kernels.c.keys())
    assert {f.name for f in fields(Device)} <= set(schema.devices.c.keys())
    for value, table in ((CompileFacts, schema.compile_facts), (Prediction, schema.predictions)):
        shared = {"spec", "layout", "target", "device", "variant", "workload", "code_hash", "environment"}
        assert {f.name for f in fields(value)} - shared <= set(table.c.keys())


def test_a_device_without_the_later_features_is_written_as_before_them():
    """What version 1 stored keeps its digest."""
    assert "core_clock_mhz" not in CPU.to_dict()
    assert codec.device_row(H100)["digest"] == "1e491f26b93fba4e875e9dafa6811d86a71acef30fbbc6d9314abdc6e11a44af"
    known = dataclasses.replace(H100, core_clock_mhz=1980.0, partition="MIG 1g.10gb")
    assert Device.from_dict(known.to_dict()) == known
    assert codec.device_from(codec.device_row(known)["data"]) == known
