"""Tuning for sm_90 where there is none: predictions, checked by the compiler, never stored as trials."""

from __future__ import annotations

import itertools

import pytest
from faulty_compilers import facts
from pagegen_autotune import absent, tune
from pagegen_autotune.compiling import Compiled
from pagegen_autotune.interrupt import StopSignal
from pagegen_autotune.tuner import TuneError
from tuning_fakes import DECODE, MIXED, PROFILE, SPEC, FakeClock

from pagegen import costs, selection, targets
from pagegen.costs import model
from pagegen.db import open_db
from pagegen.spec import AttentionSpec, CacheLayout, DispatchRule, Status, Target, TritonVariant, Workload
from pagegen.targets.disassembly import MainLoop

LAYOUT = CacheLayout(block_size=16)
SM_90 = Target("cuda", "sm_90")
START = TritonVariant(page_walk="any")


class FakeCompilers:
    """Compiles in no time: `outcomes` maps variants to what comes of them. `compiled` is what was asked for."""

    def __init__(self):
        self.compiled: list = []
        self.outcomes: dict = {}
        self.plain = Compiled(status=Status.OK, facts=facts())

    def __call__(self, spec, device, profile):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def run(self, tasks, may_go_on):
        for task in tasks:
            if not may_go_on():
                return
            self.compiled.append(task.variant)
            yield task, self.outcomes.get(task.variant, self.plain)


@pytest.fixture
def compilers(monkeypatch):
    made = FakeCompilers()
    monkeypatch.setattr(absent, "Compilers", made)
    return made


@pytest.fixture
def times(monkeypatch):
    """Times by the variant alone: `times["of"]` says which."""
    told = {"of": lambda variant: 100.0 / variant.num_warps}

    def predict_us(spec, layout, variant, device, workload, *, facts=None, fit=None):
        return told["of"](variant)

    monkeypatch.setattr(costs, "predict_us", predict_us)
    monkeypatch.setattr(targets, "default_variant", lambda spec, layout, target, *, decode: START)
    return told


@pytest.fixture(autouse=True)
def one_code(monkeypatch):
    monkeypatch.setattr(targets, "code_hash", lambda target: "hash-1")


@pytest.fixture
def db(tmp_path):
    with open_db(tmp_path / "tuning.db", shipped=False) as found:
        yield found


def predict(db, **options):
    return tune(SPEC, PROFILE, **{"db": db, "target": "sm_90", "block_sizes": (16,), "progress": False, **options})


def test_the_predicted_best_that_compiles_is_stored_as_predicted(db, compilers, times):
    report = predict(db)
    rule = db.portfolio(SPEC, LAYOUT, SM_90, "hash-1")
    assert rule.choose(8, 1, 100).num_warps == 8
    assert rule.evidence["kind"] == report.kind == "predicted" and "predicted, not measured" in rule.reason
    assert db.trials(spec=SPEC) == []
    expected = {p.variant.num_warps: p.predicted_us for p in db.predictions(spec=SPEC, workload=DECODE)}
    assert expected == {4: 25.0, 8: 12.5}
    assert report.rows[0].speedup == pytest.approx(2.0) and report.device.target == SM_90


def test_every_compiled_candidate_leaves_its_facts(db, compilers, times):
    predict(db)
    stored = {(f.variant, f.form) for f in db.compile_facts(spec=SPEC)}
    assert len(stored) == len(compilers.compiled) > 4
    assert {form for _, form in stored} == {"decode", "ragged"}
    assert db.portfolio(SPEC, LAYOUT, SM_90, "hash-1").evidence["compiled"] == len(stored)


def test_code_that_spills_overfills_or_does_not_compile_is_passed_over_and_said(db, compilers, times):
    predict(db)
    bad = {
        "spills": Compiled(status=Status.OK, facts=facts(spills=8)),
        "taken_shared_memory": Compiled(status=Status.OK, facts=facts(shared_bytes=400_000)),
        "occupancy": Compiled(status=Status.OK, facts=facts(programs_per_unit=0)),
        "compile_error": Compiled(status=Status.COMPILE_ERROR, detail="CompileError: too much"),
        "timeout": Compiled(status=Status.TIMEOUT, detail="no answer within 60 s"),
        "runtime_error": Compiled(status=Status.RUNTIME_ERROR, detail="the process ended by SIGABRT"),
    }
    fast = list(dict.fromkeys(v for v in compilers.compiled if v.num_warps == 8))
    compilers.outcomes = dict(zip(fast, bad.values(), strict=False))
    assert len(compilers.outcomes) == len(bad)
    report = predict(db)
    rule = report.rows[0].rule
    assert not set(rule.variants) & set(compilers.outcomes)
    assert set(rule.evidence["rejected"]) == set(bad)
    assert "no answer within 60 s" in rule.evidence["rejected"]["timeout"]["reason"]
    assert {"spills (compiled)", "timeout (compiled)"} <= set(report.rejected)


def test_when_nothing_compiles_the_default_stays(db, compilers, times):
    compilers.plain = Compiled(status=Status.COMPILE_ERROR, detail="no")
    rule = predict(db).rows[0].rule
    assert rule.variants == (START,) and "default stays" in rule.reason


def test_a_predicted_tie_keeps_the_default_and_compiles_it_alone(db, compilers, times):
    times["of"] = lambda variant: 100.0
    assert predict(db).rows[0].speedup == 1.0
    assert set(compilers.compiled) == {START}


def test_batches_that_want_different_variants_get_a_tree_where_one_would_lose_too_much(db, compilers, monkeypatch):
    monkeypatch.setattr(targets, "default_variant", lambda spec, layout, target, *, decode: START)

    def predict_us(spec, layout, variant, device, workload, *, facts=None, fit=None):
        wanted = 8 if workload.num_seqs > 4 else 2
        return 10.0 if variant.num_warps == wanted else 100.0

    monkeypatch.setattr(costs, "predict_us", predict_us)
    row = predict(db).rows[0]
    assert row.rule.choose(2, 1, 500).num_warps == 2
    assert row.rule.choose(8, 1, 4000).num_warps == 8
    assert all(d.regret == pytest.approx(0.0) for d in row.decisions)


def test_a_batch_invariant_spec_gets_one_variant_for_all(db, compilers, monkeypatch):
    def predict_us(spec, layout, variant, device, workload, *, facts=None, fit=None):
        return 10.0 if variant.num_warps == (8 if workload.num_seqs > 4 else 2) else 100.0

    monkeypatch.setattr(costs, "predict_us", predict_us)
    invariant = SPEC.replace(batch_invariant=True)
    report = tune(invariant, PROFILE, db=db, target="sm_90", block_sizes=(16,), progress=False)
    assert len(report.rows[0].rule.clauses) == 1


def test_the_compilers_facts_change_what_is_chosen(db, compilers, monkeypatch):
    """The estimates name a favourite; its code turns out to fit once a multiprocessor and to issue very much more."""
    heavy = MainLoop(
        instructions=20_000, matrix=1, matrix_kind="HMMA", async_copies=1, wide_loads=0, descriptor_copies=0,
        narrow_loads=0, local_memory=0, integer_divisions=0,
    )  # fmt: skip
    before = predict(db).rows[0].rule
    favourites = [
        v for v in before.variants if v not in {targets.default_variant(SPEC, LAYOUT, SM_90, decode=d) for d in (0, 1)}
    ]
    assert favourites
    slow = Compiled(status=Status.OK, facts=facts(programs_per_unit=1, loop=heavy))
    compilers.outcomes = dict.fromkeys(favourites, slow)
    after = predict(db).rows[0].rule
    assert not set(favourites) & set(after.variants)


def test_a_query_answers_with_the_predicted_times_and_says_so_until_there_are_trials(db, compilers):
    report = predict(db)
    row = report.rows[0]
    (answer, *_) = [r for r in selection.best_block_size(SPEC, "sm_90", PROFILE, db=db) if r.block_size == 16]
    assert answer.kind == "predicted" and answer.measured_share == 0.0
    assert answer.step_us == pytest.approx(row.step_us)  # by the compiler's facts, as it was decided
    assert "predicted, not measured" in answer.reason
    chosen = db.select(SPEC, LAYOUT, "sm_90", DECODE)
    assert chosen.evidence["time"] == "predicted" and chosen.evidence["compiled"] and chosen.confidence == "low"
    stored = {p.variant: p.predicted_us for p in db.predictions(spec=SPEC, workload=DECODE)}
    assert stored[chosen.variant] == pytest.approx(chosen.predicted_us)


def test_a_prediction_needs_a_process_that_can_compile(db, compilers, times, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(TuneError, match="TRITON_INTERPRET unset"):
        predict(db)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TuneError, match="needs triton"):
        predict(db)


def test_a_measured_rule_is_not_replaced_by_a_prediction(db, compilers, times):
    predict(db)
    predicted = db.portfolio(SPEC, LAYOUT, SM_90, "hash-1")
    measured = DispatchRule(clauses=predicted.clauses, reason="measured", evidence={"kind": "measured"})
    db.save_portfolio(
        spec=SPEC, layout=LAYOUT, device=costs.shipped_device(SM_90), profile=PROFILE, rule=measured, code_hash="hash-1"
    )
    report = predict(db)
    assert db.portfolio(SPEC, LAYOUT, SM_90, "hash-1").reason == "measured"
    assert any("measured rule in the database stays" in what for what in report.left_out)


def test_a_product_that_is_named_is_predicted_for_itself(db, compilers, times):
    report = predict(db, device="h200")
    assert report.device.name == "NVIDIA H200"
    assert db.portfolio(SPEC, LAYOUT, SM_90, "hash-1", device=report.device) is not None
    assert db.portfolio(SPEC, LAYOUT, SM_90, "hash-1", device=costs.shipped_device(SM_90)) is None


def test_what_was_measured_on_one_product_hides_no_prediction_for_another(db, compilers, times):
    predicted = predict(db).rows[0].rule
    measured = DispatchRule(clauses=predicted.clauses, reason="measured", evidence={"kind": "measured"})
    h200 = costs.product(SM_90, "h200")
    db.save_portfolio(
        spec=SPEC, layout=LAYOUT, device=costs.shipped_device(SM_90), profile=PROFILE, rule=measured, code_hash="hash-1"
    )
    assert predict(db, device=h200).left_out == ()
    assert db.portfolio(SPEC, LAYOUT, SM_90, "hash-1", device=h200).evidence["kind"] == "predicted"


def test_a_spent_budget_compiles_nothing_and_keeps_the_default(db, compilers, times):
    clock = FakeClock()

    def late():
        clock.now += 1.0
        return clock.now

    report = predict(db, clock=late, budget_s=0.5)
    assert compilers.compiled == [] and report.rows[0].speedup == 1.0
    assert any("no time to compile" in what for what in report.left_out)


def test_a_run_without_time_does_not_hide_what_an_earlier_one_compiled(db, compilers, times):
    assert predict(db).rows[0].rule.choose(8, 1, 100).num_warps == 8
    clock = itertools.count()
    report = predict(db, clock=lambda: float(next(clock)), budget_s=0.5)
    assert "the rule in the database stays" in str(report)
    assert db.portfolio(SPEC, LAYOUT, SM_90, "hash-1").choose(8, 1, 100).num_warps == 8


def test_the_objective_decides_among_predictions_too(db, compilers, monkeypatch):
    """8 warps are best on the many short batches, 2 on the few long ones."""
    monkeypatch.setattr(targets, "default_variant", lambda spec, layout, target, *, decode: START)

    def predict_us(spec, layout, variant, device, workload, *, facts=None, fit=None):
        long = workload.num_seqs > 4
        return (100.0 if long else 90.0) * {8: 1.2 if long else 0.1, 2: 0.8 if long else 1.0}.get(variant.num_warps, 1)

    monkeypatch.setattr(costs, "predict_us", predict_us)
    found = {}
    for objective in ("mean", "p99"):
        report = predict(db, objective=objective)
        found[objective] = next(d.chosen.num_warps for d in report.rows[0].decisions if d.batches == "decode")
    assert found == {"mean": 8, "p99": 2}


@pytest.mark.parametrize("options", [{"budget_trials": 5}, {"strategy": "exhaustive"}])
def test_what_is_only_for_measuring_is_refused_where_nothing_is_measured(db, compilers, times, options):
    with pytest.raises(ValueError, match="are for what is measured, and nothing is timed for NVIDIA H100"):
        predict(db, **options)
    assert compilers.compiled == []


def test_a_budget_that_ends_while_compiling_decides_among_what_was_compiled(db, compilers, times):
    clock = FakeClock()

    def run(tasks, may_go_on, whole=compilers.run):
        for done in whole(tasks, may_go_on):
            clock.now += 1.0
            yield done

    compilers.run = run
    report = predict(db, clock=clock, budget_s=6.0)
    assert len(compilers.compiled) == 6
    assert set(report.rows[0].rule.variants) <= set(compilers.compiled)
    assert any("kernels were not compiled" in what for what in report.left_out)


def test_a_stop_keeps_the_layouts_that_were_done(db, compilers, times, monkeypatch):
    asked = []

    def check(self):
        asked.append(None)
        if len(asked) > 60:
            raise KeyboardInterrupt

    monkeypatch.setattr(StopSignal, "check", check)
    report = predict(db, block_sizes=(16, 32, 64, 128))
    assert report.interrupted and 1 <= len(report.rows) < 4
    for row in report.rows:
        assert db.portfolio(SPEC, row.layout, SM_90, "hash-1") is not None


def test_named_variants_are_the_only_ones_compiled(db, compilers):
    named = TritonVariant(tile_kv=32, page_walk="any", num_splits=2)
    only = {LAYOUT: {"decode": [named], "mixed": []}}
    predict(db, only=only)
    defaults = {targets.default_variant(SPEC, LAYOUT, SM_90, decode=d) for d in (True, False)}
    assert set(compilers.compiled) <= {named, *defaults}


def test_an_mla_cache_a_window_and_float8_are_predicted_for_every_gpu_of_the_table(db, compilers):
    specs = (
        AttentionSpec(num_q_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512, shared_kv=True),
        SPEC.replace(window=64),
        SPEC.replace(kv_dtype="float8_e4m3fn"),
    )
    for spec in specs:
        for target in ("sm_80", "gfx942"):
            only = {LAYOUT: {"decode": list(costs.candidates(spec, LAYOUT, Target.parse(target), decode=True))[:3]}}
            report = tune(spec, PROFILE, db=db, target=target, block_sizes=(16,), progress=False, only=only)
            assert report.rows[0].step_us > model.roofline_us(
                spec, LAYOUT, costs.shipped_device(target), Workload(context_lens=(1,))
            )
            assert MIXED in [w for w, _ in PROFILE]
