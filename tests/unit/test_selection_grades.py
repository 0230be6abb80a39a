"""Grades: which rung answers, within what radius, what is refused before it could be launched, and how it is told."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from database_fakes import DECODE, H100, LAYOUT, MIXED, PROFILE, SM_90, SPEC, TUNED, rule, trial
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagegen import costs, selection, targets
from pagegen.db import open_db
from pagegen.selection import feasibility, grades
from pagegen.selection.predicted import predicted_rule
from pagegen.spec import CacheLayout, Profile, Target, TritonVariant, Workload

CODE = targets.code_hash(SM_90)
H200 = costs.shipped_device(SM_90, name="NVIDIA H200")
A100 = costs.shipped_device("sm_80")
RTX = costs.shipped_device("sm_89")
ANYWHERE = replace(TUNED, page_walk="any")
FAR = Workload(context_lens=(100_000,) * 64)


@pytest.fixture(autouse=True)
def _no_device_of_this_machine(monkeypatch):
    def absent(target):
        raise ValueError(f"no {target} here")

    monkeypatch.setattr(targets, "current_device", absent)
    predicted_rule.cache_clear()


@pytest.fixture
def db(tmp_path):
    with open_db(tmp_path / "tuned.db") as database:
        yield database


def save(db, saved, *, spec=SPEC, layout=LAYOUT, device=H100, code=CODE, at="2026-01-01", profile=PROFILE):
    db.save_portfolio(
        spec=spec, layout=layout, device=device, profile=profile, rule=saved, code_hash=code, created_at=at
    )


def near(workload: Workload) -> Workload:
    """A batch of nearly the same figures."""
    return Workload(context_lens=tuple(n + 1 for n in workload.context_lens), query_lens=workload.query_lens)


def test_a_product_that_is_named_has_its_own_portfolios_first(db):
    save(db, rule(TUNED))
    save(db, rule(ANYWHERE), device=H200)
    assert db.select(SPEC, LAYOUT, SM_90, DECODE).variant == TUNED
    for named in ("h200", H200):
        chosen = db.select(SPEC, LAYOUT, SM_90, DECODE, device=named)
        assert (chosen.grade, chosen.variant) == ("exact", ANYWHERE)
    assert db.select(SPEC, LAYOUT, SM_90, DECODE, device="h100 pcie").grade == "arch"


def test_every_grade_is_reached_in_its_order_as_better_evidence_arrives(db):
    said = []

    def ask():
        chosen = db.select(SPEC, LAYOUT, SM_90, near(DECODE))
        said.append((chosen.grade, chosen.confidence))
        return chosen

    ask()
    save(db, rule(replace(ANYWHERE, num_splits=1)), device=A100)
    assert ask().variant.num_splits == 1
    save(db, rule(replace(ANYWHERE, num_splits=2)), device=H200)
    assert ask().variant.num_splits == 2
    save(db, rule(ANYWHERE), layout=CacheLayout(block_size=64))
    assert ask().variant == ANYWHERE
    save(db, rule(TUNED))
    assert ask().variant == TUNED
    exact = db.select(SPEC, LAYOUT, SM_90, DECODE)
    assert said == [
        ("predicted", "low"), ("other_arch", "low"), ("arch", "low"), ("near", "medium"), ("near", "high")
    ]  # fmt: skip
    assert (exact.grade, exact.confidence, exact.distance) == ("exact", "high", 0)


def test_a_device_that_nothing_is_known_of_gets_the_default_with_no_confidence(db):
    chosen = db.select(SPEC, LAYOUT, Target("cuda", "sm_61"), DECODE)
    assert (chosen.grade, chosen.confidence) == ("default", "none")


def test_beyond_the_radius_what_was_tuned_does_not_count_as_evidence(db):
    save(db, rule(TUNED))
    chosen = db.select(SPEC, LAYOUT, SM_90, FAR)
    assert chosen.grade == "predicted"
    assert "further than the radius of 3" in chosen.reason
    assert db.select(SPEC, LAYOUT, SM_90, near(DECODE)).grade == "near"


def test_decode_evidence_says_nothing_about_longer_queries(db):
    save(db, rule(), profile=Profile(name="decode only", workloads=(DECODE,), weights=(1,)))
    chosen = db.select(SPEC, LAYOUT, SM_90, MIXED)
    assert chosen.grade == "predicted"
    assert "has no such batches" in chosen.reason


def test_a_farther_portfolio_that_knows_the_batch_beats_a_nearer_one_that_does_not(db):
    save(db, rule(TUNED))
    save(db, rule(ANYWHERE), device=H200, profile=Profile(name="long", workloads=(FAR,), weights=(1,)))
    chosen = db.select(SPEC, LAYOUT, SM_90, FAR)
    assert (chosen.grade, chosen.variant) == ("arch", ANYWHERE)
    assert chosen.evidence["dispatch"] == TUNED.name  # what an operator prepared here would take


def test_beyond_the_radius_the_tuned_variant_stays_where_the_model_expects_nothing_clearly_faster(db):
    best = predicted_rule(SPEC, LAYOUT, H100).choose(64, 1, 100_000)
    save(db, rule(best))
    chosen = db.select(SPEC, LAYOUT, SM_90, FAR)
    assert (chosen.grade, chosen.variant) == ("predicted", best)
    assert "the cost model" in chosen.reason
    assert "dispatch" not in chosen.evidence


# --- feasibility ------------------------------------------------------------------------------------------


def test_a_variant_of_another_arch_that_needs_its_shared_memory_is_refused_before_anything_launches(db):
    wide = TritonVariant(tile_kv=256, page_walk="any")
    save(db, rule(wide), device=H100)
    assert costs.legal(SPEC, LAYOUT, wide, H100) == []
    chosen = db.select(SPEC, LAYOUT, RTX.target, DECODE)
    assert chosen.variant != wide
    assert chosen.grade == "predicted"
    assert "bytes of shared memory" in chosen.reason


def test_registers_and_dtypes_are_checked_before_anything_launches():
    fat = TritonVariant(tile_rows=256, tile_kv=128, num_warps=4)
    assert any("registers a thread" in why for why in feasibility.infeasible(SPEC, LAYOUT, fat, H100))
    assert not any("registers" in why for why in feasibility.infeasible(SPEC, LAYOUT, TUNED, H100))
    tight = replace(H100, registers_per_unit=4096)
    assert any("4096 of NVIDIA H100" in why for why in feasibility.infeasible(SPEC, LAYOUT, TUNED, tight))
    turing = replace(H100, target=Target("cuda", "sm_75"), name="Turing")
    assert "bfloat16 needs sm_80 or later, not sm_75" in feasibility.infeasible(SPEC, LAYOUT, TUNED, turing)
    half = SPEC.replace(q_dtype="float16", kv_dtype="float16")
    assert not any("float" in why for why in feasibility.infeasible(half, LAYOUT, TUNED, turing))


def test_every_variant_that_the_defaults_and_the_model_offer_is_feasible_where_it_is_offered():
    for device in (H100, A100, RTX, costs.shipped_device("gfx942"), costs.shipped_device("sm_100")):
        offered = {
            *predicted_rule(SPEC, LAYOUT, device).variants,
            *(targets.default_variant(SPEC, LAYOUT, device.target, decode=d) for d in (True, False)),
        }
        for variant in offered:
            assert feasibility.infeasible(SPEC, LAYOUT, variant, device) == []


def test_a_cpu_portfolio_never_serves_a_gpu(db):
    from database_fakes import CPU

    from pagegen.spec import CppVariant

    save(db, rule(CppVariant()), device=CPU)
    save(db, rule(CppVariant()), device=CPU, code=targets.code_hash(CPU.target))
    chosen = db.select(SPEC, LAYOUT, SM_90, DECODE)
    assert chosen.grade == "predicted"
    assert chosen.variant.family == "triton"


def test_one_product_under_two_names_is_one_device(db):
    save(db, rule(), device=replace(H100, name="H100 SXM5 80GB"))
    chosen = db.select(SPEC, LAYOUT, SM_90, DECODE)
    assert chosen.grade == "exact"
    assert "alike in everything but the name" in chosen.reason


# --- distance -----------------------------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(1, 50_000), min_size=1, max_size=20)
LOADS = st.builds(
    lambda contexts, more: Workload(
        context_lens=tuple(c + 8 for c in contexts), query_lens=tuple(1 + (i % 7) * more for i in range(len(contexts)))
    ),
    LENGTHS,
    st.integers(0, 1),
)


@settings(max_examples=settings.default.max_examples, deadline=None)
@given(LOADS, LOADS)
def test_distance_is_symmetric_and_zero_for_the_same_batch_only(a, b):
    assert grades.workload_distance(a, b) == grades.workload_distance(b, a) >= 0
    assert (grades.workload_distance(a, b) == 0) == (a == b)


def test_the_distribution_of_contexts_counts_and_not_their_sum():
    even = Workload(context_lens=(4000,) * 8)
    skewed = Workload(context_lens=(400,) * 7 + (29_200,))
    alike = Workload(context_lens=(4100,) * 8)
    assert even.total_context == skewed.total_context
    assert grades.workload_distance(even, skewed) > 2
    assert grades.workload_distance(even, alike) < 0.1
    assert grades.workload_distance(even, Workload(context_lens=(4000,) * 64)) == pytest.approx(math.log2(65 / 9))


# --- purity -------------------------------------------------------------------------------------------------

STORED = [
    {"saved": rule(TUNED), "at": "2026-01-02"},
    {"saved": rule(ANYWHERE), "at": "2026-01-02"},
    {"saved": rule(replace(ANYWHERE, num_splits=2)), "device": H200, "at": "2026-01-03"},
    {"saved": rule(replace(ANYWHERE, num_splits=8)), "layout": CacheLayout(block_size=64), "at": "2026-01-01"},
    {"saved": rule(replace(ANYWHERE, num_splits=8)), "layout": CacheLayout(block_size=8), "at": "2026-01-01"},
]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(len(STORED))), layout=st.sampled_from([8, 16, 32, 128]))
def test_selection_is_a_pure_function_of_what_is_stored_whatever_the_order_it_was_stored_in(
    order, layout, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("pure")
    found = []
    for name, numbers in (("one", range(len(STORED))), ("other", order)):
        with open_db(folder / f"{name}.db") as db:
            for number in numbers:
                save(db, **STORED[number])
            found.append(db.select(SPEC, CacheLayout(block_size=layout), SM_90, DECODE))
    assert found[0].variant == found[1].variant
    assert [c.reason.replace("one.db", "other.db") for c in found] == [found[1].reason] * 2


# --- explained ----------------------------------------------------------------------------------------------


def test_the_ladder_is_told_from_the_top_with_every_rung_and_why_it_missed(db):
    save(db, rule(TUNED))
    save(db, rule(TritonVariant(tile_kv=32, page_walk="tile_in_page")), device=H200, layout=CacheLayout(block_size=32))
    found = selection.explain_selection(SPEC, LAYOUT, SM_90, FAR, db)
    assert [(r.grade, r.state) for r in found.rungs] == [
        ("exact", "missed"), ("near", "missed"), ("arch", "missed"), ("other_arch", "missed"),
        ("predicted", "answered"), ("default", "below"),
    ]  # fmt: skip
    assert "further than the radius" in found.rungs[1].why
    assert found.selection == db.select(SPEC, LAYOUT, SM_90, FAR)


def test_near_misses_are_told_field_by_field_the_nearest_first(db):
    save(db, rule(), code="older templates", at="2026-01-01")
    save(
        db, rule(), spec=SPEC.replace(kv_dtype="int8", kv_scale_granularity="tensor"), layout=CacheLayout(block_size=32)
    )
    save(
        db,
        rule(),
        spec=SPEC.replace(num_q_heads=64, head_dim=64, v_head_dim=64, window=7, causal=False, alibi=True, sinks=True),
    )
    first, second = selection.explain_selection(SPEC, LAYOUT, SM_90, DECODE, db).near_misses
    assert first.fields == {"code_hash": ("older templa", CODE[:12])}
    assert second.fields["spec.kv_dtype"] == ("int8", "bfloat16")
    assert second.fields["layout.block_size"] == (32, 16)
    assert set(second.fields) == {"spec.kv_dtype", "spec.kv_scale_granularity", "layout.block_size"}


def test_near_misses_that_differ_alike_are_told_once_by_the_newest(db):
    save(db, rule(), at="2026-01-01")
    save(db, rule(), at="2026-01-02")  # answers; the older one differs in nothing
    for day in (1, 2, 3):
        save(db, rule(), code="older templates", at=f"2026-02-0{day}")
    save(db, rule(), code="older templates", layout=CacheLayout(block_size=32), at="2026-01-01")
    found = selection.explain_selection(SPEC, LAYOUT, SM_90, DECODE, db).near_misses
    assert [(miss.tuned_at, set(miss.fields)) for miss in found] == [
        ("2026-02-03", {"code_hash"}), ("2026-01-01", {"code_hash", "layout.block_size"})
    ]  # fmt: skip


def test_a_near_miss_for_its_batch_says_how_far_each_axis_is_from_the_radius(db):
    save(db, rule())
    (miss,) = selection.explain_selection(SPEC, LAYOUT, SM_90, FAR, db).near_misses
    stored, asked = miss.fields["batch.num_seqs"]
    assert asked == 64
    assert stored == "3 (4 of 3 away)"
    assert "further than the radius" in miss.why


def test_an_answer_never_rests_on_a_times_of_another_variant(db):
    save(db, rule())
    db.record(trial(code_hash=CODE, variant=ANYWHERE, samples_us=(1.0,)))
    assert db.select(SPEC, LAYOUT, SM_90, DECODE).evidence["time"] == "predicted"
