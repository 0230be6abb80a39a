"""The figure from a stored document: hit rate against memory, a panel a trace, and operations a second beside vLLM."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT, TOP, BOTTOM, LEFT = 1000, 380, 62, 56, 46
GAP = 58  # between panels, for the next one's axis
COLOURS = ("#1b6ca8", "#d9822b", "#4d9221")
BARS = {"pagegen": "#1b6ca8", "vllm:none": "#f0c08a", "vllm:xxhash": "#e39a4f", "vllm:sha256": "#d9822b"}
NAMES = {
    "pagegen": "pagegen", "vllm:none": "vLLM, hashes made before", "vllm:xxhash": "vLLM, xxhash",
    "vllm:sha256": "vLLM, sha256 (its default)",
}  # fmt: skip
Row = dict[str, Any]


def svg(document: dict[str, Any]) -> str:
    """Raises ValueError where the document has neither hit rates nor replays."""
    curves, bars = _curves(document["rows"]), _bars(document["rows"])
    count = len(curves) + bool(bars)
    if not count:
        raise ValueError("the document must hold rows of hit_rate or replay, got none")
    width = (WIDTH - LEFT - 10 - (count - 1) * GAP) / count
    parts: list[str] = []
    for i, (trace, orders) in enumerate(curves.items()):
        parts += _panel(LEFT + i * (width + GAP), width, trace, orders)
    if bars:
        parts += _replays(LEFT + len(curves) * (width + GAP), width, bars)
    style = "font-family:sans-serif;background:#ffffff"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" style="{style}">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


def _curves(rows: Iterable[Row]) -> dict[str, dict[str, list[Row]]]:
    """trace -> order -> its rows by memory."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        if row["section"] == "hit_rate":
            found.setdefault(row["cell"]["trace"], {}).setdefault(row["cell"]["order"], []).append(row)
    for orders in found.values():
        for points in orders.values():
            points.sort(key=lambda row: row["cell"]["tokens"])
    return found


def _bars(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """sequence -> implementation -> operations a second."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["section"] == "replay" and row["status"] == "ok":
            found.setdefault(row["cell"]["sequence"], {})[row["what"]] = row["operations_per_s"]
    return found


def _panel(left: float, width: float, trace: str, orders: dict[str, list[Row]]) -> Iterable[str]:
    """Share of prompt tokens found against the cache's size in tokens, logarithmic; a line an order, limits dashed."""
    points = [row for rows in orders.values() for row in rows]
    low, high = (math.log2(f(row["cell"]["tokens"] for row in points)) for f in (min, max))
    base, tall = HEIGHT - BOTTOM, HEIGHT - TOP - BOTTOM
    top = 10 * math.ceil(max(row["limit"] for row in points) * 10 + 0.3)  # per cent

    def x(tokens: float) -> float:
        return left + (math.log2(tokens) - low) / max(high - low, 1e-9) * width

    def y(rate: float) -> float:
        return float(base - rate * 100 / top * tall)

    block = points[0]["cell"]["block_size"]
    yield _text(left, 16, f"{trace.removesuffix('.csv')}, blocks of {block}", size=13)
    yield _text(left, 31, "% of prompt tokens found in the cache")
    for percent in range(0, top + 1, 10):
        yield _line([(left, y(percent / 100)), (left + width, y(percent / 100))], "#e5e5e5", 1)
        yield _text(left - 6, y(percent / 100) + 4, str(percent), anchor="end")
    for exponent in range(math.ceil(low), math.floor(high) + 1, 2 if high - low < 9 else 3):
        yield _text(x(2.0**exponent), base + 16, _size(2**exponent), anchor="middle")
    yield _text(left + width / 2, base + 34, "cache, tokens", anchor="middle")
    for i, (order, rows) in enumerate(orders.items()):
        colour = COLOURS[i % len(COLOURS)]
        yield _line([(x(row["cell"]["tokens"]), y(row["rate"])) for row in rows], colour, 2)
        for row in rows:
            said = f"{row['cell']['tokens']} tokens: {row['rate']:.1%}"
            centre = f'cx="{x(row["cell"]["tokens"]):.1f}" cy="{y(row["rate"]):.1f}"'
            yield f'<circle {centre} r="3" fill="{colour}"><title>{escape(said)}</title></circle>'
        limit = rows[0]["limit"]
        yield _line([(left, y(limit)), (left + width, y(limit))], colour, 1, dashed=True)
        yield _text(left + 2, 46 + 13 * i, f"{order}; infinite: {limit:.1%}", colour=colour)


def _replays(left: float, width: float, sequences: dict[str, dict[str, float]]) -> Iterable[str]:
    """A group of bars a sequence, thousand operations a second, each sequence by its own fastest."""
    row = (HEIGHT - TOP - 10) / len(sequences)
    yield _text(left - 30, 16, "operations a second", size=13)
    for i, name in enumerate(n for n in BARS if any(n in found for found in sequences.values())):
        at = left - 30 + i % 2 * 150, 24 + i // 2 * 13
        yield f'<rect x="{at[0]:.1f}" y="{at[1]}" width="9" height="9" fill="{BARS[name]}"/>'
        yield _text(at[0] + 13, at[1] + 8, NAMES[name], size=10)
    for i, (sequence, found) in enumerate(sequences.items()):
        y = TOP + i * row
        yield _text(left - 30, y + 10, sequence)
        names = [name for name in BARS if name in found]
        bar = (row - 18) / len(names)
        for j, name in enumerate(names):
            long = found[name] / max(found.values()) * (width - 50)
            at_y = y + 14 + j * bar
            yield (
                f'<rect x="{left - 30:.1f}" y="{at_y:.1f}" width="{long:.1f}" height="{bar * 0.85:.1f}" '
                f'fill="{BARS[name]}"><title>{escape(f"{sequence}, {NAMES[name]}")}</title></rect>'
            )
            yield _text(left - 26 + long, at_y + bar * 0.8, _size(found[name], 1000), size=10)


def _size(value: float, thousand: int = 1024) -> str:
    """12K, 3.4M: in powers of 1024, or of 1000."""
    for unit in ("", "K", "M", "G"):
        if value < thousand:
            return f"{value:.0f}{unit}" if value >= 10 or value == int(value) else f"{value:.1f}{unit}"
        value /= thousand
    return f"{value:.0f}T"


def _line(points: Sequence[tuple[float, float]], colour: str, width: float, dashed: bool = False) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>'


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11, colour: str = "#222222") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {place}>{escape(text)}</text>"
