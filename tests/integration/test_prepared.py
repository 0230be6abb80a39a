"""After `prepare`, serving compiles nothing, and nothing is compiled while a CUDA graph is captured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import pagegen
from pagegen import AttentionSpec, CacheLayout, PagedKVCache, targets
from pagegen.ops import attention, plans
from pagegen.targets import capture, cpu

SPEC = AttentionSpec(num_q_heads=6, num_kv_heads=2, head_dim=24, q_dtype="float32")
LAYOUT = CacheLayout(block_size=8)


@pytest.fixture
def forgotten():
    """As a process begins: no plan, no kernel."""
    attention.forget()
    plans._PREPARED.clear()
    for cache in (plans.plan_for, targets.load_attention, cpu._toolchain):
        cache.cache_clear()


@pytest.fixture
def capturing(monkeypatch):
    """As if a CUDA graph were being captured, once it is called."""
    cuda = SimpleNamespace(is_available=lambda: True, is_current_stream_capturing=lambda: True)
    return lambda: monkeypatch.setattr(capture, "torch", SimpleNamespace(cuda=cuda))


def serve(spec=SPEC, steps=20):
    """Prompts of different lengths in one ragged step, then decoding with 1, 3 and 16 sequences."""
    cache = PagedKVCache(1, 64, LAYOUT, spec.num_kv_heads, spec.head_dim, dtype=spec.kv_dtype)
    names = [f"s{i}" for i in range(16)]
    for i, name in enumerate(names):
        cache.add(name, range(i, 2 * i + 3))
    step(cache, names, spec)
    for count in [1, 3, 16] * (steps // 3):
        for name in names[:count]:
            cache.append(name, [7])
        step(cache, names[:count], spec)


def step(cache, names, spec):
    batch = cache.batch(names)
    tokens = len(batch.slot_mapping)
    q, k, v = (torch.randn(tokens, heads, spec.head_dim) for heads in (6, 2, 2))
    pagegen.write_kv(k, v, cache.k_cache(0), cache.v_cache(0), batch.slot_mapping)
    given = {"query_start_loc": batch.query_start_loc} if tokens > len(names) else {}
    longest = int(batch.seq_lens.max())
    pagegen.paged_attention(
        q, cache.k_cache(0), cache.v_cache(0), batch.block_table, batch.seq_lens, max_seq_len=longest, **given
    )


@pytest.mark.compat("torch", "prepare: serving compiles nothing")
def test_a_serving_run_compiles_nothing_that_prepare_did_not(forgotten):
    before = targets.compiled()
    pagegen.prepare(SPEC, LAYOUT)
    ready = targets.compiled()
    assert len(ready) > len(before)
    serve()
    assert targets.compiled() == ready


def test_without_prepare_the_first_step_compiles(forgotten):
    before = targets.compiled()
    serve(steps=0)
    assert len(targets.compiled()) > len(before)


def test_another_spec_is_seen_to_compile(forgotten):
    pagegen.prepare(SPEC, LAYOUT)
    ready = targets.compiled()
    serve(SPEC.replace(kv_dtype="float16"), steps=0)
    assert len(targets.compiled()) > len(ready)


def test_nothing_is_compiled_while_a_graph_is_captured_and_the_message_says_what_to_do(forgotten, capturing):
    capturing()
    with pytest.raises(RuntimeError, match=r"not prepared: call pagegen.prepare\(spec, layout\) before capturing"):
        serve(steps=0)


@pytest.mark.compat("torch", "CUDA graphs, simulated: a prepared step compiles nothing in capture")
def test_a_prepared_step_may_be_captured(forgotten, capturing):
    pagegen.prepare(SPEC, LAYOUT)
    capturing()
    serve(steps=3)
