"""The operator beside latencies that others published for this device, on the same shapes.

The source states neither page size nor timing method, nor whether its caches were cold: the time from a cold cache is
what is judged, the time of a call repeated on the same blocks stands beside it. published.json is distilled from the
source's file by `python -m gpu_check_bench.published FILE` (in bench/).
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpu_check_bench import models, operands, peers
from gpu_check_bench.context import Context
from gpu_check_bench.operands import TOLERANCE, Cell
from gpu_check_bench.speed import cell_fields
from gpu_check_bench.timing import interleave, summary
from gpu_check_bench.worker import Cases, Row
from pagegen.spec import AttentionSpec

if TYPE_CHECKING:
    from cost_model_bench.data import Row as Measured

FILE = Path(__file__).with_name("published.json")
SYSTEMS = {"NVIDIA H200": "h200_sxm", "NVIDIA A100-SXM4-80GB": "a100_sxm"}
# (q heads, kv heads, head dim, window): Llama-3.1-8B's, its 70B sister's on one and on eight GPUs, gpt-oss' two, and
# the groups of 8 and heads of 256 of others
GEOMETRIES = (
    (32, 8, 128, 0), (8, 1, 128, 0), (64, 8, 128, 0), (64, 8, 64, 0), (64, 8, 64, 128), (32, 4, 128, 0),
    (16, 8, 256, 1024),
)  # fmt: skip
BATCHES, CONTEXTS = (1, 8, 32, 64, 128), (1024, 4096, 16384)
FIELDS = ("system", "q_heads", "kv_heads", "head_dim", "window", "kv_dtype", "batch", "context", "us", "engine")
OUR_BLOCK = 64
ROUNDS = 9
DRY_RUN_ROWS = 2


def add_cases(context: Context, cases: Cases) -> None:
    """A case a shape, the geometries taking turns, so that a cut leaves some of each."""
    rows = rows_for(context.device.name)
    if context.dry_run:  # of whatever device: the shapes are shrunk, and the latencies mean nothing beside them
        rows = rows_for("NVIDIA H200")[:DRY_RUN_ROWS]
    if not rows:
        cases.add("none", lambda: {"skipped": f"no latencies of {context.device.name} are known here"})
    for row in in_turns(rows):
        cases.add(case_name(row), functools.partial(measure, context, row))


def rows_for(device: str) -> list[dict[str, Any]]:
    """What was published for a device, by its name."""
    table = json.loads(FILE.read_text(encoding="utf-8"))
    found = [dict(zip(FIELDS, row, strict=True)) for row in table["rows"]]
    return [row for row in found if row["system"] == SYSTEMS.get(device)]


def in_turns(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first of every geometry and dtype, then the second of every one, and so on."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in FIELDS[1:6]), []).append(row)
    longest = max(map(len, groups.values()), default=0)
    return [group[i] for i in range(longest) for group in groups.values() if i < len(group)]


def case_name(row: dict[str, Any]) -> str:
    window = f", window {row['window']}" if row["window"] else ""
    heads = f"{row['q_heads']}/{row['kv_heads']} heads of {row['head_dim']}"
    return f"{row['batch']} x {row['context']}, {heads}, {row['kv_dtype']}{window}"


def kernels(context: Context) -> dict[str, dict[str, Any]]:
    """By name, a shape of each geometry and dtype: what has to be compiled before `measure` counts."""
    found: dict[str, dict[str, Any]] = {}
    for row in [] if context.dry_run else in_turns(rows_for(context.device.name)):
        _, _, name = case_name(row).partition(", ")
        found.setdefault(name, row)
    return found


def first_call(context: Context, row: dict[str, Any]) -> Row:
    """One call of the operator on a small batch, for its compilation."""
    cell = Cell(spec=_spec(row), batch=2, context=CONTEXTS[0])
    given = operands.make(cell, OUR_BLOCK, on=context.on, cold_bytes=1)
    error = given.error(peers.Pagegen(OUR_BLOCK).prepare(given).result())
    row = {"error_share": error}
    return row if error <= TOLERANCE else {**row, "error": "wrong: see error_share"}


def _spec(row: dict[str, Any]) -> AttentionSpec:
    return AttentionSpec(
        num_q_heads=row["q_heads"], num_kv_heads=row["kv_heads"], head_dim=row["head_dim"],
        window=row["window"] or None, q_dtype=torch.bfloat16, kv_dtype=row["kv_dtype"],
    )  # fmt: skip


def measure(context: Context, row: dict[str, Any]) -> Row:
    """The operator's time on one shape, cold and warm, over the published one."""
    cell = Cell(spec=_spec(row), batch=row["batch"], context=row["context"])
    if context.dry_run:
        small = next(iter(models.specs(True).values()))
        cell = Cell(spec=small, batch=2, context=48)
    ours = peers.Pagegen(models.block_sizes(True)[0] if context.dry_run else OUR_BLOCK)
    given = operands.make(cell, ours.size, on=context.on, cold_bytes=context.cold_bytes)
    prepared = ours.prepare(given)
    error = given.error(prepared.result())
    if error > TOLERANCE:
        return {"error": f"wrong: off by {error:.3g} of the row's largest value, {TOLERANCE:.3g} allowed"}
    same = [prepared.calls[0]] * len(prepared.calls)
    runners = {
        "cold": context.clock.runner(prepared.calls),
        "warm": context.clock.runner(same, cold=False),
    }
    samples = interleave(runners, ROUNDS, context.left_s)
    cold, warm = (summary(samples[name])["us"] for name in runners)
    return {
        **cell_fields(cell), "us": cold, "warm_us": warm, "how": runners["cold"].how, "published_us": row["us"],
        "engine": row["engine"], "speed": round(row["us"] / cold, 3), "warm_speed": round(row["us"] / warm, 3),
    }  # fmt: skip


# ---- from the source's file ----------------------------------------------------------------------------------------


def distil(path: Path) -> dict[str, Any]:
    """The fastest plausible latency of each shape of GEOMETRIES, BATCHES and CONTEXTS."""
    from cost_model_bench import data

    shapes, set_aside = data.sound(data.read(path))
    rows = [shape.fastest for shape in shapes]
    dropped = [
        f"{d['engine']} on {d['system']}: {d['rows_faster_than_memory']} rows faster than memory" for d in set_aside
    ]
    kept = sorted(filter(_wanted, rows), key=_place)
    return {**data.ORIGIN, "set_aside": dropped, "fields": list(FIELDS), "rows": [_listed(row) for row in kept]}


def _wanted(row: Measured) -> bool:
    return row.geometry[:4] in GEOMETRIES and row.batch in BATCHES and row.context in CONTEXTS


def _place(row: Measured) -> tuple[Any, ...]:
    """Geometries as listed; the middle of the batches first, since the last shapes may be cut."""
    middling = abs(BATCHES.index(row.batch) - 3) + abs(CONTEXTS.index(row.context) - 1)
    return row.system, GEOMETRIES.index(row.geometry[:4]), row.kv_dtype, middling, row.batch, row.context


def _listed(row: Measured) -> list[Any]:
    return [row.system, *row.geometry, row.batch, row.context, row.us, row.backend]


def main(path: str) -> None:
    from cache_bench.document import as_text

    FILE.write_text(as_text(distil(Path(path))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
