"""Tuning for sm_90 with its real compilers, on a machine that has none: a minute's work cut to two candidates."""

from __future__ import annotations

import os

import pytest
from pagegen_autotune import tune

from pagegen import costs, selection, targets
from pagegen.db import open_db
from pagegen.spec import AttentionSpec, CacheLayout, Profile, Target, TritonVariant, Workload

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreting process compiles nothing"
)

SPEC = AttentionSpec.from_model("llama-3.1-8b")
LAYOUT = CacheLayout(block_size=16)
SM_90 = Target.parse("sm_90")
PROFILE = Profile(name="one long chat", workloads=(Workload(context_lens=(6000,)),), weights=(1.0,))
# 128 keys in two warps need 255 registers and more; 16 parts of one sequence fill the device.
SPILLING = TritonVariant(tile_kv=128, page_walk="pages_in_tile", num_splits=32, num_warps=2, num_stages=1)
GOOD = TritonVariant(tile_kv=64, page_walk="pages_in_tile", num_splits=32, reduce="last", num_stages=3)


def test_a_run_for_an_absent_gpu_compiles_prunes_stores_and_is_asked(tmp_path):
    with open_db(tmp_path / "tuning.db", shipped=False) as db:
        report = tune(
            SPEC, PROFILE, db=db, target="sm_90", block_sizes=(16,), progress=False,
            only={LAYOUT: {"decode": [GOOD, SPILLING]}},
        )  # fmt: skip
        assert report.kind == "predicted"
        facts = {f.variant: f for f in db.compile_facts(spec=SPEC)}
        assert facts[SPILLING].spills > 0 and facts[GOOD].spills == 0
        assert facts[GOOD].loop["instructions"] > 100 and facts[GOOD].programs_per_unit >= 2
        rule = db.portfolio(SPEC, LAYOUT, SM_90, targets.code_hash(SM_90))
        assert rule.evidence["rejected"]["spills"]["example"] == SPILLING.name
        assert rule.choose(1, 1, 6000) == GOOD
        assert "predicted, not measured" in rule.reason and "no spills" in rule.reason

        row = next(r for r in selection.best_block_size(SPEC, SM_90, PROFILE, db=db) if r.block_size == 16)
        assert row.kind == "predicted" and row.variants == (GOOD.name,)
        load = PROFILE.workloads[0]
        by_facts = costs.predict_us(SPEC, LAYOUT, GOOD, costs.shipped_device(SM_90), load, facts=facts[GOOD])
        assert row.step_us == pytest.approx(by_facts)
