"""The questions that concern pagegen alone: element types, shapes, block sizes, one thread, ragged batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from cpu_bench import ours
from cpu_bench.bench import Bench, Row
from cpu_bench.samples import Runner
from cpu_bench.sections import ORDERS, WALKS
from pagegen.spec import AttentionSpec, CacheLayout
from pagegen.spec.dtypes import DTYPES
from pagegen.targets import cpu_probes

BATCH, CONTEXT = 8, 4096
BASE = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, q_dtype=torch.bfloat16)
MLA = BASE.replace(num_q_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512, shared_kv=True, scale=192**-0.5)
DIMS = {f"dim {d}": BASE.replace(head_dim=d, v_head_dim=d, scale=d**-0.5) for d in (64, 80, 96, 128, 256)} | {
    "dim MLA": MLA
}
FORMATS: tuple[tuple[str, str], ...] = tuple(
    (dtype, scales) for dtype in ("float8_e4m3fn", "int8", "int4") for scales in ("head", "token_head")
)
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
# 32768 tokens each: equal lengths, halving ones, and one long sequence with seven short ones
RAGGED = {
    "equal": [CONTEXT] * BATCH,
    "halving": [16384, 8192, 4096, 2048, 1024, 512, 256, 256],
    "one long": [CONTEXT * BATCH - 7 * 256] + [256] * 7,
}


def formats(bench: Bench, orders: Iterable[str] = ORDERS) -> Iterable[Row]:
    """Quantised caches beside bf16: each should be faster in proportion to its bytes, as far as arithmetic lets it.
    `of_products` is what share of the peak of byte products int8 and int4 reach."""
    peak = cpu_probes.peak_gflops("int8", bench.threads) * 1e9
    for order in orders:
        layout = CacheLayout(block_size=32, order=order)
        found = {"bfloat16": BASE} | {
            f"{name} {scales}": BASE.replace(kv_dtype=DTYPES[name], kv_scale_granularity=scales)
            for name, scales in FORMATS
        }
        runners = [_kernel(bench, spec, layout, name) for name, spec in found.items()]
        for row in _rows(bench, "formats", order, runners, over=["bfloat16"]):
            seconds = row.get("ms", 0) / 1e3
            products = ours.byte_products(found[row["what"]], BATCH * CONTEXT)
            integers = seconds and peak and str(row["what"]).startswith("int")
            yield {**row, **({"of_products": round(products / seconds / peak, 3)} if integers else {})}


def one_thread(bench: Bench) -> Iterable[Row]:
    """Both orders and their walks on one thread."""
    with bench.on_threads(1):
        runners = []
        for order in ORDERS:
            layout = CacheLayout(block_size=32, order=order)
            runners += ours.with_walks(ours.batches(bench.pool, BASE, layout, [CONTEXT] * BATCH))
        yield from _rows(bench, "1 thread", "", runners, over=WALKS)


def head_dims(bench: Bench) -> Iterable[Row]:
    """Head dims with their walks, MLA's latent cache among them."""
    for order in ORDERS:
        for name, spec in DIMS.items():
            lens = [2 * CONTEXT if spec.shared_kv else CONTEXT] * BATCH
            found = ours.batches(bench.pool, spec, CacheLayout(block_size=32, order=order), lens)
            kernel, *walks = ours.with_walks(found)
            runners = [dataclasses.replace(kernel, name=name), *walks]
            for row in _rows(bench, "head dim", order, runners, over=[walk.name for walk in walks]):
                yield {**row, "of": name}


def groups(bench: Bench) -> Iterable[Row]:
    """Query heads a KV head: the same bytes, more arithmetic."""
    for order in ORDERS:
        layout = CacheLayout(block_size=32, order=order)
        specs = {f"group {g}": BASE.replace(num_q_heads=8 * g) for g in (1, 3, 4, 7, 8, 16)}
        runners = [_kernel(bench, spec, layout, name) for name, spec in specs.items()]
        yield from _rows(bench, "group", order, runners, over=["group 4"])


def block_sizes(bench: Bench) -> Iterable[Row]:
    """Block sizes side by side; `of_best` is a size's speed as a share of the fastest's."""
    for order in ORDERS:
        layouts = {f"block {b}": CacheLayout(block_size=b, order=order) for b in BLOCK_SIZES}
        runners = [_kernel(bench, BASE, layout, name) for name, layout in layouts.items()]
        rows = list(_rows(bench, "block", order, runners, over=["block 32"]))
        itself = {"block 32": {"median": 1.0}}
        times = {r["what"]: {**itself, **r["time_over"]}["block 32"]["median"] for r in rows if r["status"] == "ok"}
        for row in rows:
            best = {"of_best": round(min(times.values()) / times[row["what"]], 3)} if row["what"] in times else {}
            yield {**row, **best}


def ragged(bench: Bench) -> Iterable[Row]:
    """The same tokens in sequences of different lengths."""
    for order in ORDERS:
        layout = CacheLayout(block_size=32, order=order)
        runners = [
            ours.kernel(ours.batches(bench.pool, BASE, layout, lens), name=name) for name, lens in RAGGED.items()
        ]
        yield from _rows(bench, "ragged", order, runners, over=["equal"])


def _kernel(bench: Bench, spec: AttentionSpec, layout: CacheLayout, name: str) -> Runner:
    return ours.kernel(ours.batches(bench.pool, spec, layout, [CONTEXT] * BATCH), name=name)


def _rows(bench: Bench, section: str, order: str, runners: list[Runner], over: list[str]) -> Iterable[Row]:
    cell: dict[str, Any] = {"label": f"B{BATCH} ctx{CONTEXT} {order}".strip()}
    yield from bench.compare(section, cell, runners, over=over)
