"""The guided search: what it asks for, and that it finds in a fraction of the space what only several fields do."""

from __future__ import annotations

import random

import pytest
from pagegen_autotune.search import MOST, SHARE, guided
from pagegen_autotune.space import Space
from pagegen_autotune.surrogate import Surrogate, relative
from test_space import CPP, anything, walk

from pagegen.spec import CppVariant, TritonVariant


def rugged(v):
    """A best point that no single field leads to: streams help only small tiles, and only without prefetch."""
    together = 0.7 if (v.streams, v.tile_kv, v.prefetch_ahead) == (8, 32, 0) else 1.0
    return together * (0.95 if v.split_tokens == 8192 else 1.0) * (0.97 if v.tile_kv == 32 else 1.0)


def best_of(batches, score):
    return min(score(v) for batch in batches for v in batch)


def test_a_small_space_is_measured_whole():
    space = Space(CPP, anything, (), axes={"tile_kv": (32, 64, 128), "streams": (2, 4, 8)})
    (batch,) = walk(guided(space), lambda v: 1.0)
    assert len(batch) == 8 and CPP not in batch


def test_of_a_large_space_a_share_is_asked_for_no_variant_twice_and_never_the_start():
    for score in (rugged, lambda v: 1.0, lambda v: 1.0 / v.streams):
        space = Space(CPP, anything)
        asked = [v for batch in walk(guided(space), score) for v in batch]
        assert len(asked) == len(set(asked)) and CPP not in asked
        assert len(asked) <= max(26, min(MOST, SHARE * len(space.points())) + 1)


def test_it_finds_what_only_several_fields_do_together_given_a_hint_of_each():
    def hinted(v):
        single = (0.97 if v.streams == 8 else 1.0) * (0.97 if v.prefetch_ahead == 0 else 1.0)
        return rugged(v) * single

    space = Space(CPP, anything)
    assert best_of(walk(guided(space), hinted), hinted) == min(map(hinted, space.grid()))


def test_what_won_elsewhere_and_what_the_model_expects_are_in_the_first_batch():
    won, expected = CppVariant(tile_kv=256, streams=2), CppVariant(tile_kv=32, streams=2, split_tokens=512)
    space = Space(CPP, anything, prior=lambda v: 1.0 if v == expected else 2.0, seeds=[won])
    first = next(guided(space))
    assert first[0] == won
    # the model is asked about a sample of the grid, the favourite included where it lies in it
    sampled = Space(CPP, anything, (), axes={"tile_kv": (32, 64, 128, 256), "streams": (2, 4, 8), "split_tokens":
                    (512, 2048, 8192)}, prior=lambda v: 1.0 if v == expected else 2.0)  # fmt: skip
    assert expected in next(guided(sampled))


def test_illegal_seeds_and_those_of_other_families_are_left_out():
    space = Space(CPP, lambda v: ["no"] if v.streams == 8 else [], seeds=[CppVariant(streams=8), TritonVariant(), CPP])
    assert space.seeds == []


def test_noise_on_a_flat_field_ends_the_search_early():
    sizes = []
    for seed in range(10):
        rng = random.Random(seed)
        sizes.append(len(walk(guided(Space(CPP, anything)), lambda v, rng=rng: rng.gauss(1.0, 0.002))))
    assert max(sizes) <= 7  # of the nine batches that the share allows


def test_candidates_that_all_failed_do_not_end_it_with_an_error():
    search = guided(Space(CPP, anything))
    next(search)
    with pytest.raises(StopIteration):
        for _ in range(50):
            search.send({})


def test_scores_of_variants_that_it_did_not_ask_for_change_no_step():
    def steps(extra):
        space, asked = Space(CPP, anything), []
        search = guided(space)
        batch = next(search)
        while True:
            asked.append(batch)
            try:
                batch = search.send({**extra, **{v: rugged(v) for v in batch}})
            except StopIteration:
                return asked

    others = {v: 0.5 for v in Space(CPP, anything).grid()[200:260]}
    mine = steps({})
    assert steps({v: s for v, s in others.items() if not any(v in b for b in mine)}) == mine


def test_the_surrogate_returns_what_it_was_told_and_is_unsure_elsewhere():
    told = {CPP: 1.0, CppVariant(streams=8): 0.8, CppVariant(tile_kv=32): 1.1}
    model = Surrogate(told, None)
    known = model.optimistic(list(told), 0.0)
    assert all(known[v] == pytest.approx(score, rel=0.02) for v, score in told.items())
    both = CppVariant(streams=8, tile_kv=32)
    assert model.optimistic([both], 0.0)[both] == pytest.approx(0.88, abs=0.05)  # gains of fields add up
    assert model.optimistic([both], 1.0)[both] < model.optimistic([both], 0.0)[both]
    assert model.optimistic([], 1.0) == {}


def test_a_prior_is_counted_from_the_start_and_asked_once_a_variant():
    asked = []
    prior = relative(lambda v: asked.append(v) or 2.0 * v.streams, CPP)
    assert prior(CPP) == 0.0 and prior(CppVariant(streams=8)) == pytest.approx(0.693, abs=1e-3)
    assert prior(CppVariant(streams=8)) > 0 and len(asked) == 2
