"""`tune` as a whole, against a table of times and a real database file."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections import Counter

import pytest
from pagegen_autotune import Report, tune, tune_fleet, tuner
from pagegen_autotune.interrupt import SIGNALS, StopSignal
from pagegen_autotune.isolated import WorkerLost
from pagegen_autotune.measure import Verdict
from pagegen_autotune.progress import Progress
from pagegen_autotune.tuner import TuneError
from tuning_fakes import (
    DECODE,
    DEFAULT,
    DEVICE,
    FASTER,
    LONG,
    MIXED,
    PROFILE,
    SPEC,
    FakeBench,
    FakeClock,
    FakeStore,
    table,
)

from pagegen import costs, targets
from pagegen.db import open_db
from pagegen.spec import CacheLayout, DispatchRule, Profile, Status, Target, Workload
from pagegen.spec.result import COMPARE, CONFIRM, GAUGE, PURPOSE, SESSION
from pagegen.targets.errors import CannotBuild, CompileError

LAYOUT = CacheLayout(block_size=16)
CPU = Target("cpu")


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    """The CPU target as facts alone, so that nothing is compiled and no device is looked at."""
    monkeypatch.setattr(targets, "current_device", lambda target: DEVICE)
    monkeypatch.setattr(costs, "predict_us", lambda *args, **options: 1000.0)
    monkeypatch.setattr(targets, "code_hash", lambda target: "hash-1")
    monkeypatch.setattr(targets, "unsupported", lambda spec, target: None)
    monkeypatch.setattr(targets, "default_variant", lambda spec, layout, target, *, decode: DEFAULT)


@pytest.fixture
def db(tmp_path):
    with open_db(str(tmp_path / "tuning.db")) as database:
        yield database


def run(db, bench, **options) -> Report:
    defaults = {"block_sizes": (16,), "target": "cpu", "progress": False}
    return tune(SPEC, PROFILE, db=db, bench=bench, **{**defaults, **options})


def chosen(report: Report, batches: str = "decode", *, row: int = 0):
    return next(d.chosen for d in report.rows[row].decisions if d.batches == batches)


def saved(db, layout=LAYOUT) -> DispatchRule | None:
    return db.portfolio(SPEC, layout, CPU, "hash-1")


def test_a_faster_variant_wins_and_its_rule_is_in_the_database(db):
    report = run(db, FakeBench(table(s8=0.8), noise=0.02))
    assert chosen(report).streams == chosen(report, "mixed").streams == 8
    assert saved(db).choose(8, 1, 4000) == chosen(report)
    assert report.rows[0].speedup == pytest.approx(1.25, rel=0.03)
    assert saved(db).evidence["kind"] == "measured" and saved(db).evidence["profile"] == "fake traffic"


def test_a_tie_keeps_the_default(db):
    report = run(db, FakeBench(table(), noise=0.1))
    assert chosen(report) == DEFAULT and report.rows[0].speedup == 1.0


def test_noise_alone_hardly_ever_dethrones_the_default():
    wins = 0
    for seed in range(12):
        report = run(FakeStore(), FakeBench(table(), noise=0.3, seed=seed), seed=seed)
        wins += sum(d.chosen != DEFAULT for d in report.rows[0].decisions)
    assert wins <= 3  # of 24 decisions, each between nine and more equal variants


def test_the_winner_is_never_slower_than_the_default_on_the_profile():
    for seed in range(6):
        factors = {f"s{n}": 0.7 + 0.1 * ((seed * 7 + n) % 6) for n in (1, 2, 8)}
        bench = FakeBench(table(**factors), noise=0.1, seed=seed)
        report = run(FakeStore(), bench, seed=seed)
        for decision in report.rows[0].decisions:
            true = factors.get(f"s{decision.chosen.streams}", 1.0)
            assert true <= 1.0 and decision.chosen_us <= decision.default_us


def test_a_machine_that_slows_down_during_the_search_does_not_decide(db):
    assert chosen(run(db, FakeBench(table(), drift=0.01))) == DEFAULT


def test_decode_and_mixed_batches_get_their_own_winners(db):
    def times(layout, variant, workload):
        best = 8 if workload.is_decode else 2
        return 800.0 if variant.streams == best else 1000.0

    rule = run(db, FakeBench(times)).rows[0].rule
    assert rule.choose(8, 1, 100).streams == 8 and rule.choose(8, 2, 100).streams == 2


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.OK])
def test_a_candidate_that_fails_its_check_never_wins_is_never_timed_and_is_stored(db, status):
    bench = FakeBench(table(s8=0.1), bad={FASTER: Verdict(status=status, detail="why", max_error=None)})
    report = run(db, bench)
    assert FASTER not in {v for _, v, _ in bench.sampled}
    assert chosen(report) != FASTER
    stored = db.trials(spec=SPEC, variant=FASTER)
    assert {t.status for t in stored} == {status} and stored[0].detail == "why" and stored[0].samples_us == ()
    assert report.trials[status.value] >= 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("boom"), Status.RUNTIME_ERROR),
        (MemoryError("no"), Status.RESOURCE_LIMIT),
        (TimeoutError("late"), Status.TIMEOUT),
        (CompileError("cpu", "v", "late"), Status.COMPILE_ERROR),
    ],
)
def test_a_candidate_that_fails_while_timed_costs_only_itself(db, error, status):
    usual = table(s2=0.8)

    def times(layout, variant, workload):  # another variant of as many streams is not broken
        return 100.0 if variant == FASTER else usual(layout, variant, workload)

    report = run(db, FakeBench(times, broken={FASTER: error}))
    assert chosen(report).streams == 2
    assert {t.status for t in db.trials(spec=SPEC, variant=FASTER)} == {status}


def test_a_machine_that_can_compile_nothing_any_more_ends_the_run_and_fails_no_candidate(db):
    with pytest.raises(TuneError, match=r"nothing can be compiled here: a full disk; what was measured is stored"):
        run(db, FakeBench(table(s8=0.1), broken={FASTER: CannotBuild("cpu", "v", "a full disk")}))
    assert {t.status for t in db.trials(spec=SPEC)} == {Status.OK}
    assert chosen(run(db, FakeBench(table(s8=0.1)))).streams == 8


def test_every_trial_holds_raw_samples_environment_regime_error_and_code_hash(db):
    report = run(db, FakeBench(table(s8=0.8)))
    stored = db.trials(spec=SPEC, variant=chosen(report), status=Status.OK)
    assert {t.environment[PURPOSE] for t in stored} == {"search", "confirm"}
    for trial in stored:
        assert len(trial.samples_us) >= 5 and trial.environment["threads"] == "2"
        assert (trial.regime, trial.code_hash, trial.max_error) == ("cold", "hash-1", 0.001)
        assert trial.created_at and trial.layout == LAYOUT and trial.device == DEVICE


def test_a_second_run_measures_nothing_and_says_the_same(db):
    first = run(db, FakeBench(table(s8=0.8, s2=0.9), noise=0.05))
    again = FakeBench(table(), noise=0.05)
    second = run(db, again)
    assert again.sampled == [] and again.checked == []
    assert second.rows == first.rows and second.resumed == sum(first.trials.values()) > 0
    assert second.trials == {}


def test_what_is_stored_while_a_run_goes_on_says_so_and_a_second_run_stores_nothing(db):
    run(db, FakeBench(table(s8=0.8, s2=0.9), noise=0.05))
    stored = [p.rule.evidence.get("interim", False) for p in db.portfolios()]
    assert len(stored) > 1 and stored[0] is False and all(stored[1:])
    assert saved(db) == db.portfolios()[0].rule
    run(db, FakeBench(table(s8=0.8, s2=0.9), noise=0.05))
    assert len(db.portfolios()) == len(stored)


def test_a_repeated_run_takes_the_same_steps_whatever_was_measured_since():
    for seed in range(2):
        store = FakeStore()
        first = run(store, FakeBench(table(s8=0.93, s2=0.95), noise=0.1, seed=seed), seed=seed, block_sizes=(16, 32))
        again = FakeBench(table())
        assert run(store, again, seed=seed + 1, block_sizes=(16, 32)).rows == first.rows
        assert again.sampled == []


def test_block_sizes_are_compared_in_rounds_over_all_of_them():
    store, drifting = FakeStore(), FakeBench(lambda layout, v, w: 1000.0 + layout.block_size / 16, drift=0.002)
    report = run(store, drifting, block_sizes=(16, 32, 64, 128))
    # the machine became several times slower while the block sizes were tuned one after the other
    assert [r.step_us for r in report.rows] == sorted(r.step_us for r in report.rows)
    assert report.rows[-1].step_us < 1.02 * report.rows[0].step_us
    for workload in PROFILE.workloads:
        rounds = [t for t in store.recorded if t.environment[PURPOSE] == COMPARE and t.workload == workload]
        assert len({t.layout for t in rounds}) == 4 and len({t.environment[SESSION] for t in rounds}) == 1


def test_one_block_size_alone_is_compared_with_none():
    store = FakeStore()
    run(store, FakeBench(table()))
    assert not [t for t in store.recorded if t.environment[PURPOSE] == COMPARE]


def test_a_further_block_size_is_compared_with_the_ones_tuned_before():
    store = FakeStore()
    run(store, FakeBench(table()), block_sizes=(16, 32))
    run(store, FakeBench(table()), block_sizes=(16, 32, 64))
    rounds = [t for t in store.recorded if t.environment[PURPOSE] == COMPARE]
    last = {t.layout.block_size for t in rounds if t.environment[SESSION] == rounds[-1].environment[SESSION]}
    assert last == {16, 32, 64}


def test_a_batch_invariant_spec_gets_one_variant_for_all_batches():
    store = FakeStore()
    spec = SPEC.replace(batch_invariant=True)
    bench = FakeBench(lambda layout, v, w: 500.0 if v.streams == (8 if w.is_decode else 2) else 1000.0)
    report = tune(spec, PROFILE, db=store, bench=bench, block_sizes=(16,), target="cpu", progress=False)
    assert len(report.rows[0].rule.clauses) == 1
    assert chosen(report, "all").streams == 8  # decode is four fifths of the steps


@pytest.mark.parametrize("change", ["code", "threads", "compiler", "device", "regime"])
def test_trials_of_other_code_threads_compiler_device_or_regime_are_measured_anew(db, monkeypatch, change):
    run(db, FakeBench(table(s8=0.8)))
    again = FakeBench(table())
    if change == "code":
        monkeypatch.setattr(targets, "code_hash", lambda target: "hash-2")
    elif change in ("threads", "compiler"):
        again.environment = {**again.environment, change: "another"}
    elif change == "device":
        monkeypatch.setattr(targets, "current_device", lambda target: type(DEVICE)(name="other", target=CPU, units=2))
    else:
        again.regime = "warm"
    report = run(db, again)
    assert report.resumed == 0 and len(again.sampled) > 100
    assert chosen(report) == DEFAULT


def test_a_failed_candidate_is_not_tried_again_but_a_failed_default_is(db):
    wrong = Verdict(status=Status.WRONG_RESULT, detail="bad")
    run(db, FakeBench(table(), bad={FASTER: wrong}))
    again = FakeBench(table())
    run(db, again)
    assert (LAYOUT, FASTER) not in again.checked
    with pytest.raises(TuneError, match="no default variant ran on cpu.*no compiler"):
        run(
            db,
            FakeBench(table(), bad={DEFAULT: Verdict(status=Status.COMPILE_ERROR, detail="no compiler")}),
            block_sizes=(32,),
        )
    assert run(db, FakeBench(table()), block_sizes=(32,)).rows


def test_a_block_size_whose_default_fails_is_left_out_and_the_others_are_tuned(db):
    bench = FakeBench(table(s8=0.8))
    check = bench.check
    bad = Verdict(status=Status.WRONG_RESULT, detail="off")
    bench.check = lambda layout, vs: {v: bad for v in vs} if layout.block_size == 8 else check(layout, vs)
    report = run(db, bench, block_sizes=(8, 16))
    assert [r.layout.block_size for r in report.rows] == [16]
    assert any("block size 8" in what and "off" in what for what in report.left_out)
    assert saved(db, CacheLayout(block_size=8)) is None


@pytest.mark.parametrize("stop_at", [0, 1, 2, 8, 20, 90, 150, 250])
def test_ctrl_c_keeps_what_was_measured_and_a_second_run_finishes_the_rest(db, stop_at):
    times = table(s8=0.8)
    first = FakeBench(times, stop_at=stop_at)
    report = run(db, first, block_sizes=(16, 32))
    stored = db.trials(spec=SPEC)
    assert report.interrupted and "stopped before the end" in str(report)
    assert sum(len(t.samples_us) for t in stored) == stop_at
    assert (saved(db) is not None) == (stop_at > 10)  # as soon as the default has a time on every workload
    second = FakeBench(times)
    finished = run(db, second, block_sizes=(16, 32))
    assert not finished.interrupted
    assert chosen(finished, row=0).streams == chosen(finished, row=1).streams == 8
    whole = FakeBench(times)
    run(FakeStore(), whole, block_sizes=(16, 32))
    # at most the rounds of one interrupted comparison (four of sixteen variants) are taken again
    assert len(second.sampled) <= len(whole.sampled) - stop_at + 64


@pytest.mark.parametrize("races", [1, 2])
def test_a_run_that_was_stopped_while_it_confirmed_takes_only_the_fresh_samples_that_it_lacks(db, races):
    def confirmed(trials):
        return [t for t in trials if t.environment[PURPOSE] == CONFIRM]

    times, whole = table(s8=0.8), FakeStore()
    run(whole, FakeBench(times))
    wanted = confirmed(whole.recorded)
    sessions = list(dict.fromkeys(t.environment[SESSION] for t in wanted))
    first = [t for t in wanted if t.environment[SESSION] in sessions[:races]]
    earlier = whole.recorded[: whole.recorded.index(wanted[0])]
    run(db, FakeBench(times, stop_at=sum(len(t.samples_us) for t in (*earlier, *first))))
    assert len(confirmed(db.trials(spec=SPEC))) == len(first) > 0
    run(db, FakeBench(times))
    found = confirmed(db.trials(spec=SPEC))
    assert Counter((t.variant, t.workload) for t in found) == Counter((t.variant, t.workload) for t in wanted)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_a_closed_terminal_end_at_a_clean_point_and_save(db, number, request):
    inherited = signal.signal(number, signal.SIG_DFL)  # ignored under nohup
    request.addfinalizer(lambda: signal.signal(number, inherited))
    bench = FakeBench(table(s8=0.8))
    sample = bench.sample

    def interrupted(*args):
        if len(bench.sampled) == 60:
            signal.raise_signal(number)
        return sample(*args)

    bench.sample = interrupted
    before = [signal.getsignal(one) for one in SIGNALS]
    report = run(db, bench)
    assert report.interrupted and len(bench.sampled) == 61  # the sample in progress was finished
    assert [signal.getsignal(one) for one in SIGNALS] == before
    assert saved(db) is not None


@pytest.fixture
def ctrl_c():
    """Ctrl-C as at a terminal: a process started in the background inherits SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_compiler_killed_by_ctrl_c_is_not_stored_as_a_failure(db, ctrl_c):
    bench = FakeBench(table())
    check = bench.check

    def killed(layout, variants):
        if FASTER in variants:
            signal.raise_signal(signal.SIGINT)
            return {v: Verdict(status=Status.COMPILE_ERROR, detail="killed") for v in variants}
        return check(layout, variants)

    bench.check = killed
    assert run(db, bench).interrupted
    assert not [t for t in db.trials(spec=SPEC) if t.status is not Status.OK]


def test_a_second_signal_acts_at_once(ctrl_c):
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_tuning_in_a_thread_leaves_signals_alone(db):
    reports = []
    thread = threading.Thread(target=lambda: reports.append(run(db, FakeBench(table()))))
    thread.start()
    thread.join()
    assert reports[0].rows


def test_a_tiny_budget_still_measures_the_default_on_every_row(db):
    clock = FakeClock()
    report = run(db, FakeBench(table(), clock=clock), clock=clock, budget_s=0.001, block_sizes=(16, 32, 64))
    assert [r.layout.block_size for r in report.rows] == [16, 32, 64]
    assert all(d.default_us == pytest.approx(1000.0) and d.chosen == DEFAULT for r in report.rows for d in r.decisions)
    assert len(report.left_out) == 7 and sum("not compiled" in what for what in report.left_out) == 6
    measured = {(t.layout, t.workload) for t in db.trials(spec=SPEC)}
    assert measured == set(itertools.product([r.layout for r in report.rows], PROFILE.workloads))


@pytest.mark.parametrize("budget_s", [3.0, 8.0, 16.0])
def test_the_budget_is_kept_and_what_it_left_out_is_said(db, budget_s):
    clock = FakeClock()
    bench = FakeBench(lambda layout, variant, workload: 20_000.0, clock=clock, check_s=1.5)
    report = run(db, bench, clock=clock, budget_s=budget_s, block_sizes=(16, 32))
    assert report.left_out and report.seconds == clock.now <= budget_s + 4


def test_a_budget_is_spread_over_block_sizes(db):
    clock = FakeClock()
    run(db, FakeBench(table(), clock=clock), clock=clock, budget_s=40.0, block_sizes=(16, 32, 64, 128))
    tried = {t.layout.block_size: 0 for t in db.trials(spec=SPEC)}
    for trial in db.trials(spec=SPEC):
        tried[trial.layout.block_size] += trial.variant != DEFAULT
    assert min(tried.values()) > 0 and max(tried.values()) <= 3 * min(tried.values())


def test_within_a_block_size_the_class_that_takes_the_time_gets_the_budget(db):
    clock = FakeClock()
    mostly_decode = Profile(name="d", workloads=(DECODE, MIXED), weights=(0.9, 0.1))
    bench = FakeBench(table(), clock=clock, check_s=0.0)
    bench._table = lambda layout, variant, workload: 100_000.0
    tune(
        SPEC,
        mostly_decode,
        db=db,
        bench=bench,
        clock=clock,
        budget_s=6.0,
        block_sizes=(16,),
        target="cpu",
        progress=False,
    )
    spent = {w: sum(1 for _, _, load in bench.sampled if load == w) for w in (DECODE, MIXED)}
    assert spent[DECODE] > 1.5 * spent[MIXED]  # what decode leaves unused passes on


def test_a_call_too_slow_for_its_share_is_skipped_and_said(db):
    clock = FakeClock()

    def times(layout, variant, workload):
        return 450_000.0 if workload == LONG else 50.0

    report = run(db, FakeBench(times, clock=clock, check_s=0.005), clock=clock, budget_s=3.0)
    assert any("decode" in what and "of 2 workloads" in what for what in report.left_out)
    assert report.seconds < 75


def test_illegal_candidates_are_counted_by_reason_and_never_compiled(monkeypatch):
    from pagegen import costs

    monkeypatch.setattr(costs, "legal", lambda spec, layout, v, device: ["eight is too many"] if v.streams == 8 else [])
    bench = FakeBench(table())
    report = run(FakeStore(), bench)
    (reason, count), *others = report.rejected.items()
    assert reason == "eight is too many" and count >= 2 * 4 * 3 * 3 * 3 and not others  # a third of either grid
    assert all(v.streams != 8 for _, v in bench.checked)


def test_exhaustive_measures_the_whole_grid():
    bench = FakeBench(table(s2=0.8))
    report = run(FakeStore(), bench, strategy="exhaustive")
    assert len({v for _, v, _ in bench.sampled}) == 4 * 3 * 3 * 3 * 3
    assert chosen(report).streams == 2


def test_a_batch_that_a_profile_holds_twice_weighs_twice_and_is_measured_once():
    twice = Profile(name="t", workloads=(DECODE, LONG, DECODE), weights=(1.0, 1.0, 2.0))
    bench = FakeBench(lambda layout, v, w: 1000.0 if w == LONG else 200.0)
    report = tune(SPEC, twice, db=FakeStore(), bench=bench, block_sizes=(16,), target="cpu", progress=False)
    assert report.rows[0].step_us == pytest.approx(0.25 * 1000 + 0.75 * 200)
    once = sum(load == LONG for _, _, load in bench.sampled)
    assert sum(load == DECODE for _, _, load in bench.sampled) == once


def test_a_profile_of_decode_only_leaves_mixed_batches_their_default(db):
    decode_only = Profile(name="d", workloads=(DECODE,), weights=(1.0,))
    report = tune(
        SPEC, decode_only, db=db, bench=FakeBench(table(s8=0.5)), block_sizes=(16,), target="cpu", progress=False
    )
    rule = report.rows[0].rule
    assert rule.choose(2, 1, 500).streams == 8 and rule.choose(2, 9, 500) == DEFAULT


def test_both_orders_are_tuned_apart_and_orders_that_are_the_same_bytes_once(db):
    bench = FakeBench(
        lambda layout, variant, workload: 700.0 if (layout.order, variant.streams) == ("HND", 8) else 1000.0
    )
    report = run(db, bench, orders=("NHD", "HND"))
    assert [(r.layout.order, chosen(report, row=i).streams) for i, r in enumerate(report.rows)] == [
        ("NHD", 4),
        ("HND", 8),
    ]
    one_head = SPEC.replace(num_kv_heads=1)
    same = tune(
        one_head,
        PROFILE,
        db=db,
        bench=FakeBench(table()),
        block_sizes=(16,),
        orders=("NHD", "HND"),
        target="cpu",
        progress=False,
    )
    assert [r.layout.order for r in same.rows] == ["NHD"]


def test_the_report_is_plain_data_and_readable_text(db):
    import json

    report = run(db, FakeBench(table(s8=0.8), noise=0.01), block_sizes=(16, 32))
    document = json.loads(json.dumps(report.to_dict()))
    first = document["block_sizes"][0]
    assert (first["block_size"], document["kind"], document["target"]) == (16, "measured", "cpu")
    assert DispatchRule.from_dict(first["rule"]) == report.rows[0].rule
    assert first["default_step_us"] / first["step_us"] == pytest.approx(first["speedup"])
    text = str(report)
    assert "won 9 of 9 fresh rounds" in text and "1.25" in text and "ok" in text


def test_the_default_database_is_used_when_none_is_named_and_a_path_is_opened(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEGEN_DB", str(tmp_path / "default.db"))
    run(None, FakeBench(table()))
    run(str(tmp_path / "named.db"), FakeBench(table()))
    for name in ("default.db", "named.db"):
        with open_db(str(tmp_path / name)) as database:
            assert saved(database) is not None


def by_size(layout, variant, workload):
    """Streams of 8 serve the long batch best, those of 2 the short one; each is slower than the default elsewhere."""
    factors = {LONG: {8: 0.8, 2: 1.1}, DECODE: {8: 1.05, 2: 0.88}}.get(workload, {})
    return 1000.0 * factors.get(variant.streams, 1.0)


def test_batches_that_want_different_variants_get_a_portfolio_with_its_regret_and_confidence(db):
    report = run(db, FakeBench(by_size, noise=0.02))
    rule = report.rows[0].rule
    assert rule.choose(LONG.num_seqs, 1, 4000).streams == 8 and rule.choose(2, 1, 500).streams == 2
    assert report.rows[0].variants == 3 and report.rows[0].regret_at_most < 0.05
    assert any("num_seqs <=" in line for line in rule.evidence["rule"]) and rule.evidence["cells_checked"] >= 4
    assert saved(db).evidence["decode"]["regret_confidence"] == 0.95
    again = FakeBench(by_size)
    assert run(db, again).rows == report.rows and again.sampled == []


def test_no_cell_of_a_rule_is_served_by_a_variant_that_is_not_legal_there(db, monkeypatch):
    made = run(db, FakeBench(by_size)).rows[0]
    monkeypatch.setattr(costs, "legal", lambda spec, layout, v, device: ["too many"] if v.streams == 8 else [])
    rule = run(db, FakeBench(by_size)).rows[0].rule
    assert any(v.streams == 8 for v in made.rule.variants) and not any(v.streams == 8 for v in rule.variants)


def test_the_objective_is_part_of_the_answer_and_decides(db):
    def times(layout, variant, workload):  # faster on most steps, slower on the slowest ones
        return {DECODE: 500.0, LONG: 4800.0}.get(workload, 900.0) if variant.streams == 8 else (
            {DECODE: 1000.0, LONG: 4000.0}.get(workload, 1000.0)
        )  # fmt: skip

    spec, stores = SPEC.replace(batch_invariant=True), {}
    for objective in ("mean", "p99", "cvar"):
        bench, stores[objective] = FakeBench(times, noise=0.01), FakeStore()
        profile = Profile(name="t", workloads=(DECODE, LONG), weights=(0.95, 0.05))
        report = tune(spec, profile, db=stores[objective], bench=bench, block_sizes=(16,), target="cpu",
                      progress=False, objective=objective)  # fmt: skip
        assert (chosen(report, "all").streams == 8) == (objective == "mean")
        assert report.rows[0].rule.evidence["objective"] == objective


def test_a_budget_of_trials_is_kept_and_what_it_left_out_is_said(db):
    report = run(db, FakeBench(table(s8=0.8)), budget_trials=60)
    defaults = 2 * len(PROFILE.workloads)  # the first rounds, and the last for drift
    assert sum(report.trials.values()) <= 60 + defaults and report.left_out
    with pytest.raises(ValueError, match="budget_trials"):
        run(db, FakeBench(table()), budget_trials=0)


@pytest.mark.parametrize(("trials", "compiled"), [(1, 1), (3, 2), (20, 12)])
def test_no_more_is_compiled_than_a_budget_of_trials_may_measure(trials, compiled):
    bench = FakeBench(table(s8=0.8))
    assert run(FakeStore(), bench, budget_trials=trials).left_out
    assert len(bench.checked) <= compiled  # the default among them


def test_the_defaults_drift_over_a_run_is_measured_and_told(db):
    report = run(db, FakeBench(table(), drift=0.002))
    assert report.drift and all(drift > 1.2 for drift in report.drift.values())
    assert "drift: the defaults took" in str(report) and report.to_dict()["drift"]
    assert all(0.98 < d < 1.02 for d in run(FakeStore(), FakeBench(table(), noise=0.01)).drift.values())


def test_every_sample_is_stored_with_what_memory_gave_beside_it():
    store, bench = FakeStore(), FakeBench(table(s8=0.8))
    bench.memory_gb_s = 21.54321
    run(store, bench)
    ok = [t for t in store.recorded if t.status is Status.OK]
    assert ok and all(t.environment[GAUGE].split() == ["21.54"] * len(t.samples_us) for t in ok)


def test_a_gauge_makes_no_other_environment_of_a_trial(db):
    first, again = FakeBench(table(s8=0.8)), FakeBench(table())
    first.memory_gb_s, again.memory_gb_s = 20.0, 30.0
    run(db, first)
    assert run(db, again).trials == {} and again.sampled == []


def test_most_candidates_are_eliminated_after_a_few_rounds_and_say_so(db):
    run(db, FakeBench(table(s8=0.5, s2=0.9), noise=0.01))
    details = [t.detail for t in db.trials(spec=SPEC) if t.detail]
    assert details and all(d.startswith("eliminated after") and "95% sure" in d for d in details)
    out = {t.variant for t in db.trials(spec=SPEC) if t.detail}
    assert not any(v.streams == 8 and v.replace(streams=4) == DEFAULT for v in out)


def test_what_one_block_size_taught_is_tried_first_on_the_next():
    bench = FakeBench(lambda layout, v, w: 700.0 if (v.streams, v.tile_kv) == (8, 128) else
                      900.0 if 8 in (v.streams,) or v.tile_kv == 128 else 1000.0)  # fmt: skip
    run(FakeStore(), bench, block_sizes=(16, 32))
    second = [v for layout, v in bench.checked if layout.block_size == 32 and v != DEFAULT]
    assert (second[0].streams, second[0].tile_kv) == (8, 128)


def test_the_line_of_progress_tells_trials_best_roofline_and_time(db, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run(db, FakeBench(table(s8=0.8), clock=(clock := FakeClock())), progress=True, clock=clock, budget_s=500.0)
    line = capsys.readouterr().err
    assert "trials done" in line and " left" in line and "to go" in line
    assert "best 0.80 of the default's time (" in line and "of the roofline)" in line


def test_a_default_whose_times_cannot_be_true_is_named_with_the_reason(db):
    with pytest.raises(TuneError, match="block size 16 NHD, decode: the default variant: refused: a median of"):
        run(db, FakeBench(lambda layout, v, w: 1e-6))


def test_a_file_gets_a_line_of_progress_every_ten_seconds_and_no_more(capsys):
    clock = FakeClock()
    line = Progress(True, lambda: 100.0, clock)
    line.at("block size 16")
    line.expect(50)
    for _ in range(50):
        clock.now += 1.0
        line.done(1)
    line.close()
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "block size 16: 0 trials done, 50 left, 1m40s to go"
    assert shown[-1] == "block size 16: 50 trials done, 0 left, 0s to go" and len(shown) == 6


def test_what_a_part_left_undone_is_not_awaited_in_the_next(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    line = Progress(True, lambda: 100.0, FakeClock())
    line.at("block size 16")
    line.expect(40)
    line.done(10)
    line.at("comparing block sizes")
    line.expect(4)
    line.close()
    shown = capsys.readouterr().err
    assert shown.split("\r")[1].startswith("block size 16: 0 trials done, 40 left")  # no empty line before it
    assert "comparing block sizes: 10 trials done, 4 left" in shown


def test_progress_goes_to_standard_error_only(db, capsys):
    run(db, FakeBench(table()), progress=True)
    captured = capsys.readouterr()
    assert captured.out == "" and "block size 16" in captured.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "interpreter"}, "target must be one whose times mean something"),
        ({"block_sizes": ()}, "block_sizes and orders must not be empty"),
        ({"block_sizes": (0,)}, "block_sizes must be at least 1"),
        ({"budget_s": 0}, "budget_s must be positive"),
        ({"budget_s": float("nan")}, "budget_s must be positive"),
        ({"strategy": "magic"}, "strategy must be one of"),
        ({"orders": ("DHN",)}, "order must be one of"),
        ({"target": "tpu"}, "target must be like"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_measured(db, change, message):
    bench = FakeBench(table())
    with pytest.raises(ValueError, match=message):
        run(db, bench, **change)
    assert bench.checked == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_sizes": 16}, "block_sizes must be a sequence of integers, got int 16"),
        ({"block_sizes": "16"}, "block_sizes must be a sequence of integers, got str '16'"),
        ({"orders": "NHD"}, "orders must be a tuple, got str 'NHD'"),
        ({"budget_s": "5m"}, "budget_s must be seconds or None, got str '5m'"),
        ({"seed": "x"}, "seed must be an integer, got str 'x'"),
        ({"only": 5}, "only must be a Mapping, got int 5"),
    ],
)
def test_arguments_of_the_wrong_type_are_named_with_what_was_expected(db, change, message):
    with pytest.raises(TypeError, match=message):
        run(db, FakeBench(table()), **change)


@pytest.mark.parametrize("wrong", [5, [], b"tuning.db"])
def test_a_database_of_the_wrong_type_is_named_before_anything_is_measured(wrong):
    bench = FakeBench(table())
    for ask in (lambda: run(wrong, bench), lambda: tune_fleet(SPEC, PROFILE, db=wrong, address="localhost:1")):
        with pytest.raises(TypeError, match="db must be a Database, a path, a URL or None"):
            ask()
    assert bench.checked == []


@pytest.mark.parametrize("change", [{"devices": "sm_90"}, {"devices": [5]}, {"address": None}])
def test_a_fleet_whose_devices_are_no_list_of_names_is_refused(db, change):
    with pytest.raises(TypeError, match="must be a "):  # "sm_90" would be five names of one letter
        tune_fleet(SPEC, PROFILE, db=db, **{"address": "localhost:1", **change})


def test_a_path_object_names_a_database(tmp_path):
    run(tmp_path / "mine.db", FakeBench(table()))
    with open_db(tmp_path / "mine.db") as found:
        assert found.trials(spec=SPEC)


def test_a_run_that_compares_nothing_does_not_hide_what_an_earlier_one_found(db):
    found = chosen(run(db, FakeBench(table(s8=0.8))))
    assert found.streams == 8
    other = Profile(name="other traffic", workloads=(Workload(context_lens=(7_000, 9_000)),), weights=(1.0,))
    clock = FakeClock()
    bench = FakeBench(table(s8=0.8), clock=clock)
    short = tune(SPEC, other, db=db, bench=bench, clock=clock, block_sizes=(16,), target="cpu", progress=False,
                 budget_s=1e-6)  # fmt: skip
    assert "nothing was compared, the rule in the database stays" in str(short)
    assert db.portfolio(SPEC, LAYOUT, CPU, "hash-1").choose(2, 1, 500) == found
    assert db.trials(spec=SPEC, workload=LONG)  # what was measured is kept


def test_a_stop_while_the_worker_starts_is_a_report_of_nothing_and_no_traceback(db, monkeypatch):
    def stopped(*arguments):
        arguments[-1].requested = True
        arguments[-1].check()

    monkeypatch.setattr(tuner, "_bench", stopped)
    report = tune(SPEC, PROFILE, block_sizes=(16,), target="cpu", db=db, progress=False)
    assert report.interrupted and report.rows == () and "stopped before the end" in str(report)


def test_a_worker_that_does_not_start_is_one_line(db, monkeypatch):
    def lost(*args, **options):
        raise WorkerLost(Status.RUNTIME_ERROR, "the process ended with exit status 1")

    monkeypatch.setattr(tuner, "IsolatedBench", lost)
    with pytest.raises(TuneError, match="no process that runs candidates for cpu could be started: the process ended"):
        run(db, None)


def test_a_spec_that_no_kernel_serves_is_refused_with_the_reason(db, monkeypatch):
    monkeypatch.setattr(targets, "unsupported", lambda spec, target: "int4 caches are computed densely")
    with pytest.raises(ValueError, match="int4 caches are computed densely"):
        run(db, FakeBench(table()))


def test_spec_and_profile_of_the_wrong_type_are_named(db):
    with pytest.raises(TypeError, match="profile must be a Profile"):
        tune(SPEC, "azure", db=db)
    with pytest.raises(TypeError, match="spec must be an AttentionSpec"):
        tune("llama", PROFILE, db=db)


def test_a_zero_length_workload_is_tuned_like_any_other(db):
    empty = Profile(name="idle", workloads=(Workload(context_lens=(0,), query_lens=(0,)), DECODE), weights=(0.5, 0.5))
    assert tune(SPEC, empty, db=db, bench=FakeBench(table()), block_sizes=(16,), target="cpu", progress=False).rows
