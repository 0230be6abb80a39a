"""The step graph is no drawing: the work of every path, done on one small batch on the CPU, gives one result."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import pagegen
from pagegen import lowering, selection
from pagegen.cache.batch import Batch
from pagegen.spec import AttentionSpec, CacheLayout, Target, Workload

SPEC = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=32, q_dtype="float32")
LAYOUT = CacheLayout(block_size=8)
PROMPT = list(range(70))  # 8 whole blocks to share
OWN = {"a": 3, "b": 1, "c": 9, "d": 2}


@dataclass
class Data:
    """A step under way: what the model projected, the cache, and whatever a step has left."""

    batch: Batch
    cache: pagegen.PagedKVCache
    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    left: dict[str, Any] = field(default_factory=dict)

    @property
    def written(self) -> tuple[Tensor, Tensor]:
        return self.cache.k_cache(0), self.cache.v_cache(0)

    @property
    def operands(self) -> tuple[Tensor, ...]:
        return (self.q, *self.written, self.batch.block_table, self.batch.seq_lens)


def begin() -> Data:
    """Three sequences that share a prompt that is computed, and one of its own; some with several new tokens."""
    torch.manual_seed(0)
    cache = pagegen.PagedKVCache(1, 60, LAYOUT, SPEC.num_kv_heads, SPEC.head_dim, dtype="float32")
    for pool in cache.pools:
        pool.normal_()
    cache.add("first", PROMPT)
    cache.batch(["first"])
    for name, count in OWN.items():
        cache.add(name, ([900] if name == "d" else PROMPT) + [500 + i for i in range(count)])
    batch = cache.batch(list(OWN))
    tokens = len(batch.positions)
    angles = torch.arange(100)[:, None] / 100.0 ** (torch.arange(16) / 16)
    return Data(
        batch=batch, cache=cache, q=torch.randn(tokens, 8, 32), k=torch.randn(tokens, 2, 32),
        v=torch.randn(tokens, 2, 32), cos=angles.cos(), sin=angles.sin(),
    )  # fmt: skip


def rotate(data: Data) -> None:
    cos, sin = (table[data.batch.positions][:, None].repeat(1, 1, 2) for table in (data.cos, data.sin))
    for name in ("q", "k"):
        rows = getattr(data, name)
        half = torch.cat([-rows[..., 16:], rows[..., :16]], dim=-1)
        setattr(data, name, rows * cos + half * sin)


def write(data: Data) -> None:
    pagegen.write_kv(data.k, data.v, *data.written, data.batch.slot_mapping)


def rotate_and_write(data: Data) -> None:
    data.q = pagegen.rope_write_kv(
        data.q, data.k, data.v, data.batch.positions, data.cos, data.sin, *data.written, data.batch.slot_mapping
    )


def attend(data: Data) -> None:
    data.left["result"] = pagegen.paged_attention(*data.operands, query_start_loc=data.batch.query_start_loc)


def attend_cascade(data: Data) -> None:
    plan = pagegen.plan_cascade(
        data.batch.prefix_groups, data.batch.block_table, data.batch.seq_lens,
        block_size=LAYOUT.block_size, query_lens=data.batch.query_lens,
    )  # fmt: skip
    assert plan is not None
    data.left["result"] = pagegen.cascade_attention(
        *data.operands, query_start_loc=data.batch.query_start_loc, cascade=plan
    )


def gather(data: Data) -> None:
    """[num_seqs, max_blocks * block_size, Hkv, D] of K and of V."""
    table = data.batch.block_table
    data.left["contiguous"] = [
        torch.index_select(cache, 0, table.flatten()).view(len(table), -1, *cache.shape[2:]) for cache in data.written
    ]


def dense(data: Data) -> None:
    keys, values = (rows.transpose(1, 2) for rows in data.left["contiguous"])
    counts, lens = torch.tensor(data.batch.query_lens), data.batch.seq_lens
    most = int(counts.max())
    queries = torch.nn.utils.rnn.pad_sequence(data.q.split(counts.tolist()), batch_first=True).transpose(1, 2)
    q_pos = (lens - counts)[:, None, None] + torch.arange(most)[None, :, None]
    mask = torch.arange(keys.shape[2])[None, None, :] <= q_pos
    out = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, mask[:, None], enable_gqa=True)
    data.left["result"] = torch.cat([rows[:, :count].transpose(0, 1) for rows, count in zip(out, counts, strict=True)])


def reference(data: Data) -> None:
    data.left["result"] = pagegen.reference_attention(
        *data.operands, query_start_loc=data.batch.query_start_loc, compute_dtype=torch.float32
    )


WORK: dict[str, Callable[[Data], None]] = {
    "rotate": rotate,
    "write": write,
    "rotate and write": rotate_and_write,
    "attend": attend,
    # both passes and the merge are one call
    "attend prefix": attend_cascade,
    "attend own": lambda data: None,
    "merge": lambda data: None,
    "gather": gather,
    "dense": dense,
    "gather and attend densely": reference,
}


def graph() -> lowering.Graph:
    batch = begin().batch
    workload = Workload(context_lens=tuple(batch.seq_lens.tolist()), query_lens=batch.query_lens)
    target = Target("cpu")
    chosen = selection.select(SPEC, LAYOUT, target, workload)
    return lowering.step_graph(
        SPEC, LAYOUT, chosen.variant, selection.device_for(target), workload, prefix_groups=batch.prefix_groups
    )


def expected() -> Tensor:
    data = begin()
    rotate(data)
    write(data)
    result = pagegen.reference_attention(*data.operands, query_start_loc=data.batch.query_start_loc)
    assert isinstance(result, Tensor)
    return result


def test_every_path_that_the_graph_knows_gives_the_same_result() -> None:
    found = lowering.paths(graph())
    assert len(found) == 8  # two ways to write; attend, cascade, gather + dense, and densely from the blocks
    wanted = expected()
    for path in found:
        data = begin()
        for step in path.steps:
            WORK[step.name](data)
        torch.testing.assert_close(
            data.left["result"], wanted, atol=2e-5, rtol=1e-4, msg=lambda m, path=path: f"{path.name}: {m}"
        )


def test_a_path_that_leaves_out_a_step_would_be_noticed() -> None:
    data = begin()
    write(data)  # not rotated
    attend(data)
    assert not math.isclose(float((data.left["result"] - expected()).abs().max()), 0.0, abs_tol=1e-3)


def test_the_plan_is_one_of_them() -> None:
    drawn = graph()
    assert lowering.plan(drawn).steps == lowering.paths(drawn)[0].steps
    assert lowering.plan(drawn).us == pytest.approx(sum(step.us for step in lowering.plan(drawn).steps))
