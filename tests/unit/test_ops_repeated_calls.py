"""A call like one before is not checked again: what must still be refused, seen and let go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pagegen
from pagegen.ops import attention

BLOCKS, BLOCK, HEADS, DIM = 8, 4, 2, 16


def operands(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "q": torch.randn(3, 4, DIM),
        "k_cache": torch.randn(BLOCKS, BLOCK, HEADS, DIM),
        "v_cache": torch.randn(BLOCKS, BLOCK, HEADS, DIM),
        "block_table": torch.tensor([[3, 1], [6, 2], [0, 7]], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 3, 8], dtype=torch.int32),
    }
    return {**values, **changes}


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "a cache resized in place": (
        lambda given: {"k_cache": given["k_cache"].resize_(BLOCKS, BLOCK, HEADS, 8)},
        "k_cache",
    ),
    "strides": (lambda given: {"q": torch.randn(3, DIM, 4).transpose(1, 2)}, "q must have a last stride of 1"),
    "a dtype": (lambda given: {"seq_lens": given["seq_lens"].long()}, "seq_lens must be int32"),
    "fewer sequences": (lambda given: {"seq_lens": given["seq_lens"][:2]}, "block_table must be"),
    "the v cache": (lambda given: {"v_cache": given["v_cache"][:4]}, "v_cache must be"),
    "an option": (lambda given: {"window": 0}, "window must be at least 1"),
    "slopes": (lambda given: {"alibi_slopes": torch.zeros(3)}, "alibi_slopes must be"),
    "a scale": (lambda given: {"k_scale": torch.ones(3)}, "k_scale must be"),
    "a bound": (lambda given: {"max_seq_len": -1}, "max_seq_len must be at least 0"),
    "queries": (lambda given: {"max_query_len": 2}, "query_start_loc is required"),
    "out": (lambda given: {"out": given["q"]}, "out must have memory of its own"),
    "out's shape": (lambda given: {"out": torch.zeros(3, 4, DIM - 1)}, "out must be"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_from_a_call_that_passed_is_checked(change: str) -> None:
    given = operands()
    for _ in range(2):
        pagegen.paged_attention(**given)
    changed, message = CHANGES[change]
    with pytest.raises((ValueError, RuntimeError), match=message):
        pagegen.paged_attention(**{**given, **changed(given)})


def test_values_are_checked_in_every_call_once_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands()
    pagegen.paged_attention(**given)
    given["block_table"][1, 0] = BLOCKS
    monkeypatch.setenv("PAGEGEN_CHECK", "1")
    with pytest.raises(ValueError, match=r"block_table\[1, 0\] must be in 0..7, got 8"):
        pagegen.paged_attention(**given)


def test_a_refused_call_is_refused_again() -> None:
    given = operands(seq_lens=torch.tensor([5, 3], dtype=torch.int32))
    for _ in range(2):
        with pytest.raises(ValueError, match="block_table must be"):
            pagegen.paged_attention(**given)


def test_other_values_and_other_memory_of_the_same_form_are_seen() -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        given = operands()
        expected = pagegen.reference_attention(**given)
        torch.testing.assert_close(pagegen.paged_attention(**given).double(), expected.double(), rtol=1e-4, atol=1e-4)


def test_no_tensor_is_kept_alive() -> None:
    given = operands()
    pagegen.paged_attention(**given)
    known = [weakref.ref(value) for value in given.values()]
    del given
    gc.collect()
    assert not [alive for alive in known if alive() is not None]


def test_forms_that_passed_are_forgotten_before_they_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_PASSED", {})
    monkeypatch.setattr(attention, "_MOST_PASSED", 3)
    for width in range(2, 9):
        table = torch.zeros(3, width, dtype=torch.int32)
        pagegen.paged_attention(**operands(block_table=table))
        assert 1 <= len(attention._PASSED) <= 3
