"""The bookkeeping of blocks: references, growth, fork, copy-on-write, truncation and refusals."""

from __future__ import annotations

import pickle
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

import pagegen
from pagegen import BlockAllocator, OutOfBlocks

BOOKKEEPING = ("allocator", "groups", "invariants")  # and all that they import


def computed(allocator, seq_id, tokens, **options):
    """Adds a sequence and computes all of it."""
    hit = allocator.add(seq_id, tokens, **options)
    allocator.mark_computed(seq_id, len(tokens))
    return hit


@pytest.fixture
def allocator():
    made = BlockAllocator(8, 4)
    yield made
    made.check_invariants()


def test_a_sequence_takes_just_the_blocks_that_its_tokens_fill(allocator):
    for seq_id, length, blocks in (("none", 0, 0), ("one", 1, 1), ("full", 4, 1), ("over", 5, 2)):
        allocator.add(seq_id, range(length))
        assert len(allocator.block_ids(seq_id)) == blocks and allocator.length(seq_id) == length
    held = [block for seq_id in allocator.sequences for block in allocator.block_ids(seq_id)]
    assert len(set(held)) == 4


def test_appending_fills_the_last_block_before_it_takes_another(allocator):
    allocator.add("a", range(3))
    first = allocator.block_ids("a")
    assert allocator.append("a", [3]) == [] and allocator.block_ids("a") == first
    assert allocator.append("a", [4]) == [] and len(allocator.block_ids("a")) == 2
    assert allocator.append("a", range(5, 17)) == [] and len(allocator.block_ids("a")) == 5
    assert allocator.append("a", []) == [] and allocator.length("a") == 17


def test_released_block_stays_alive_while_another_sequence_refers_to_it(allocator):
    computed(allocator, "parent", range(6))
    allocator.fork("parent", "child")
    blocks = allocator.block_ids("parent")
    allocator.free("parent")
    allocator.add("other", range(100, 124))  # all that is free
    assert allocator.block_ids("child") == blocks
    assert not set(blocks) & set(allocator.block_ids("other"))
    with pytest.raises(OutOfBlocks):
        allocator.append("other", [1])


def test_a_fork_shares_every_block_and_takes_none(allocator):
    computed(allocator, "parent", range(6))
    allocator.fork("parent", "child")
    stats = allocator.stats()
    assert allocator.block_ids("child") == allocator.block_ids("parent")
    assert (stats.used_blocks, stats.shared_blocks) == (2, 2)


@pytest.mark.parametrize("length", [5, 6, 7])
def test_whoever_writes_first_into_a_shared_tail_gets_the_copy_and_the_last_owner_none(allocator, length):
    computed(allocator, "parent", range(length))
    allocator.fork("parent", "child")
    head, tail = allocator.block_ids("parent")
    ((source, target),) = allocator.append("child", [7])
    assert source == tail and target not in (head, tail)
    assert allocator.block_ids("child") == [head, target] and allocator.block_ids("parent") == [head, tail]
    assert allocator.append("parent", [8]) == [] and allocator.block_ids("parent") == [head, tail]


def test_a_child_whose_parent_is_gone_writes_in_place(allocator):
    computed(allocator, "parent", range(6))
    allocator.fork("parent", "child")
    blocks = allocator.block_ids("child")
    allocator.free("parent")
    assert allocator.append("child", [7]) == [] and allocator.block_ids("child") == blocks


def test_a_full_shared_tail_is_not_copied_to_append_behind_it(allocator):
    computed(allocator, "parent", range(8))
    allocator.fork("parent", "child")
    assert allocator.append("child", [9]) == []
    assert allocator.block_ids("child")[:2] == allocator.block_ids("parent")


def test_truncating_into_a_shared_full_block_copies_it_on_the_next_append(allocator):
    computed(allocator, "parent", range(8))
    allocator.fork("parent", "child")
    head, tail = allocator.block_ids("parent")
    allocator.truncate("child", 6)
    assert allocator.block_ids("child") == [head, tail]
    ((source, target),) = allocator.append("child", [50, 51])
    assert source == tail and allocator.block_ids("child") == [head, target]
    assert allocator.computed("child") == 6
    allocator.mark_computed("child", 8)
    assert allocator.add("again", [*range(8), 9]) == 8 and allocator.block_ids("again")[:2] == [head, tail]
    assert allocator.add("other", [*range(6), 50, 51, 9]) == 8 and allocator.block_ids("other")[1] == target


def test_truncating_across_blocks_gives_back_what_lies_behind(allocator):
    computed(allocator, "a", range(14))
    allocator.truncate("a", 5)
    assert len(allocator.block_ids("a")) == 2 and allocator.computed("a") == 5
    allocator.truncate("a", 4)
    assert len(allocator.block_ids("a")) == 1
    allocator.truncate("a", 0)
    assert allocator.block_ids("a") == [] and allocator.length("a") == 0
    allocator.append("a", [1])
    assert len(allocator.block_ids("a")) == 1 and allocator.computed("a") == 0


def test_a_full_pool_still_lets_rejected_tokens_be_replaced(allocator):
    computed(allocator, "a", range(32))
    allocator.truncate("a", 30)
    assert allocator.append("a", [90, 91]) == []
    with pytest.raises(OutOfBlocks) as error:
        allocator.append("a", [92])
    assert (error.value.needed, error.value.free) == (1, 0)


def test_out_of_blocks_says_how_many_and_changes_nothing(allocator):
    computed(allocator, "a", range(20))
    before = allocator.stats()
    for call in (lambda: allocator.add("b", range(50, 66)), lambda: allocator.append("a", range(16))):
        with pytest.raises(OutOfBlocks, match="4 blocks are needed but 3 are free") as error:
            call()
        assert (error.value.needed, error.value.free) == (4, 3)
    assert allocator.stats() == before and allocator.length("a") == 20
    with pytest.raises(KeyError):
        allocator.length("b")


def test_a_copy_counts_among_the_blocks_needed():
    allocator = BlockAllocator(3, 4)
    computed(allocator, "parent", range(6))
    allocator.fork("parent", "child")
    with pytest.raises(OutOfBlocks) as error:
        allocator.append("child", range(3))  # one block more, and a copy of the shared tail
    assert (error.value.needed, error.value.free) == (2, 1)
    assert len(allocator.append("child", range(2))) == 1
    allocator.check_invariants()


def test_what_a_fork_had_not_computed_each_computes_in_blocks_of_its_own(allocator):
    allocator.add("parent", range(10))
    allocator.mark_computed("parent", 5)
    allocator.fork("parent", "child")
    shared = allocator.block_ids("parent")
    pairs = allocator.mark_computed("child", 10)
    own = allocator.block_ids("child")
    assert own[0] == shared[0] and not set(own[1:]) & set(shared)
    assert pairs == [(shared[1], own[1])]  # holds token 4; of the last block nothing is kept
    assert allocator.mark_computed("parent", 10) == [] and allocator.block_ids("parent") == shared


def test_two_who_share_uncomputed_blocks_need_one_copy_in_one_step():
    allocator = BlockAllocator(2, 4)
    allocator.add("parent", range(4))
    allocator.fork("parent", "child")
    assert allocator.mark_all_computed(["parent", "child"], [4, 4]) == []
    assert set(allocator.block_ids("parent") + allocator.block_ids("child")) == {0, 1}
    allocator.check_invariants()


def test_a_step_that_lacks_blocks_for_its_copies_computes_nothing():
    allocator = BlockAllocator(2, 4)
    for seq_id in ("lone", "parent"):
        allocator.add(seq_id, range(3))
    allocator.fork("parent", "child")
    with pytest.raises(OutOfBlocks) as error:
        allocator.mark_all_computed(["lone", "parent", "child"], [3, 3, 3])
    assert (error.value.needed, error.value.free) == (1, 0)
    assert [allocator.computed(seq_id) for seq_id in ("lone", "parent", "child")] == [0, 0, 0]
    allocator.check_invariants()


def test_marking_less_than_is_computed_changes_nothing(allocator):
    computed(allocator, "a", range(8))
    assert allocator.mark_computed("a", 3) == [] and allocator.computed("a") == 8


def test_the_watermark_is_kept_from_new_sequences_but_not_from_running_ones():
    allocator = BlockAllocator(4, 4, watermark=1)
    assert allocator.can_admit(12) and not allocator.can_admit(13)
    with pytest.raises(OutOfBlocks) as error:
        allocator.add("a", range(13))
    assert (error.value.needed, error.value.free) == (4, 3)
    allocator.add("a", range(12))
    assert not allocator.can_admit(1) and allocator.can_admit(0)
    allocator.append("a", [12])


def test_can_admit_looks_ahead_and_counts_the_prefix_that_is_cached(allocator):
    computed(allocator, "a", range(20))
    assert allocator.can_admit(12) and not allocator.can_admit(12, lookahead=1)
    tokens = [*range(20), *range(50, 58)]
    assert not allocator.can_admit(28) and allocator.can_admit(28, tokens=tokens)
    assert not allocator.can_admit(28, tokens=tokens, context=b"other")
    assert not allocator.can_admit(28, tokens=tokens, lookahead=5)


def test_a_cached_block_that_is_hit_cannot_make_room_as_well():
    allocator = BlockAllocator(3, 4)
    computed(allocator, "a", range(8))
    allocator.free("a")
    longer = [*range(8), *range(50, 55)]
    assert allocator.stats().cached_blocks == 2
    assert not allocator.can_admit(13, tokens=longer)
    with pytest.raises(OutOfBlocks) as error:
        allocator.add("b", longer)
    assert (error.value.needed, error.value.free) == (2, 1)
    assert allocator.can_admit(12, tokens=longer[:12]) and allocator.add("b", longer[:12]) == 8
    allocator.check_invariants()


def test_slots_are_counted_once_however_many_share_them(allocator):
    computed(allocator, "a", range(6))
    assert (allocator.stats().allocated_slots, allocator.stats().used_slots, allocator.stats().wasted_slots) == (
        8,
        6,
        2,
    )
    allocator.fork("a", "b")
    allocator.truncate("b", 5)
    assert (allocator.stats().used_slots, allocator.stats().wasted_slots) == (6, 2)
    allocator.free("a")
    assert (allocator.stats().used_slots, allocator.stats().wasted_slots) == (5, 3)


def test_waste_of_unshared_sequences_is_what_rounding_up_costs(allocator):
    for seq_id, length in enumerate((1, 4, 5, 9)):
        allocator.add(seq_id, [seq_id] * length)
    stats = allocator.stats()
    assert stats.wasted_slots == sum(4 * -(-n // 4) - n for n in (1, 4, 5, 9)) == 9
    assert stats.free_blocks + stats.used_blocks + stats.cached_blocks == stats.num_blocks == 8


@pytest.mark.parametrize("seq_id", ["x", ("request", 7), 3, None, frozenset({1})])
def test_any_hashable_is_an_id_and_errors_name_it(allocator, seq_id):
    calls = [
        lambda: allocator.append(seq_id, [1]),
        lambda: allocator.fork(seq_id, "child"),
        lambda: allocator.truncate(seq_id, 0),
        lambda: allocator.free(seq_id),
        lambda: allocator.block_ids(seq_id),
        lambda: allocator.length(seq_id),
        lambda: allocator.mark_computed(seq_id, 0),
    ]
    for call in calls:
        with pytest.raises(KeyError) as error:
            call()
        assert repr(seq_id) in str(error.value)
    allocator.add(seq_id, [1])
    for call in (lambda: allocator.add(seq_id, [1]), lambda: allocator.fork(seq_id, seq_id)):
        with pytest.raises(ValueError) as refused:
            call()
        assert repr(seq_id) in str(refused.value)
    allocator.free(seq_id)
    for call in calls:
        with pytest.raises(KeyError):
            call()


@pytest.mark.parametrize(
    ("tokens", "error", "says"),
    [
        ([1, -1], ValueError, "-1"),
        ([2**32], ValueError, str(2**32)),
        ([2**80], ValueError, str(2**80)),
        ([1.0], TypeError, "float"),
        (["1"], TypeError, "str"),
        (5, TypeError, "int"),
        (None, TypeError, "NoneType"),
        (b"1234", TypeError, "bytes"),
        ("1234", TypeError, "str"),
    ],
)
def test_wrong_tokens_are_refused_before_anything_changes(allocator, tokens, error, says):
    allocator.add("a", [1, 2])
    for call in (lambda: allocator.append("a", tokens), lambda: allocator.add("b", tokens)):
        with pytest.raises(error, match=says):
            call()
    assert allocator.length("a") == 2 and list(allocator.sequences) == ["a"]


def test_the_callers_tokens_are_not_kept_by_reference(allocator):
    tokens = array("I", [1, 2, 3])
    allocator.add("a", tokens)
    tokens.extend([4] * 40)
    assert allocator.length("a") == 3
    allocator.check_invariants()


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ((0, 4), {}, ValueError),
        ((4, 0), {}, ValueError),
        ((2**31, 4), {}, ValueError),
        ((4.0, 4), {}, TypeError),
        ((4, True), {}, TypeError),
        ((4, 4, 1), {}, TypeError),
        ((4, 4), {"watermark": -1}, ValueError),
        ((4, 4), {"watermark": 5}, ValueError),
    ],
)
def test_wrong_sizes_are_refused(arguments, options, error):
    with pytest.raises(error):
        BlockAllocator(*arguments, **options)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda a: a.truncate("a", 7), ValueError, r"length must be in 0\.\.6, got 7"),
        (lambda a: a.truncate("a", -1), ValueError, "length"),
        (lambda a: a.truncate("a", 1.0), TypeError, "length"),
        (lambda a: a.mark_computed("a", 7), ValueError, "length"),
        (lambda a: a.can_admit(-1), ValueError, "num_tokens"),
        (lambda a: a.can_admit(1, lookahead=-1), ValueError, "lookahead"),
        (lambda a: a.can_admit(3, tokens=[1]), ValueError, "num_tokens = 3"),
        (lambda a: a.add("b", [1], context="text"), TypeError, "context must be bytes"),
        (lambda a: a.add([], [1]), TypeError, "hashable"),
    ],
)
def test_wrong_arguments_are_named(allocator, call, error, says):
    allocator.add("a", range(6))
    with pytest.raises(error, match=says):
        call(allocator)


def test_out_of_blocks_survives_pickling_between_processes():
    error = pickle.loads(pickle.dumps(OutOfBlocks(3, 1)))
    assert (error.needed, error.free) == (3, 1) and "3 blocks are needed" in str(error)


def test_the_bookkeeping_loads_without_torch():
    folder = str(Path(pagegen.__file__).parent)
    code = (
        "import sys, types, importlib\n"
        "sys.modules['torch'] = None\n"
        f"package = types.ModuleType('pagegen'); package.__path__ = [{folder!r}]; sys.modules['pagegen'] = package\n"
        f"for name in {BOOKKEEPING}: importlib.import_module('pagegen.cache.' + name)\n"
        "import pagegen.cache; a = pagegen.cache.BlockAllocator(2, 2); a.add(1, [1, 2, 3]); a.check_invariants()\n"
        "print(a.block_ids(1))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[0, 1]\n", done.stderr
