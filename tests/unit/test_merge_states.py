"""Merging partial attention states: associative to rounding, whatever is empty, however far the weights are apart."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import pagegen

State = tuple[Tensor, Tensor]
ROWS, HEADS, WIDTH = 6, 3, 8


def states(dtype: torch.dtype, spread: float) -> list[State]:
    """Four states; each row is empty in some of them, the last row in all."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(4):
        out = torch.randn(ROWS, HEADS, WIDTH, generator=generator).to(dtype)
        lse = torch.randn(ROWS, HEADS, generator=generator) * spread
        lse[i], lse[-1] = -math.inf, -math.inf
        out[i], out[-1] = math.nan, math.nan  # what an empty state holds must not matter
        made.append((out, lse))
    return made


def merge(*parts: State) -> State:
    return pagegen.merge_states([out for out, _ in parts], [lse for _, lse in parts])


@pytest.mark.parametrize("spread", [1.0, 100.0, 1e30], ids=["near", "far", "as far as floats go"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_order_of_merging_gives_the_same_state(dtype: torch.dtype, spread: float) -> None:
    a, b, c, d = states(dtype, spread)
    at_once, at_once_lse = merge(a, b, c, d)
    tolerance = 4 * torch.finfo(dtype).eps
    for out, lse in (merge(merge(a, b), merge(c, d)), merge(a, merge(b, merge(c, d))), merge(d, c, b, a)):
        torch.testing.assert_close(out.float(), at_once.float(), rtol=tolerance, atol=4 * tolerance)
        torch.testing.assert_close(lse, at_once_lse, rtol=1e-6, atol=1e-6)
    assert at_once.isfinite().all()
    assert not at_once[-1].any()
    assert (at_once_lse[-1] == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_state_merges_to_itself_bit_for_bit(dtype: torch.dtype) -> None:
    out, lse = states(dtype, 1.0)[0]
    merged, merged_lse = merge((out, lse))
    held = lse > -math.inf
    assert torch.equal(merged[held], out[held])
    assert torch.equal(merged_lse, lse)


def test_states_are_weighed_by_their_exponentials() -> None:
    outs = torch.tensor([1.0, 5.0]).view(2, 1, 1, 1)
    lses = torch.tensor([0.0, math.log(3.0)]).view(2, 1, 1)
    merged, lse = pagegen.merge_states(outs, lses)
    assert merged.item() == pytest.approx(4.0)
    assert lse.item() == pytest.approx(math.log(4.0))


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(2, 3), "outs must be"),
        (torch.zeros(2, 3, 4, 8, dtype=torch.int32), torch.zeros(2, 3, 4), "outs must be float32"),
        (torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4).half(), "lses must be float32"),
        (torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 5), "lses must be"),
    ],
)
def test_states_of_the_wrong_shape_are_refused_by_name(outs: Tensor, lses: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pagegen.merge_states(outs, lses)
