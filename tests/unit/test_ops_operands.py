"""What a kernel is handed: caches by their meaning, scales of one shape, masks; and what is refused before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pagegen
from pagegen import targets
from pagegen.ops import attention, checks
from pagegen.spec.dtypes import INT4
from pagegen.targets import AttentionCall, warm

BLOCKS, BLOCK, HEADS, DIM = 8, 4, 2, 16


class Recorder:
    """A kernel that keeps the calls it gets and the spec that it was made for."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.specs: list[pagegen.AttentionSpec] = []

    def load(self, spec: pagegen.AttentionSpec, *_: Any) -> Any:
        self.specs.append(spec)
        return self.calls.append


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Every spec is served, by the recorder."""
    recorder = Recorder()
    monkeypatch.setattr(targets, "load_attention", recorder.load)
    monkeypatch.setattr(targets, "unsupported", lambda *_: None)
    monkeypatch.setattr(attention.plans, "lookup", lambda *given: attention.plans.make_plan(*given, None))
    attention.forget()
    yield recorder
    attention.forget()


def operands(dtype: torch.dtype = torch.int8, dim: int = DIM, **changes: Any) -> dict[str, Any]:
    cache = torch.zeros(BLOCKS, BLOCK, HEADS, dim, dtype=dtype)
    values: dict[str, Any] = {
        "q": torch.zeros(3, 4, DIM),
        "k_cache": cache,
        "v_cache": cache.clone(),
        "block_table": torch.tensor([[3, 1, -9], [-1, -1, -1], [0, 7, 5]], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 0, 9], dtype=torch.int32),
    }
    return {**values, **changes}


def per_slot(value: float) -> torch.Tensor:
    return torch.full((BLOCKS, BLOCK, HEADS), value)


@pytest.mark.parametrize(
    ("scales", "granularity", "k_seen", "v_seen"),
    [
        ({"k_scale": 0.37, "v_scale": 1.9}, "tensor", [0.37, 0.37], [1.9, 1.9]),
        ({"k_scale": torch.tensor([0.5], dtype=torch.float16)}, "tensor", [0.5, 0.5], [1.0, 1.0]),
        ({"v_scale": torch.tensor([0.25, 4.0])}, "head", [1.0, 1.0], [0.25, 4.0]),
        ({"k_scale": torch.tensor([2.0, 3.0]), "v_scale": 0.5}, "head", [2.0, 3.0], [0.5, 0.5]),
        ({"k_scale": per_slot(0.125), "v_scale": torch.tensor([1.0, 2.0])}, "token_head", [0.125, 0.125], [1.0, 2.0]),
    ],
)
def test_scales_of_every_granularity_arrive_in_one_shape_and_a_missing_one_is_one(
    kernel: Recorder, scales: dict[str, Any], granularity: str, k_seen: list[float], v_seen: list[float]
) -> None:
    pagegen.paged_attention(**operands(), **scales)
    (call,), (spec,) = kernel.calls, kernel.specs
    assert (spec.kv_scale_granularity, spec.kv_zero_points) == (granularity, False)
    for found, expected in ((call.k_scale, k_seen), (call.v_scale, v_seen)):
        assert found is not None
        assert (found.dtype, found.shape) == (torch.float32, (BLOCKS, BLOCK, HEADS))
        assert torch.equal(found, torch.tensor(expected).expand(BLOCKS, BLOCK, HEADS))
    assert call.k_zero is None
    assert call.v_zero is None


def test_a_scale_that_is_already_right_is_handed_on_and_not_copied(kernel: Recorder) -> None:
    k_scale, heads = per_slot(2.0), torch.tensor([1.0, 2.0])
    pagegen.paged_attention(**operands(), k_scale=k_scale, v_scale=heads)
    (call,) = kernel.calls
    assert call.k_scale is not None
    assert call.v_scale is not None
    assert call.k_scale.data_ptr() == k_scale.data_ptr()
    assert (call.v_scale.data_ptr(), call.v_scale.stride()) == (heads.data_ptr(), (0, 0, 1))


def test_zero_points_are_a_property_of_their_own_and_a_missing_one_is_zero(kernel: Recorder) -> None:
    pagegen.paged_attention(**operands(), k_zero=per_slot(3.0))
    pagegen.paged_attention(**operands(), k_zero=per_slot(3.0), v_zero=torch.tensor([1.0, 2.0]), k_scale=0.5)
    pagegen.paged_attention(**operands())
    assert [(s.kv_scale_granularity, s.kv_zero_points) for s in kernel.specs] == [
        ("none", True), ("tensor", True), ("none", False),
    ]  # fmt: skip
    first, second, third = kernel.calls
    assert first.k_zero is not None
    assert first.v_zero is not None
    assert (first.k_zero == 3).all()
    assert not first.v_zero.any()
    assert first.k_scale is None
    assert second.v_zero is not None
    assert second.v_zero[5, 2].tolist() == [1.0, 2.0]
    assert (third.k_zero, third.v_zero, third.k_scale, third.v_scale) == (None,) * 4


@pytest.mark.parametrize(
    ("stored", "kv_dtype", "seen"),
    [
        (torch.uint8, "float8_e4m3fn", torch.float8_e4m3fn),
        (torch.uint8, "int8", torch.int8),
        (torch.float8_e5m2, None, torch.float8_e5m2),
        (torch.uint8, "int4", torch.uint8),
        (torch.int8, "int4", torch.uint8),
    ],
)
def test_a_cache_arrives_as_what_it_means_in_the_same_memory(
    kernel: Recorder, stored: torch.dtype, kv_dtype: str | None, seen: torch.dtype
) -> None:
    given = operands(stored, DIM // 2 if kv_dtype == "int4" else DIM)
    given["k_cache"] = given["k_cache"].transpose(1, 2).contiguous().transpose(1, 2)  # heads before tokens
    pagegen.paged_attention(**given, kv_dtype=kv_dtype)
    (call,), (spec,) = kernel.calls, kernel.specs
    for found, name in ((call.k_cache, "k_cache"), (call.v_cache, "v_cache")):
        assert (found.dtype, found.data_ptr()) == (seen, given[name].data_ptr())
        assert (found.shape, found.stride()) == (given[name].shape, given[name].stride())
    assert (spec.head_dim, spec.v_head_dim) == (DIM, DIM)
    assert spec.kv_dtype == (INT4 if kv_dtype == "int4" else seen)


@pytest.mark.parametrize("packed", [False, True])
def test_values_that_are_part_of_k_arrive_as_a_view_with_the_scales_of_k(kernel: Recorder, packed: bool) -> None:
    given = operands(torch.uint8 if packed else torch.int8, DIM // 2 if packed else DIM, v_cache=None)
    kv_dtype = "int4" if packed else None
    pagegen.paged_attention(**given, v_head_dim=12, kv_dtype=kv_dtype, k_scale=per_slot(0.5), k_zero=per_slot(1.0))
    (call,), (spec,) = kernel.calls, kernel.specs
    assert (spec.shared_kv, spec.v_head_dim) == (True, 12)
    assert call.v_cache.data_ptr() == given["k_cache"].data_ptr()
    assert call.v_cache.shape[-1] == (DIM // 2 if packed else 12)
    assert call.v_scale is not None
    assert call.v_zero is not None
    assert (call.v_scale == 0.5).all()
    assert (call.v_zero == 1.0).all()
    assert call.out.shape == (3, 4, 12)


def test_a_tree_mask_is_part_of_the_call_and_of_no_plan(kernel: Recorder) -> None:
    tree = torch.ones(3, 1, dtype=torch.bool)
    pagegen.paged_attention(**operands(torch.float32))
    plans = len(attention.PLANS)
    pagegen.paged_attention(**operands(torch.float32), tree_mask=tree)
    assert kernel.calls[1].tree_mask is not None
    assert kernel.calls[1].tree_mask.data_ptr() == tree.data_ptr()
    assert (len(attention.PLANS), kernel.calls[0].tree_mask) == (plans, None)


def test_captured_tensors_arrive_in_order_the_score_functions_first(kernel: Recorder) -> None:
    slopes, lengths = torch.zeros(4), torch.tensor([3, 2, 1])
    pagegen.paged_attention(
        **operands(torch.float32),
        score_mod=pagegen.modifiers.alibi(slopes),
        mask_mod=pagegen.modifiers.prefix_lm(lengths),
    )
    (call,), (spec,) = kernel.calls, kernel.specs
    assert (spec.score_mod, spec.mask_mod) == ("alibi(float32)", "prefix_lm(int64)")
    assert [tensor.data_ptr() for tensor in call.captures] == [slopes.data_ptr(), lengths.data_ptr()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_dtype": torch.int8, "kv_scale_granularity": "token_head", "alibi": True, "sinks": True},
        {"kv_dtype": INT4, "kv_scale_granularity": "head", "kv_zero_points": True, "v_head_dim": 8},
        {"kv_dtype": torch.float8_e4m3fn, "kv_scale_granularity": "tensor", "shared_kv": True, "v_head_dim": 8},
        {"mask_mod": "chunked(8)", "score_mod": "alibi(float32)"},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_what_warms_a_kernel_up_is_what_the_operator_would_hand_it(options: dict[str, Any]) -> None:
    pagegen.modifiers.alibi(torch.zeros(4))
    spec = pagegen.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=DIM, q_dtype=torch.float32, **options)
    layout = pagegen.CacheLayout(block_size=BLOCK, order="HND")
    target = pagegen.Target("cpu")
    if targets.unsupported(spec, target):
        pytest.skip("no C++ compiler works here")
    kernel = targets.load_attention(spec, layout, targets.default_variant(spec, layout, target, decode=True), target)
    calls = list(warm.calls(spec, layout, "cpu"))
    forms = {(c.query_start_loc is None, c.lse is None, c.tree_mask is None) for c in calls}
    assert len(forms) == len(calls) == 6
    for call in calls:
        call.out.fill_(math.nan)
        kernel(call)
        assert (call.out == -float(spec.kv_zero_points)).all()  # stored 0, zero point 1, scale 1


BAD = {
    "scale_16_bit": ({"k_scale": per_slot(1.0).half()}, "k_scale must be float32 where it is one a token and head"),
    "zero_64_bit": ({"v_zero": per_slot(1.0).double()}, "v_zero must be float32 where it is one a token and head"),
    "shared_scale": ({"v_cache": None, "v_head_dim": 8, "v_scale": 1.0}, "v_scale must be None where v_cache is None"),
    "shared_zero": ({"v_cache": None, "v_head_dim": 8, "v_zero": per_slot(0.0)}, "v_zero must be None where v_cache"),
    "zero_of_floats": ({"k_cache": torch.zeros(BLOCKS, BLOCK, HEADS, DIM), "v_cache": torch.zeros(8, 4, 2, DIM),
                        "k_zero": per_slot(0.0)}, "k_zero must be None unless the cache holds int8 or int4"),
    "odd_head": ({"q": torch.zeros(3, 4, 15), "k_cache": torch.zeros(8, 4, 2, 7, dtype=torch.uint8),
                  "v_cache": torch.zeros(8, 4, 2, 7, dtype=torch.uint8), "kv_dtype": "int4"},
                 "q must have an even head_dim.*int4 cache .two values a byte., got 15"),
    "odd_value": ({"k_cache": torch.zeros(8, 4, 2, 8, dtype=torch.uint8), "v_cache": None, "v_head_dim": 7,
                   "kv_dtype": "int4"}, "v_head_dim be even, for an int4 cache .two values a byte., got 16 and 7"),
    "tree_rows": ({"tree_mask": torch.ones(2, 1, dtype=torch.bool)}, "tree_mask must be .total_q, max_query_len."),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_no_kernel_could_read_is_refused_by_name(name: str) -> None:
    changes, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        pagegen.paged_attention(**operands(**changes))


def test_a_scale_on_another_device_is_refused_by_name() -> None:
    cache = operands()["k_cache"]
    with pytest.raises(ValueError, match="k_scale must be on cpu, got meta"):
        checks.scale("k_scale", torch.ones((), device="meta"), cache, cache, None)


def test_a_tree_mask_narrower_than_a_query_is_found_when_values_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGEN_CHECK", "1")
    starts, tree = torch.tensor([0, 3, 3, 3], dtype=torch.int32), torch.ones(3, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"tree_mask must have 3 columns \(sequence 0\), got 2"):
        pagegen.paged_attention(**operands(), query_start_loc=starts, tree_mask=tree)


def test_a_compiled_graph_with_an_eight_bit_cache_in_bytes_does_not_copy_the_cache() -> None:
    given = operands(torch.uint8)
    given["k_cache"].copy_(torch.randint(0, 100, given["k_cache"].shape))
    graphs: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    step = torch.compile(pagegen.paged_attention, fullgraph=True, backend=backend)
    options: dict[str, Any] = {"kv_dtype": "float8_e4m3fn", "k_scale": 0.37, "v_scale": 1.9}
    out = step(**given, **options)
    torch.testing.assert_close(out, pagegen.reference_attention(**given, **options), rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1
    assert "view(" not in graphs[0].replace(" ", "")
    assert not math.isnan(float(out.sum()))
