"""What every rank of a process group checks: run by test_parallel.py, one set of processes for all checks of a size.

A check is a function of (ranks, rank) that raises where something is wrong; all ranks run the same ones in the same
order. What is compared with is always the operator's float64 reference over the whole batch.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batches import Batch, compare, make_batch
from spread_blocks import dealt
from torch import Tensor

import pagegen
from pagegen.integrations import context_parallel, sharding
from pagegen.integrations.context_parallel import BlockSpread
from pagegen.modifiers import score_mod
from pagegen.reference import reference_attention
from pagegen.spec import AttentionSpec
from pagegen.targets import cpp_build

DECODE = [(37, 1), (1, 1), (0, 1), (64, 1)]
RAGGED = [(20, 7), (0, 0), (33, 1), (16, 16), (70, 40)]
SIZES = (2, 4)
TENSOR = "tensor parallelism: DTensors on gloo ranks"
CONTEXT = "context parallelism on gloo ranks"
FEATURES: dict[str, str] = {}
Check = Callable[[int, int], None]
CHECKS: dict[int, dict[str, Check]] = {ranks: {} for ranks in SIZES}


def check(feature: str, sizes: Iterable[int] = SIZES) -> Callable[[Check], Check]:
    """A check of groups of `sizes` ranks, which shows the `feature`."""

    def entered(function: Check) -> Check:
        FEATURES[function.__name__] = feature
        for ranks in sizes:
            CHECKS[ranks][function.__name__] = function
        return function

    return entered


def run(rank: int, ranks: int, folder: str) -> None:
    """One rank: runs all checks and leaves what they said in `folder`."""
    os.environ["PAGEGEN_DB"] = f"{folder}/{rank}.db"
    torch.set_num_threads(1)
    cpp_build._built = one_at_a_time(cpp_build._built, Path(folder, "compiling"))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=60)
    )
    sharding.register()
    sharding.register()  # again is harmless
    said: dict[str, str | None] = {}
    for name, function in CHECKS[ranks].items():
        try:
            with torch.inference_mode():
                function(ranks, rank)
            said[name] = None
        except (Exception, pytest.fail.Exception):  # whatever a check raises is what the test reports
            said[name] = traceback.format_exc()
    Path(folder, f"{rank}.json").write_text(json.dumps(said), encoding="utf-8")
    dist.destroy_process_group()


def one_at_a_time(build: Callable[..., Any], lock: Path) -> Callable[..., Any]:
    """`build` for one rank at a time: the others find there what the first one compiled."""

    def alone(*args: Any, **options: Any) -> Any:
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            return build(*args, **options)

    return alone


def spec_of(ranks: int, **fields: Any) -> AttentionSpec:
    fields = {"num_q_heads": 4 * ranks, "num_kv_heads": 2 * ranks, "head_dim": 16, "q_dtype": "bfloat16", **fields}
    return AttentionSpec(**fields)


HEADS = {"q": 1, "k_cache": 2, "v_cache": 2, "alibi_slopes": 0, "sinks": 0, "k": 1, "v": 1}


def line(ranks: int) -> Any:
    return dist.device_mesh.init_device_mesh("cpu", (ranks,))


def placed(name: str, value: Tensor, mesh: Any, *, sharded: bool | None = None) -> Any:
    """A tensor that every rank has whole as a DTensor, its heads sharded where it has some. Memory is this rank's own,
    in the order of the whole tensor's."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    dim = HEADS.get(name)
    if name.endswith(("_scale", "_zero")) and value.numel() > 1:
        dim = value.dim() - 1
    if dim is None or sharded is False:
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    local = value.chunk(mesh.size(), dim)[mesh.get_rank()]
    order = sorted(range(local.dim()), key=local.stride, reverse=True)
    own = (
        local.permute(order)
        .clone(memory_format=torch.contiguous_format)
        .permute([*map(order.index, range(local.dim()))])
    )
    return DTensor.from_local(own, mesh, [Shard(dim)], run_check=False)


def on_mesh(batch: Batch, mesh: Any, leave: Iterable[str] = ()) -> dict[str, Any]:
    """The arguments of a batch but those to `leave`, its tensors as DTensors."""
    given = {n: v for n, v in batch.kwargs().items() if n not in leave}
    return {n: placed(n, v, mesh) if isinstance(v, Tensor) else v for n, v in given.items()}


def attends(batch: Batch, given: dict[str, Any]) -> None:
    """The operator on DTensors gives the reference's result, placed like q, without a message between ranks."""
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as messages:
        out, lse = pagegen.paged_attention(**given, return_lse=True)
    assert messages.get_total_counts() == 0, messages.get_comm_counts()
    assert out.placements == lse.placements == given["q"].placements
    compare(out.full_tensor(), lse.full_tensor(), *batch.expected(), batch.spec.q_dtype, batch.spec.kv_dtype)


@check(TENSOR)
def attention_runs_on_each_ranks_own_heads(ranks: int, rank: int) -> None:
    spec = spec_of(ranks, sinks=True, window=19, logit_softcap=20.0, alibi=True)
    for order, sequences in (("NHD", DECODE), ("HND", RAGGED), ("pool", RAGGED)):
        batch = make_batch(spec, sequences, block_size=8, order=order)
        attends(batch, on_mesh(batch, line(ranks)))
        attends(batch.permuted(), on_mesh(batch.permuted(), line(ranks)))


@check(TENSOR)
def a_float_scale_and_scales_of_heads_and_tokens_follow_the_caches(ranks: int, rank: int) -> None:
    for granularity, zeros in (("tensor", False), ("head", False), ("token_head", True)):
        spec = spec_of(ranks, kv_dtype="int8", kv_scale_granularity=granularity, kv_zero_points=zeros)
        batch = make_batch(spec, DECODE, block_size=8)
        given = on_mesh(batch, line(ranks))
        attends(batch, given)
        if granularity == "tensor":
            attends(batch, {**given, "k_scale": float(batch.k_scale), "v_scale": float(batch.v_scale)})


@check(TENSOR)
def writes_stay_in_each_ranks_own_cache(ranks: int, rank: int) -> None:
    mesh, heads = line(ranks), 2 * ranks
    generator = torch.Generator().manual_seed(1)
    k, v, q = (torch.randn(5, n, 16, generator=generator) for n in (heads, heads, 2 * heads))
    slots, positions = torch.tensor([3, -1, 8, 0, 17]), torch.tensor([0, 5, 2, 9, 1])
    cos, sin = torch.rand(12, 8, generator=generator), torch.rand(12, 8, generator=generator)
    plain = {"k": k, "v": v, "k_cache": torch.zeros(4, 8, heads, 16), "v_cache": torch.zeros(4, 8, heads, 16)}
    scales = {f"{n}_{what}": torch.ones(4, 8, heads) for n in "kv" for what in ("scale", "zero")}
    stored = {n: torch.zeros(4, 8, heads, 16, dtype=torch.int8) for n in ("k_cache", "v_cache")}
    spread = {n: placed(n, t.clone(), mesh) for n, t in plain.items()}
    spread_scales = {n: placed(n, t.clone(), mesh) for n, t in scales.items()}
    spread_stored = {n: placed(n, t.clone(), mesh) for n, t in stored.items()}
    addresses = {n: t.to_local().data_ptr() for n, t in spread.items()}
    rest = {"slot_mapping": slots, "positions": positions, "cos": cos, "sin": sin}
    spread_rest = {n: placed(n, t, mesh) for n, t in rest.items()}

    def written(tensors: dict[str, Any], others: dict[str, Any], q: Any) -> Any:
        return pagegen.rope_write_kv(q, **tensors, **others)

    rotated = written(spread, spread_rest, placed("q", q, mesh))
    assert rotated.placements == placed("q", q, mesh).placements
    torch.testing.assert_close(rotated.full_tensor(), written(plain, rest, q), rtol=0, atol=0)
    for tensors, more, held, at in (
        (plain, scales, stored, slots),
        (spread, spread_scales, spread_stored, spread_rest["slot_mapping"]),
    ):
        pagegen.write_kv(tensors["k"], tensors["v"], tensors["k_cache"], tensors["v_cache"], at)
        pagegen.update_scales(tensors["k"], tensors["v"], at, **more, kv_dtype="int8")
        pagegen.write_kv(tensors["k"], tensors["v"], **held, slot_mapping=at, **more)
        pairs = torch.tensor([[0, 3], [1, 2]])
        moved = pairs if held is stored else placed("pairs", pairs, mesh)
        pagegen.copy_blocks(tensors["k_cache"], tensors["v_cache"], moved)
        pagegen.copy_blocks(held["k_cache"], held["v_cache"], moved)
    for mine, theirs in ((plain, spread), (scales, spread_scales), (stored, spread_stored)):
        for name in mine:
            torch.testing.assert_close(theirs[name].full_tensor(), mine[name], rtol=0, atol=0, msg=name)
    assert addresses == {n: t.to_local().data_ptr() for n, t in spread.items()}


@check(TENSOR)
def states_merge_by_head_and_by_query(ranks: int, rank: int) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, generator = line(ranks), torch.Generator().manual_seed(2)
    outs = torch.randn(3, 2 * ranks, 2 * ranks, 8, generator=generator)
    lses = torch.randn(3, 2 * ranks, 2 * ranks, generator=generator)
    expected = pagegen.merge_states(outs, lses)
    for dim in (0, 1):
        stacked = pagegen.merge_states(*(distribute_tensor(t, mesh, [Shard(dim + 1)]) for t in (outs, lses)))
        listed = pagegen.merge_states(*([distribute_tensor(s, mesh, [Shard(dim)]) for s in t] for t in (outs, lses)))
        for got in (*zip(stacked, expected, strict=True), *zip(listed, expected, strict=True)):
            assert got[0].placements == (Shard(dim),)
            torch.testing.assert_close(got[0].full_tensor(), got[1])


@check(TENSOR)
def fewer_kv_heads_than_ranks_are_replicated(ranks: int, rank: int) -> None:
    """By a mesh whose inner dimension has the copies, by expanding the cache to a head a rank, and for MLA."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    kv_heads = max(1, ranks // 2)
    spec = spec_of(ranks, num_kv_heads=kv_heads, sinks=True)
    batch = make_batch(spec, RAGGED, block_size=8)
    shard = sharding.head_shard(spec, rank, ranks)
    local = {n: v[..., shard.kv_heads, :].clone() for n, v in (("k_cache", batch.k_cache), ("v_cache", batch.v_cache))}
    local |= {"q": batch.q[:, shard.q_heads].clone(), "sinks": batch.sinks[shard.q_heads].clone()}
    mesh = dist.device_mesh.init_device_mesh("cpu", (kv_heads, ranks // kv_heads))
    whole = on_mesh(batch, mesh, leave=local)
    q_places, kv_places = [Shard(1), Shard(1)], [Shard(2), Replicate()]
    places = {"q": q_places, "sinks": [Shard(0), Shard(0)], "k_cache": kv_places, "v_cache": kv_places}
    attends(batch, {**whole, **{n: DTensor.from_local(v, mesh, places[n], run_check=False) for n, v in local.items()}})

    row = line(ranks)
    whole = on_mesh(batch, row, leave=local)
    expanded = {n: DTensor.from_local(v, row, [Shard(HEADS[n])], run_check=False) for n, v in local.items()}
    assert expanded["k_cache"].shape[2] == ranks
    attends(batch, {**whole, **expanded})

    latent = make_batch(spec_of(ranks, num_kv_heads=1, v_head_dim=8, shared_kv=True), DECODE, block_size=8)
    attends(
        latent,
        {**on_mesh(latent, row, leave=["k_cache"]), "k_cache": placed("k_cache", latent.k_cache, row, sharded=False)},
    )


@check(TENSOR)
def what_cannot_be_sharded_is_refused_by_name(ranks: int, rank: int) -> None:
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    mesh = line(ranks)
    batch = make_batch(spec_of(ranks, sinks=True), RAGGED, block_size=8)
    given = on_mesh(batch, mesh)
    pagegen.paged_attention(**given)  # DTensor has cached a decision by now
    from_the_end = DTensor.from_local(given["q"].to_local(), mesh, [Shard(-2)], run_check=False)
    attends(batch, {**given, "q": from_the_end})

    def whole(name: str) -> Any:
        return placed(name, batch.kwargs()[name], mesh, sharded=False)

    def put(name: str, placement: Any) -> Any:
        return DTensor.from_local(given[name].to_local(), mesh, [placement], run_check=False)

    head_mod = score_mod(lambda score, batch, head, q_pos, k_pos: score * head)
    few = make_batch(
        spec_of(ranks, num_q_heads=2 * ranks + 2, num_kv_heads=ranks + 1, sinks=True), RAGGED, block_size=8
    )
    for change, message in (
        ({"sinks": whole("sinks")}, r"sinks must be Shard\(0\) on mesh dimension 0 like q"),
        ({"v_cache": whole("v_cache")}, r"v_cache must be Shard\(2\) on mesh dimension 0 like k_cache"),
        ({n: whole(n) for n in ("k_cache", "v_cache")}, r"k_cache must be Shard\(2\) on every mesh dimension that q"),
        ({"q": whole("q"), "sinks": whole("sinks")}, r"k_cache must be Shard\(2\) on every mesh dimension that q"),
        ({"q": put("q", Shard(0))}, r"q must be Shard\(1\) \(heads\) or Replicate\(\)"),
        ({"q": put("q", Partial())}, r"q must be Shard\(1\) \(heads\) or Replicate\(\)"),
        ({"q": put("q", Shard(-1))}, r"q must be Shard\(1\) \(heads\) or Replicate\(\) on mesh dimension 0"),
        ({"k_cache": put("k_cache", Shard(0))}, r"k_cache must be Shard\(2\) \(heads\) or Replicate\(\)"),
        ({"seq_lens": put("seq_lens", Shard(0))}, r"seq_lens must be Replicate\(\) on mesh dimension 0"),
        ({"out": placed("q", batch.q, mesh)}, "out must be None where tensors are DTensors"),
        ({"block_table": batch.block_table}, "mixed torch.Tensor and DTensor"),
        ({"score_mod": head_mod}, "score_mod must not depend on the head"),
    ):
        with pytest.raises(RuntimeError, match=message):
            pagegen.paged_attention(**{**given, **change})
    with pytest.raises(RuntimeError, match=rf"must have a multiple of {ranks} heads .*head_shard"):
        uneven = ("q", "k_cache", "v_cache", "sinks")
        parts = {n: distribute_tensor(few.kwargs()[n], mesh, [Shard(HEADS[n])]) for n in uneven}
        pagegen.paged_attention(**on_mesh(few, mesh, leave=uneven), **parts)
    k = placed("k", torch.zeros(1, 2 * ranks, 16, dtype=torch.bfloat16), mesh)
    with pytest.raises(RuntimeError, match=r"k_cache must be Replicate|k_cache must be Shard\(2\)"):
        slots = placed("slot_mapping", torch.zeros(1, dtype=torch.int64), mesh)
        pagegen.write_kv(k, k, whole("k_cache"), whole("v_cache"), slots)


@check(TENSOR)
def a_score_function_that_does_not_read_the_head_is_served(ranks: int, rank: int) -> None:
    halve = score_mod(lambda score, batch, head, q_pos, k_pos: score * 0.5 + 0.01 * k_pos)
    batch = make_batch(spec_of(ranks, score_mod=halve.name), RAGGED, block_size=8)
    attends(batch, on_mesh(batch, line(ranks)))


# of two ranks alone: what is traced is the same for four, and takes each of them seconds
@check(TENSOR, sizes=[2])
def a_compiled_step_writes_and_attends_without_a_break(ranks: int, rank: int) -> None:
    batch = make_batch(spec_of(ranks), RAGGED, block_size=8)
    mesh = line(ranks)
    given = on_mesh(batch, mesh)
    rows = sum(n for _, n in RAGGED)
    k = torch.randn(rows, 2 * ranks, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    slots = [  # this step's own tokens
        int(batch.block_table[s, p // 8]) * 8 + p % 8 for s, (n, q) in enumerate(RAGGED) for p in range(n - q, n)
    ]
    spread_k, spread_slots = placed("k", k, mesh), placed("slot_mapping", torch.tensor(slots), mesh)

    def step(k: Any, slots: Any, given: dict[str, Any]) -> Any:
        pagegen.write_kv(k, k, given["k_cache"], given["v_cache"], slots)
        return pagegen.paged_attention(**given)

    out = torch.compile(step, backend="aot_eager", fullgraph=True)(spread_k, spread_slots, given)
    pagegen.write_kv(k, k, batch.k_cache, batch.v_cache, torch.tensor(slots))
    assert out.placements == given["q"].placements
    compare(out.full_tensor(), None, *batch.expected(), torch.bfloat16)
    torch.testing.assert_close(given["k_cache"].full_tensor().nan_to_num(), batch.k_cache.nan_to_num(), rtol=0, atol=0)


def spread_attention(batch: Batch, spread: BlockSpread, rank: int, **options: Any) -> tuple[Tensor, Tensor]:
    """The batch's result where every rank has its own blocks alone, all others being poison."""
    table, k_cache, v_cache = dealt(batch, spread, rank)
    decode = batch.query_start_loc is None
    lengths, counts = zip(*batch.sequences, strict=True)
    share = context_parallel.share_of(
        spread, rank, table, batch.seq_lens if decode else lengths, query_lens=None if decode else counts,
        causal=batch.spec.causal, window=batch.spec.window,
    )  # fmt: skip
    result = context_parallel.attention(
        share, batch.q, k_cache, v_cache, sinks=batch.sinks, scale=batch.spec.scale, return_lse=True,
        logit_softcap=batch.spec.logit_softcap, **options,
    )  # fmt: skip
    return result[0], result[1]


@check(CONTEXT)
def blocks_on_several_ranks_give_the_whole_result_on_each(ranks: int, rank: int) -> None:
    for fields in ({"sinks": True}, {"window": 11, "logit_softcap": 20.0}, {"causal": False}):
        spec = spec_of(2, **fields)
        for sequences, stripe in ((DECODE, 1), (RAGGED, 1), (RAGGED, 3)):
            batch = make_batch(spec, sequences, block_size=8)
            spread = BlockSpread(ranks=ranks, block_size=8, stripe_blocks=stripe)
            for one in (batch, batch.permuted()):
                compare(*spread_attention(one, spread, rank), *batch.expected(), torch.bfloat16)


@check(CONTEXT)
def scattered_heads_are_each_ranks_own_part_of_the_result(ranks: int, rank: int) -> None:
    batch = make_batch(spec_of(2, q_dtype="float32", sinks=True), RAGGED, block_size=8)
    own = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
    out, lse = spread_attention(batch, BlockSpread(ranks=ranks, block_size=8), rank, scatter_heads=True)
    expected, expected_lse = batch.expected()
    compare(out, lse, expected[:, own], expected_lse[:, own], torch.float32)
    odd = make_batch(spec_of(1, num_q_heads=ranks + 1, num_kv_heads=1), DECODE, block_size=8)
    with pytest.raises(ValueError, match=f"out must have a multiple of {ranks} heads"):
        spread_attention(odd, BlockSpread(ranks=ranks, block_size=8), rank, scatter_heads=True)


@check(CONTEXT)
def a_state_of_any_width_travels_with_its_lse(ranks: int, rank: int) -> None:
    for shape in ((1, 1, 3), (2, 3, 5), (0, 4, 8)):
        for dtype in (torch.bfloat16, torch.float32):
            out = torch.full(shape, float(rank), dtype=dtype)
            lse = torch.where(torch.ones(shape[:2]) > 0, 0.0 if rank < 2 else -torch.inf, 0.0)
            merged, total = context_parallel.merge_over_ranks(out, lse)
            assert (merged == 0.5).all(), merged  # ranks 0 and 1 weigh the same, the others nothing
            torch.testing.assert_close(total, torch.full(shape[:2], 2.0).log())


@check(CONTEXT, sizes=[2])  # see above
def a_compiled_step_merges_over_ranks_without_a_break(ranks: int, rank: int) -> None:
    for window in (None, 11):
        batch = make_batch(spec_of(2, window=window), DECODE, block_size=8)
        spread = BlockSpread(ranks=ranks, block_size=8)

        def step(table: Tensor, lengths: Tensor, q: Tensor, caches: list[Any], spread: BlockSpread = spread) -> Any:
            share = context_parallel.share_of(spread, rank, table, lengths, window=batch.spec.window)  # noqa: B023
            return context_parallel.attention(share, q, *caches, return_lse=True)

        table, *caches = dealt(batch, spread, rank)
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        compare(*compiled(table, batch.seq_lens, batch.q, caches), *batch.expected(), torch.bfloat16)


@check(CONTEXT)
def one_allocator_serves_all_ranks(ranks: int, rank: int) -> None:
    """Decoding token by token: every rank keeps the same books, and writes and attends its own tokens."""
    spread = BlockSpread(ranks=ranks, block_size=2)
    allocator = pagegen.BlockAllocator(12, spread.turn_tokens)
    generator = torch.Generator().manual_seed(4)
    caches = [torch.full((12, 2, 2, 16), float("nan")) for _ in "kv"]
    keys: list[list[Tensor]] = [[], [], []]
    lengths = [2 * spread.turn_tokens - 3, 1, 4]
    for s, length in enumerate(lengths):
        allocator.add(s, [1] * length, context=bytes([s]))
        rows = torch.randn(length, 2, 16, generator=generator)
        keys[s] += list(rows)
        slots = spread.local_slots(rank, turn_slots(allocator, s, range(length)))
        pagegen.write_kv(rows, -rows, *caches, slots)
    for _ in range(spread.turn_tokens):
        q = torch.randn(3, 4, 16, generator=generator)
        rows = torch.randn(3, 2, 16, generator=generator)
        for s in range(3):
            allocator.append(s, [1])
            keys[s].append(rows[s])
        slots = torch.cat([turn_slots(allocator, s, [len(keys[s]) - 1]) for s in range(3)])
        pagegen.write_kv(rows, -rows, *caches, spread.local_slots(rank, slots))
        table = torch.zeros(3, 6, dtype=torch.int32)
        for s in range(3):
            ids = allocator.block_ids(s)
            table[s, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        seq_lens = torch.tensor([len(tokens) for tokens in keys], dtype=torch.int32)
        share = context_parallel.share_of(spread, rank, spread.local_table(table), seq_lens)
        out, lse = context_parallel.attention(share, q, *caches, return_lse=True)
        longest = max(map(len, keys))
        whole = torch.stack([torch.cat([torch.stack(t), torch.zeros(longest - len(t), 2, 16)]) for t in keys])
        arranged = torch.arange(3, dtype=torch.int32)[:, None]
        expected = reference_attention(q.double(), whole, -whole, arranged, seq_lens, return_lse=True)
        compare(out, lse, *expected, torch.float32)


def turn_slots(allocator: Any, s: int, positions: Any) -> Tensor:
    ids, size = allocator.block_ids(s), allocator.block_size
    return torch.tensor([ids[p // size] * size + p % size for p in positions])


@check(CONTEXT)
def a_share_of_another_rank_or_size_is_refused(ranks: int, rank: int) -> None:
    batch = make_batch(spec_of(2), DECODE, block_size=8)
    for wrong, at in (
        (BlockSpread(ranks=ranks + 1, block_size=8), rank),
        (BlockSpread(ranks=ranks, block_size=8), rank - 1),
    ):
        table, k_cache, v_cache = dealt(batch, wrong, at % ranks)
        share = context_parallel.share_of(wrong, at % ranks, table, batch.seq_lens)
        with pytest.raises(ValueError, match="group must have .* ranks and this one be rank"):
            context_parallel.attention(share, batch.q, k_cache, v_cache)
    assert replace(share, rank=rank) != share
