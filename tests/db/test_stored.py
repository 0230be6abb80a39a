"""What is stored and cannot be believed is passed over with a note and named by verify; content alone decides."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from database_fakes import DECODE, H100, LAYOUT, PROFILE, SM_90, SPEC, TUNED, rule, trial

from pagegen import selection, targets
from pagegen.db import dates, figures, open_db
from pagegen.db.schema import portfolios
from pagegen.spec import Clause, CppVariant, DispatchRule, Workload

CODE = targets.code_hash(SM_90)
IMPOSSIBLE = replace(TUNED, tile_rows=256, tile_kv=512, num_stages=8, num_warps=1)


@pytest.fixture(autouse=True)
def _no_device_of_this_machine(monkeypatch):
    def absent(target):
        raise ValueError(f"no {target} here")

    monkeypatch.setattr(targets, "current_device", absent)


def save(db, saved: DispatchRule, *, spec=SPEC, at: str | None = "2026-01-01") -> bool:
    return db.save_portfolio(
        spec=spec, layout=LAYOUT, device=H100, profile=PROFILE, rule=saved, code_hash=CODE, created_at=at
    )


def stored(db, **changes) -> None:
    """Writes a rule behind pagegen's back, as an older one or an editor would have."""
    with db.atomic() as connection:
        plain = {**rule().to_dict(), **changes}
        connection.execute(portfolios.update().values(rule=json.dumps(plain)))


BELIEVED_ONCE = {
    "a reason that is none": {"reason": None},
    "a reason that is a number": {"reason": 5},
    "a distance in words": {"distance": "far"},
    "a negative distance": {"distance": -100},
    "evidence that is a list": {"evidence": []},
    "evidence of another kind": {"evidence": {"kind": "reference"}},
    "a bound that is text": {
        "clauses": [{"variant": TUNED.to_dict(), "max_num_seqs": "64"}, {"variant": TUNED.to_dict()}]
    },
    "a bound that is a list": {
        "clauses": [{"variant": TUNED.to_dict(), "max_query_len": [1]}, {"variant": TUNED.to_dict()}]
    },
    "a variant of another family": {"clauses": [{"variant": CppVariant().to_dict()}]},
    "a field of a newer pagegen": {"zzz": 1},
}


@pytest.mark.parametrize("what", BELIEVED_ONCE)
def test_a_rule_that_cannot_be_believed_is_passed_over_with_a_note_and_named_by_verify(what, tmp_path):
    with open_db(tmp_path / "one.db") as db:
        save(db, rule())
        assert db.verify() == []
        stored(db, **BELIEVED_ONCE[what])
        found = db.select(SPEC, LAYOUT, SM_90, DECODE)
        assert found.grade == "predicted"
        assert "run pagegen db verify" in found.reason
        assert selection.explain_selection(SPEC, LAYOUT, SM_90, DECODE, db).selection == found
        assert "rule" in db.digest(SPEC, LAYOUT, SM_90).fields
        assert db.best_block_size(SPEC, SM_90, PROFILE)
        assert any("portfolio 1 cannot be read" in problem for problem in db.verify())


def test_a_rule_that_cannot_run_here_is_refused_though_it_is_stored_for_here_until_a_trial_shows_that_it_ran(tmp_path):
    with open_db(tmp_path / "one.db") as db:
        save(db, rule(IMPOSSIBLE))
        found = db.select(SPEC, LAYOUT, SM_90, DECODE)
        assert (found.grade, "dispatch" in found.evidence) == ("predicted", False)
        assert "is not legal here" in found.reason
        assert any("cannot run on NVIDIA H100" in problem for problem in db.verify())
        db.record(trial(code_hash=CODE, variant=IMPOSSIBLE))  # the estimate of its needs was too careful
        assert db.select(SPEC, LAYOUT, SM_90, DECODE).variant == IMPOSSIBLE
        assert db.verify() == []


def test_proof_is_of_this_kernel_and_device_and_of_trials_that_ran_well(tmp_path):
    with open_db(tmp_path / "one.db") as db:
        db.record(trial(code_hash="other"))
        db.record(trial(code_hash=CODE, device=replace(H100, name="another", units=99)))

        def ran() -> set:
            return figures.proven(db.stores, SPEC, LAYOUT, H100, CODE, (TUNED, IMPOSSIBLE))

        assert ran() == set()
        db.record(trial(code_hash=CODE))
        assert ran() == {TUNED}


BATCHES = [Workload(context_lens=(c,) * n) for n, c in ((3, 1000), (1, 17), (1, 100_000), (64, 8192), (256, 32_768))]
SLOW = replace(TUNED, tile_kv=16, page_walk="tile_in_page", num_splits=1, num_warps=1, num_stages=1)


@pytest.mark.parametrize("saved", [None, SLOW, IMPOSSIBLE], ids=["nothing", "something slow", "something impossible"])
def test_where_a_row_must_not_depend_on_its_neighbours_neither_does_its_kernel(saved, tmp_path):
    spec = SPEC.replace(batch_invariant=True)
    with open_db(tmp_path / "one.db") as db:
        if saved is not None:
            bounded = (Clause(variant=TUNED, max_num_seqs=8), Clause(variant=saved))
            save(db, replace(rule(), clauses=bounded), spec=spec)
        found = [db.select(spec, LAYOUT, SM_90, batch) for batch in (*BATCHES, DECODE)]
        assert {f.variant for f in found} == {selection.rule_for(spec, LAYOUT, SM_90, db).clauses[-1].variant}
        if saved == SLOW:  # the grade still says how far the batch is from those that were tuned on
            assert [found[0].grade, found[-1].grade] == ["near", "exact"]
            assert found[4].distance > found[0].distance > found[-1].distance == 0


def test_a_date_ahead_of_the_clock_is_told_and_what_is_tuned_later_goes_before_it(tmp_path):
    other = rule(replace(TUNED, num_splits=8), reason="tuned later")
    with open_db(tmp_path / "one.db") as db:
        save(db, rule(), at="2999-01-01")
        assert any("dated ahead of the clock" in problem for problem in db.verify())
        assert save(db, other, at=None)
        assert db.select(SPEC, LAYOUT, SM_90, DECODE).reason == "tuned later"
        assert not save(db, other, at=None)


@pytest.mark.parametrize("at", ["2026", "2026-02", "2026-02-28", "2026-02-28T10:30Z", "2026-02-28T23:59:59.5+00:00"])
def test_a_date_after_another_sorts_after_it(at):
    assert dates.after(at) > at
    assert not dates.is_ahead(at)
    assert dates.is_ahead("9" + at[1:])


def test_times_with_a_warm_cache_count_only_where_there_are_none_with_a_cold_one(tmp_path):
    with open_db(tmp_path / "one.db") as db:
        save(db, rule())
        db.record(trial(code_hash=CODE, samples_us=(1.0,) * 9, regime="warm"))
        assert db.select(SPEC, LAYOUT, SM_90, DECODE).predicted_us == 1.0
        db.record(trial(code_hash=CODE, samples_us=(100.0,)))
        assert db.select(SPEC, LAYOUT, SM_90, DECODE).predicted_us == 100.0
        assert figures.measured_medians(db.trials()) == {(TUNED, DECODE): 100.0}


def test_one_product_whose_drivers_reserve_differently_is_one_device(tmp_path, monkeypatch):
    here, there = (replace(H100, memory_gib=gib) for gib in (44.53, 44.39))
    monkeypatch.setattr(targets, "current_device", lambda target: here)
    with open_db(tmp_path / "one.db") as db:
        db.save_portfolio(
            spec=SPEC,
            layout=LAYOUT,
            device=there,
            profile=PROFILE,
            rule=rule(),
            code_hash=CODE,
            created_at="2026-01-01",
        )
        assert db.select(SPEC, LAYOUT, SM_90, DECODE).grade == "exact"
        monkeypatch.setattr(targets, "current_device", lambda target: replace(H100, memory_gib=24.0))
        assert db.select(SPEC, LAYOUT, SM_90, DECODE).grade == "arch"


def test_block_sizes_do_not_depend_on_the_order_in_which_trials_came(tmp_path):
    one = replace(H100, name="Other GPU", bandwidth_gb_s=3000.0)
    trials = [trial(code_hash=CODE, device=one), trial(code_hash=CODE, device=replace(one, bandwidth_gb_s=1000.0))]
    found = []
    for name, order in (("a", trials), ("b", trials[::-1])):
        with open_db(tmp_path / f"{name}.db") as db:
            for one_trial in order:
                db.record(one_trial)
            rows = [row.step_us for row in db.best_block_size(SPEC, SM_90, PROFILE)]
            found.append((db.measured_devices(SPEC, SM_90, CODE), rows))
    assert found[0] == found[1]


def test_a_server_with_a_locale_orders_as_sqlite_does(postgres, tmp_path):
    if not postgres.execute("SELECT 1 FROM pg_collation WHERE collprovider = 'i' LIMIT 1"):
        pytest.skip("this server has no ICU locales")
    postgres.execute("CREATE DATABASE icu LOCALE_PROVIDER icu ICU_LOCALE 'en-US' TEMPLATE template0")
    try:
        with open_db(tmp_path / "one.db") as one, open_db(postgres.url("icu")) as other:
            for at in ("2026-01-01T00:00:00+00:00", "2026-01-01T00:00:00.5+00:00", "2026-01-01T00:00:00Z"):
                one.record(trial(code_hash=CODE, created_at=at))
                save(one, rule(reason=at), at=at)
            for splits in (1, 2, 8, 16):
                one.record(trial(variant=replace(TUNED, num_splits=splits)))
                one.record(trial(variant=replace(TUNED, num_splits=splits, dot="fma")))
            other.merge(one)
            assert one.export(tmp_path / "0.jsonl") == other.export(tmp_path / "1.jsonl")
            assert (tmp_path / "0.jsonl").read_text() == (tmp_path / "1.jsonl").read_text()
            assert other.trials() == one.trials()
            assert other.digest(SPEC, LAYOUT, SM_90) == one.digest(SPEC, LAYOUT, SM_90)
            assert [p.created_at for p in other.portfolios()] == [p.created_at for p in one.portfolios()]
            assert other.select(SPEC, LAYOUT, SM_90, DECODE) == one.select(SPEC, LAYOUT, SM_90, DECODE)
    finally:
        postgres.execute("DROP DATABASE icu WITH (FORCE)")
