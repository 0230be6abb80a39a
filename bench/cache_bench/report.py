"""One line a row, and what all rows say together."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]


def line(row: Row) -> str:
    """One row as text."""
    return _LINES[row["section"]](row)


def _step(row: Row) -> str:
    cell = row["cell"]
    shared = f", {cell['shared']} of them shared" if cell["shared"] else ""
    shared += "" if cell["reused"] else ", new tensors"
    where = f"{cell['num_seqs']} sequences of {cell['context']}{shared}, blocks of {cell['block_size']}"
    parts = (
        f"append {row['append_us']:.0f}, batch {row['batch_us']:.0f}, p99 {row['p99_us']:.0f}, CPU {row['cpu_us']:.0f}"
    )
    low, high = row["step_us"]["range"]
    found = f"{row['step_us']['median']:.0f} us, rounds {low:.0f} to {high:.0f}"
    return f"step   {where}: {found} ({parts}), target {row['target_us']:.0f}"


def _add(row: Row) -> str:
    cell, ms = row["cell"], row["ms"]
    where = f"{cell['tokens']} tokens as {cell['given_as']}, blocks of {cell['block_size']}"
    return f"add    {where}: {ms['median']:.3f} ms, {row['cached_tokens']} cached, target {row['target_ms']:.0f}"


def _replay(row: Row) -> str:
    head = f"replay {row['cell']['sequence']:24} {row['what']:12}"
    if row["status"] != "ok":
        return f"{head} {row['status']}: {row['reason']}"
    over = row["time_over_ours"]
    against = f", {over['median']:.2f}x our CPU time ({over['range'][0]:.2f} to {over['range'][1]:.2f})" if over else ""
    kinds = ", ".join(f"{kind} {us['mean']:.1f} us" for kind, us in row["us_by_kind"].items())
    return f"{head} {row['operations_per_s']:>9,} operations/s{against}; {kinds}"


def _infinite(row: Row) -> str:
    cell = row["cell"]
    found = f"{row['rate']:.2%} by the allocator, {row['counted_rate']:.2%} counted, equal: {row['equal']}"
    where = f"{cell['trace']}, blocks of {cell['block_size']}"
    return f"limit  {where}: {found}; with partial blocks {row['partial_rate']:.2%}"


def _hit_rate(row: Row) -> str:
    cell = row["cell"]
    where = f"{cell['trace']}, {cell['order']}, {cell['tokens']:>11,} tokens"
    return f"hits   {where}: {row['rate']:.1%} of {row['limit']:.1%}"


def _memory(row: Row) -> str:
    cell = row["cell"]
    states = ", ".join(f"{state} {value:.0f}" for state, value in row["bytes_a_block"].items())
    token = max(row["bytes_a_token"].values())
    most = f"at most {token:.1f} a token, {row['share_of_kv']:.2%} of the KV bytes of {row['model']}"
    return f"memory blocks of {cell['block_size']}, {cell['counted']}: {states} bytes a block, {most}"


_LINES = {
    "decode_step": _step, "add": _add, "replay": _replay, "infinite": _infinite, "hit_rate": _hit_rate,
    "memory": _memory,
}  # fmt: skip


def summary(rows: Iterable[Row]) -> dict[str, Any]:
    """The targets and what was found: the slowest step (wall and CPU time) and add, the least and the median time of
    vLLM over ours by hash function, the limits of the traces, the largest share of the KV bytes."""
    rows = list(rows)
    steps = [row["step_us"]["median"] for row in rows if row["section"] == "decode_step"]
    adds = [row["ms"]["median"] for row in rows if row["section"] == "add" and row["cell"]["block_size"] == 16]
    shares = [row["share_of_kv"] for row in rows if row["section"] == "memory" and row["cell"]["block_size"] == 16]
    over: dict[str, list[float]] = {}
    for row in rows:
        if row["section"] == "replay" and row["status"] == "ok" and row["what"] != "pagegen" and row["time_over_ours"]:
            over.setdefault(row["what"], []).append(row["time_over_ours"]["median"])
    return {
        "slowest_step_us": max(steps, default=None),
        "slowest_step_cpu_us": max((row["cpu_us"] for row in rows if row["section"] == "decode_step"), default=None),
        "slowest_add_ms": max(adds, default=None),
        "vllm_time_over_ours": {
            what: {"least": min(found), "median": statistics.median(found), "sequences": len(found)}
            for what, found in over.items()
        },
        "void": [row["what"] for row in rows if row["section"] == "replay" and row["status"] != "ok"],
        "limits": {
            row["cell"]["trace"]: {
                "allocator": round(row["rate"], 4), "with_partial_blocks": round(row["partial_rate"], 4),
            }
            for row in rows
            if row["section"] == "infinite"
        },
        "largest_share_of_kv": max(shares, default=None),
    }  # fmt: skip
