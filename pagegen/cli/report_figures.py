"""The figures of a report, as SVG text. Loads matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

COLOURS = ("#1f5f8b", "#d1762b", "#3b8c4a", "#9b3d6e", "#6b6b6b", "#b59b00", "#2aa4a4", "#7a55c7")
SHOWN_LINES = 8
SHOWN_BARS = 24
# Names hold dollar signs, which begin a formula to matplotlib.
STYLE = {
    "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
    "text.parse_math": False,
}  # fmt: skip
_styled = matplotlib.rc_context(STYLE)  # texts and axes take it when they are made


def svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element; the same figure gives the same text. `name` keeps the ids of a page's figures
    apart."""
    out = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    text = out.getvalue()
    return text[text.index("<svg") :]


@_styled
def block_sizes(entry: dict[str, Any]) -> str:
    """Step time, waste and tokens/s over the block sizes of one spec and profile."""
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    panels = figure.subplots(1, 3)
    orders = sorted({row["order"] for row in entry["rows"]})
    for axes, (key, title, factor) in zip(
        panels,
        (
            ("step_us", "step, us a layer", 1.0),
            ("waste_share", "slots wasted, %", 100.0),
            ("tokens_per_s", "tokens/s of attention alone", 1.0),
        ),
        strict=True,
    ):
        for colour, order in zip(COLOURS, orders, strict=False):
            rows = [row for row in entry["rows"] if row["order"] == order]
            sizes = [row["block_size"] for row in rows]
            axes.plot(sizes, [factor * row[key] for row in rows], color=colour, label=order)
            for measured, marker in ((True, "o"), (False, "x")):
                some = [row for row in rows if (row["kind"] == "measured") == measured]
                axes.plot([r["block_size"] for r in some], [factor * r[key] for r in some], marker, color=colour)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({row["block_size"] for row in entry["rows"]}))
        axes.minorticks_off()
        axes.get_xaxis().set_major_formatter(_number)
        axes.get_yaxis().set_major_formatter(_number)
        axes.margins(x=0.12)
        _from_zero(axes.set_ylim, [factor * row[key] for row in entry["rows"]])
        axes.set_xlabel("block size, tokens")
        axes.set_title(title, fontsize=9)
    if len(orders) > 1:
        panels[0].legend(frameon=False)
    return svg(figure, f"block {entry['spec']} {entry['device']} {entry['profile']}")


@_styled
def roofline(entry: dict[str, Any]) -> str:
    """A device's trials below its roofs."""
    figure = Figure(figsize=(5.5, 3.2), layout="constrained")
    axes = figure.subplots()
    for colour, kind in zip(COLOURS, ("decode", "mixed"), strict=False):
        points = [p for p in entry["points"] if p[2] == kind]
        if points:
            axes.plot([p[0] for p in points], [p[1] for p in points], ".", ms=3, color=colour, label=kind)
    reach = [p[0] for p in entry["points"]]
    low, high = min(reach) / 2, max(reach) * 2
    rate = entry["bandwidth_gb_s"] / 1e3
    roof = entry["matrix_tflops"] or float("inf")
    if roof < float("inf"):
        high = max(high, 2 * roof / rate)
    ends = [low, *([roof / rate] if low < roof / rate < high else []), high]
    axes.plot(ends, [min(x * rate, roof) for x in ends], color="black", lw=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.get_xaxis(), axes.get_yaxis()):
        from_, to = sorted(axis.get_view_interval())
        axis.set_major_formatter(_number)
        if to < 30 * from_:  # a decade alone has too few numbers, and all of its own would touch
            axis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
            axis.set_minor_formatter(_number)
        else:
            axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("flops a byte of keys and values")
    axes.set_ylabel("Tflop/s")
    axes.legend(frameon=False, markerscale=3, loc="lower right")
    return svg(figure, f"roofline {entry['device']}")


@_styled
def regret(entries: list[dict[str, Any]]) -> str:
    """What each portfolio's choices lose against the best variant a batch, and gain over the default."""
    shown = sorted(entries, key=lambda e: -e["regret"])[:SHOWN_BARS][::-1]
    figure = Figure(figsize=(9, 0.5 + 0.24 * len(shown)))
    left, right = figure.subplots(1, 2, sharey=True)
    at = range(len(shown))
    left.set_yticks(list(at), [_short(e["what"]) for e in shown], fontsize=7)
    left.set_title("regret, %", fontsize=9)
    # a tenth of a percent across where there is nothing to show
    _bars(left, [100 * e["regret"] for e in shown], COLOURS[1], "{:.1f}", at_least=0.1)
    _bars(right, [e["speedup"] for e in shown], COLOURS[0], "{:.2f}", at_least=1.0)
    right.axvline(1.0, color="black", lw=0.8)
    right.set_title("default's time over the choice's", fontsize=9)
    return svg(figure, "regret")


@_styled
def history(entries: list[dict[str, Any]]) -> str:
    """How much quicker the best so far is than a batch's first trial, by trials."""
    figure = Figure(figsize=(9, 3.2))
    axes = figure.subplots()
    for colour, entry in zip(COLOURS, entries[:SHOWN_LINES], strict=False):
        axes.plot(
            [p[0] for p in entry["line"]], [p[1] for p in entry["line"]], color=colour, label=_short(entry["what"])
        )
    axes.set_xlabel("trials")
    axes.set_ylabel("first trial's time over the best so far")
    axes.axhline(1.0, color="black", lw=0.8)
    axes.get_xaxis().set_major_formatter(_number)
    axes.set_ylim(bottom=0.95, top=max(1.1, 1.05 * max(p[1] for e in entries[:SHOWN_LINES] for p in e["line"])))
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return svg(figure, "history")


@_styled
def devices(entries: list[dict[str, Any]]) -> str:
    """The best of each device on the same batches."""
    shown = entries[:SHOWN_BARS][::-1]
    figure = Figure(figsize=(9, 0.5 + 0.28 * len(shown)))
    left, right = figure.subplots(1, 2, sharey=True)
    at = range(len(shown))
    left.set_yticks(list(at), [_short(f"{e['device']}: {e['spec']}") for e in shown], fontsize=7)
    left.set_title("us a call (geometric mean)", fontsize=9)
    _bars(left, [e["us"] for e in shown], COLOURS[0], "{:,.0f}")
    _bars(right, [100 * e["roofline_share"] for e in shown], COLOURS[2], "{:.0f}")
    right.set_title("share of the roofline, %", fontsize=9)
    return svg(figure, "devices")


def _bars(axes: Any, values: list[float], colour: str, shown_as: str, *, at_least: float = 0.0) -> None:
    """Horizontal bars from zero, each with its number."""
    bars = axes.barh(range(len(values)), values, color=colour)
    axes.bar_label(bars, [shown_as.format(value) for value in values], padding=2, fontsize=7)
    axes.get_xaxis().set_major_formatter(_number)
    axes.tick_params(axis="y", length=0)
    _from_zero(axes.set_xlim, [*values, at_least], room=1.15)


def _from_zero(set_limits: Callable[[float, float], Any], values: list[float], room: float = 1.08) -> None:
    """An axis from zero, with room for a mark at its end."""
    set_limits(0.0, room * max(values) or 1.0)


def _number(value: float, _: Any = None) -> str:
    """A tick's number: matplotlib writes powers of ten as formulas."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _short(text: str) -> str:
    return text if len(text) <= 70 else text[:67] + "..."
