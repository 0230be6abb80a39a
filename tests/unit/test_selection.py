"""The ladder: which evidence decides, how it is explained, and that nothing about a database stops it."""

from __future__ import annotations

import logging
import sqlite3
from dataclasses import replace

import database_fakes as fakes
import pytest
from database_fakes import CPU, DECODE, H100, LAYOUT, MIXED, PROFILE, SM_90, SPEC, TUNED, rule, trial

from pagegen import costs, selection, targets
from pagegen.db import open_db
from pagegen.selection import candidates, ladder
from pagegen.selection.predicted import merged_clauses, predicted_rule
from pagegen.spec import CacheLayout, Clause, CppVariant, DispatchRule, Target, TritonVariant, Workload

CODE = targets.code_hash(SM_90)
H200 = costs.shipped_device(SM_90, name="NVIDIA H200")
ANYWHERE = replace(TUNED, page_walk="any")


@pytest.fixture(autouse=True)
def _no_device_of_this_machine(monkeypatch):
    def absent(target):
        raise ValueError(f"no {target} here")

    monkeypatch.setattr(targets, "current_device", absent)
    ladder._log_once.cache_clear()
    predicted_rule.cache_clear()


@pytest.fixture
def db(tmp_path):
    with open_db(tmp_path / "tuned.db") as database:
        yield database


def save(db, saved, *, layout=LAYOUT, device=H100, code=CODE, at="2026-01-01"):
    db.save_portfolio(
        spec=SPEC, layout=layout, device=device, profile=PROFILE, rule=saved, code_hash=code, created_at=at
    )


def ask(db, *, layout=LAYOUT, spec=SPEC, target=SM_90) -> DispatchRule:
    return selection.rule_for(spec, layout, target, db)


def test_the_portfolio_of_this_very_kernel_decides(db):
    save(db, rule())
    save(db, rule(ANYWHERE), layout=CacheLayout(block_size=32))
    found = ask(db)
    assert found.variants == (TUNED,)
    assert (found.distance, found.reason) == (0, "tuned on fake traffic")
    assert found.evidence["kind"] == "measured"
    assert found.evidence["profile"] == PROFILE.name
    assert found.evidence["missed"] == []


def test_the_newest_measured_portfolio_beats_an_older_and_a_predicted_one(db):
    save(db, rule(ANYWHERE), at="2026-01-01")
    save(db, rule(), at="2026-01-02")
    save(db, rule(replace(TUNED, num_splits=1), kind="predicted"), at="2026-01-03")
    assert ask(db).variants == (TUNED,)


def test_old_code_does_not_decide(db):
    save(db, rule(), code="the hash of older templates")
    found = ask(db)
    assert found.evidence["kind"] == "predicted"
    assert (
        "no readable portfolio for this spec and code on sm_90 (1 of other code: run pagegen tune again)"
        in found.reason
    )


def test_a_portfolio_of_this_device_beats_a_newer_one_of_another_product_of_the_arch(db):
    save(db, rule(), at="2026-01-01")
    save(db, rule(ANYWHERE), device=H200, at="2026-01-02")
    assert ask(db).variants == (TUNED,)


def test_a_portfolio_of_another_product_is_further_away_and_said_to_be(db):
    save(db, rule(), device=H200)
    found = ask(db)
    assert found.variants == (TUNED,)
    assert found.distance == candidates.OTHER_DEVICE_DISTANCE
    assert "on NVIDIA H200, which is not the device here" in found.reason


def test_the_nearest_block_size_whose_variants_are_legal_here_serves(db):
    save(db, rule(replace(TUNED, page_walk="tile_in_page")), layout=CacheLayout(block_size=32))  # not legal at 16
    save(db, rule(ANYWHERE), layout=CacheLayout(block_size=128))
    save(db, rule(replace(ANYWHERE, num_splits=2)), layout=CacheLayout(block_size=256))
    found = ask(db)
    assert found.variants == (ANYWHERE,)
    assert found.distance == 3
    assert "for block size 128 NHD on NVIDIA H100" in found.reason
    assert "portfolio of block size 32 NHD" in found.reason
    assert "is not legal here" in found.reason
    assert found.evidence["tuned_layout"] == {"block_size": 128, "order": "NHD"}


def test_the_other_order_at_the_same_block_size_is_one_away(db):
    save(db, rule(), layout=CacheLayout(block_size=16, order="HND"))
    found = ask(db)
    assert (found.variants, found.distance) == ((TUNED,), candidates.OTHER_ORDER_DISTANCE)


def test_a_tuned_kernel_that_does_not_fit_this_products_shared_memory_is_not_taken(db):
    """A portfolio of a larger sibling of the arch: 106,496 bytes asked of 101,376 took engines down."""
    sm_89 = Target.parse("sm_89")
    big = replace(H200, target=sm_89, name="a larger sibling", shared_memory_kib=227.0)
    wide = TritonVariant(tile_kv=256, page_walk="any")
    db.save_portfolio(spec=SPEC, layout=LAYOUT, device=big, profile=PROFILE, rule=rule(wide), code_hash=CODE)
    found = selection.rule_for(SPEC, LAYOUT, sm_89, db)
    assert wide not in found.variants
    assert "bytes of shared memory" in found.reason


def test_where_nothing_was_tuned_the_cost_model_chooses_legal_variants_and_says_so(db):
    for block_size in (1, 16, 24, 256):
        layout = CacheLayout(block_size=block_size)
        found = ask(db, layout=layout)
        assert found.evidence["kind"] == "predicted"
        assert "not measured" in found.reason
        assert found.distance == 16
        assert all(costs.legal(SPEC, layout, v, H100) == [] for v in found.variants)


def test_the_predicted_rule_splits_lone_sequences_and_not_crowds_of_short_ones(db):
    found = ask(db)
    lone = found.choose(1, 1, 32768)
    assert lone.num_splits > 1
    assert found.choose(64, 1, 512).num_splits <= lone.num_splits
    assert found.choose(4, 512, 2048).tile_rows >= 64  # prefill: many rows a tile
    assert lone.tile_rows == 16  # decode: no more rows than the group needs


def test_a_rule_for_a_batch_invariant_spec_serves_every_batch_alike(db):
    found = ask(db, spec=SPEC.replace(batch_invariant=True))
    assert len(found.clauses) == 1


def test_without_known_rates_the_default_variants_serve(db, monkeypatch):
    blind = replace(CPU, bandwidth_gb_s=0.0)
    monkeypatch.setattr(targets, "current_device", lambda target: blind)
    found = selection.rule_for(SPEC, LAYOUT, CPU.target, db)
    assert found.evidence["kind"] == "default"
    assert found.reason.startswith("the default variant; ")
    assert "bandwidth_gb_s" in found.reason
    assert found.choose(4, 1, 100) == targets.default_variant(SPEC, LAYOUT, CPU.target, decode=True)
    assert found.choose(4, 9, 100) == targets.default_variant(SPEC, LAYOUT, CPU.target, decode=False)


def test_an_arch_that_nobody_knows_gets_the_default_variants(db):
    found = ask(db, target=Target("cuda", "sm_61"))
    assert found.evidence["kind"] == "default"
    assert found.distance == 32


# --- databases that are broken ------------------------------------------------------------------------------


def garbage(path):
    path.write_bytes(b"no database " * 1000)


def newer(path):
    open_db(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE pagegen_schema SET version = 99")


def foreign(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE cookies (id INTEGER)")


def damaged_rows(path):
    with open_db(path) as db:
        save(db, rule())
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE portfolios SET rule = '{'")
        connection.execute("UPDATE kernels SET data = 'x'")


def folder(path):
    path.mkdir()


BROKEN = {
    garbage: "is damaged or no database",
    newer: "has schema version 99",
    foreign: "another program's database",
    damaged_rows: "no readable portfolio",
    folder: "is a folder",
    lambda path: None: "there is no tuning database",
    lambda path: path.touch(): "is empty",
}


@pytest.mark.parametrize("ruin", BROKEN, ids=lambda f: f.__name__)
def test_a_broken_database_never_stops_a_model_and_its_state_is_in_the_reason(tmp_path, ruin, caplog):
    path = tmp_path / "broken.db"
    ruin(path)
    with caplog.at_level(logging.INFO):
        found = selection.rule_for(SPEC, LAYOUT, SM_90, str(path))
        chosen = selection.select(SPEC, LAYOUT, SM_90, DECODE, str(path))
        rows = selection.best_block_size(SPEC, SM_90, PROFILE, db=str(path))
    assert found.evidence["kind"] == "predicted"
    for reason in (found.reason, chosen.reason, rows[0].reason, *found.evidence["missed"]):
        assert BROKEN[ruin] in reason
        assert "broken.db" in reason
    assert BROKEN[ruin] in caplog.text


def test_the_default_database_is_asked_and_not_made(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEGEN_DB", str(tmp_path / "own" / "trials.db"))
    assert "there is no tuning database" in selection.rule_for(SPEC, LAYOUT, SM_90).reason
    assert not (tmp_path / "own").exists()
    with open_db() as db:
        save(db, rule())
    assert selection.rule_for(SPEC, LAYOUT, SM_90).variants == (TUNED,)


def test_a_database_that_breaks_while_it_is_open_degrades_too(db):
    save(db, rule())
    db.record(trial(code_hash=CODE))
    for path in (db.store.path.parent).glob("tuned.db*"):
        path.unlink()
    db.store.path.write_bytes(b"garbage" * 1000)
    chosen = db.select(SPEC, LAYOUT, SM_90, DECODE)
    assert chosen.evidence["kind"] == "predicted"
    assert "is damaged or no database" in chosen.reason
    assert chosen.predicted_us > 0


def test_a_fault_inside_a_rung_is_named_and_the_next_rung_answers(db, monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("a bug in the cost model")

    monkeypatch.setattr(costs, "predict_us", broken)
    found = ask(db)
    assert found.evidence["kind"] == "default"
    assert "ZeroDivisionError: a bug in the cost model" in found.reason
    chosen = selection.select(SPEC, LAYOUT, SM_90, DECODE, db)
    assert chosen.predicted_us is None
    assert "ZeroDivisionError" in chosen.evidence["time"]


def test_each_reason_is_logged_once(db, caplog):
    save(db, rule())
    with caplog.at_level(logging.INFO, logger="pagegen.selection"):
        for _ in range(3):
            ask(db)
        ask(db, layout=CacheLayout(block_size=64))
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        "sm_90, block size 16 NHD",
        "sm_90, block size 64 NHD",
    ]


# --- one batch ----------------------------------------------------------------------------------------------


def test_select_follows_the_clause_of_the_batch(db):
    other = replace(TUNED, num_splits=16)
    save(db, DispatchRule(clauses=(Clause(variant=other, max_num_seqs=2), Clause(variant=TUNED)), reason="two"))
    assert db.select(SPEC, LAYOUT, SM_90, Workload(context_lens=(900, 900))).variant == other
    assert db.select(SPEC, LAYOUT, SM_90, Workload(context_lens=(900, 900, 900))).variant == TUNED


def test_select_tells_the_median_measured_on_this_very_batch(db):
    save(db, rule())
    db.record(trial(code_hash=CODE, samples_us=(10.0, 30.0, 20.0)))
    db.record(trial(code_hash=CODE, samples_us=(1.0,), variant=ANYWHERE))
    db.record(trial(code_hash=CODE, samples_us=(1.0,), device=H200))
    db.record(trial(code_hash="old", samples_us=(1.0,)))
    chosen = db.select(SPEC, LAYOUT, SM_90, DECODE)
    assert chosen.predicted_us == 20.0
    assert chosen.evidence["time"] == "measured"
    assert chosen.distance == 0


def test_select_scales_the_nearest_batchs_time_and_says_from_which(db):
    save(db, rule())
    half = Workload(context_lens=(2048,) * 6)
    db.record(trial(code_hash=CODE, workload=half, samples_us=(500.0,)))
    db.record(trial(code_hash=CODE, workload=DECODE, samples_us=(7.0,)))
    db.record(trial(code_hash=CODE, workload=MIXED, samples_us=(9.0,)))
    asked = Workload(context_lens=(4096,) * 6)
    chosen = db.select(SPEC, LAYOUT, SM_90, asked)
    ratio = costs.predict_us(SPEC, LAYOUT, TUNED, H100, asked) / costs.predict_us(SPEC, LAYOUT, TUNED, H100, half)
    assert chosen.predicted_us == pytest.approx(500 * ratio)
    assert 1.2 < ratio < 2.1
    assert chosen.evidence["time"] == "scaled"
    assert chosen.evidence["measured_workload"]["total_context"] == half.total_context
    assert chosen.distance == pytest.approx(selection.workload_distance(asked, DECODE))  # what the choice rests on


def test_select_predicts_where_the_variant_was_never_timed(db):
    save(db, rule())
    chosen = db.select(SPEC, LAYOUT, SM_90, DECODE)
    assert chosen.evidence["time"] == "predicted"
    assert chosen.predicted_us == costs.predict_us(SPEC, LAYOUT, TUNED, H100, DECODE)


def test_a_decode_trial_says_nothing_about_a_batch_with_longer_queries(db):
    save(db, rule())
    db.record(trial(code_hash=CODE, workload=DECODE))
    assert db.select(SPEC, LAYOUT, SM_90, MIXED).evidence["time"] == "predicted"


def test_only_the_same_batch_is_at_distance_zero():
    one, shuffled = Workload(context_lens=(5, 9)), Workload(context_lens=(9, 5))
    assert selection.workload_distance(one, one) == 0
    assert (
        0 < selection.workload_distance(one, shuffled) < selection.workload_distance(one, Workload(context_lens=(5, 8)))
    )
    doubled = Workload(context_lens=(5, 9, 5, 9))
    assert selection.workload_distance(one, doubled) == selection.workload_distance(doubled, one) > 0.5


def test_where_no_kernel_serves_the_reference_path_is_the_answer_with_its_reason_and_time(db):
    save(db, rule(), layout=LAYOUT)  # whatever was tuned
    spec = SPEC.replace(kv_dtype="float16", q_dtype="float16", kv_zero_points=True, kv_scale_granularity="tensor")
    chosen = db.select(spec, LAYOUT, SM_90, DECODE)
    why = "zero points belong to int8 and int4 caches, not float16"
    assert chosen.reason == f"the reference path serves: {why}"
    assert (chosen.evidence["kind"], chosen.evidence["why"], chosen.evidence["time"]) == ("reference", why, "predicted")
    served = db.select(SPEC, LAYOUT, SM_90, DECODE)
    assert chosen.predicted_us > 2 * served.predicted_us


def test_clauses_that_repeat_the_next_are_merged_and_every_cell_keeps_its_variant():
    a, b, c = (CppVariant(split_tokens=n) for n in (512, 1024, 2048))
    table = {
        (1, 1024): a, (1, None): b,
        (4, 1024): a, (4, None): b,
        (None, 1024): c, (None, None): c,
    }  # fmt: skip
    clauses = merged_clauses(table.items())
    assert len(clauses) == 3
    whole = DispatchRule(clauses=(*clauses, Clause(variant=CppVariant())), reason="")
    for (seqs, context), variant in table.items():
        assert whole.choose(seqs or 999, 1, context or 99999) == variant
    assert whole.choose(1, 2, 10) == CppVariant()


def test_the_cpu_is_asked_for_its_own_portfolio_though_its_rates_changed(db, monkeypatch):
    monkeypatch.setattr(targets, "current_device", lambda target: replace(CPU, bandwidth_gb_s=12.3))
    tuned = rule(CppVariant(streams=2))
    code = targets.code_hash(CPU.target)
    db.save_portfolio(spec=SPEC, layout=LAYOUT, device=CPU, profile=PROFILE, rule=tuned, code_hash=code)
    found = selection.rule_for(fakes.SPEC, LAYOUT, CPU.target, db)
    assert (found.variants, found.distance) == ((CppVariant(streams=2),), 0)


def test_a_target_may_be_given_by_name_and_wrong_arguments_are_named(db):
    save(db, rule())
    assert db.select(SPEC, LAYOUT, "sm_90", DECODE).variant == TUNED
    assert selection.rule_for(SPEC, LAYOUT, "sm_90", db).variants == (TUNED,)
    for arguments, words in (
        (("llama", LAYOUT, SM_90, DECODE), "spec must be an AttentionSpec, got str 'llama'"),
        ((SPEC, 16, SM_90, DECODE), "layout must be a CacheLayout, got int 16"),
        ((SPEC, LAYOUT, SM_90, (1, 2)), "workload must be a Workload, got tuple"),
    ):
        with pytest.raises(TypeError, match=words):
            db.select(*arguments)
    with pytest.raises(ValueError, match="target must be like sm_90"):
        db.select(SPEC, LAYOUT, "gpu", DECODE)
    with pytest.raises(TypeError, match="measurement must be a Measurement, got dict"):
        db.record({"median_us": 3})
