"""Merging: a union that commutes, associates and may be repeated; samples pooled, conflicts told, nothing dropped."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from database_fakes import CPU, DECODE, H100, LAYOUT, MIXED, PROFILE, SPEC, TUNED, cpu_trial, rule, trial
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagegen.db import open_db, pooling
from pagegen.db.conflicts import portfolio_conflicts
from pagegen.spec import CacheLayout, CompileFacts, Prediction, Status

TRIALS = [
    trial(),
    trial(samples_us=(98.0,)),
    trial(samples_us=(300.0,), created_at="2026-02-01"),
    cpu_trial(),
    trial(status=Status.TIMEOUT, samples_us=(), detail="no answer in 30 s"),
    trial(layout=CacheLayout(block_size=64), variant=replace(TUNED, num_warps=8), workload=MIXED),
    trial(device=replace(H100, bandwidth_gb_s=3300.0), environment={}),
    cpu_trial(device=replace(CPU, name="another CPU")),
]
FACTS = CompileFacts(
    spec=SPEC, layout=LAYOUT, target=H100.target, variant=TUNED, form="decode", code_hash="c0de", registers=96
)
PREDICTED = Prediction(
    spec=SPEC, layout=LAYOUT, device=H100, variant=TUNED, workload=DECODE, predicted_us=9.5, model="m", code_hash="c0de"
)
NEWER = [
    {"record": "weather", "v": 1, "sky": "blue"},
    {"record": "variant", "v": 1, "id": "x", "variant": TUNED.to_dict(), "colour": "red"},
]
PORTFOLIOS = [(rule(), "2026-01-01"), (rule(replace(TUNED, num_splits=2)), "2026-01-02")]
# what a database may hold, as (kind, number)
PARTS = [
    *(("trial", n) for n in range(len(TRIALS))),
    *(("portfolio", n) for n in range(len(PORTFOLIOS))),
    ("facts", 0), ("prediction", 0), ("newer", 0), ("newer", 1),
]  # fmt: skip
SOME = st.lists(st.sampled_from(PARTS), unique=True, max_size=len(PARTS))


def fill(db, parts, folder):
    for kind, number in parts:
        if kind == "trial":
            db.record(TRIALS[number])
        elif kind == "portfolio":
            saved, at = PORTFOLIOS[number]
            db.save_portfolio(
                spec=SPEC, layout=LAYOUT, device=H100, profile=PROFILE, rule=saved, code_hash="c0de", created_at=at
            )
        elif kind == "facts":
            db.record_facts(FACTS)
        elif kind == "prediction":
            db.record_prediction(PREDICTED)
        else:
            (folder / "newer.jsonl").write_text(json.dumps(NEWER[number]) + "\n")
            assert len(db.import_(folder / "newer.jsonl").ignored) == 1


def exported(db, folder) -> str:
    db.export(folder / "out.jsonl")
    return (folder / "out.jsonl").read_text()


class Bench:
    """Databases with given parts, made once an example."""

    def __init__(self, folder):
        self.folder = folder
        self.count = 0

    def made(self, *groups):
        """A new database with the first parts, into which databases of the others are merged in turn."""
        self.count += 1
        db = open_db(self.folder / f"{self.count}.db", shipped=False)
        fill(db, groups[0], self.folder)
        for group in groups[1:]:
            self.merge(db, group)
        return db

    def merge(self, db, group):
        other = group if not isinstance(group, list) else self.made(group)
        db.merge(other)
        if isinstance(group, list):
            other.close()

    def text(self, db) -> str:
        with db:
            return exported(db, self.folder)


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SOME, SOME, SOME)
def test_merging_commutes_associates_and_may_be_repeated(tmp_path_factory, a, b, c):
    bench = Bench(tmp_path_factory.mktemp("merged"))
    left = bench.text(bench.made(a, b, c))
    assert bench.text(bench.made(b, a, c)) == left  # commutes
    inner = bench.made(b, c)
    assert bench.text(bench.made(a, inner)) == left  # associates
    inner.close()
    assert bench.text(bench.made(a, b, c, a, b)) == left  # may be repeated
    whole = bench.made(list(dict.fromkeys([*a, *b, *c])))
    assert bench.text(whole) == left  # and is the union: nothing is lost, nothing made


def test_an_export_imports_into_the_same_export(tmp_path):
    bench = Bench(tmp_path)
    one = bench.made(PARTS)
    text = exported(one, tmp_path)
    with open_db(tmp_path / "again.db", shipped=False) as other:
        report = other.import_(tmp_path / "out.jsonl")
        assert (report.malformed, report.present) == ((), 0)
        assert exported(other, tmp_path) == text
    one.close()


def test_what_a_newer_pagegen_wrote_is_kept_ignored_and_reported(place, tmp_path):
    with open_db(place("one"), shipped=False) as db:
        db.record(trial())
        lines = exported(db, tmp_path).splitlines()
        newer = {**json.loads(lines[-1]), "power_watts": 700}
        (tmp_path / "newer.jsonl").write_text("\n".join([*lines[:-1], json.dumps(newer), json.dumps(NEWER[0])]))
    with open_db(place("other"), shipped=False) as other:
        report = other.import_(tmp_path / "newer.jsonl")
        assert report.ignored == (
            f"line {len(lines)}: unknown field power_watts", f"line {len(lines) + 1}: unknown record 'weather'"
        )  # fmt: skip
        assert other.trials() == [trial()]
        out = [json.loads(line) for line in exported(other, tmp_path).splitlines()]
        assert newer in out
        assert NEWER[0] in out


def test_conflicts_are_told_and_both_sides_stay(place):
    other_time = trial(samples_us=(500.0,), created_at="2026-03-01")
    wrong = trial(status=Status.WRONG_RESULT, samples_us=(), created_at="2026-03-02")
    with open_db(place("one"), shipped=False) as one, open_db(place("other"), shipped=False) as other:
        one.record(trial())
        other.record(other_time)
        other.record(wrong)
        (told,) = one.merge(other).conflicts
        assert TUNED.name in told
        assert "block size 16 NHD on NVIDIA H100" in told
        for part in ("100.1 us (ok, 2026-01-02", "500 us (ok, 2026-03-01)", "no time (wrong_result, 2026-03-02)"):
            assert part in told
        assert one.trials() == [trial(), other_time, wrong]
        assert one.merge(other).conflicts == ()  # nothing new came


def test_trials_that_agree_or_were_taken_elsewhere_are_no_conflict(place):
    with open_db(place("one"), shipped=False) as one, open_db(place("other"), shipped=False) as other:
        one.record(trial())
        other.record(trial(samples_us=(150.0,)))
        other.record(trial(samples_us=(900.0,), environment={"driver": "999"}))
        other.record(trial(samples_us=(900.0,), workload=MIXED))
        assert one.merge(other).conflicts == ()


def test_portfolios_that_choose_differently_are_told_and_the_newest_counts(place):
    with open_db(place("one"), shipped=False) as one, open_db(place("other"), shipped=False) as other:
        for db, (saved, at) in zip((one, other), PORTFOLIOS, strict=True):
            db.save_portfolio(
                spec=SPEC, layout=LAYOUT, device=H100, profile=PROFILE, rule=saved, code_hash="c0de", created_at=at
            )
        (told,) = one.merge(other).conflicts
        assert "(2026-01-01)" in told
        assert "(2026-01-02)" in told
        assert [p.rule for p in one.portfolios()] == [PORTFOLIOS[1][0], PORTFOLIOS[0][0]]


def test_what_a_run_stored_on_its_way_is_no_conflict_with_what_it_came_to(place):
    def saved(db, variant, at: str, *, interim: bool = False, profile=PROFILE) -> None:
        made = rule(variant)
        made = replace(made, evidence={**made.evidence, "interim": True}) if interim else made
        db.save_portfolio(
            spec=SPEC, layout=LAYOUT, device=H100, profile=profile, rule=made, code_hash="c0de", created_at=at
        )

    first, second, third = (replace(TUNED, num_splits=splits) for splits in (1, 2, 8))
    with open_db(place("one"), shipped=False) as one, open_db(place("other"), shipped=False) as other:
        saved(one, first, "2026-01-01", interim=True)
        saved(one, second, "2026-01-02", interim=True)
        assert conflicts_of(one) == []  # a killed run: its last word counts
        saved(one, third, "2026-01-03")
        assert conflicts_of(one) == []
        saved(other, second, "2026-01-04")
        (told,) = one.merge(other).conflicts
        assert told.count("; ") == 1
        assert "2026-01-03" in told
        assert "2026-01-04" in told
        assert len(one.portfolios()) == 4
        saved(one, first, "2026-01-05", interim=True)  # newer than all: it is what counts, and contradicts them
        (told,) = conflicts_of(one)
        assert told.count("; ") == 2


def conflicts_of(db) -> list[str]:
    with db.store.reading() as connection:
        return [str(conflict) for conflict in portfolio_conflicts(connection)]


def test_samples_of_one_question_are_pooled_with_where_each_came_from(place):
    with open_db(place("one"), shipped=False) as one, open_db(place("other"), shipped=False) as other:
        one.record(trial(samples_us=(100.0, 104.0), environment={"driver": "570", "tuning_session": "a"}))
        other.record(trial(samples_us=(102.0,), environment={"driver": "570", "tuning_session": "b"}))
        other.record(trial(samples_us=(110.0,), environment={"driver": "999"}))
        one.merge(other)
        pools = pooling.pooled(one, spec=SPEC)
        assert sorted(p.samples_us for p in pools) == [(100.0, 104.0, 102.0), (110.0,)]
        both = next(p for p in pools if len(p.samples_us) == 3)
        assert both.median_us == 102.0
        assert [(s.samples, s.median_us, s.session) for s in both.sources] == [(2, 102.0, "a"), (1, 102.0, "b")]
        assert both.conflict is None


@pytest.mark.parametrize("number", range(len(TRIALS)))
def test_a_pool_of_one_trial_is_that_trial(tmp_path, number):
    with open_db(tmp_path / "one.db", shipped=False) as db:
        db.record(TRIALS[number])
        (pool,) = pooling.pooled(db)
        assert pool.samples_us == TRIALS[number].samples_us
        assert [s.status for s in pool.sources] == [TRIALS[number].status.value]
