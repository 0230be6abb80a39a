"""A call like one before is not checked again: what must still be refused, seen and let go."""

from __future__ import annotations

import dataclasses
import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pagegen
from pagegen.ops import attention, cache_ops, repeated

BLOCKS, BLOCK, HEADS, DIM = 8, 4, 2, 16


@pytest.fixture(autouse=True, params=["torch's guards", "pagegen's own"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How calls are told apart: by what is private to torch, and without it."""
    if request.param == "pagegen's own":
        monkeypatch.setattr(repeated, "_Guards", None)
    attention.forget()
    monkeypatch.setattr(cache_ops, "_RECENT", repeated.Recent())


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
    "a gradient": (lambda given: {"q": given["q"].clone().requires_grad_()}, "q must not require gradients"),
    "one of the values": (lambda given: {"v_cache": given["v_cache"].clone().requires_grad_()}, "v_cache must not"),
    "no values": (lambda given: {"v_cache": None}, "v_head_dim must be"),
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


def test_values_are_checked_where_a_test_put_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands()
    pagegen.paged_attention(**given)
    given["seq_lens"][0] = 9
    monkeypatch.setattr(os, "environ", {"PAGEGEN_CHECK": "1"})
    with pytest.raises(ValueError, match=r"seq_lens\[0\] must be in 0..8, got 9"):
        pagegen.paged_attention(**given)


def test_a_target_named_between_two_calls_is_seen_by_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands()
    for _ in range(2):
        pagegen.paged_attention(**given)
    with monkeypatch.context() as patch:
        patch.setenv("PAGEGEN_TARGET", "sm_90")
        with pytest.raises(ValueError, match="PAGEGEN_TARGET must be cpu or interpreter"):
            pagegen.paged_attention(**given)
    plans = len(attention.PLANS)
    pagegen.paged_attention(**given)
    assert len(attention.PLANS) == plans == 1


def test_a_plan_found_before_another_thread_prepared_one_serves_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands()
    pagegen.paged_attention(**given)
    (old,) = attention.PLANS.values()
    new = dataclasses.replace(old)

    def overtaken(*args: Any) -> Any:
        monkeypatch.setattr(attention.plans, "lookup", lambda *args: new)
        attention.forget()  # what `prepare` ends with
        return old

    attention.forget()
    monkeypatch.setattr(attention.plans, "lookup", overtaken)
    for _ in range(2):
        pagegen.paged_attention(**given)
    assert [*attention.PLANS.values()] == [new]
    assert attention._RECENT._kept[0][3].plan is new


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


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda x: x,
    "other memory": torch.clone,
    "a size": lambda x: x[:, :3],
    "strides": lambda x: x.mT.contiguous().mT,
    "the stride of a size of 1": lambda x: x.as_strided(x.shape, (7, 4, 1)),
    "a dimension": lambda x: x[0],
    "a dtype": lambda x: x.half(),
    "a device": lambda x: x.to("meta"),
    "a gradient": lambda x: x.clone().requires_grad_(),
    "a class": lambda x: torch.nn.Parameter(x, requires_grad=False),
}


def test_torch_guards_are_recognised_whatever_the_default_dtype_is_where_they_are_loaded() -> None:
    before = torch.get_default_dtype()
    found = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            found.append(repeated._guards())
        finally:
            torch.set_default_dtype(before)
    assert len(set(found)) == 1


@pytest.mark.parametrize("change", FORMS)
def test_a_form_is_all_that_a_check_could_look_at(change: str) -> None:
    x, other = torch.zeros(1, 4, 4), torch.zeros(2)
    is_like = repeated.of_the_form([x, other])
    changed = FORMS[change](x)
    alike = change in ("itself", "other memory") or (change == "a class" and repeated._Guards is None)
    assert is_like(changed, other) == alike


def test_a_gradient_that_nobody_wants_is_no_difference() -> None:
    given = operands(q=torch.randn(3, 4, DIM).requires_grad_())
    with torch.no_grad():
        for _ in range(2):
            pagegen.paged_attention(**given)
    with pytest.raises(RuntimeError, match="q must not require gradients"):
        pagegen.paged_attention(**given)


def test_calls_in_turns_within_inference_mode_and_outside_are_each_their_own() -> None:
    given = operands()
    expected = pagegen.reference_attention(**given)
    for _ in range(3):
        for inferring in (False, True):
            with torch.inference_mode(inferring):
                found = pagegen.paged_attention(**given)
            assert found.is_inference() == inferring
            torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-4)


def test_more_kinds_of_calls_than_are_kept_at_once_are_all_right_in_any_turn() -> None:
    shared = operands()
    tree, k = torch.ones(3, 1, dtype=torch.bool), shared["k_cache"]
    kinds: list[dict[str, Any]] = [{"window": window} for window in range(1, 9)]
    kinds += [{"sinks": torch.ones(4)}, {"alibi_slopes": torch.ones(4)}, {"tree_mask": tree}, {"causal": False}]
    kinds += [{"v_cache": k}, {"v_cache": None, "v_head_dim": DIM}, {"scale": 0.5}, {"max_seq_len": 8}, {}]
    calls = [operands(**{**shared, **kind}) for kind in kinds]
    for given in (*calls, *reversed(calls), *calls[::3]):
        expected = pagegen.reference_attention(**{n: v for n, v in given.items() if n != "max_seq_len"})
        torch.testing.assert_close(pagegen.paged_attention(**given).double(), expected.double(), rtol=1e-4, atol=1e-4)


def test_a_write_like_one_before_is_refused_where_it_would_do_harm() -> None:
    both = torch.zeros(2, BLOCKS, BLOCK, HEADS, DIM)
    k, slots = torch.randn(3, HEADS, DIM), torch.tensor([1, -1, 30])
    for _ in range(2):
        pagegen.write_kv(k, k, both[0], both[1], slots)
    assert torch.equal(both[:, 7, 2], k[2].expand(2, -1, -1))
    for caches, message in (
        ((both[0], both[0]), "v_cache must have memory"),
        ((both[0], both[1, :4]), "v_cache must be"),
    ):
        with pytest.raises(ValueError, match=message):
            pagegen.write_kv(k, k, *caches, slots)
    with pytest.raises(RuntimeError, match="k must not require gradients"):
        pagegen.write_kv(k.clone().requires_grad_(), k, both[0], both[1], slots)
    with pytest.raises(ValueError, match="v and v_cache must both"):
        pagegen.write_kv(k, None, both[0], both[1], slots)
