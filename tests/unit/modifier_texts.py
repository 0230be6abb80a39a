"""Evaluates printed modifiers: Triton text as Python over torch, C++ text in one small program."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pagegen.modifiers import Modifier


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


def _where(condition: Any, a: Any, b: Any) -> Tensor:
    return torch.where(_tensor(condition), a, b)


TL = SimpleNamespace(
    where=_where,
    abs=torch.abs,
    minimum=lambda a, b: torch.minimum(*torch.broadcast_tensors(_tensor(a), _tensor(b))),
    maximum=lambda a, b: torch.maximum(*torch.broadcast_tensors(_tensor(a), _tensor(b))),
    int32=torch.int32,
    int64=torch.int64,
    **{name: getattr(torch, name) for name in ("exp", "exp2", "log", "sqrt", "sin", "cos", "erf", "floor", "ceil")},
)


def _captured(pointer: Tensor, *rest: Any) -> Tensor:
    indices, sizes = rest[: pointer.dim()], rest[pointer.dim() :]
    inside = [_tensor(i).long().clamp(0, size - 1) for i, size in zip(indices, sizes, strict=True)]
    return pointer[tuple(inside)]


def evaluate_triton(text: str, modifier: Modifier, values: dict[str, Tensor]) -> Any:
    """The text over tensors by the names of the parameters, with the modifier's tensors as the captured ones."""
    scope: dict[str, Any] = {
        "tl": TL, "tanh": torch.tanh, "floor_div": lambda a, b: torch.floor_divide(_tensor(a), b),
        "floor_mod": lambda a, b: torch.remainder(_tensor(a), b), **values,
        **{f"captured_{rank}": _captured for rank in (1, 2, 3)},
    }  # fmt: skip
    for name, tensor in modifier.tensors.items():
        scope[f"{modifier.kind}_{name}_ptr"] = tensor.long() if tensor.dtype == torch.bool else tensor
        scope |= {f"{modifier.kind}_{name}_size_{i}": size for i, size in enumerate(tensor.shape)}
    return eval(text, {"__builtins__": {"float": float}}, scope)  # noqa: S307  our own printer's text


_HEADER = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
template <typename A, typename B> auto floor_div(A a, B b) {
  auto quotient = a / b;
  return (a % b != 0 && (a < 0) != (b < 0)) ? quotient - 1 : quotient;
}
template <typename A, typename B> auto floor_mod(A a, B b) { return a - floor_div(a, b) * b; }
"""


def _loads(modifier: Modifier) -> str:
    """A struct whose members load the captured tensors, with indices moved inside."""
    members = []
    for name, tensor in modifier.tensors.items():
        held = {torch.float32: "float", torch.bool: "bool"}.get(tensor.dtype, "int64_t")
        numbers = ", ".join(str(v).lower() for v in tensor.flatten().tolist())
        places = [f"int64_t i{d}" for d in range(tensor.dim())]
        index = " + ".join(
            f"std::clamp<int64_t>(i{d}, 0, {size - 1}) * {tensor.stride(d)}" for d, size in enumerate(tensor.shape)
        )
        members.append(
            f"static {held} {modifier.kind}_{name}({', '.join(places)}) "
            f"{{ static const {held} values[] = {{{numbers}}}; return values[{index}]; }}"
        )
    return "struct { " + " ".join(members) + " } captured;"


def evaluate_cpp(
    cases: Sequence[tuple[Modifier, str]], points: Sequence[tuple[float, int, int, int, int]], folder: Path
) -> list[list[float]]:
    """The value of every text at every point (score, batch, head, q_pos, k_pos): one compiler call for all of them."""
    functions, calls = [], []
    typed = [("float", "score"), *(("int32_t", name) for name in ("batch", "head", "q_pos", "k_pos"))]
    parameters = ", ".join(f"[[maybe_unused]] {kind} {name}" for kind, name in typed)
    for i, (modifier, text) in enumerate(cases):
        functions.append(f"static double f{i}({parameters}) {{ [[maybe_unused]] {_loads(modifier)} return {text}; }}")
        calls.append(
            f'for (const auto& p : points) std::printf("%.9g ", f{i}(p.s, p.b, p.h, p.q, p.k)); std::puts("");'
        )
    rows = ", ".join(f"{{{float(s)!r}f, {b}, {h}, {q}, {k}}}" for s, b, h, q, k in points)
    source = folder / "texts.cpp"
    table = f"struct Point {{ float s; int32_t b, h, q, k; }};\nstatic const Point points[] = {{{rows}}};\n"
    body = "\n".join(functions) + "\nint main() {\n" + "\n".join(calls) + "\n}\n"
    source.write_text(_HEADER + table + body, encoding="utf-8")
    flags = [
        "-std=c++20",
        "-O0",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-sign-compare",
        "-Wno-bool-compare",
        "-Wno-misleading-indentation",
    ]
    subprocess.run(["c++", *flags, str(source), "-o", str(folder / "texts")], check=True)
    done = subprocess.run([str(folder / "texts")], check=True, capture_output=True, text=True)
    return [[float(word) for word in line.split()] for line in done.stdout.splitlines()]
