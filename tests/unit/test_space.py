"""The search space and the strategies that walk it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pagegen_autotune.search import STRATEGIES, coordinate, exhaustive
from pagegen_autotune.space import AXES, Space, resources, space_around

from pagegen import costs
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant, Device, Target, TritonVariant

CPP = CppVariant()
TRITON = TritonVariant()


def anything(variant):
    return []


def walk(search, score):
    """Runs a strategy against a scoring function; every batch it asked for."""
    batches, scores = [], {}
    batch = next(search)
    while True:
        batches.append(batch)
        scores.update({v: score(v) for v in batch})
        try:
            batch = search.send(scores)
        except StopIteration:
            return batches


def test_grid_holds_every_combination_once_and_begins_with_the_start():
    grid = Space(CPP, anything).grid()
    assert grid[0] == CPP
    assert len(grid) == len(set(grid)) == 4 * 3 * 3 * 3 * 3


def test_neighbours_differ_in_one_field_by_one_step():
    found = Space(CPP, anything, ways=()).neighbours(CPP)
    assert set(found) == {
        CppVariant(tile_kv=32), CppVariant(tile_kv=128), CppVariant(streams=2), CppVariant(streams=8),
        CppVariant(heads_together=2), CppVariant(prefetch_ahead=0), CppVariant(prefetch_ahead=2),
        CppVariant(split_tokens=512), CppVariant(split_tokens=8192),
    }  # fmt: skip


def test_a_start_between_the_axis_values_steps_to_the_ones_beside_it():
    start = CppVariant(split_tokens=1024)
    steps = {v.split_tokens for v in Space(start, anything).neighbours(start)}
    assert steps == {512, 1024, 2048}


def test_an_unordered_field_may_change_to_any_other_value():
    walks = {v.page_walk for v in Space(TRITON, anything).neighbours(TRITON)}
    assert walks == set(AXES["triton"]["page_walk"])


def test_a_tile_may_change_together_with_the_walk_that_fits_it_to_the_block():
    start = TritonVariant(tile_kv=32, page_walk="tile_in_page")
    fits = {"tile_in_page": lambda t: 32 % t == 0, "pages_in_tile": lambda t: t % 32 == 0, "any": lambda t: True}
    near = Space(start, lambda v: [] if fits[v.page_walk](v.tile_kv) else ["does not fit"]).neighbours(start)
    assert TritonVariant(tile_kv=64, page_walk="pages_in_tile") in near
    assert TritonVariant(tile_kv=64, page_walk="tile_in_page") not in near


def test_rejected_points_are_kept_with_their_reasons_and_never_offered():
    space = Space(CPP, lambda v: ["too many streams"] if v.streams > 4 else [])
    assert all(v.streams <= 4 for v in space.grid())
    assert space.rejected[CppVariant(streams=8).name] == ("too many streams",)


def test_contradictory_fields_are_rejected_with_the_reason_and_do_not_end_the_search():
    start = CppVariant(tile_kv=16, split_tokens=48)  # 48 is no multiple of 32
    space = Space(start, anything)
    assert all(v.tile_kv == 16 for v in space.neighbours(start) if v.split_tokens == 48)
    assert any("multiple of tile_kv" in reasons[0] for reasons in space.rejected.values())


def test_the_start_is_never_rejected_since_the_default_is_always_among_the_candidates():
    space = Space(CPP, lambda v: ["no"])
    assert space.grid() == [CPP]


def test_combine_joins_moves_and_the_better_one_wins_where_two_change_one_field():
    moves = [CppVariant(streams=8), CppVariant(streams=2), CppVariant(tile_kv=128)]
    assert Space(CPP, anything).combine(CPP, moves) == [CppVariant(streams=8, tile_kv=128)]


def test_exhaustive_asks_for_everything_but_the_start():
    space = Space(CPP, anything)
    (batch,) = walk(exhaustive(space), lambda v: 1.0)
    assert set(batch) == set(space.grid()) - {CPP}


def test_coordinate_stops_after_one_neighbourhood_when_nothing_improves():
    batches = walk(coordinate(Space(CPP, anything)), lambda v: 1.0)
    assert len(batches) == 1


def test_coordinate_combines_gains_of_several_axes_and_finds_the_joint_optimum():
    def score(v):
        return (0.9 if v.streams == 8 else 1.0) * (0.9 if v.tile_kv == 128 else 1.0)

    batches = walk(coordinate(Space(CPP, anything)), score)
    assert CppVariant(streams=8, tile_kv=128) in batches[1]


def test_coordinate_goes_on_from_the_best_so_far_over_several_steps():
    start = CppVariant(streams=2)
    batches = walk(coordinate(Space(start, anything)), lambda v: 2.0 / v.streams)
    assert CppVariant(streams=8) in [v for batch in batches for v in batch]


def test_coordinate_asks_for_no_variant_twice_and_never_for_the_start():
    batches = walk(coordinate(Space(CPP, anything)), lambda v: 1.0 / v.streams)
    asked = [v for batch in batches for v in batch]
    assert len(asked) == len(set(asked)) and CPP not in asked


def test_coordinate_survives_candidates_that_all_failed():
    search = coordinate(Space(CPP, anything))
    next(search)
    with pytest.raises(StopIteration):
        search.send({})


def test_every_strategy_is_deterministic():
    for strategy in STRATEGIES.values():
        runs = [walk(strategy(Space(CPP, anything)), lambda v: 1.0 / v.streams) for _ in range(2)]
        assert runs[0] == runs[1]


def test_fewer_threads_and_less_memory_in_flight_are_fewer_resources():
    assert resources(TritonVariant(num_warps=2)) < resources(TritonVariant(num_warps=4))
    assert resources(TritonVariant(num_stages=1)) < resources(TritonVariant(num_stages=2))
    assert resources(TritonVariant(page_walk="pages_in_tile")) < resources(TritonVariant(page_walk="any"))
    assert resources(CppVariant(prefetch_ahead=0)) < resources(CppVariant(prefetch_ahead=1))
    assert resources(CppVariant(split_tokens=8192)) < resources(CppVariant(split_tokens=2048))


def test_a_gpu_space_obeys_the_cost_models_legality():
    spec = AttentionSpec.from_model("llama-3.1-8b")
    layout, device = CacheLayout(block_size=16), costs.shipped_device("sm_90")
    start = TritonVariant(page_walk="pages_in_tile")
    space = space_around(start, spec, layout, device)
    near = space.neighbours(start)
    assert near and not any(costs.legal(spec, layout, v, device) for v in near)
    assert any("tile_in_page" in reason for reasons in space.rejected.values() for reason in reasons)


def test_all_heads_of_a_token_are_tried_together_and_reading_by_token_where_it_is_another_kernel():
    layout = CacheLayout(block_size=16, order="NHD")
    device = Device(target=Target("cpu"), name="a CPU", features=("avx512_vnni",))
    quantised = {"kv_dtype": torch.int8, "kv_scale_granularity": "head"}
    spec = AttentionSpec(num_q_heads=32, num_kv_heads=32, head_dim=128, **quantised)

    def near(spec, device):
        return space_around(CPP, spec, layout, device).neighbours(CPP)

    assert {v.heads_together for v in near(spec, device)} >= {32}
    assert {v.heads_together for v in near(spec.replace(num_kv_heads=8), device)} <= {1, 2, 8}
    by_token = {
        (dtype, features): any(
            v.read_order == "token" for v in near(spec.replace(kv_dtype=dtype), replace(device, features=features))
        )
        for dtype in (torch.int8, torch.float8_e4m3fn)
        for features in (("avx512_vnni",), ())
    }
    assert by_token == {
        (torch.int8, ("avx512_vnni",)): False, (torch.int8, ()): True,
        (torch.float8_e4m3fn, ("avx512_vnni",)): True, (torch.float8_e4m3fn, ()): True,
    }  # fmt: skip
