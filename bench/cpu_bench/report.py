"""What all rows say together: our speed over every peer, and shares of the machine's limits."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from cpu_bench.bench import LIMITS, Row

OURS = ("pagegen HND", "pagegen NHD")
# The tables of a summary, and how they read.
TITLES = {
    "speed_over": "as fast as", "limit_over": "limit over", "share_of_read": "of READ",
    "share_of_alike": "of reading as much", "share_of_walk": "of", "share_of_peak": "of PEAK",
}  # fmt: skip


def is_ours(row: Row) -> bool:
    return str(row["what"]).startswith("pagegen")


def is_peer(row: Row) -> bool:
    return row["section"] in ("decode", "prefill") and not str(row["what"]).startswith(("pagegen", *LIMITS))


def summary(rows: Iterable[Row]) -> dict[str, Any]:
    """Over the cells of decode and prefill: `speed_over` a peer, how many times as fast each cache order is, and
    `limit_over` one, what does nothing but read; of bf16 decode `share_of_read` by order (or what reads) and state of
    the machine, `share_of_alike`, of reading as many bytes as the cell has, and `share_of_walk` by order;
    `share_of_peak` of prefill."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {name: defaultdict(list) for name in TITLES}
    for row in rows:
        if row["status"] == "ok" and row["section"] in ("decode", "prefill"):
            for name, key, value in _facts(row):
                found[name][key].append(value)
    return {name: {key: _spread(values) for key, values in sorted(keys.items())} for name, keys in found.items()}


def _facts(row: Row) -> Iterable[tuple[str, str, tuple[float, float]]]:
    """(table, key, (value, the same by CPU time)) of one row of decode or prefill."""
    cell, over = row["cell"], row["time_over"]
    kind = f"{row['section']} {cell['dtype']}{_group(cell)}"
    if is_peer(row):
        for name, found in over.items():
            table, last = ("speed_over", name.split()[1]) if name in OURS else ("limit_over", name)
            yield table, f"{kind} {row['what']} {last}", (found["median"], found["cpu"])
    elif is_ours(row):
        order = row["what"].split()[1]
        if row["section"] == "prefill":
            yield "share_of_peak", f"{kind} {order}", (row["share"], row["cpu_share"])
        elif cell["dtype"] == "bfloat16":
            yield from _shares(row, f"{kind} {order}")
            for name in (n for n in over if n == "read" or n.startswith(f"walk {order}")):
                table, key = ("share_of_alike", order) if name == "read" else ("share_of_walk", name)
                yield table, f"{kind} {key}", (1 / over[name]["median"], 1 / over[name]["cpu"])
    elif row["section"] == "decode" and cell["dtype"] == "bfloat16":
        yield from _shares(row, f"{kind} {row['what']}")


def _shares(row: Row, kind: str) -> Iterable[tuple[str, str, tuple[float, float]]]:
    for state, found in row["by_state"].items():
        yield "share_of_read", f"{kind} {state}", (found["share"], found["cpu_share"])


def _group(cell: dict[str, Any]) -> str:
    group = cell["num_q_heads"] // cell["num_kv_heads"]
    return "" if group == 4 else f" group {group}"


def _spread(values: list[tuple[float, float]]) -> dict[str, float]:
    wall, cpu = ([pair[i] for pair in values] for i in range(2))
    found = {"median": statistics.median(wall), "least": min(wall), "cpu_median": statistics.median(cpu)}
    return {**{name: round(value, 3) for name, value in found.items()}, "cells": len(values)}


def lines(found: dict[str, Any]) -> Iterable[str]:
    """The summary as text."""
    for name, title in TITLES.items():
        for key, spread in found[name].items():
            numbers = (spread[n] for n in ("median", "least", "cpu_median"))
            median, least, cpu = (f"{x:.2f}x" if name.endswith("_over") else f"{x:.0%}" for x in numbers)
            cells = f"{spread['cells']} cells"
            yield f"{title:18} {key:42} median {median:>6}, least {least:>6}, median by CPU time {cpu:>6} ({cells})"


# ---- one row ---------------------------------------------------------------------------------------------


def line(row: Row) -> str:
    """One row: what and where, its rate and share, how it compares."""
    head = f"{row['section']:8} {_cell(row['cell']):38} {row['what']:14}"
    if row["status"] != "ok":
        return f"{head} {row['status']}" + (f": {row['reason']}" if row.get("reason") else "")
    if row["section"] == "compile":
        return f"{head} {row['seconds']:9.2f} s"
    if row["section"] == "overhead":
        return f"{head} {row['ms'] * 1e3:9.2f} us a call"
    gauge = "READ" if row["unit"] == "GB/s" else "PEAK"
    text = f"{head} {row['ms']:9.3f} ms {row['rate']:6.1f} {row['unit']}"
    text += f" {row['share']:4.0%} ({row['cpu_share']:.0%} by CPU time) of {gauge} {row['gauge']:.1f}"
    text += "".join(_against(row, over, found) for over, found in row["time_over"].items())
    text += f", {row['of_best']:.0%} of the best size" if "of_best" in row else ""
    states = ", ".join(f"{state} {found['samples']}" for state, found in row["by_state"].items())
    return f"{text} [{row['undisturbed']}/{len(row['samples_ms'])} undisturbed, {states}]"


def _against(row: Row, over: str, found: dict[str, Any]) -> str:
    if over == "read":
        return "" if is_peer(row) else f", {1 / found['median']:.0%} ({1 / found['cpu']:.0%}) of reading as much"
    if over.startswith("walk"):
        own = not is_peer(row) and over.removeprefix("walk ").removesuffix(" tokens") in row["what"]
        title = "the walk by tokens" if over.endswith("tokens") else "the walk"
        return f", {1 / found['median']:.0%} ({1 / found['cpu']:.0%}) of {title}" if own else ""
    if over.startswith("pagegen"):
        return f", {found['median']:.2f}x the time of {over.split()[1]}" if is_peer(row) else ""
    return f", {1 / found['median']:.2f}x the speed of {over}"


def _cell(cell: dict[str, Any]) -> str:
    if "batch" not in cell:
        return str(cell["label"])
    new = f" new{cell['new']}" if cell["new"] > 1 else ""
    heads = f"{cell['num_q_heads']}/{cell['num_kv_heads']}x{cell['head_dim']}"
    return f"B{cell['batch']} ctx{cell['context']}{new} {heads} {cell['dtype']}"
