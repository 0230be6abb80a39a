"""Decode steps beside peers, in interleaved rounds, from CUDA graphs and a cold cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from gpu_check_bench import models, operands, peers
from gpu_check_bench.context import Context
from gpu_check_bench.operands import TOLERANCE, Cell, Operands
from gpu_check_bench.peers import Peer, Prepared, Unsupported
from gpu_check_bench.timing import Runner, interleave, summary
from gpu_check_bench.worker import Cases, Row, first_lines

ROUNDS = 11
# (batch, context), the ones that the aims are about first; 16 and 64 tokens a block: vLLM's default and a larger one
LLAMA = ((64, 4096), (8, 16384), (32, 8192), (1, 4096), (128, 1024))
SMOLLM = ((64, 2048), (1, 2048))
OUR_BLOCKS = (16, 64)
FIRST_CALL_S = 45.0
FIRST_CELL = (4, 1024)  # the first call of each peer: what it compiles is no part of a cell's time


def add_cases(context: Context, cases: Cases) -> None:
    """First each peer alone on a small cell, so that one which hangs costs itself; then a case a cell."""
    chosen = cells(context.dry_run)
    theirs = peers.others(dry_run=context.dry_run)
    for peer in theirs:
        first = functools.partial(first_call, context, peer, chosen[0])
        cases.add(f"peer: {peer.name}", first, limit_s=FIRST_CALL_S)
    usual = [peer for peer in theirs if not peer.few]
    for cell in chosen:
        cases.add(cell.name, functools.partial(measure, context, cell, usual))
    for peer in theirs:  # last, since compiling may take all the time that is left
        if peer.few:
            cases.add(f"{chosen[0].name}: {peer.name}", functools.partial(measure, context, chosen[0], [peer]))


def cells(dry_run: bool) -> list[Cell]:
    specs = models.specs(dry_run)
    if dry_run:
        return [Cell(spec=spec, batch=2, context=256) for spec in specs.values()]
    found = [
        Cell(spec=specs[f"llama-3.1-8b {short}"], batch=batch, context=context)
        for batch, context in LLAMA
        for short in ("bf16", "fp8")
    ]
    return found + [Cell(spec=specs["smollm2-135m bf16"], batch=batch, context=context) for batch, context in SMOLLM]


def first_call(context: Context, peer: Peer, like: Cell) -> Row:
    """Whether a peer is here and right."""
    why = peers.absent(peer)
    if why is not None:
        return {"absent": why}
    batch, tokens = (2, 256) if context.dry_run else FIRST_CELL
    cell = Cell(spec=like.spec, batch=batch, context=tokens)
    given = operands.make(cell, peer.block_size(cell), on=context.on, cold_bytes=1)
    prepared = peer.prepare(given)
    for call in prepared.calls:
        call()
    error = given.error(prepared.result())
    row: Row = {"version": peer.version(), "error_share": error}
    if error > TOLERANCE:
        row["error"] = f"wrong: off by {error:.3g} of the row's largest value, {TOLERANCE:.3g} allowed"
    return row


def measure(context: Context, cell: Cell, theirs: Sequence[Peer]) -> Row:
    """One cell: everything that is here and right, in rounds."""
    left_out: dict[str, str] = {}
    runners: dict[str, Runner] = {}
    notes: dict[str, dict[str, Any]] = {}
    pools: dict[int, Operands] = {}
    sizes = models.block_sizes(True) if context.dry_run else OUR_BLOCKS
    for peer in [*peers.ours(sizes), *theirs]:
        why = _left_out(context, peer)
        if why is None:
            try:
                prepared = _prepared(context, cell, peer, pools)
                runners[peer.name] = context.clock.runner(prepared.calls)
                notes[peer.name] = {"block_size": peer.block_size(cell)}
                if prepared.note:
                    notes[peer.name]["note"] = prepared.note
            except Unsupported as error:
                why = str(error)
            except Exception as error:  # a peer may fail in any way: its failure is its result
                why = f"failed: {first_lines(error)}"
                if context.stuck():
                    raise
        if why is not None:
            left_out[peer.name] = why
    if not runners:
        return {"error": f"nothing could be measured: {left_out}"}
    samples = interleave(runners, ROUNDS, context.left_s)
    found = {
        name: {**summary(taken), "how": runners[name].how, **notes[name], **_rate(cell, summary(taken)["us"])}
        for name, taken in samples.items()
    }
    row: Row = {**cell_fields(cell), "contenders": found, "left_out": left_out}
    wrong = [name for name, why in left_out.items() if name.startswith("pagegen") and why.startswith("failed")]
    if wrong:
        row["error"] = f"{wrong[0]}: {left_out[wrong[0]]}"
    return row


def _left_out(context: Context, peer: Peer) -> str | None:
    """Why a peer is not tried on a cell."""
    if isinstance(peer, peers.Pagegen):
        return None
    why = peers.absent(peer)
    if why is not None:
        return f"absent: {why}"
    if ("speed", f"peer: {peer.name}") in context.failed:
        return "its first call failed"
    return "no time" if context.left_s() <= 0 else None


def _prepared(context: Context, cell: Cell, peer: Peer, pools: dict[int, Operands]) -> Prepared:
    size = peer.block_size(cell)
    if size not in pools:
        pools[size] = operands.make(cell, size, on=context.on, cold_bytes=context.cold_bytes)
    prepared = peer.prepare(pools[size])
    error = pools[size].error(prepared.result())
    if error > TOLERANCE:
        raise ValueError(f"off by {error:.3g} of the row's largest value, {TOLERANCE:.3g} allowed")
    return prepared


def cell_fields(cell: Cell) -> Row:
    spec = cell.spec
    return {
        "batch": cell.batch, "context": cell.context, "q_heads": spec.num_q_heads, "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim, "window": spec.window, "kv_dtype": str(spec.kv_dtype).removeprefix("torch."),
        "kv_bytes": cell.bytes,
    }  # fmt: skip


def _rate(cell: Cell, us: float) -> Row:
    return {"gb_s": round(cell.bytes / us / 1e3, 1)}
