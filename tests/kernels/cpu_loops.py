"""What a compiled CPU kernel's loops are made of, read off objdump's listing (x86-64 and AArch64)."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

# (address, mnemonic, operands)
Instruction = tuple[int, str, str]
Loop = list[Instruction]

_LINE = re.compile(r"^\s*([0-9a-f]+):\s+([a-z][\w.]*)[ \t]*(.*)$", re.MULTILINE)
_JUMP = re.compile(r"^(?:j\w+|b(?:\.\w+)?|cbn?z|tbn?z)$")
_TARGET = re.compile(r"\b([0-9a-f]+) <")
_VECTOR_REGISTER = re.compile(r"%[xyz]mm\d|\b[qv]\d")
_STACK = re.compile(r"\(%r[sb]p|\[(?:sp|x29)\b")
_MOVE = re.compile(r"^v?mov(?:[au]p[sd]|dq\w+)$|^(?:ld|st)(?:r|p|ur)$")


def instructions(library: Path, objdump: str = "objdump") -> list[Instruction]:
    """Every instruction of a library, in order."""
    command = [objdump, "-d", "--no-show-raw-insn", str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return [(int(address, 16), name, operands) for address, name, operands in _LINE.findall(listing)]


def innermost_loops(code: list[Instruction]) -> list[Loop]:
    """What stands between the target of a jump backwards and the jump, where no other such stretch lies within."""
    at = {address: i for i, (address, _, _) in enumerate(code)}
    found = set()
    for i, (address, name, operands) in enumerate(code):
        target = _TARGET.search(operands) if _JUMP.match(name) else None
        if target and int(target[1], 16) <= address and int(target[1], 16) in at:
            found.add((at[int(target[1], 16)], i))
    inner = [
        (first, last)
        for first, last in found
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in found)
    ]
    return [code[first : last + 1] for first, last in sorted(inner)]


def count(loop: Loop, names: str) -> int:
    """How many instructions have a mnemonic that the expression `names` matches as a whole."""
    return sum(bool(re.fullmatch(names, name)) for _, name, _ in loop)


def stack_moves(loop: Loop) -> list[Instruction]:
    """Moves of whole vectors between registers and the stack."""
    return [
        (address, name, operands)
        for address, name, operands in loop
        if _MOVE.match(name) and _STACK.search(operands) and _VECTOR_REGISTER.search(operands)
    ]
