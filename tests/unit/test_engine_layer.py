"""One attention layer of a serving engine, apart from the engines: what it hands to the operators."""

from __future__ import annotations

import pytest
import torch

import pagegen
from pagegen.integrations.engine_layer import EngineLayer, EngineStep, kv_dtype_of, prepare_layers, version_of
from pagegen.ops import plans
from pagegen.spec import CacheLayout

LENGTHS, QUERIES = [9, 4], [2, 1]


@pytest.fixture
def step():
    table = torch.tensor([[3, 1, 10**6], [4, 10**6, 10**6]], dtype=torch.int32)
    starts = torch.tensor([0, *torch.tensor(QUERIES).cumsum(0).tolist()], dtype=torch.int32)
    return EngineStep(table, torch.tensor(LENGTHS, dtype=torch.int32), starts, max(QUERIES), max(LENGTHS))


def layer_of(**changes):
    return EngineLayer(**{"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "scale": 0.2, **changes})


def caches(dtype=torch.float32):
    return torch.randn(2, 6, 8, 2, 16).to(dtype)


def test_attending_is_the_operator_with_everything_the_layer_has(step):
    torch.manual_seed(0)
    q, (k_cache, v_cache) = torch.randn(3, 4, 16), caches()
    extras = {"alibi_slopes": torch.rand(4), "sinks": torch.randn(4), "window": 3, "logit_softcap": 2.0}
    out = torch.empty(3, 4, 16)
    layer_of(**extras).attend(q, k_cache, v_cache, step, out)
    starts = step.query_start_loc
    wanted = pagegen.reference_attention(
        q, k_cache, v_cache, step.block_table, step.seq_lens, query_start_loc=starts, scale=0.2, **extras
    )
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


def test_scales_count_for_a_float8_cache_and_for_no_other(step):
    torch.manual_seed(0)
    q, out, other = torch.randn(3, 4, 16), torch.empty(3, 4, 16), torch.empty(3, 4, 16)
    k_cache, v_cache = caches()
    layer_of().attend(q, k_cache, v_cache, step, out, torch.tensor(5.0), torch.tensor(5.0))
    layer_of().attend(q, k_cache, v_cache, step, other)
    assert torch.equal(out, other)
    bits = caches(torch.float8_e4m3fn).view(torch.uint8)
    layer = layer_of(kv_dtype="float8_e4m3fn")
    layer.attend(q, bits[0], bits[1], step, out, torch.tensor(1.0), torch.tensor(3.0))
    layer.attend(q, bits[0], bits[1], step, other, torch.tensor(1.0), torch.tensor(1.0))
    torch.testing.assert_close(out, 3 * other, rtol=1e-5, atol=1e-5)


def test_rows_past_the_slots_are_padding_and_a_negative_slot_skips_its_token():
    k_cache, v_cache = torch.zeros(2, 6, 8, 2, 16)
    rows = torch.ones(5, 2, 16)
    rows[3:] = float("nan")
    layer_of().write(rows, 2 * rows, k_cache, v_cache, torch.tensor([7, -1, 40]))
    assert k_cache.flatten(0, 1).sum(dim=(1, 2)).nonzero().flatten().tolist() == [7, 40]
    assert torch.equal(v_cache, 2 * k_cache)


def test_the_spec_is_that_of_the_layers_own_calls(step):
    layer = layer_of(kv_dtype="float8_e5m2", window=5, sinks=torch.zeros(4), batch_invariant=True)
    spec = layer.spec(torch.bfloat16, torch.uint8, 16, scaled=True)
    before = set(plans._PREPARED)
    prepare_layers([spec, spec], CacheLayout(block_size=8), torch.device("cpu"))
    (plan,) = (plan for key, plan in plans._PREPARED.items() if key not in before)
    loaded = set(plan.kernels)
    bits = caches(torch.float8_e5m2).view(torch.uint8)
    one = torch.tensor(1.0)
    layer.attend(torch.randn(3, 4, 16).bfloat16(), bits[0], bits[1], step, torch.empty(3, 4, 16).bfloat16(), one, one)
    from pagegen.ops import attention

    assert plan in attention.PLANS.values()
    assert loaded == set(plan.kernels), "the call compiled something"


def test_a_layer_without_scales_has_a_spec_without():
    layer = layer_of(kv_dtype="float8_e4m3fn")
    assert layer.spec(torch.float16, torch.float8_e4m3fn, 16, scaled=False).kv_scale_granularity == "none"
    plain = layer_of().spec(torch.float16, torch.bfloat16, 8, scaled=True)
    assert (plain.kv_scale_granularity, plain.kv_dtype, plain.v_head_dim) == ("none", torch.bfloat16, 8)


@pytest.mark.parametrize("name", ["nvfp4", "int8", "fp8_inc", ""])
def test_a_cache_dtype_that_the_operators_lack_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=f"got {name}$"):
        kv_dtype_of(name)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0.33.0", (0, 33, 0)),
        ("0.33.0rc1", (0, 33, 0)),
        ("0.33", (0, 33)),
        ("0.5.23.post1", (0, 5, 23)),
        ("1.2.3+cpu", (1, 2, 3)),
        ("dev", ()),
        ("", ()),
        ("0.dev.5", (0,)),
    ],
)
def test_a_version_is_its_leading_numbers(text, numbers):
    assert version_of(text) == numbers


def test_the_backends_to_replace_in_vllm_are_read_from_the_environment(monkeypatch):
    from pagegen import settings

    monkeypatch.setenv("PAGEGEN_VLLM_REPLACE", " cpu_attn,, FLEX_ATTENTION ")
    assert settings.vllm_replaced() == ("CPU_ATTN", "FLEX_ATTENTION")
    monkeypatch.delenv("PAGEGEN_VLLM_REPLACE")
    assert settings.vllm_replaced() == ()
