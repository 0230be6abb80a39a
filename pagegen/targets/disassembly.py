"""Reading a kernel's machine code: the main loop and what is in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import networkx

_MATRIX = re.compile(r"\b((?:H|HG|I|IG|Q|QG|O|D)MMA|UTC\w*MMA)\b|\b(v_(?:mfma|wmma|smfmac))_")
_MULTIPLY_ADD = re.compile(r"\b(?:FFMA2?|HFMA2|v_(?:pk_)?(?:fma|fmac|mac)_\w+)\b")
_GLOBAL_LOAD = re.compile(r"\b(?:LDG|LDGSTS|(?:global|buffer|flat)_load_\w+|s_(?:buffer_)?load_\w+)\b")
_WIDE = re.compile(r"\bLDG(?:STS)?\.\S*\b(?:128|256)\b|\b(?:global|buffer|flat)_load_(?:lds_)?dwordx4\b")
_ASYNCHRONOUS = re.compile(r"\bLDGSTS\b|_load_lds_|\blds$")
_DESCRIPTOR = re.compile(r"\b(?:UTMALDG|UBLKCP|tensor_load_to_lds)\b")
_LOCAL = re.compile(r"\b(?:LDL|STL|scratch_(?:load|store)\w*)\b|\bbuffer_(?:load|store)\w* .*\boff, s\[0:3\], ")
# An integer division goes by way of the reciprocal of the divisor, rounded up (I2F.RP) or not to trap (rcp_iflag);
# floats are divided without either. 64 bits are divided by a subroutine.
_INTEGER_DIVISION = re.compile(r"\bI2F\.(?:\w+\.)*RP\b|\bv_rcp_iflag_f32|\bCALL\b.*_(?:div|rem)_[su]\d+")
_JUMP = re.compile(r"\b(?:BRA\b.*?`\((\.L[\w.$]*)\)|s_c?branch\w* (\.L[\w.$]*))")
# Without a predicate in front or as an operand these let nothing pass
_NO_WAY_ON = re.compile(r"^(?:BRA\S* `|EXIT\b|RET\b|s_branch\b|s_endpgm\b|s_setpc_b64\b)")


@dataclass(frozen=True, kw_only=True)
class MainLoop:
    """The loop over key tiles: what one turn of it issues. Where warps are specialised, the loop of those that issue
    the matrix instructions.

    `matrix` counts matrix instructions and `matrix_kind` names them ("HMMA", "HGMMA", "UTCHMMA", "v_mfma"; "" without
    any). Global memory is read by `async_copies` into shared memory and by `wide_loads` into registers, both of 16 or
    more bytes a thread, by `descriptor_copies` of whole tiles, and by `narrow_loads` of fewer bytes. `local_memory`
    counts accesses to what was spilled, `integer_divisions` divisions by what the compiler did not know.
    """

    instructions: int
    matrix: int
    matrix_kind: str
    async_copies: int
    wide_loads: int
    descriptor_copies: int
    narrow_loads: int
    local_memory: int
    integer_divisions: int


def main_loop(assembly: str) -> MainLoop | None:
    """The innermost loop with most matrix instructions in SASS or GCN text, or with most multiply-adds where there are
    no matrix instructions; None when no loop has any."""
    bodies = list(_innermost_loops(_blocks(assembly)))
    for pattern in (_MATRIX, _MULTIPLY_ADD):
        count, body = max(((_count(pattern, b), b) for b in bodies), key=lambda found: found[0], default=(0, []))
        if count:
            return _describe(body)
    return None


def _describe(body: list[str]) -> MainLoop:
    loads = [line for line in body if _GLOBAL_LOAD.search(line) and not _LOCAL.search(line)]
    wide = [line for line in loads if _WIDE.search(line)]
    asynchronous = _count(_ASYNCHRONOUS, wide)
    return MainLoop(
        instructions=len(body),
        matrix=_count(_MATRIX, body),
        matrix_kind="+".join(sorted({m[1] or m[2] for line in body for m in [_MATRIX.search(line)] if m})),
        async_copies=asynchronous,
        wide_loads=len(wide) - asynchronous,
        descriptor_copies=_count(_DESCRIPTOR, body),
        narrow_loads=len(loads) - len(wide),
        local_memory=_count(_LOCAL, body),
        integer_divisions=_count(_INTEGER_DIVISION, body),
    )


def _count(pattern: re.Pattern[str], lines: list[str]) -> int:
    return sum(bool(pattern.search(line)) for line in lines)


_START = -1  # the block before all others


@dataclass
class _Block:
    """Instructions that run one after the other, and where they can go on."""

    instructions: list[str] = field(default_factory=list)
    jumps: list[str] = field(default_factory=list)
    falls_through: bool = True


def _blocks(assembly: str) -> tuple[list[_Block], dict[str, int]]:
    """The basic blocks in the order of the text, and the block that each label stands before."""
    blocks = [_Block()]
    labels: dict[str, int] = {}
    for raw in assembly.splitlines():
        text = raw.strip()
        label = re.match(r"^(\.L[\w.$]*):", text)
        if label:
            if blocks[-1].instructions:
                blocks.append(_Block())
            labels[label[1]] = len(blocks) - 1
            continue
        instruction = _instruction(text)
        if instruction is None:
            continue
        block = blocks[-1]
        block.instructions.append(instruction)
        jump = _JUMP.search(instruction)
        if jump:
            block.jumps.append(jump[1] or jump[2])
        if _NO_WAY_ON.search(instruction):
            block.falls_through = False
        if jump or not block.falls_through:
            blocks.append(_Block())
    return blocks, labels


def _innermost_loops(found: tuple[list[_Block], dict[str, int]]) -> Iterator[list[str]]:
    """The instructions of each natural loop that has no other loop with matrix instructions or multiply-adds inside.

    Compilers move waiting and rare paths behind the loop that they belong to, so what lies between a jump back and its
    target is not the loop: the blocks from which the jump back is reached without passing its target are.
    """
    blocks, labels = found
    graph: networkx.DiGraph[int] = networkx.DiGraph()
    graph.add_nodes_from(range(len(blocks)))
    for i, block in enumerate(blocks):
        graph.add_edges_from((i, labels[name]) for name in block.jumps if name in labels)
        if block.falls_through and i + 1 < len(blocks):
            graph.add_edge(i, i + 1)
    entries: list[int] = []
    reached: set[int] = set()
    for i in range(len(blocks)):  # the first, and those that specialised warps find by a table of jumps
        if i not in reached:
            entries.append(i)
            reached |= networkx.descendants(graph, i) | {i}
    graph.add_edges_from((_START, i) for i in entries)
    parents = networkx.immediate_dominators(graph, _START)
    loops: dict[int, set[int]] = {}
    for source, header in graph.edges:
        if _dominates(parents, header, source):
            rest = graph.subgraph(set(graph) - {header})
            inside = networkx.ancestors(rest, source) | {source} if source != header else set()
            loops.setdefault(header, {header}).update(inside)
    bodies = {h: [line for i in sorted(members) for line in blocks[i].instructions] for h, members in loops.items()}
    work = {h for h, body in bodies.items() if _count(_MATRIX, body) or _count(_MULTIPLY_ADD, body)}
    for header in work:
        if not any(other != header and other in loops[header] for other in work):
            yield bodies[header]


def _dominates(parents: dict[int, int | None], header: int, node: int | None) -> bool:
    """Whether every way to `node` leads through `header`."""
    while node is not None and node != header:
        above = parents.get(node)
        node = None if above == node else above
    return node == header


def _instruction(text: str) -> str | None:
    """One instruction of `nvdisasm -c` ("/*0070*/  IMAD ... ;") or of an amdgcn listing; None for the rest."""
    sass = re.match(r"^/\*[0-9a-f]+\*/\s+(.*?)\s*;", text)
    if sass:
        return sass.group(1)
    return text if re.match(r"^(v|s|ds|buffer|global|flat|scratch|tensor)_\w+", text) else None
