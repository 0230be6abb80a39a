"""What the rows say about the issue's aims, and the short table that is printed last. The standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
# Of the copy's bandwidth, in decode at 64 x 4096 with a bfloat16 cache.
BANDWIDTH, BANDWIDTH_CELL = 0.90, (64, 4096, "bfloat16")
# Of the fastest published latency: in half of the cells, and in all of them.
PUBLISHED_HALF, PUBLISHED_ALL = 1.0, 0.8
# A float8 cache against a bfloat16 one, where contexts are long enough for bytes to decide.
FLOAT8, LONG_CONTEXT, LONG_TOKENS = 1.7, 4096, 1 << 17
OURS = "pagegen"
NOT_KNOWN, NOT_JUDGED = "not known", "dry run"


def aims(rows: Sequence[Row], *, dry_run: bool = False) -> list[Row]:
    """One row an aim: what was asked, what was found, and whether that meets it ("yes", "no" or "not known"; the
    times of a dry run meet nothing)."""
    found = [
        _correct(rows), _bandwidth(rows), _published_half(rows), _published_all(rows), _float8(rows), _peers(rows),
        _ranking(rows), _integration(rows),
    ]  # fmt: skip
    return [{**aim, "met": NOT_JUDGED} for aim in found] if dry_run else found


def _aim(aim: str, asked: str, found: str | None, met: bool | None) -> Row:
    verdict = NOT_KNOWN if met is None or found is None else "yes" if met else "no"
    return {"aim": aim, "asked": asked, "found": NOT_KNOWN if found is None else found, "met": verdict}


def _of(rows: Iterable[Row], part: str) -> list[Row]:
    return [row for row in rows if row["part"] == part]


def _correct(rows: Sequence[Row]) -> Row:
    own = [row for row in _of(rows, "correctness") if "skipped" not in row]
    wrong = sum("error" in row for row in own)
    found = f"{len(own) - wrong} of {len(own)}" if own else None
    return _aim("kernels equal the float64 reference", "all", found, None if not own else wrong == 0)


def best_of_ours(row: Row) -> float | None:
    """The least time of pagegen's contenders in a row of the part speed."""
    found = [taken["us"] for name, taken in row.get("contenders", {}).items() if name.startswith(OURS)]
    return min(found, default=None)


def _bandwidth(rows: Sequence[Row]) -> Row:
    copied = [row["gb_s"] for row in _of(rows, "bandwidth") if "gb_s" in row]
    batch, context, dtype = BANDWIDTH_CELL
    cells = [
        row for row in _speed(rows)
        if (row["batch"], row["context"], row["kv_dtype"]) == (batch, context, dtype) and best_of_ours(row) is not None
    ]  # fmt: skip
    name, asked = f"decode at {batch} x {context}, {dtype}, over a device copy", f">= {BANDWIDTH:.2f}"
    if not copied or not cells:
        return _aim(name, asked, None, None)
    row = cells[0]
    gb_s = row["kv_bytes"] / (best_of_ours(row) or 1.0) / 1e3
    return _aim(
        name, asked, f"{gb_s / copied[0]:.3f} ({gb_s:.0f} of {copied[0]:.0f} GB/s)", gb_s >= BANDWIDTH * copied[0]
    )


def _speed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in _of(rows, "speed") if "contenders" in row]


def _published_speeds(rows: Sequence[Row]) -> list[float]:
    return [row["speed"] for row in _of(rows, "published") if "speed" in row]


def _published_half(rows: Sequence[Row]) -> Row:
    speeds = _published_speeds(rows)
    enough = sum(speed >= PUBLISHED_HALF for speed in speeds)
    found = f"{enough} of {len(speeds)} cells" if speeds else None
    name, asked = "over the fastest published latency", f">= {PUBLISHED_HALF:.1f} in half the cells"
    return _aim(name, asked, found, 2 * enough >= len(speeds) if speeds else None)


def _published_all(rows: Sequence[Row]) -> Row:
    speeds = _published_speeds(rows)
    found = f"{min(speeds):.2f} at the least" if speeds else None
    name, asked = "over the fastest published latency", f">= {PUBLISHED_ALL:.1f} everywhere"
    return _aim(name, asked, found, min(speeds) >= PUBLISHED_ALL if speeds else None)


def _float8(rows: Sequence[Row]) -> Row:
    """Cells with a bfloat16 and a float8 cache: the least ratio of the long ones."""
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in _speed(rows):
        us = best_of_ours(row)
        long = row["context"] >= LONG_CONTEXT and row["batch"] * row["context"] >= LONG_TOKENS
        if us is not None and long:
            shape = tuple(row[name] for name in ("batch", "context", "q_heads", "kv_heads", "head_dim", "window"))
            times.setdefault(shape, {})[row["kv_dtype"]] = us
    ratios = [found["bfloat16"] / found["float8_e4m3fn"] for found in times.values() if len(found) == 2]
    found = f"{min(ratios):.2f} at the least of {len(ratios)} cells" if ratios else None
    return _aim("float8 over bfloat16, long cells", f">= {FLOAT8}", found, min(ratios) >= FLOAT8 if ratios else None)


def _peers(rows: Sequence[Row]) -> Row:
    """The fastest peer of every cell over ours."""
    ratios = []
    for row in _speed(rows):
        us = best_of_ours(row)
        theirs = [taken["us"] for name, taken in row["contenders"].items() if not name.startswith(OURS)]
        if us is not None and theirs:
            ratios.append(min(theirs) / us)
    found = f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} cells" if ratios else None
    return _aim("the fastest peer's time over pagegen's", "> 1.0", found, min(ratios) > 1.0 if ratios else None)


def _ranking(rows: Sequence[Row]) -> Row:
    batches = [batch for row in _of(rows, "ranking") for batch in row.get("batches", [])]
    held = sum(batch["static"]["top_holds_winner"] for batch in batches)
    known = [batch["static"]["rank_correlation"] for batch in batches]
    known = sorted(value for value in known if value is not None)
    middle = f", rank correlation {known[len(known) // 2]:.2f} in the middle" if known else ""
    found = f"{held} of {len(batches)} batches{middle}" if batches else None
    name = "the predicted top 5 hold the winner, or one within 5 %"
    return _aim(name, "all", found, held == len(batches) if batches else None)


def _integration(rows: Sequence[Row]) -> Row:
    own = _of(rows, "integration")
    wrong = [row["case"] for row in own if "error" in row]
    found = (f"failed: {', '.join(wrong)}" if wrong else f"{len(own)} of {len(own)}") if own else None
    return _aim("CUDA graph, fullgraph compile, host cost", "all run", found, not wrong if own else None)


# ---- for people ----------------------------------------------------------------------------------------------------


def table(document: Row) -> str:
    """How the parts ended, what failed, the aims. Short: it is what a log shows last."""
    lines = [f"{document['device']}, {document['seconds']:.0f} s of {document['budget_s']:.0f} s"]
    if document["dry_run"]:
        lines.append("DRY RUN on a CPU: small sizes, to see that the code runs; no figure here says anything of a GPU.")
    for name, part in document["parts"].items():
        left = f", {len(part['left'])} cases not run" if part["left"] else ""
        failed = f", {part['failed']} failed" if part["failed"] else ""
        lines.append(f"  {name:<12} {part['state']}: {part['cases']} cases{failed}{left}, {part['seconds']:.0f} s")
    cut = [name for name, part in document["parts"].items() if part["state"] != "done"]
    if cut:
        lines.append(f"  not whole, and so ends with 1: {', '.join(cut)}; a larger --budget gives them more time")
    failures = [row for row in document["rows"] if "error" in row]
    lines += [f"  FAILED {row['part']}: {row['case']}: {row['error'][:160]}" for row in failures[:12]]
    if len(failures) > 12:
        lines.append(f"  and {len(failures) - 12} more failures, in the JSON")
    absent = [f"{row['case'].removeprefix('peer: ')} ({row['absent']})" for row in document["rows"] if "absent" in row]
    if absent:
        lines.append(f"  absent peers: {'; '.join(absent)}")
    lines += ["", *_speed_lines(document["rows"]), ""]
    width = max(len(aim["aim"]) for aim in document["aims"])
    asked = max(len(aim["asked"]) for aim in document["aims"])
    lines += [
        f"  {aim['aim']:<{width}}  {aim['asked']:<{asked}}  {aim['met']:<9}  {aim['found']}" for aim in document["aims"]
    ]
    return "\n".join(lines)


def _speed_lines(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in _speed(rows):
        times = sorted((taken["us"], name) for name, taken in row["contenders"].items())
        lines.append(f"  {row['case']}: " + "; ".join(f"{name} {us:.1f} us" for us, name in times))
    return lines
