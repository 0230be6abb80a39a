"""The operators' manners: what they accept, what they refuse and how they say it, and what the dense path computes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import pagegen
from pagegen import targets
from pagegen.ops import checks, plans
from pagegen.spec import AttentionSpec, CppVariant, Target, TritonVariant


def operands(**changes: Any) -> dict[str, Any]:
    """Three decode rows of contexts 5, 0 and 9 over blocks of 4, 4 query heads on 2 KV heads."""
    generator = torch.Generator().manual_seed(0)
    values: dict[str, Any] = {
        "q": torch.randn(3, 4, 16, generator=generator),
        "k_cache": torch.randn(8, 4, 2, 16, generator=generator),
        "v_cache": torch.randn(8, 4, 2, 16, generator=generator),
        "block_table": torch.tensor([[3, 1, -9], [-1, -1, -1], [0, 7, 5]], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 0, 9], dtype=torch.int32),
    }
    return {**values, **changes}


BAD_OPERANDS = {
    "q_rank": ({"q": torch.zeros(3, 64)}, "q must be .*total_q, num_q_heads, head_dim.*got float32 \\[3, 64\\]"),
    "q_dtype": ({"q": torch.zeros(3, 4, 16, dtype=torch.int64)}, "q must be float32 or float16 or bfloat16"),
    "q_stride": ({"q": torch.zeros(3, 4, 32)[..., ::2]}, "q must have a last stride of 1"),
    "q_heads": ({"q": torch.zeros(3, 5, 16)}, "q must have a multiple of num_kv_heads 2 heads, got 5"),
    "head_dim": ({"q": torch.zeros(3, 4, 8)}, "k_cache must have head_dim 8 like q"),
    "k_rank": ({"k_cache": torch.zeros(8, 4, 32)}, "k_cache must be"),
    "v_blocks": ({"v_cache": torch.zeros(7, 4, 2, 16)}, "v_cache must be"),
    "v_dtype": ({"v_cache": torch.zeros(8, 4, 2, 16, dtype=torch.float16)}, "v_cache must be float32"),
    "table_dtype": ({"block_table": torch.zeros(3, 3, dtype=torch.int64)}, "block_table must be int32"),
    "table_rows": ({"block_table": torch.zeros(2, 3, dtype=torch.int32)}, "block_table must be"),
    "lens_dtype": ({"seq_lens": torch.tensor([5, 0, 9])}, "seq_lens must be int32"),
    "lens_rank": ({"seq_lens": torch.zeros(3, 1, dtype=torch.int32)}, "seq_lens must be int32 \\[num_seqs\\]"),
    "queries": ({"q": torch.zeros(4, 4, 16)}, "query_start_loc is required"),
    "start_size": ({"query_start_loc": torch.zeros(3, dtype=torch.int32)}, "query_start_loc must be"),
    "max_query_len": ({"max_query_len": 2}, "query_start_loc is required"),
    "window": ({"window": 0}, "window must be at least 1"),
    "softcap": ({"logit_softcap": -1.0}, "logit_softcap must be positive"),
    "alibi": ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes must be"),
    "sinks": ({"sinks": torch.zeros(4, dtype=torch.int32)}, "sinks must be"),
    "scale": ({"k_scale": torch.zeros(3)}, "k_scale must be a float"),
    "tree": ({"tree_mask": torch.zeros(3, 1)}, "tree_mask must be bool"),
    "uint8": ({"k_cache": torch.zeros(8, 4, 2, 16, dtype=torch.uint8),
               "v_cache": torch.zeros(8, 4, 2, 16, dtype=torch.uint8)}, "kv_dtype must say what a uint8 k_cache holds"),
    "no_v": ({"v_cache": None}, "v_head_dim must be in 1..16 when v_cache is None"),
    "out": ({"out": torch.zeros(3, 4, 8)}, "out must be"),
    "out_repeated": ({"out": torch.zeros(1, 1, 16).expand(3, 4, 16)}, "out must have memory of its own"),
    "kv_dtype": ({"kv_dtype": "bfloat16"}, "kv_dtype must be a dtype that k_cache can hold, got bfloat16 for float32"),
    "int4_in_float": ({"kv_dtype": "int4"}, "kv_dtype must be a dtype that k_cache can hold"),
    "out_dtype": ({"out": torch.zeros(3, 4, 16, dtype=torch.float16)}, "out must be float32"),
    "score_mod": ({"score_mod": "nobody"}, "score_mod must be a function decorated"),
    "variant": ({"variant": "basic:tile=3"}, "family must be one of"),
    "empty_block": ({"k_cache": torch.zeros(8, 0, 2, 16), "v_cache": torch.zeros(8, 0, 2, 16)}, "block size"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_OPERANDS)
def test_a_bad_operand_is_refused_by_name_before_anything_is_touched(name: str) -> None:
    changes, message = BAD_OPERANDS[name]
    with pytest.raises((ValueError, TypeError), match=message):
        pagegen.paged_attention(**operands(**changes))


def test_operands_on_different_devices_are_refused_by_name() -> None:
    given = operands(k_cache=torch.zeros(8, 4, 2, 16, device="meta"))
    with pytest.raises(ValueError, match="k_cache must be on cpu, got meta"):
        checks.attention(*given.values(), *[None] * 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_table": torch.tensor([[3, 99, 0], [0, 0, 0], [0, 7, 5]], dtype=torch.int32)}, r"block_table\[0, 1\]"),
        ({"seq_lens": torch.tensor([5, 0, 13], dtype=torch.int32)}, r"seq_lens\[2\] must be in 0..12, got 13"),
        ({"seq_lens": torch.tensor([-1, 0, 9], dtype=torch.int32)}, r"seq_lens\[0\]"),
        ({"query_start_loc": torch.tensor([0, 2, 1, 3], dtype=torch.int32)}, r"query_start_loc\[1\]"),
        ({"max_seq_len": 8}, "max_seq_len must be at least 9"),
    ],
)
def test_values_on_the_device_are_checked_when_asked_for(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEGEN_CHECK", "1")
    with pytest.raises(ValueError, match=message):
        pagegen.paged_attention(**operands(**changes))


def test_the_operator_agrees_with_the_reference_and_gives_an_empty_row_zero_and_minus_infinity() -> None:
    out, lse = pagegen.paged_attention(**operands(), return_lse=True)
    expected, expected_lse = pagegen.reference_attention(**operands(), return_lse=True)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert not out[1].any()
    assert (lse[1] == -math.inf).all()


def test_out_is_written_in_place_and_returned() -> None:
    out = torch.full((3, 4, 16), math.nan)
    result = pagegen.paged_attention(**operands(out=out))
    assert result is out
    torch.testing.assert_close(out, pagegen.paged_attention(**operands()))


@pytest.mark.parametrize(
    "options",
    [{"scale": math.nan}, {"variant": "cpp:tile_kv=3"}, {"variant": TritonVariant()}],
    ids=["scale", "variant", "family"],
)
def test_what_is_refused_late_leaves_out_as_it_was(options: dict[str, Any]) -> None:
    out, starts = torch.full((3, 4, 16), 7.0), torch.arange(4, dtype=torch.int32)
    with pytest.raises(ValueError, match="scale must be finite|tile_kv must be|variant must be"):
        pagegen.paged_attention(**operands(out=out, query_start_loc=starts, **options))
    assert (out == 7.0).all()


@pytest.mark.parametrize("starts", [None, torch.arange(4, dtype=torch.int32)], ids=["decode", "ragged"])
def test_queries_are_not_overwritten_by_their_own_result(starts: torch.Tensor | None) -> None:
    given = operands(query_start_loc=starts)
    before = given["q"].clone()
    with pytest.raises(ValueError, match="out must have memory of its own"):
        pagegen.paged_attention(**given, out=given["q"])
    assert torch.equal(given["q"], before)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_tree_of_more_queries_than_tokens_leaves_the_first_rows_empty(length: int) -> None:
    tree = torch.ones(3, 3, dtype=torch.bool).tril()
    lens, starts = torch.tensor([length], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    given = operands(block_table=torch.tensor([[3]], dtype=torch.int32), seq_lens=lens, query_start_loc=starts)
    out = pagegen.paged_attention(**given, tree_mask=tree)
    assert not out[: 3 - length].any()
    torch.testing.assert_close(out, pagegen.reference_attention(**given))  # the tree is a chain: causal says the same


def test_rows_past_the_last_sequence_are_zero() -> None:
    starts = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
    out, lse = pagegen.paged_attention(**operands(query_start_loc=starts), return_lse=True)
    assert not out[2].any()
    assert (lse[2] == -math.inf).all()
    assert out[:2].any()


def test_a_batch_without_sequences_gives_no_rows() -> None:
    none = operands(
        q=torch.zeros(0, 4, 16),
        block_table=torch.zeros(0, 3, dtype=torch.int32),
        seq_lens=torch.zeros(0, dtype=torch.int32),
    )
    assert pagegen.paged_attention(**none).shape == (0, 4, 16)


@pagegen.score_mod
def distance_bias(score: Any, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    return score - 0.5 * (q_pos - k_pos)


@pagegen.mask_mod
def even_keys(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    return k_pos % 2 == 0


INT8 = torch.arange(-128, 896).reshape(8, 4, 2, 16).remainder(5).to(torch.int8)


@pytest.mark.parametrize(
    "options",
    [
        {"score_mod": distance_bias},
        {"mask_mod": even_keys},
        {"tree_mask": torch.ones(3, 1, dtype=torch.bool)},
        {"k_scale": 0.37, "v_scale": 1.9},
        {"v_scale": 1.9},
        {"v_scale": torch.tensor([0.3, 1.9])},
        {"k_zero": torch.linspace(-1, 1, 64).reshape(8, 4, 2), "k_cache": INT8, "v_cache": INT8},
        {"v_zero": torch.linspace(-1, 1, 64).reshape(8, 4, 2), "k_cache": INT8, "v_cache": INT8},
        {"v_cache": None, "v_head_dim": 12},
    ],
    ids=lambda options: "+".join(options),
)
def test_what_serves_a_feature_computes_what_the_reference_does(options: dict[str, Any]) -> None:
    out = pagegen.paged_attention(**operands(**options))
    torch.testing.assert_close(out, pagegen.reference_attention(**operands(**options)), rtol=1e-5, atol=1e-5)


@pagegen.mask_mod
def decides_in_python(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    return k_pos <= q_pos if k_pos.shape[-1] > 0 else k_pos < 0


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_what_no_expression_says_is_generated_nowhere_and_the_reason_names_it(target: str) -> None:
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, mask_mod=decides_in_python.name)
    assert "decides_in_python cannot be traced" in str(targets.unsupported(spec, Target.parse(target)))
    zeros = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, kv_zero_points=True)
    assert (
        targets.unsupported(zeros, Target.parse(target)) == "zero points belong to int8 and int4 caches, not bfloat16"
    )


def test_a_table_indexed_by_the_score_is_generated_for_the_cpu_and_for_no_gpu() -> None:
    table = torch.linspace(-1, 1, 9)

    @pagegen.score_mod
    def looked_up(score: Any, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return table[(score * 4).floor().long() + 4]

    spec = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, score_mod=looked_up.name)
    reason = targets.unsupported(spec, Target.parse("sm_90"))
    assert reason == f"score_mod {looked_up.name} indexes a captured tensor by the score"
    given = operands(score_mod=looked_up)
    torch.testing.assert_close(
        pagegen.paged_attention(**given), pagegen.reference_attention(**given), rtol=1e-5, atol=1e-5
    )


def test_a_variant_named_for_a_call_that_no_kernel_serves_is_refused() -> None:
    with pytest.raises(ValueError, match="variant must be None where no generated kernel serves .*cannot be traced"):
        pagegen.paged_attention(**operands(mask_mod=decides_in_python, variant=CppVariant()))


def test_what_no_kernel_serves_is_computed_densely_and_is_right() -> None:
    out = pagegen.paged_attention(**operands(mask_mod=decides_in_python))
    torch.testing.assert_close(out, pagegen.reference_attention(**operands()), rtol=1e-5, atol=1e-5)


def test_a_function_that_decides_in_python_on_a_value_is_refused_by_name_with_the_cure() -> None:
    @pagegen.score_mod
    def clipped(score: Any, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return min(score, 10.0)

    with pytest.raises(ValueError, match="clipped must not decide in Python .*torch.minimum"):
        pagegen.paged_attention(**operands(score_mod=clipped))


def test_a_modifier_with_other_arguments_is_refused() -> None:
    with pytest.raises(TypeError, match="a mask_mod takes \\(batch, head, q_pos, k_pos\\), got \\(a, b\\)"):
        pagegen.mask_mod(lambda a, b: True)
    with pytest.raises(ValueError, match="score_mod must be a score function, got the mask function"):
        pagegen.paged_attention(**operands(score_mod=even_keys))


def test_keys_are_stored_at_their_slots_and_a_slot_of_minus_one_is_skipped() -> None:
    k_cache, v_cache = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    pagegen.write_kv(k, v, k_cache, v_cache, torch.tensor([9, -1, 2]))
    assert torch.equal(k_cache[2, 1], k[0])
    assert torch.equal(v_cache[0, 2], v[2])
    assert torch.count_nonzero(k_cache.abs().sum(dim=(2, 3))) == 2


@pytest.mark.parametrize("slots", [[0, 1, 12], [0, 1, -5], [0, 1, 1]])
def test_slots_are_checked_before_anything_is_written_when_asked_for(
    slots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEGEN_CHECK", "1")
    pool = torch.zeros(2, 4, 4, 2, 8)  # one block more than the cache has
    k_cache, v_cache = pool[:, :3]
    k, turn = torch.ones(3, 2, 8), torch.ones(4, 4)
    with pytest.raises(ValueError, match="slot_mapping must"):
        pagegen.write_kv(k, k, k_cache, v_cache, torch.tensor(slots))
    with pytest.raises(ValueError, match="slot_mapping must"):
        pagegen.rope_write_kv(k, k, k, torch.arange(3), turn, turn, k_cache, v_cache, torch.tensor(slots))
    assert not pool.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_table": torch.zeros(2, 3, dtype=torch.int32)}, "block_table must be"),
        ({"query_start_loc": torch.zeros(1, dtype=torch.int32)}, "query_start_loc must be"),
        ({"seq_lens": [5, 0, 9]}, "seq_lens must be a tensor"),
        ({"slot_mapping": torch.zeros(1, 1, dtype=torch.int64)}, "slot_mapping must be int64"),
    ],
)
def test_batch_of_the_wrong_shape_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    given = {name: value for name, value in operands().items() if name not in ("q", "v_cache")}
    with pytest.raises((ValueError, TypeError), match=message):
        pagegen.validate_batch(**{**given, **changes})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_an_eight_bit_cache_saturates_and_round_trips(dtype: torch.dtype) -> None:
    caches = [torch.zeros(2, 4, 2, 8).to(dtype) for _ in range(2)]
    k = torch.linspace(-3, 3, 32).reshape(2, 2, 8)
    k[0, 0, 0] = 1e6
    pagegen.write_kv(k, k, *caches, torch.tensor([1, 6]), k_scale=0.05, v_scale=0.1)
    limit = 127 if dtype == torch.int8 else torch.finfo(dtype).max
    assert caches[0][0, 1, 0, 0].float() == limit
    restored = caches[0][1, 2].float() * 0.05
    assert (restored - k[1]).abs().max() < (0.05 if dtype == torch.int8 else 0.5)


def test_a_copied_block_equals_its_source_and_no_other_block_changes() -> None:
    k_cache, v_cache = torch.randn(5, 4, 2, 8), torch.randn(5, 4, 2, 8)
    before = k_cache.clone()
    pagegen.copy_blocks(k_cache, v_cache, [(1, 3), (1, 4)])
    assert torch.equal(k_cache[3], before[1])
    assert torch.equal(k_cache[:3], before[:3])
    assert torch.equal(v_cache[4], v_cache[1])


@pytest.mark.parametrize("pairs", [[(0, 1), (1, 2)], [(0, 1), (2, 1)], [(0, 9)]])
def test_pairs_that_would_race_or_miss_the_cache_are_refused(pairs: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="pairs must"):
        pagegen.copy_blocks(torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8), pairs)


@pytest.mark.parametrize("pairs", [[(0.5, 1)], [(0, 1, 2)], [0, 1], None])
def test_what_is_no_pair_of_blocks_is_refused(pairs: Any) -> None:
    with pytest.raises(TypeError, match="pairs must hold"):
        pagegen.copy_blocks(torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8), pairs)


def test_pairs_may_come_from_an_iterator() -> None:
    k_cache, v_cache = torch.randn(3, 4, 2, 8), torch.randn(3, 4, 2, 8)
    pagegen.copy_blocks(k_cache, v_cache, zip([0], [2], strict=True))  # type: ignore[arg-type]
    assert torch.equal(k_cache[2], k_cache[0])


def test_merging_no_states_or_states_of_several_shapes_is_refused() -> None:
    one, other = (torch.zeros(2, 4, 8), torch.zeros(2, 4)), (torch.zeros(3, 4, 8), torch.zeros(3, 4))
    for outs, lses in (
        ([], []),
        ([one[0], other[0]], [one[1], other[1]]),
        (torch.zeros(0, 2, 4, 8), torch.zeros(0, 2, 4)),
    ):
        with pytest.raises(ValueError, match="outs must"):
            pagegen.merge_states(outs, lses)


def test_merging_states_equals_attending_all_keys_at_once_and_empty_states_change_nothing() -> None:
    given = operands()
    whole, whole_lse = pagegen.reference_attention(**given, return_lse=True)
    first, first_lse = pagegen.reference_attention(
        **{**given, "seq_lens": torch.tensor([4, 0, 4], dtype=torch.int32)}, causal=False, return_lse=True
    )
    rest = {
        "block_table": torch.tensor([[1, 0], [0, 0], [7, 5]], dtype=torch.int32),
        "seq_lens": torch.tensor([1, 0, 5], dtype=torch.int32),
    }
    second, second_lse = pagegen.reference_attention(**{**given, **rest}, causal=False, return_lse=True)
    empty, empty_lse = torch.full_like(first, math.nan), torch.full_like(first_lse, -math.inf)
    merged, lse = pagegen.merge_states([empty, first, second], [empty_lse, first_lse, second_lse])
    torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)
    nothing, nothing_lse = pagegen.merge_states([empty, empty], [empty_lse, empty_lse])
    assert not nothing.any()
    assert (nothing_lse == -math.inf).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_follows_the_logical_position_and_leaves_the_rest_of_the_head(interleaved: bool) -> None:
    angles = torch.outer(torch.arange(32.0), torch.tensor([1.0, 0.1]))
    q, k = torch.randn(2, 4, 6), torch.randn(2, 2, 6)
    caches = torch.zeros(2, 4, 2, 6), torch.zeros(2, 4, 2, 6)
    positions = torch.tensor([7, 30])
    rotated = pagegen.rope_write_kv(
        q, k, k, positions, angles.cos(), angles.sin(), *caches, torch.tensor([5, 0]), interleaved=interleaved
    )
    pairs = ((0, 1), (2, 3)) if interleaved else ((0, 2), (1, 3))
    for row, position in enumerate((7, 30)):
        for (a, b), speed in zip(pairs, (1.0, 0.1), strict=True):
            turn = torch.polar(torch.tensor(1.0), torch.tensor(position * speed))
            expected = torch.complex(q[row, :, a], q[row, :, b]) * turn
            torch.testing.assert_close(rotated[row, :, a], expected.real, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(rotated[row, :, b], expected.imag, rtol=1e-4, atol=1e-4)
    assert torch.equal(rotated[..., 4:], q[..., 4:])
    assert torch.equal(caches[1][1, 1], k[0])
    assert not torch.equal(caches[0][1, 1], k[0])


def test_the_order_of_a_cache_is_read_off_its_strides() -> None:
    assert plans.order_of(torch.zeros(2, 4, 3, 8)) == "NHD"
    assert plans.order_of(torch.zeros(2, 3, 4, 8).transpose(1, 2)) == "HND"
    assert plans.order_of(torch.zeros(2, 1, 4, 8).transpose(1, 2)) == "NHD"


def test_a_choice_that_does_not_compile_leaves_the_call_to_the_dense_path(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from pagegen import targets
    from pagegen.targets.errors import CompileError

    def refuse(*_: Any) -> Any:
        raise CompileError("cpu", "cpp:any", "the disk is full")

    monkeypatch.setattr(targets, "load_attention", refuse)
    given = operands(scale=0.123)  # a plan of its own
    out = pagegen.paged_attention(**given)
    torch.testing.assert_close(out, pagegen.reference_attention(**given), rtol=1e-5, atol=1e-5)
    assert "the disk is full" in caplog.text
    with pytest.raises(ValueError, match="variant must be None.*the disk is full"):
        pagegen.paged_attention(**given, variant=pagegen.CppVariant())


def test_a_value_width_that_contradicts_the_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="v_head_dim must be 16 like v_cache, got 8"):
        pagegen.paged_attention(**operands(v_head_dim=8))


def test_preparing_for_a_gpu_that_is_not_here_is_refused_by_name() -> None:
    spec = pagegen.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16)
    with pytest.raises(ValueError, match="target must be the GPU of this machine"):
        pagegen.prepare(spec, pagegen.CacheLayout(block_size=16), "gfx90a")
