"""What the search space loses to which rule."""

from __future__ import annotations

import pytest
from database_fakes import CPU, H100, SPEC
from pagegen_autotune.rejections import pruned
from pagegen_autotune.space import AXES, space_around

from pagegen import costs, targets
from pagegen.costs import rules
from pagegen.spec import CacheLayout, CppVariant, TritonVariant


@pytest.fixture(autouse=True)
def small_grid(monkeypatch):
    """192 points: the whole grid of 3456 takes seconds."""
    axes = {"tile_rows": (16, 128), "num_splits": (1, 8), "num_warps": (2, 8), "num_stages": (1, 4)}
    monkeypatch.setitem(AXES, "triton", {**AXES["triton"], **axes})


def found(block_size: int, device=H100, spec=SPEC):
    layout = CacheLayout(block_size=block_size)
    start = targets.default_variant(spec, layout, device.target, decode=True)
    return pruned(start, spec, layout, device), space_around(start, spec, layout, device)


def test_every_point_of_the_space_is_legal_or_ruled_out_by_a_named_rule():
    result, space = found(24)
    assert 0 < result.legal < result.points
    known = {rule.name for rule in (*rules.RULES, *rules.CONTRADICTIONS)} | {"variant"}
    assert {one.rule for one in result.rejections} <= known
    # the grid holds the start; a way that is the grid's point again is one point more here
    legal = space.points()
    assert abs(result.legal - len(legal)) <= len(space.ways)


def test_a_block_size_that_is_no_power_of_two_loses_the_walks_that_need_one():
    result, _ = found(24)
    counts = {one.rule: one.variants for one in result.rejections}
    # of the grid's 192 points a third each walks so: all of them are ruled out, none of "any"
    assert counts["tile_in_page"] >= 64 and counts["pages_in_tile"] >= 64
    assert "24" in next(one.reason for one in result.rejections if one.rule == "pages_in_tile")


def test_a_reason_is_that_of_its_example():
    result, _ = found(16)
    for one in result.rejections:
        assert one.variants > 0 and one.reason and one.example.startswith("triton:")
        if one.rule == "registers":
            assert "registers a thread are more than the 255" in one.reason and "tile_kv" in one.example
    counts = [one.variants for one in result.rejections]
    assert counts == sorted(counts, reverse=True)


def test_fields_that_contradict_each_other_are_told_apart_from_what_the_device_lacks():
    layout = CacheLayout(block_size=16)
    start = TritonVariant(page_walk="any", num_splits=1, split_tokens=1024)
    rows = {one.rule: one for one in pruned(start, SPEC, layout, costs.shipped_device("sm_80")).rejections}
    assert rows["one_kind_of_split"].stage == "fields"
    assert rows["one_kind_of_split"].example.endswith("num_stages=1")  # what was asked for: it is no variant
    assert rows["tile_in_page"].stage == rows["descriptor_hardware"].stage == "symbols"


def test_a_cpu_space_is_legal_throughout():
    layout = CacheLayout(block_size=16)
    result = pruned(CppVariant(), SPEC, layout, CPU)
    assert result.points > 100 and result.legal + sum(one.variants for one in result.rejections) == result.points
