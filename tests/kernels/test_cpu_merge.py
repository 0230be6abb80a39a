"""The C++ kernel that merges states, against torch's own operators: empty, infinite and NaN states, strides, rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import pagegen
from pagegen.ops.merging import merge_by_torch
from pagegen.targets import cpu

pytestmark = pytest.mark.skipif(cpu.compiler() is None, reason="needs a C++ compiler")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
HARD = (0.0, -math.inf, math.inf, math.nan, -1e30, 1e30, -100.0, 3.0, -87.5)


def states(dtype: torch.dtype, count: int, rows: int = 90, heads: int = 5, width: int = 40) -> tuple[Tensor, Tensor]:
    """States whose log-sum-exps are ordinary in some rows and every pair of hard values in others."""
    generator = torch.Generator().manual_seed(count)
    outs = torch.randn(count, rows, heads, width, generator=generator).to(dtype)
    lses = torch.randn(count, rows, heads, generator=generator) * 5
    for row in range(81):
        lses[0, row, 0], lses[-1, row, 0] = HARD[row // 9], HARD[row % 9]
    outs[lses == -math.inf] = math.nan  # nobody may read what an empty state holds
    return outs, lses


def close(merged: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    tolerance = 2 * torch.finfo(merged[0].dtype).eps
    torch.testing.assert_close(merged[0], wanted[0], rtol=tolerance, atol=4 * tolerance, equal_nan=True)
    torch.testing.assert_close(merged[1], wanted[1], rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("count", [1, 2, 3, 40])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_states_merge_as_torch_merges_them_whatever_they_hold(dtype: torch.dtype, count: int) -> None:
    outs, lses = states(dtype, count)
    close(pagegen.merge_states(outs, lses), merge_by_torch(outs, lses))


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 128), (torch.float32, 20), (torch.bfloat16, 128),
                                              (torch.bfloat16, 80), (torch.float16, 96)])  # fmt: skip
def test_a_large_result_has_the_bits_of_its_parts(dtype: torch.dtype, width: int) -> None:
    """From 1 MiB on whole lines are written past the caches; parts of 90 rows are not."""
    outs, lses = states(dtype, 3, rows=1800, heads=16, width=width)
    assert outs[0].nbytes >= 1 << 20
    merged, lse = pagegen.merge_states(outs, lses)
    parts = [pagegen.merge_states(outs[:, i : i + 90], lses[:, i : i + 90]) for i in range(0, 1800, 90)]
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert merged.view(bits).equal(torch.cat([part[0] for part in parts]).view(bits))
    assert lse.view(torch.int32).equal(torch.cat([part[1] for part in parts]).view(torch.int32))


def test_a_state_too_far_behind_to_weigh_anything_is_not_read() -> None:
    outs = torch.tensor([1.5, math.nan]).view(2, 1, 1, 1).repeat(1, 1, 20, 40)
    lses = torch.tensor([0.0, -1e3]).view(2, 1, 1).repeat(1, 1, 20)
    merged, lse = pagegen.merge_states(outs, lses)
    assert (merged == 1.5).all()
    assert not lse.any()
    outs[1] = 1e38
    lses[1] = -95.0  # e^-95 is subnormal, and weighs: 1e38 of it is 5.5e-4
    merged, _ = pagegen.merge_states(outs, lses)
    torch.testing.assert_close(merged, torch.full_like(merged, 1.5 + 1e38 * math.exp(-95.0)), rtol=1e-5, atol=0)


def test_states_may_lie_apart_and_have_any_strides() -> None:
    outs, lses = states(torch.bfloat16, 3, width=37)
    wanted = pagegen.merge_states(outs, lses)
    wide = torch.zeros(90, 3, 2, 5, 64, dtype=torch.bfloat16)
    wide[:, :, 1, :, 3:40] = outs.transpose(0, 1)
    strided = wide[:, :, 1, :, 3:40].transpose(0, 1)
    columns = list(outs.transpose(2, 3).contiguous().transpose(2, 3))  # no last stride of 1
    padded = torch.zeros(3, 90, 9)[..., 2:7].copy_(lses)
    for given in ((strided, padded), (list(strided), list(padded)), (columns, list(lses)), (list(outs), lses)):
        merged = pagegen.merge_states(*given)
        assert torch.equal(merged[0].view(torch.int16), wanted[0].view(torch.int16))
        assert torch.equal(merged[1].view(torch.int32), wanted[1].view(torch.int32))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_no_bit_depends_on_the_number_of_threads_or_on_other_rows(dtype: torch.dtype) -> None:
    outs, lses = states(dtype, 2, rows=300, heads=20)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(pagegen.merge_states(outs, lses))
    finally:
        torch.set_num_threads(before)
    found.append(pagegen.merge_states(outs[:, 100:117, 3:5], lses[:, 100:117, 3:5]))
    assert torch.equal(found[0][0].view(torch.uint8), found[1][0].view(torch.uint8))
    assert torch.equal(found[0][1].view(torch.int32), found[1][1].view(torch.int32))
    assert torch.equal(found[0][0][100:117, 3:5].contiguous().view(torch.uint8), found[2][0].view(torch.uint8))


@pytest.mark.parametrize("where", ["all", "some"])
def test_a_state_takes_another_one_in_at_the_rows_named(where: str) -> None:
    outs, lses = states(torch.bfloat16, 2)
    rows = None if where == "all" else torch.randperm(90)[:33]
    chosen = torch.arange(90) if rows is None else rows
    out, lse = outs[1].clone(), lses[1].clone()
    wanted_out, wanted_lse = out.clone(), lse.clone()
    wanted_out[chosen], wanted_lse[chosen] = merge_by_torch(
        torch.stack([outs[0][: len(chosen)], out[chosen]]), torch.stack([lses[0][: len(chosen)], lse[chosen]])
    )
    torch.ops.pagegen.merge_into(out, lse, outs[0][: len(chosen)], lses[0][: len(chosen)], rows)
    close((out, lse), (wanted_out, wanted_lse))


def test_without_a_compiler_torch_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    outs, lses = states(torch.bfloat16, 2)
    wanted = pagegen.merge_states(outs, lses)
    monkeypatch.setattr(cpu, "compiler", lambda: None)
    monkeypatch.setattr(cpu, "library", lambda: pytest.fail("the library was asked for"))
    close(pagegen.merge_states(outs, lses), wanted)
    close(pagegen.merge_states(list(outs), list(lses)), wanted)
    out, lse = outs[1].clone(), lses[1].clone()
    torch.ops.pagegen.merge_into(out, lse, outs[0], lses[0], torch.arange(90))
    close((out, lse), wanted)


def test_lists_that_do_not_match_are_refused_by_name() -> None:
    out, lse = torch.zeros(2, 3, 8), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="as many of each, got 2 and 1"):
        pagegen.merge_states([out, out], [lse])
    with pytest.raises(ValueError, match=r"outs must be float32 \[total_q"):
        pagegen.merge_states([out, out.half()], [lse, lse])
    with pytest.raises(ValueError, match="lses must be float32"):
        pagegen.merge_states([out, out], [lse, lse.half()])
    with pytest.raises(ValueError, match="lses must be"):
        pagegen.merge_states([out, out], [torch.zeros(2, 4)] * 2)


def test_no_rows_are_no_work() -> None:
    out, lse = pagegen.merge_states(torch.zeros(2, 0, 3, 8), torch.zeros(2, 0, 3))
    assert (out.shape, lse.shape) == ((0, 3, 8), (0, 3))
    one, its = torch.ones(4, 3, 8), torch.ones(4, 3)
    torch.ops.pagegen.merge_into(one, its, out, lse, torch.empty(0, dtype=torch.int64))
    assert bool((one == 1).all()) and bool((its == 1).all())
