"""Reading a kernel's machine code: the main loop and what is in it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NVIDIA_MATRIX = re.compile(r"\b(HMMA|HGMMA|IMMA|QGMMA|QMMA|OMMA|UTC\w*MMA)\b")
_AMD_MATRIX = re.compile(r"\bv_(mfma|wmma|smfmac)_")


@dataclass(frozen=True, kw_only=True)
class MainLoop:
    """The loop over key tiles: how many instructions one turn issues, how many of them are matrix instructions,
    and how many are asynchronous or descriptor copies into shared memory."""

    instructions: int
    matrix: int
    async_copies: int


def main_loop(assembly: str) -> MainLoop | None:
    """The innermost loop with matrix instructions in SASS or GCN text; None when no loop has any (a kernel that
    computes with plain multiply-adds)."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    loops: list[tuple[int, int]] = []
    for raw in assembly.splitlines():
        text = raw.strip()
        label = re.match(r"^(\.L[\w.$]*):", text)
        if label:
            labels[label.group(1)] = len(lines)
            continue
        instruction = _instruction(text)
        if instruction is None:
            continue
        jump = re.search(r"\b(?:BRA\b.*?`\((\.L[\w.$]*)\)|s_c?branch\w* (\.L[\w.$]*))", instruction)
        target = (jump.group(1) or jump.group(2)) if jump else None
        if target in labels:
            loops.append((labels[target], len(lines) + 1))
        lines.append(instruction)
    bodies = [lines[first:last] for first, last in loops]
    bodies = [b for b in bodies if any(_is_matrix(line) for line in b)]
    if not bodies:
        return None
    body = min(bodies, key=len)
    return MainLoop(
        instructions=len(body),
        matrix=sum(map(_is_matrix, body)),
        async_copies=sum(bool(re.search(r"\b(LDGSTS|UBLKCP|UTMALDG|buffer_load\w* .*\blds)\b", i)) for i in body),
    )


def _is_matrix(line: str) -> bool:
    return bool(_NVIDIA_MATRIX.search(line) or _AMD_MATRIX.search(line))


def _instruction(text: str) -> str | None:
    """One instruction of `nvdisasm -c` ("/*0070*/  IMAD ... ;") or of an amdgcn listing; None for the rest."""
    sass = re.match(r"^/\*[0-9a-f]+\*/\s+(.*?);", text)
    if sass:
        return sass.group(1)
    return text if re.match(r"^(v|s|ds|buffer|global|flat|scratch)_\w+", text) else None
