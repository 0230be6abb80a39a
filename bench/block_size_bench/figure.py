"""The figure from a stored document, as SVG by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from block_size_bench.kernels import CONTIGUOUS, over

COLOURS = ("#1b6ca8", "#d9822b", "#4d9221", "#8c6bb1", "#7f8c8d")
STYLE = {
    "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlesize": 10, "axes.titlelocation": "left", "legend.frameon": False, "legend.fontsize": 8,
    "text.parse_math": False, "svg.hashsalt": "block size",
}  # fmt: skip
NAMES = {
    "azure2023_conv": "chat (Azure)", "azure2023_code": "code (Azure)", "servegen_deepseek_r1": "reasoning (ServeGen)",
    "mooncake_conversation": "long chat (Mooncake)", "sharegpt_v3_part_multiturn": "turns (ShareGPT)",
}  # fmt: skip
Row = dict[str, Any]


def svg(document: dict[str, Any]) -> str:
    """Six panels. Raises ValueError where the document lacks a section."""
    rows: dict[str, list[Row]] = {}
    for row in document["rows"]:
        rows.setdefault(row["section"], []).append(row)
    missing = {"memory", "sharing", "kernel", "served"} - rows.keys()
    if missing:
        raise ValueError(f"the document must hold rows of {', '.join(sorted(missing))}, got none")
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(11.5, 6.6), layout="constrained")
        panels = drawn.subplots(2, 3).flat
        _memory(next(panels), rows["memory"])
        _sharing(next(panels), rows["sharing"])
        _kernel(next(panels), rows["kernel"])
        _speed(next(panels), rows["served"])
        _waits(next(panels), rows["served"], "ttft", "what requests wait for the first token, s")
        _waits(next(panels), rows["served"], "itl", "what they wait between tokens, s")
        environment = document["environment"]
        about = f"{document['model']}, {environment['cpu']}, {environment['threads']} threads; x: tokens a block"
        drawn.supxlabel(f"{about}; above: computed and measured, below: simulated on the measured times", fontsize=9)
        out = io.StringIO()
        drawn.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")
    text = out.getvalue()
    return text[text.index("<svg") :]


def _memory(axes: Axes, rows: list[Row]) -> None:
    axes.set_title("% of the memory held that has tokens in it")
    for colour, (trace, found) in zip(COLOURS, _by_trace(rows), strict=False):
        paged = [row for row in found if "block_size" in row["cell"]]
        axes.plot(_sizes(paged), [100 * row["used_share"] for row in paged], ".-", color=colour, label=_name(trace))
    first = next(_by_trace(rows))[1]
    for row in first:
        if "reservation" in row["cell"]:
            axes.axhline(100 * row["used_share"], color=COLOURS[0], lw=0.9, ls=":")
            label = f"in one piece: {row['cell']['reservation']}"
            axes.annotate(label, (1, 100 * row["used_share"] + 1.5), fontsize=8, color=COLOURS[0])
    axes.set_ylim(0, 102)
    _log_sizes(axes, [row for _, found in _by_trace(rows) for row in found])
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 0.2))


def _sharing(axes: Axes, rows: list[Row]) -> None:
    axes.set_title("% of the shared prompt tokens lost to whole blocks")
    for colour, (trace, found) in zip((COLOURS[3], COLOURS[4]), _by_trace(rows), strict=False):
        label = f"{_name(trace)}: {found[0]['common_share']:.0%} shared"
        axes.plot(_sizes(found), [100 * row["lost_share"] for row in found], ".-", color=colour, label=label)
    axes.set_ylim(bottom=0)
    _log_sizes(axes, rows)
    axes.legend(loc="upper left")


def _kernel(axes: Axes, rows: list[Row]) -> None:
    """Times over those of the same kernel with each context in one piece."""
    axes.set_title(f"decode kernel's time over that {CONTIGUOUS}")
    cells = list(dict.fromkeys((row["cell"]["batch"], row["cell"]["context"], row["cell"]["order"]) for row in rows))
    for i, cell in enumerate(cells):
        found = {r["what"]: r for r in rows if tuple(r["cell"][k] for k in ("batch", "context", "order")) == cell}
        colour, line = COLOURS[i // 2 % 2] if len(cells) > 2 else COLOURS[i], "--" if cell[2] == "HND" else "-"
        paged = [(int(what.split()[1]), _over(row)) for what, row in found.items() if what.split()[-1].isdigit()]
        label = f"{cell[0]} x {cell[1]} tokens, {cell[2]}"
        axes.plot([s for s, _ in paged], [t for _, t in paged], f".{line}", color=colour, label=label)
        for what, row in found.items():
            if "SDPA" in what:
                x = int(what.split()[1]) if what.startswith("gather") else max(s for s, _ in paged)
                axes.plot([x], [_over(row)], "x" if what.startswith("gather") else "+", color=colour)
    axes.plot([], [], "x", color="#444444", label="gather, then SDPA")
    axes.plot([], [], "+", color="#444444", label="SDPA, contiguous already")
    axes.axhline(1, color="#999999", lw=0.8)
    axes.set_yscale("log")
    ticks = [t for t in (0.5, 1, 2, 5, 10, 20, 50) if axes.get_ylim()[0] <= t <= axes.get_ylim()[1]]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    sizes = [int(r["what"].split()[1]) for r in rows if r["what"].startswith("paged") and r["what"][-1].isdigit()]
    _ticks(axes, sizes)
    axes.legend(loc="center left", bbox_to_anchor=(0.0, 0.55))


def _over(row: Row) -> float:
    return over(row, f"paged {CONTIGUOUS}")


def _speed(axes: Axes, rows: list[Row]) -> None:
    axes.set_title("the server's tokens/s")
    for colour, (trace, found) in zip(COLOURS, _by_trace(rows), strict=False):
        paged, whole = _apart(found)
        values = [row["server"]["output_tokens_per_s"] for row in paged]
        axes.plot(_sizes(paged), values, ".-", color=colour, label=_name(trace))
        for row in whole:
            axes.axhline(row["server"]["output_tokens_per_s"], color=colour, lw=0.9, ls=":")
    axes.plot([], [], ":", color="#444444", label="in one piece, longest request")
    axes.set_ylim(bottom=0)
    _log_sizes(axes, rows)
    axes.legend(loc="best")


def _waits(axes: Axes, rows: list[Row], name: str, title: str) -> None:
    axes.set_title(title)
    for colour, (trace, found) in zip(COLOURS, _by_trace(rows), strict=False):
        paged, whole = _apart(found)
        for percentile, line in (("p50", "-"), ("p99", "--")):
            key, label = f"{name}_{percentile}_s", f"{_name(trace)}, {percentile}"
            axes.plot(_sizes(paged), [r["requests"][key] for r in paged], f".{line}", color=colour, label=label)
            for row in whole:
                axes.axhline(row["requests"][key], color=colour, lw=0.9, ls=":")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    _log_sizes(axes, rows)
    axes.legend(loc="best")


def _by_trace(rows: Iterable[Row]) -> Iterator[tuple[str, list[Row]]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["cell"]["trace"], []).append(row)
    return iter(found.items())


def _apart(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """(in blocks, in one piece)."""
    found = list(rows)
    return [r for r in found if "block_size" in r["cell"]], [r for r in found if "reservation" in r["cell"]]


def _name(trace: str) -> str:
    return NAMES.get(trace, trace)


def _sizes(rows: Iterable[Row]) -> list[int]:
    return [row["cell"]["block_size"] for row in rows]


def _log_sizes(axes: Axes, rows: Iterable[Row]) -> None:
    _ticks(axes, [row["cell"]["block_size"] for row in rows if "block_size" in row["cell"]])


def _ticks(axes: Axes, sizes: Sequence[int]) -> None:
    shown = sorted(set(sizes))
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [str(size) for size in shown], fontsize=8 if len(shown) > 8 else None)
    axes.minorticks_off()
