"""The README's figure from a stored document: decode's GB/s, ours beside the peers', reading and the walk as lines."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

# What is drawn, from left to right in each cell, and its colour.
BARS = {
    "pagegen HND": "#1b6ca8", "pagegen NHD": "#6aaed6", "vllm": "#d9822b", "openvino": "#8c6bb1",
    "sdpa": "#7f8c8d", "ggml": "#4d9221", "onnxruntime": "#c2a5cf", "gather": "#bdbdbd", "flex": "#e6c229",
}  # fmt: skip
NAMES = {
    "vllm": "vLLM's CPU kernel", "openvino": "OpenVINO", "onnxruntime": "ONNX Runtime f16, contiguous",
    "ggml": "ggml f16, contiguous", "flex": "FlexAttention, paged", "sdpa": "SDPA, contiguous",
    "gather": "gather + SDPA",
}  # fmt: skip
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 1000, 440, 50, 70, 60
READ_COLOUR, WALK_COLOUR = "#c0392b", "#222222"


def svg(document: dict[str, Any]) -> str:
    """One group of bars a bf16 decode cell of 32/8 heads. Raises ValueError where the document has none."""
    cells = _cells(document["rows"])
    if not cells:
        raise ValueError("the document must hold rows of bf16 decode, got none")
    drawn = [name for name in BARS if any(name in cell for cell in cells.values())]
    top = max(max(row["rate"], row["gauge"]) for cell in cells.values() for row in cell.values())
    step = next(s for s in (5, 10, 20, 50, 100, 200, 500, 1000) if top / s <= 8)
    scale = (HEIGHT - TOP - BOTTOM) / (step * (int(top / step) + 1))
    group = (WIDTH - LEFT - 10) / len(cells)
    parts = [*_axis(step, int(top / step) + 1, scale), *_legend(drawn)]
    for i, (label, cell) in enumerate(cells.items()):
        parts += _group(LEFT + i * group, group, label, cell, drawn, scale)
    environment = document["environment"]
    about = f"{environment['cpu']}, {environment['threads']} threads, bf16, 32 query and 8 KV heads, head dim 128"
    parts.append(_text(LEFT, 16, f"Paged decode attention, GB/s of K and V read ({about})", size=14))
    style = "font-family:sans-serif;background:#ffffff"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" style="{style}">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


def _cells(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """label -> what -> row, in the order in which they were measured."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        cell = row["cell"]
        if row["section"] != "decode" or row["status"] != "ok" or cell["dtype"] != "bfloat16":
            continue
        if cell["num_q_heads"] == 4 * cell["num_kv_heads"]:
            found.setdefault(f"{cell['batch']} x {cell['context']}", {})[row["what"]] = row
    return found


def _walk(cell: dict[str, Any], order: str) -> dict[str, Any] | None:
    """The walk in the order that the kernel reads: in NHD by tokens."""
    found: dict[str, Any] | None = cell.get(f"walk {order} tokens", cell.get(f"walk {order}"))
    return found


def _group(x: float, width: float, label: str, cell: dict[str, Any], drawn: list[str], scale: float) -> Iterable[str]:
    bar = width * 0.86 / len(drawn)
    base = HEIGHT - BOTTOM
    for i, name in enumerate(drawn):
        left = x + width * 0.07 + i * bar
        if name in cell:
            tall = cell[name]["rate"] * scale
            yield _rect(
                left, base - tall, bar * 0.9, tall, BARS[name], f"{label}, {name}: {cell[name]['rate']:.1f} GB/s"
            )
        walk = _walk(cell, name.removeprefix("pagegen ")) if name.startswith("pagegen") else None
        if walk:
            yield _line(
                left - 1, base - walk["rate"] * scale, left + bar, WALK_COLOUR, f"walk: {walk['rate']:.1f} GB/s"
            )
    read = next(iter(cell.values()))["gauge"]
    height = base - read * scale
    yield _line(x + width * 0.05, height, x + width * 0.95, READ_COLOUR, f"sequential reading: {read:.1f} GB/s")
    yield _text(x + width / 2, base + 16, label, anchor="middle")


def _axis(step: int, count: int, scale: float) -> Iterable[str]:
    base = HEIGHT - BOTTOM
    for i in range(count + 1):
        y = base - i * step * scale
        yield f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e5e5"/>'
        yield _text(LEFT - 6, y + 4, str(i * step), anchor="end")
    yield _text(WIDTH / 2, base + 34, "sequences x tokens each", anchor="middle")
    read, walk = "sequential reading in the same seconds", "loads alone over the same blocks"
    yield _line(LEFT, base + 46, LEFT + 20, READ_COLOUR, read)
    yield _text(LEFT + 26, base + 50, read)
    yield _line(LEFT + 300, base + 46, LEFT + 320, WALK_COLOUR, walk)
    yield _text(LEFT + 326, base + 50, walk)


def _legend(drawn: list[str]) -> Iterable[str]:
    columns = 5
    for i, name in enumerate(drawn):
        x, y = LEFT + i % columns * 190, 30 + i // columns * 17
        yield _rect(x, y, 10, 10, BARS[name], name)
        yield _text(x + 15, y + 9, NAMES.get(name, name))


def _rect(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {box} fill="{colour}"><title>{escape(title)}</title></rect>'


def _line(x1: float, y: float, x2: float, colour: str, title: str) -> str:
    ends = f'x1="{x1:.1f}" x2="{x2:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="2"><title>{escape(title)}</title></line>'


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
