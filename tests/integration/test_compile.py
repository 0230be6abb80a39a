"""The operators under torch.compile: one graph for every batch, caches written in place, opcheck clean."""

from __future__ import annotations

import re

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.library import opcheck

import pagegen
from pagegen import CacheLayout, PagedKVCache

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 8
LAYERS, BLOCKS = 3, 64
CACHE_ELEMENTS = BLOCKS * BLOCK * KV_HEADS * DIM
ops = torch.ops.pagegen


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


@pytest.fixture
def uncached():
    """The code is looked at, so it must be generated."""
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


def decode_inputs(num_seqs: int, width: int, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v, slot_mapping, block_table, seq_lens of a decode step. Row i uses blocks of its own where they last."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_seqs, HEADS, DIM, generator=generator)
    k, v = (torch.randn(num_seqs, KV_HEADS, DIM, generator=generator) for _ in range(2))
    table = (torch.arange(num_seqs * width, dtype=torch.int32) % BLOCKS).reshape(num_seqs, width)
    lens = (torch.arange(num_seqs, dtype=torch.int32) % BLOCK) + 1
    slots = table[:, 0].long() * BLOCK + lens.long() - 1
    slots[len(slots.unique()) :] = -1
    return [q, k, v, slots, table, lens]


def attend_twice(q, k, v, slots, table, lens, k_cache, v_cache):
    """Two layers' worth of work on one cache: what is written must be seen."""
    for factor in (1.0, 2.0):
        pagegen.write_kv(k * factor, v * factor, k_cache, v_cache, slots)
        q = q + pagegen.paged_attention(q, k_cache, v_cache, table, lens)
    return q


def empty_caches() -> list[torch.Tensor]:
    return [torch.zeros(BLOCKS, BLOCK, KV_HEADS, DIM) for _ in range(2)]


@pytest.mark.compat("torch", "torch.compile, fullgraph: one graph for every batch and table width")
def test_one_graph_serves_every_batch_size_and_block_table_width_and_one_more_a_batch_of_one():
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(attend_twice, fullgraph=True, backend=counter)
    first = decode_inputs(8, 5)
    for tensor in first:
        torch._dynamo.mark_dynamic(tensor, 0)
    torch._dynamo.mark_dynamic(first[4], 1)
    with torch.no_grad():
        compiled(*first, *empty_caches())
        for num_seqs, width in ((2, 2), (3, 9), (9, 4), (33, 7), (64, 3)):
            inputs = decode_inputs(num_seqs, width, seed=num_seqs)
            expected = attend_twice(*inputs, *empty_caches())
            torch.testing.assert_close(compiled(*inputs, *empty_caches()), expected)
        assert counter.frame_count == 1
        compiled(*decode_inputs(1, 2), *empty_caches())
        assert counter.frame_count == 2


@pytest.mark.compat("torch", "torch.compile: contexts grow without compiling anew")
def test_a_longer_context_compiles_nothing_once_the_bound_is_dynamic():
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def attend(q, table, lens, k_cache, v_cache, longest):
        return pagegen.paged_attention(q, k_cache, v_cache, table, lens, max_seq_len=longest)

    q, _, _, _, table, lens = decode_inputs(8, 5)
    with torch.no_grad():
        for longest in (9, 10, 20, 33, 40):
            attend(q, table, lens, *empty_caches(), longest)
    assert counter.frame_count == 2  # a constant first, then any integer


def large_buffers(code: str) -> list[str]:
    """Lines of Inductor's output that allocate or loop over as much as a layer's cache."""
    found = []
    for line in code.splitlines():
        allocated = re.search(r"empty_strided_\w+\(\(([\d, ]+)\)", line)
        looped = re.search(r"<static_cast<int64_t>\((\d+)L\)", line)
        sizes = [int(n) for n in re.findall(r"\d+", allocated[1])] if allocated else []
        elements = torch.Size(sizes).numel() if sizes else int(looped[1]) if looped else 0
        if elements >= CACHE_ELEMENTS:
            found.append(line.strip())
    return found


def compiled_code(function, *args) -> tuple[torch.Tensor, str]:
    with torch.no_grad():
        result, sources = run_and_get_code(torch.compile(function, fullgraph=True), *args)
    return result, "\n".join(sources)


def test_the_clone_check_sees_a_clone(uncached):
    def clones(q, k, v, slots, table, lens, k_cache, v_cache):
        return attend_twice(q, k, v, slots, table, lens, k_cache + 1, v_cache + 1)

    _, code = compiled_code(clones, *decode_inputs(4, 3), *empty_caches())
    assert large_buffers(code)


class Holder(torch.nn.Module):
    """Layers that own their caches as buffers."""

    def __init__(self):
        super().__init__()
        for layer in range(LAYERS):
            for name, cache in zip("kv", empty_caches(), strict=True):
                self.register_buffer(f"{name}{layer}", cache)

    def forward(self, *inputs):
        return layers(inputs, [(getattr(self, f"k{layer}"), getattr(self, f"v{layer}")) for layer in range(LAYERS)])


def layers(inputs, caches):
    q, k, v, slots, table, lens = inputs
    for k_cache, v_cache in caches:
        pagegen.write_kv(k, v, k_cache, v_cache, slots)
        q = q + pagegen.paged_attention(q, k_cache, v_cache, table, lens)
    return q


def paged_cache_of(order: str):
    def make():
        layout = CacheLayout(block_size=BLOCK, order=order)
        cache = PagedKVCache(LAYERS, BLOCKS, layout, KV_HEADS, DIM, dtype=torch.float32)
        return lambda *inputs: layers(inputs, [(cache.k_cache(i), cache.v_cache(i)) for i in range(LAYERS)])

    return make


def interleaved_pool():
    """One tensor [layer, block, K or V, token, head, dim], cut up inside the graph."""
    pool = torch.zeros(LAYERS, BLOCKS, 2, BLOCK, KV_HEADS, DIM)
    return lambda *inputs: layers(inputs, [pool[i].unbind(1) for i in range(LAYERS)])


@pytest.mark.compat("torch", "Inductor copies no cache")
@pytest.mark.parametrize(
    "make",
    [paged_cache_of("NHD"), pytest.param(paged_cache_of("HND"), marks=pytest.mark.nightly), interleaved_pool, Holder],
    ids=["PagedKVCache NHD", "PagedKVCache HND", "interleaved pool", "module buffers"],
)
def test_no_cache_is_copied_and_the_operators_write_where_it_lies(make, uncached):
    inputs = decode_inputs(4, 3)
    with torch.no_grad():
        expected = make()(*inputs)
    result, code = compiled_code(make(), *inputs)
    torch.testing.assert_close(result, expected)
    assert not large_buffers(code)
    writes = [line for line in code.splitlines() if "pagegen.write_kv.default(" in line]
    assert len(writes) == LAYERS
    # keys, values, both caches and the slots are inputs of the graph or parts of them, none a buffer made in between
    assert all(len(re.findall(r"\barg\w+", line)) == 5 for line in writes), writes


def ragged(dtype=torch.float32) -> dict[str, torch.Tensor]:
    """Three sequences of 3, 0 and 1 queries."""
    generator = torch.Generator().manual_seed(0)
    return {
        "q": torch.randn(4, HEADS, DIM, generator=generator).to(dtype),
        "k": torch.randn(4, KV_HEADS, DIM, generator=generator).to(dtype),
        "v": torch.randn(4, KV_HEADS, DIM, generator=generator).to(dtype),
        "k_cache": torch.randn(6, BLOCK, KV_HEADS, DIM, generator=generator).to(dtype),
        "v_cache": torch.randn(6, BLOCK, KV_HEADS, DIM, generator=generator).to(dtype),
        "table": torch.tensor([[4, 1], [0, 0], [2, 5]], dtype=torch.int32),
        "lens": torch.tensor([11, 0, 9], dtype=torch.int32),
        "starts": torch.tensor([0, 3, 3, 4], dtype=torch.int32),
        "slots": torch.tensor([8, -1, 10, 40]),
    }


VARIATIONS = {
    "plain": {},
    "lse and bounds": {"return_lse": True, "max_query_len": 3, "max_seq_len": 16},
    "window, scale, softcap": {"window": 5, "scale": 0.3, "logit_softcap": 20.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "tree": {"tree_mask": torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1], [1, 0, 0]], dtype=torch.bool)},
    "not causal": {"causal": False},
}


@pytest.mark.compat("torch", "opcheck: paged_attention")
@pytest.mark.parametrize("options", VARIATIONS.values(), ids=VARIATIONS)
def test_opcheck_passes_for_attention(options):
    x = ragged()
    args = (x["q"], x["k_cache"], x["v_cache"], x["table"], x["lens"])
    opcheck(ops.paged_attention.default, args, {"query_start_loc": x["starts"], **options})


def test_opcheck_passes_for_attention_into_a_given_tensor():
    x = ragged(torch.bfloat16)
    args = (x["q"], x["k_cache"], x["v_cache"], x["table"], x["lens"])
    options = {"query_start_loc": x["starts"], "out": torch.empty_like(x["q"]), "return_lse": True}
    opcheck(ops.paged_attention.out, args, options)


def test_opcheck_passes_for_attention_over_a_latent_cache():
    x = ragged()
    opcheck(ops.paged_attention.default, (x["q"][:3], x["k_cache"], None, x["table"], x["lens"]), {"v_head_dim": 8})


@pytest.mark.compat("torch", "opcheck: write_kv")
def test_opcheck_passes_for_write_kv():
    x = ragged()
    opcheck(ops.write_kv.default, (x["k"], x["v"], x["k_cache"], x["v_cache"], x["slots"]))


def test_opcheck_passes_for_write_kv_that_quantises():
    x = ragged()
    caches = [x[name].to(torch.int8) for name in ("k_cache", "v_cache")]  # opcheck itself cannot compare float8
    scales = {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor([1.0, 3.0])}
    opcheck(ops.write_kv.default, (x["k"], x["v"], *caches, x["slots"]), scales)


@pytest.mark.compat("torch", "opcheck: rope_write_kv")
@pytest.mark.parametrize("interleaved", [False, True])
def test_opcheck_passes_for_rope_write_kv(interleaved):
    x = ragged()
    angles = torch.arange(16)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    args = (x["q"], x["k"], x["v"], torch.tensor([8, 9, 10, 8]), angles.cos(), angles.sin())
    caches = (x["k_cache"], x["v_cache"], x["slots"])
    opcheck(ops.rope_write_kv.default, (*args, *caches), {"interleaved": interleaved})


@pytest.mark.compat("torch", "opcheck: copy_blocks")
def test_opcheck_passes_for_copy_blocks():
    x = ragged()
    opcheck(ops.copy_blocks.default, (x["k_cache"], x["v_cache"], torch.tensor([[0, 3], [4, 5]])))


@pytest.mark.compat("torch", "opcheck: merge_states")
def test_opcheck_passes_for_merge_states():
    x = ragged()
    lses = torch.randn(2, 4, HEADS, generator=torch.Generator().manual_seed(1))
    lses[0, 1] = -torch.inf
    opcheck(ops.merge_states.default, (torch.stack([x["q"], x["q"] + 1]), lses))
