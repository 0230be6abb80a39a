"""Block sizes under a profile: arithmetic that can be done by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from database_fakes import H100, SM_90, SPEC, TUNED, rule, trial

from pagegen import costs, targets
from pagegen.db import open_db
from pagegen.db.block_size import BlockSizeRow, ranked
from pagegen.spec import CacheLayout, Profile, Status, Workload

CODE = targets.code_hash(SM_90)
SHORT, LONG = Workload(context_lens=(100, 60)), Workload(context_lens=(1000,) * 4)
TRAFFIC = Profile(name="two kinds", workloads=(SHORT, LONG), weights=(3, 1))
ANYWHERE = replace(TUNED, page_walk="any")
TOKEN_BYTES = SPEC.kv_bytes_per_token  # 4096


@pytest.fixture(autouse=True)
def _no_device_of_this_machine(monkeypatch):
    def absent(target):
        raise ValueError(f"no {target} here")

    monkeypatch.setattr(targets, "current_device", absent)


@pytest.fixture
def db(tmp_path):
    with open_db(tmp_path / "sizes.db") as database:
        yield database


def tuned(db, block_size, times, *, variant=ANYWHERE, order="NHD", device=H100, profile=TRAFFIC):
    """A portfolio of one variant at a block size, with one trial of so many microseconds for each workload."""
    layout = CacheLayout(block_size=block_size, order=order)
    db.save_portfolio(
        spec=SPEC, layout=layout, device=device, profile=profile, rule=rule(variant), code_hash=CODE
    )  # fmt: skip
    for workload, us in times.items():
        db.record(
            trial(layout=layout, variant=variant, workload=workload, samples_us=(us,), code_hash=CODE, device=device)
        )


def ask(db, *, profile=TRAFFIC, **options):
    return db.best_block_size(SPEC, SM_90, profile, **options)


def test_step_time_is_the_weighted_median_of_what_was_measured(db):
    tuned(db, 16, {SHORT: 10.0, LONG: 50.0})
    db.record(
        trial(
            layout=CacheLayout(block_size=16), variant=ANYWHERE, workload=LONG, samples_us=(70.0, 90.0), code_hash=CODE
        )
    )
    (row,) = ask(db)
    assert row.step_us == pytest.approx(0.75 * 10 + 0.25 * 70)  # the median of 50, 70, 90
    assert (row.kind, row.measured_share, row.device) == ("measured", 1, H100.name)
    assert row.variants == (ANYWHERE.name,)
    # 0.75 x 2 + 0.25 x 4 tokens a step
    assert row.tokens_per_s == pytest.approx(2.5 / row.step_us * 1e6)


def test_percentiles_are_over_tokens_and_not_over_steps(db):
    """Three of four steps are short, but 40 % of the tokens wait for a long one."""
    tuned(db, 16, {SHORT: 10.0, LONG: 50.0})
    (row,) = ask(db)
    assert (row.p50_us, row.p99_us) == (10.0, 50.0)
    (row,) = ask(db, profile=Profile(name="even", workloads=(SHORT, LONG), weights=(1, 1)))
    assert row.p50_us == 50.0


def test_waste_and_metadata_follow_from_the_block_size_by_hand(db):
    for block_size in (16, 64):
        tuned(db, block_size, {SHORT: 10.0, LONG: 50.0})
    rows = {row.block_size: row for row in ask(db)}
    # 16: 100 -> 112, 60 -> 64, 1000 -> 1008; 64: 128, 64, 1024. Weights 3 : 1
    slots, used = 3 * (112 + 64) + 4 * 1008, 3 * 160 + 4000
    assert rows[16].waste_share == pytest.approx(1 - used / slots)
    assert rows[64].waste_share == pytest.approx(1 - used / (3 * 192 + 4 * 1024))
    # table entries of 4 bytes, 8 for length and query start, 8 for the new token's slot; 3 x 2 and 1 x 4 sequences
    assert rows[16].metadata_bytes == pytest.approx((3 * (4 * (7 + 4) + 2 * 16) + 4 * (4 * 63 + 16)) / 10)


def test_memory_admits_whole_blocks_of_all_layers(db):
    tuned(db, 16, {SHORT: 10.0, LONG: 50.0})
    alike = Profile(name="alike", workloads=(LONG,), weights=(1,))
    block = 16 * TOKEN_BYTES
    for spare, expected in ((0, 5), (block - 1, 5), (-1, 4)):
        (row,) = ask(db, profile=alike, memory_bytes=5 * 63 * block + spare)
        assert row.admitted_sequences == expected
    (row,) = ask(db, profile=alike, memory_bytes=5 * 63 * block, num_layers=2)
    assert row.admitted_sequences == 2
    (row,) = ask(db, profile=alike)
    assert row.admitted_sequences is None


def test_only_decoding_sequences_count_for_admission(db):
    chunk = Workload(context_lens=(1000, 16), query_lens=(1, 16))
    tuned(db, 16, {chunk: 10.0})
    (row,) = ask(
        db, profile=Profile(name="mixed", workloads=(chunk,), weights=(1,)), memory_bytes=63 * 16 * TOKEN_BYTES
    )
    assert row.admitted_sequences == 1


def test_a_batch_cut_by_memory_is_scaled_by_the_model_and_no_longer_called_measured(db):
    tuned(db, 16, {SHORT: 10.0, LONG: 50.0})
    alike = Profile(name="alike", workloads=(LONG,), weights=(1,))
    (row,) = ask(db, profile=alike, memory_bytes=2 * 63 * 16 * TOKEN_BYTES)
    layout = CacheLayout(block_size=16)
    half = Workload(context_lens=(1000,) * 2)
    ratio = costs.predict_us(SPEC, layout, ANYWHERE, H100, half) / costs.predict_us(SPEC, layout, ANYWHERE, H100, LONG)
    assert (row.kind, row.measured_share, row.scaled_share) == ("predicted", 0, 1)
    assert row.step_us == pytest.approx(50 * ratio)
    assert row.tokens_per_s == pytest.approx(2 / row.step_us * 1e6)


def test_memory_for_no_sequence_at_all_serves_nothing_and_ranks_last(db):
    tuned(db, 2048, {SHORT: 1.0, LONG: 1.0})
    tuned(db, 16, {SHORT: 10.0, LONG: 50.0})
    rows = ask(db, memory_bytes=70 * 16 * TOKEN_BYTES)
    assert [row.block_size for row in rows] == [16, 2048]
    assert (rows[1].admitted_sequences, rows[1].tokens_per_s) == (0, 0)


def test_throughput_and_latency_rank_differently(db):
    tuned(db, 16, {SHORT: 10.0, LONG: 90.0})  # mean 30
    tuned(db, 64, {SHORT: 20.0, LONG: 80.0})  # mean 35
    assert [row.block_size for row in ask(db)] == [16, 64]
    assert [row.block_size for row in ask(db, objective="latency")] == [64, 16]


def test_equal_times_go_to_the_block_size_that_wastes_less(db):
    for block_size in (128, 16, 64):
        tuned(db, block_size, {SHORT: 10.0, LONG: 50.0})
    assert [row.block_size for row in ask(db)] == [16, 64, 128]


def test_a_prediction_never_outranks_a_measurement_and_says_what_share_was_measured(db):
    tuned(db, 16, {SHORT: 4e4, LONG: 4e4})
    tuned(db, 64, {SHORT: 10.0})
    rows = ask(db)
    assert [(row.block_size, row.kind, row.measured_share) for row in rows] == [
        (16, "measured", 1), (64, "predicted", 0.75),
    ]  # fmt: skip
    layout = CacheLayout(block_size=64)
    assert rows[1].step_us == pytest.approx(7.5 + 0.25 * costs.predict_us(SPEC, layout, ANYWHERE, H100, LONG))


def test_where_nothing_was_measured_the_usual_sizes_are_predicted(db):
    rows = ask(db)
    assert sorted(row.block_size for row in rows) == [16, 32, 64, 128]
    assert {(row.kind, row.measured_share) for row in rows} == {("predicted", 0)}
    assert all("not measured" in row.reason for row in rows)
    json.dumps([row.to_dict() for row in rows])


def test_orders_of_one_block_size_are_rows_of_their_own(db):
    tuned(db, 16, {SHORT: 10.0, LONG: 50.0})
    tuned(db, 16, {SHORT: 9.0, LONG: 45.0}, order="HND")
    assert [(row.block_size, row.order) for row in ask(db)] == [(16, "HND"), (16, "NHD")]


def test_times_of_several_devices_are_never_mixed(db):
    h200 = costs.shipped_device(SM_90, name="NVIDIA H200")
    tuned(db, 16, {SHORT: 10.0}, device=h200)
    tuned(db, 16, {SHORT: 20.0, LONG: 60.0})
    (row,) = ask(db)
    assert (row.device, row.step_us) == (H100.name, 0.75 * 20 + 0.25 * 60)


def test_another_machines_trials_serve_where_this_one_has_none(db):
    h200 = costs.shipped_device(SM_90, name="NVIDIA H200")
    tuned(db, 16, {SHORT: 10.0, LONG: 50.0}, device=h200)
    (row,) = ask(db)
    assert (row.device, row.kind) == ("NVIDIA H200", "measured")


def test_a_named_product_is_answered_for_itself_whatever_was_measured_on_others(db):
    tuned(db, 16, {SHORT: 20.0, LONG: 60.0})
    (row,) = ask(db, device="h200")
    assert (row.device, row.kind) == ("NVIDIA H200", "predicted")
    tuned(db, 16, {SHORT: 10.0, LONG: 50.0}, device=costs.product(SM_90, "h200"))
    (row,) = ask(db, device="NVIDIA H200")
    assert (row.device, row.kind, row.step_us) == ("NVIDIA H200", "measured", 0.75 * 10 + 0.25 * 50)


def test_a_device_of_another_target_is_refused(db):
    with pytest.raises(ValueError, match="device must be one of sm_90, got .*A100.* of sm_80"):
        ask(db, device=costs.product("sm_80", "a100 pcie"))
    with pytest.raises(TypeError, match="device must be a str, got int"):
        ask(db, device=7)


def test_confirming_samples_count_alone_since_those_of_the_search_flatter(db):
    tuned(db, 16, {SHORT: 10.0, LONG: 50.0})
    confirming = {"tuning_purpose": "confirm"}
    layout = CacheLayout(block_size=16)
    db.record(
        trial(
            layout=layout, variant=ANYWHERE, workload=LONG, samples_us=(58.0,), code_hash=CODE, environment=confirming
        )
    )
    (row,) = ask(db)
    assert row.step_us == 0.75 * 10 + 0.25 * 58


def test_failed_trials_and_trials_of_other_variants_and_code_do_not_count(db):
    tuned(db, 16, {SHORT: 10.0, LONG: 50.0})
    layout = CacheLayout(block_size=16)
    others = [
        trial(status=Status.TIMEOUT, samples_us=(), variant=ANYWHERE),
        trial(samples_us=(1.0,), variant=replace(ANYWHERE, num_warps=8)),
        trial(samples_us=(1.0,), variant=ANYWHERE, code_hash="old"),
    ]
    for other in others:
        db.record(replace(other, layout=layout, workload=LONG, code_hash=other.code_hash.replace("c0de", CODE)))
    (row,) = ask(db)
    assert row.step_us == 20.0


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"objective": "speed"}, ValueError, "objective must be one of 'throughput', 'latency', got 'speed'"),
        ({"memory_bytes": 0}, ValueError, "memory_bytes must be at least 1, got 0"),
        ({"memory_bytes": 1.5}, TypeError, "memory_bytes must be an integer"),
        ({"num_layers": 0}, ValueError, "num_layers must be at least 1"),
    ],
)
def test_bad_arguments_are_named(db, options, error, words):
    with pytest.raises(error, match=words):
        ask(db, **options)


def test_a_share_that_sums_to_one_only_nearly_is_still_all_measured(db):
    loads = tuple(Workload(context_lens=(10 + i,)) for i in range(7))
    seventh = Profile(name="sevenths", workloads=loads, weights=(0.1,) * 7)
    tuned(db, 16, {load: 5.0 + i for i, load in enumerate(loads)}, profile=seventh)
    (row,) = ask(db, profile=seventh)
    assert row.kind == "measured"
    assert (row.measured_share, row.scaled_share) == (1, 0)
    assert (row.p50_us, row.p99_us) == (8.0, 11.0)


def test_block_sizes_within_two_percent_of_the_best_go_by_waste_and_slower_ones_by_speed() -> None:
    def of(block_size: int, tokens_per_s: float, waste_share: float) -> BlockSizeRow:
        return BlockSizeRow(
            block_size=block_size, order="NHD", step_us=1.0, waste_share=waste_share, metadata_bytes=1.0,
            admitted_sequences=None, tokens_per_s=tokens_per_s, p50_us=1.0, p99_us=1.0, kind="measured",
            measured_share=1.0, scaled_share=0.0, device="d", variants=(), reason="",
        )  # fmt: skip

    rows = [of(128, 1000.0, 0.05), of(64, 700.0, 0.02), of(16, 990.0, 0.005), of(32, 800.0, 0.01)]
    assert [row.block_size for row in ranked(rows, "throughput")] == [16, 128, 32, 64]
