"""The figure from a stored document: for each trace the server's tokens a second, and apart from them the latencies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

WIDTH, PANEL, LEFT, TOP, BASE = 1000, 250, 46, 50, 215
BLUE, LIGHT = "#1b6ca8", "#9ecae1"
Row = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """Bars of `names` (the second wide behind the first) of the rows of a section."""

    section: str
    title: str
    names: tuple[str, ...]
    legend: str


PANELS = (
    Panel("rush", "tokens/s generated, all at once", ("output_tokens_per_s",), ""),
    Panel("paced", "ms to the first token", ("ttft_p50_ms", "ttft_p99_ms"), "p50, p99"),
    Panel("paced", "ms from token to token", ("itl_p50_ms", "itl_p99_ms"), "p50, p99"),
)


def svg(document: dict[str, Any]) -> str:
    """A line of panels a trace. Raises ValueError where the document has no rows."""
    traces = list(dict.fromkeys(row["cell"]["trace"] for row in document["rows"]))
    if not traces:
        raise ValueError("the document must hold rows, got none")
    parts: list[str] = []
    width = (WIDTH - 3 * LEFT - 20) / 3
    for line, trace in enumerate(traces):
        for column, panel in enumerate(PANELS):
            rows = [r for r in document["rows"] if (r["section"], r["cell"]["trace"]) == (panel.section, trace)]
            if rows:
                parts += _panel(LEFT + column * (width + LEFT), line * PANEL, width, trace, panel, rows)
    environment = document["environment"]
    about = f"{document['model']}, {environment['cpu']}, threads: {environment['threads']}, clock: {document['clock']}"
    height = PANEL * len(traces) + 22
    parts.append(_text(LEFT, height - 8, f"{about}; x: tokens a block; lines: least and most of the rounds"))
    style = "font-family:sans-serif;background:#ffffff"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" style="{style}">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


def _panel(left: float, down: float, width: float, trace: str, panel: Panel, rows: list[Row]) -> Iterable[str]:
    top = max(row[name]["range"][1] for row in rows for name in panel.names)
    step = next(s * 10**e for e in range(7) for s in (1, 2, 5) if top / (s * 10**e) <= 6)
    count = int(top / step) + 1
    scale = (BASE - TOP) / (count * step)
    yield _text(left, down + 18, trace, size=13)
    yield _text(left, down + 34, panel.title + (f" ({panel.legend})" if panel.legend else ""))
    for i in range(count + 1):
        y = down + BASE - i * step * scale
        yield f'<line x1="{left:.1f}" x2="{left + width:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e5e5"/>'
        yield _text(left - 5, y + 4, str(i * step), anchor="end")
    group = width / len(rows)
    for i, row in enumerate(sorted(rows, key=lambda row: int(row["cell"]["block_size"]))):
        x = left + i * group
        yield _text(x + group / 2, down + BASE + 16, str(row["cell"]["block_size"]), anchor="middle")
        for j, name in enumerate(panel.names):
            bar = group * 0.7 / len(panel.names)
            yield from _bar(x + group * 0.15 + j * bar, bar * 0.94, down + BASE, scale, row[name], (BLUE, LIGHT)[j])


def _bar(x: float, width: float, base: float, scale: float, found: Row, colour: str) -> Iterable[str]:
    tall = found["median"] * scale
    box = f'x="{x:.1f}" y="{base - tall:.1f}" width="{width:.1f}" height="{tall:.1f}"'
    low, high = (base - value * scale for value in found["range"])
    middle = x + width / 2
    yield f'<rect {box} fill="{colour}"><title>{escape(format(found["median"], ".1f"))}</title></rect>'
    yield f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="#222222"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
