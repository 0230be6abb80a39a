"""How a CPU kernel divides a batch among threads: read from the plan that it makes, without computing anything."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace

import pytest
import torch

from pagegen.codegen import cpp
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant
from pagegen.targets import cpp_build, cpu

pytestmark = pytest.mark.skipif(cpu.compiler() is None, reason="needs a C++ compiler")
SPEC = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, q_dtype=torch.bfloat16)
LAYOUT = CacheLayout(block_size=16)
BY_TOKEN = CppVariant(tile_kv=128, streams=8, heads_together=8, rows_together=4, read_order="token", split_tokens=1024)
BY_HEAD = replace(BY_TOKEN, read_order="head", split_tokens=2048)
MOST_ITEMS = 1 << 16
PLAN = """
#include <vector>
extern "C" int64_t plan(const int32_t* lengths, const int32_t* starts, int64_t num_seqs, int64_t num_threads,
                        int64_t* work, int64_t* figures) {
  using namespace pagegen;
  pagegen_attention_args a{};
  a.seq_lens = lengths;
  a.query_start_loc = starts;
  a.num_seqs = num_seqs;
  a.num_threads = num_threads;
  const auto d = Attention<Constants>::divide(a);
  std::vector<Item> items(d.counts.items);
  std::vector<Merge> merges(d.counts.merges + 1);
  Attention<Constants>::plan(a, d.heads, d.chunk, items.data(), merges.data());
  for (int64_t i = 0; i < d.counts.items; i++) work[i] = items[i].work(Constants::group);
  figures[0] = d.threads;
  figures[1] = d.heads;
  figures[2] = d.counts.work;
  figures[3] = d.counts.largest;
  return d.counts.items;
}
"""
DECODE = {
    "one": [(4096, 1)], "short": [(512, 1)], "three": [(700, 1)] * 3, "many": [(512, 1)] * 32,
    "one long": [(9000, 1)] + [(30, 1)] * 40, "ragged": [(100 * i + 1, 1) for i in range(9)],
}  # fmt: skip
PREFILL = {"one prompt": [(512, 512)], "chunk": [(2560, 512)], "two": [(300, 300), (1700, 40)]}
MIXED = {"mixed": [(700, 1), (2000, 1), (600, 300)]}
THREADS = (1, 2, 3, 8, 16, 64)


@dataclass(frozen=True, kw_only=True)
class Found:
    """`work`: (row, key) pairs of each item, in the order in which threads take them."""

    work: list[int]
    threads: int
    heads: int
    total: int
    largest: int

    def slowest(self) -> float:
        """What the thread with most to do has, over its share, where each takes the next item when it is done."""
        busy = [0] * self.threads
        for work in self.work:
            least = busy.index(min(busy))
            busy[least] += work
        return max(busy) * self.threads / self.total


@functools.cache
def library(variant: CppVariant) -> ctypes.CDLL:
    return cpp_build.load(cpp.render_attention(SPEC, LAYOUT, variant) + PLAN, f"{variant.name}, its plan")


def plan(variant: CppVariant, sequences: list[tuple[int, int]], threads: int) -> Found:
    lengths = torch.tensor([length for length, _ in sequences], dtype=torch.int32)
    starts = torch.tensor([0, *(queries for _, queries in sequences)]).cumsum(0).to(torch.int32)
    work, figures = torch.zeros(MOST_ITEMS, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    function = library(variant).plan
    function.restype = ctypes.c_int64
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, *[ctypes.c_void_p] * 2]
    items = function(
        lengths.data_ptr(), starts.data_ptr(), len(sequences), threads, work.data_ptr(), figures.data_ptr()
    )
    used, heads, total, largest = figures.tolist()
    return Found(work=work[:items].tolist(), threads=used, heads=heads, total=total, largest=largest)


@pytest.mark.parametrize("variant", [BY_TOKEN, BY_HEAD], ids=["by token", "by head"])
@pytest.mark.parametrize("sequences", [*DECODE.values(), *PREFILL.values(), *MIXED.values()],
                         ids=[*DECODE, *PREFILL, *MIXED])  # fmt: skip
@pytest.mark.parametrize("threads", THREADS)
def test_a_plan_knows_its_work_and_shares_it_out(
    variant: CppVariant, sequences: list[tuple[int, int]], threads: int
) -> None:
    found = plan(variant, sequences, threads)
    assert found.threads <= threads
    assert (found.total, found.largest) == (sum(found.work), max(found.work))
    # where heads are alone nothing is left to divide
    assert found.slowest() <= (1.5 if variant == BY_TOKEN else 1.25) or found.heads == 1


@pytest.mark.parametrize("sequences", [*PREFILL.values(), *MIXED.values()], ids=[*PREFILL, *MIXED])
@pytest.mark.parametrize("threads", THREADS)
def test_prompts_are_divided_alike_in_either_order(sequences: list[tuple[int, int]], threads: int) -> None:
    by_token = plan(replace(BY_TOKEN, split_tokens=2048), sequences, threads)
    assert by_token == plan(BY_HEAD, sequences, threads)


def test_by_token_an_item_keeps_all_heads_while_no_thread_gets_half_more_than_its_share() -> None:
    assert plan(BY_TOKEN, [(4096, 1)], 2).heads == 8  # four items of 1024 tokens
    assert plan(BY_TOKEN, [(700, 1)] * 3, 2).heads == 8  # three for two: 1.33
    assert plan(BY_TOKEN, [(1000, 1)], 2).heads == 4  # one: another thread would be idle
    assert plan(BY_TOKEN, [(1000, 1)] * 5, 4).heads == 4  # five for four: 1.6
    assert plan(BY_HEAD, [(4096, 1)], 2).heads == 2  # by head more items cost little
