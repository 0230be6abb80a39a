"""The generated C++ kernels against the float64 reference, on batches full of poison (see batches.py)."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from batches import compare, make_batch
from cpu_cases import (
    DECODE,
    HASWELL,
    PORTABLE,
    RAGGED,
    SHORT,
    TOKENS,
    Case,
    check,
    prebuild,
    run,
    same_bits,
)

from pagegen.reference import reference_attention
from pagegen.spec import CacheLayout, CppVariant
from pagegen.targets import cpu


def portable_cases(name: str, machine: tuple[str, ...]) -> list[Case]:
    everything = {"window": 90, "logit_softcap": 20.0, "alibi": True, "sinks": True}
    return [
        Case(f"{name}-bf16", 4, 64, 16, machine=machine),
        Case(f"{name}-fp16", 3, 100, 8, "HND", "float16", machine=machine),
        Case(f"{name}-fp32-everything", 1, 80, 24, "pool", "float32", machine=machine, fields=everything),
    ]


CASES = [
    # head dims, groups, block sizes and orders
    Case("llama", 4, 128, 16, variant=SHORT, kv_heads=3),
    Case("group-8", 8, 128, 64, "HND"),
    Case("smollm", 3, 64, 16, "HND", kv_heads=3),
    Case("mha-block-1", 1, 64, 1, kv_heads=5),
    Case("group-7", 7, 80, 8, "pool"),
    Case("group-16", 16, 96, 24, "HND"),
    Case("wide-head", 4, 256, 256, variant=SHORT),
    Case("odd-head", 1, 100, 24, "packed"),
    Case("latent-shape", 16, 576, 64, kv_heads=1, fields={"v_head_dim": 512}, nightly=True),
    Case("group-48", 48, 64, 16, kv_heads=1),
    Case("group-71", 71, 64, 8, kv_heads=1),
    Case("group-128", 128, 32, 16, kv_heads=1),
    Case("group-29", 29, 112, 272, "HND", kv_heads=1),
    Case("group-6", 6, 160, 784, kv_heads=1),
    Case("group-9", 9, 224, 544, "packed", "float16", kv_heads=1),
    Case("group-5", 5, 192, 1056, "HND"),
    Case("group-12", 12, 80, 2048, dtype="float32", kv_heads=1),
    Case("block-528", 2, 56, 528, "pool"),
    Case("narrow-values", 4, 192, 16, "packed", fields={"v_head_dim": 128}),
    Case("tiny-head", 2, 5, 3, "pool", fields={"v_head_dim": 7}),
    Case("widest-head", 1, 1536, 16, dtype="float32", kv_heads=1),  # too wide for 64 rows in half of an L2
    # dtypes
    Case("fp16", 4, 128, 16, "HND", "float16"),
    Case("fp16-group-8", 8, 80, 8, dtype="float16", variant=SHORT, nightly=True),
    Case("fp32", 3, 64, 16, dtype="float32"),
    Case("fp32-block-1", 7, 100, 1, "pool", "float32", variant=SHORT),
    Case("fp32-group-16", 16, 128, 24, "HND", "float32"),
    Case("bf16-over-fp32", 4, 64, 16, fields={"kv_dtype": "float32"}),
    Case("fp32-over-bf16", 4, 96, 16, dtype="float32", fields={"kv_dtype": "bfloat16"}, nightly=True),
    Case("fp16-over-bf16", 2, 64, 32, dtype="float16", fields={"kv_dtype": "bfloat16"}, nightly=True),
    # the corners of the search space
    Case("all-streams", 4, 64, 8, variant=CppVariant(tile_kv=16, streams=16, prefetch_ahead=8, split_tokens=16)),
    Case("big-tile", 4, 64, 16, "HND", nightly=True,
         variant=CppVariant(tile_kv=256, streams=1, prefetch_ahead=0, split_tokens=256)),
    # a few tokens of several heads at a time
    Case("tokens", 4, 80, 16, variant=TOKENS, kv_heads=5),
    Case("tokens-window", 3, 64, 24, "pool", "float32", variant=TOKENS, fields={"window": 50, "sinks": True}),
    Case("tokens-33-heads", 2, 32, 8, variant=replace(TOKENS, heads_together=32), kv_heads=33),
    Case("tokens-wider-values", 4, 64, 16, variant=TOKENS, kv_heads=3, fields={"v_head_dim": 128}),
    # features
    Case("window-1", 4, 64, 16, dtype="float32", fields={"window": 1}),
    Case("window-100", 3, 64, 24, variant=SHORT, fields={"window": 100}),
    Case("softcap", 2, 64, 16, dtype="float32", fields={"logit_softcap": 30.0}),
    Case("alibi", 4, 64, 16, dtype="float32", variant=SHORT, fields={"alibi": True}),
    Case("sinks", 4, 64, 16, dtype="float32", variant=SHORT, fields={"sinks": True}),
    Case("sinks-one-split", 4, 64, 16, dtype="float32", fields={"sinks": True}),
    Case("bidirectional", 4, 64, 16, "HND", fields={"causal": False}),
    Case("bidirectional-window", 12, 64, 16, dtype="float32", fields={"causal": False, "window": 40}, nightly=True),
    Case("other-scale", 4, 64, 16, fields={"scale": 0.3}),
    *portable_cases("avx2", HASWELL),
    *portable_cases("portable", PORTABLE),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    prebuild(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_gives_the_reference_result_wherever_blocks_lie(case: Case) -> None:
    kernel = case.load()
    for sequences in (DECODE, RAGGED):
        batch = case.batch(sequences)
        result = check(kernel, batch)
        assert same_bits(result, run(kernel, batch.permuted()))


@pytest.mark.parametrize("name", ["llama", "smollm", "fp32-group-16"])
def test_result_has_the_same_bits_on_any_number_of_threads(name: str) -> None:
    case = BY_NAME[name]
    kernel = case.load()
    threads = torch.get_num_threads()
    try:
        for sequences in ([(900, 1), (40, 1)], [(700, 300), (900, 1), (50, 50)]):
            batch = case.batch(sequences)
            results = []
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                results.append(run(kernel, batch))
            assert same_bits(results[0], results[1])
            assert same_bits(results[0], results[2])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["llama", "fp32-group-16", "sinks"])
def test_sequence_gives_the_same_bits_alone_and_in_any_company(name: str) -> None:
    case = BY_NAME[name]
    kernel = case.load()
    # a seed draws the first sequence's tokens first, whatever follows
    alone = case.batch([(300, 20)], seed=5)
    together = case.batch([(300, 20), (90, 90), (1000, 3)], seed=5)
    shared = together.k_cache[together.block_table[0, : -(-300 // case.block_size)].long()]
    own = alone.k_cache[alone.block_table[0, : -(-300 // case.block_size)].long()]
    shared[:] = own
    together.k_cache[together.block_table[0, : len(own)].long()] = own
    together.v_cache[together.block_table[0, : len(own)].long()] = alone.v_cache[
        alone.block_table[0, : len(own)].long()
    ]
    together.q[:20] = alone.q[:20]
    if alone.sinks is not None:
        assert together.sinks is not None
        together.sinks[:] = alone.sinks
    first, second = run(kernel, alone), run(kernel, together)
    assert same_bits(tuple(x[:20] for x in first), tuple(x[:20] for x in second))


def test_empty_sequence_gives_zero_and_minus_infinity_or_the_sink() -> None:
    for name in ("fp32", "sinks"):
        case = BY_NAME[name]
        batch = case.batch([(0, 1), (3, 1)])
        out, lse = check(case.load(), batch)
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        wanted = torch.full((case.spec.num_q_heads,), -math.inf) if batch.sinks is None else batch.sinks
        assert torch.equal(lse[0], wanted)


@pytest.mark.parametrize("name", ["fp32", "sinks", "group-16", "window-1", "bidirectional"])
def test_queries_before_the_first_token_attend_nothing(name: str) -> None:
    case = BY_NAME[name]
    batch = case.batch([(3, 5), (0, 2), (40, 60)])
    check(case.load(), batch)


def test_rows_that_belong_to_no_sequence_stay_untouched() -> None:
    case = BY_NAME["smollm"]
    call = case.batch([(70, 20), (9, 9)], padded_rows=4).call()
    assert call.lse is not None
    call.out[29:], call.lse[29:] = 7.0, 7.0
    case.load()(call)
    assert (call.out[29:] == 7.0).all()
    assert (call.lse[29:] == 7.0).all()


@pytest.mark.parametrize("context", [99, 100, 101, 163, 164, 1000])
def test_window_counts_the_query_itself(context: int) -> None:
    case = BY_NAME["window-100"]
    check(case.load(), case.batch([(context, 1), (context + 1, 1)]))
    check(case.load(), case.batch([(context, 40), (context, 2), (7, 7)]))


@pytest.mark.parametrize("queries", [1, 2, 30])
def test_blocks_that_have_left_the_window_are_never_touched(queries: int) -> None:
    case = BY_NAME["window-100"]
    batch = case.batch([(1000, queries), (500, queries)])
    out, lse = run(case.load(), batch.poisoned_outside())
    compare(out, lse, *batch.expected(), case.spec.q_dtype)


@pytest.mark.parametrize("magnitude", [1.0, 30.0, 1e8, 1e15])
def test_softcap_stays_finite_and_exact_for_huge_scores(magnitude: float) -> None:
    case = BY_NAME["softcap"]
    batch = case.batch([(130, 1), (60, 1)], magnitude=magnitude)
    out, lse = check(case.load(), batch)
    assert out.isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.parametrize("name", ["fp32", "fp32-group-16", "avx2-bf16", "portable-bf16"])
def test_huge_scores_without_a_softcap_do_not_overflow(name: str) -> None:
    case = BY_NAME[name]
    batch = case.batch([(130, 1), (70, 1)], magnitude=1e14)
    out, lse = run(case.load(), batch)
    # one key outweighs all others: its value is the result
    expected, expected_lse = batch.expected()
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse, expected_lse, atol=0.0, rtol=1e-3)


def test_sinks_count_once_however_the_keys_are_split() -> None:
    batch = BY_NAME["sinks"].batch([(640, 1), (65, 1), (64, 1), (3, 1)])
    for name in ("sinks", "sinks-one-split"):
        check(BY_NAME[name].load(), batch)


def test_nan_in_a_live_slot_reaches_its_own_sequence_only() -> None:
    case = BY_NAME["llama"]
    batch = case.batch([(100, 1), (100, 1)])
    clean, _ = run(case.load(), batch)
    batch.v_cache[batch.block_table[1, 2], 3, 0, 5] = math.nan
    batch.k_cache[batch.block_table[1, 2], 3, 1, 5] = math.nan
    out, _ = run(case.load(), batch)
    assert torch.equal(out[0], clean[0])
    assert out[1, : case.group, 5].isnan().all()
    assert out[1, case.group : 2 * case.group].isnan().all()


def at_end_of_memory(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, same strides, moved so that the byte after its last element may not be read."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = span * tensor.element_size()
    pages = -(-size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + pages * mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=span, offset=pages * mmap.PAGESIZE - size)
    moved = flat.as_strided(tensor.shape, tensor.stride())
    moved.copy_(tensor)
    return moved


def run_at_end_of_memory(name: str) -> None:
    """Called in a process of its own: reading or writing one byte too far kills it."""
    case = BY_NAME[name]
    for sequences in ([(33, 1), (64, 1), (5, 1)], [(40, 9), (2, 2), (17, 17)]):
        batch = case.batch(sequences, padded_rows=0)
        table = batch.block_table[:, : batch.layout.blocks_for(max(n for n, _ in sequences))]
        moved = replace(
            batch, q=at_end_of_memory(batch.q), k_cache=at_end_of_memory(batch.k_cache),
            v_cache=at_end_of_memory(batch.v_cache), block_table=at_end_of_memory(table),
            seq_lens=at_end_of_memory(batch.seq_lens),
        )  # fmt: skip
        call = moved.call()
        assert call.lse is not None
        call.out, call.lse = at_end_of_memory(call.out), at_end_of_memory(call.lse)
        case.load()(call)
        compare(call.out, call.lse, *batch.expected(), case.spec.q_dtype)


def test_nothing_past_the_end_of_a_tensor_is_read_or_written() -> None:
    names = ("smollm", "odd-head", "tiny-head", "group-48", "tokens", "fp32-block-1", "avx2-fp16", "portable-fp16")
    here = Path(__file__)
    code = f"import test_cpu_attention as t; [t.run_at_end_of_memory(name) for name in {names}]"
    paths = os.pathsep.join([str(here.parent), str(here.parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, timeout=300, check=False
    )
    assert done.returncode == 0


def at_odd_address(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, same strides, moved so that its elements lie one byte off, between bytes that are NaN in any dtype."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = bytearray(b"\xff" * (span * tensor.element_size() + 64))
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    moved = torch.frombuffer(memory, dtype=tensor.dtype, count=span, offset=32 + (1 - start) % 32)
    moved = moved.as_strided(tensor.shape, tensor.stride())
    assert moved.data_ptr() % 32 == 1
    moved.copy_(tensor)
    return moved


@pytest.mark.parametrize("name", ["llama", "tokens", "fp32-block-1"])
def test_a_cache_may_lie_at_any_address(name: str) -> None:
    """What a partial tile lacks is read as zeros, whose distance from the cache is no whole number of elements then."""
    case = BY_NAME[name]
    batch = case.batch([(37, 1), (5, 1), (0, 1), (130, 1)])
    moved = replace(batch, k_cache=at_odd_address(batch.k_cache), v_cache=at_odd_address(batch.v_cache))
    assert same_bits(run(case.load(), moved), run(case.load(), batch))


def test_lse_can_be_left_out() -> None:
    case = BY_NAME["llama"]
    batch = case.batch([(100, 1), (7, 1)])
    call = batch.call()
    call.lse = None
    case.load()(call)
    assert torch.equal(call.out, run(case.load(), batch)[0])


def test_call_of_another_shape_is_refused_before_memory_is_touched() -> None:
    kernel = BY_NAME["smollm"].load()
    with pytest.raises(ValueError, match="the call must match the kernel"):
        kernel(BY_NAME["llama"].batch([(100, 1)]).call())


def test_prefill_of_a_long_prompt_matches_in_chunks() -> None:
    case = BY_NAME["group-8"]
    kernel = case.load()
    batch = case.batch([(700, 700)], padded_rows=0)
    whole, lse = check(kernel, batch)
    for start, end in ((0, 300), (300, 301), (301, 700)):
        chunk = batch.call()
        chunk.q, chunk.out = batch.q[start:end], torch.zeros_like(whole[start:end])
        chunk.lse = None
        chunk.seq_lens = torch.tensor([end], dtype=torch.int32)
        chunk.query_start_loc = torch.tensor([0, end - start], dtype=torch.int32)
        kernel(chunk)
        compare(chunk.out, None, whole[start:end].double(), lse[start:end], torch.bfloat16)


@pytest.mark.parametrize(
    ("decode", "order", "block_size"),
    [(True, "NHD", 16), (True, "HND", 16), (False, "NHD", 16), (False, "HND", 16), (True, "HND", 1), (True, "HND", 12)],
)
def test_default_variant_serves_both_kinds_of_batch(decode: bool, order: str, block_size: int) -> None:
    spec = BY_NAME["llama"].spec
    layout = CacheLayout(block_size=block_size, order=order)
    kernel = cpu.load_attention(spec, layout, cpu.default_variant(spec, layout, decode=decode))
    for sequences in (DECODE, RAGGED):
        check(kernel, make_batch(spec, sequences, block_size=block_size, order=order))


def test_reference_itself_ignores_the_poison() -> None:
    batch = BY_NAME["fp32"].batch(RAGGED)
    out = reference_attention(**batch.kwargs())
    assert isinstance(out, torch.Tensor)
    assert out.isfinite().all()
