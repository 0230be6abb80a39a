"""`pagegen db trials`: what was measured, one trial or the pooled samples of one question a row."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from pagegen.cli import output
from pagegen.cli.option_types import TargetType, count
from pagegen.cli.options import spec_of, url_option
from pagegen.spec import Measurement, Status, Target


@click.command("trials")
@url_option
@click.option("--model", help="Only trials of this model's attention.")
@click.option("--block-size", type=count(), help="Only this block size.")
@click.option("--target", type=TargetType(), help="Only this target.")
@click.option("--status", type=click.Choice([s.value for s in Status]), help="Only trials that ended so.")
@click.option("--limit", type=count(), default=20, show_default=True, help="The newest so many.")
@click.option(
    "--pooled", is_flag=True, help="Of the questions that these answer, all samples together, with their sources."
)
@output.sql_option
@output.format_option
@output.json_option
def command(
    url: str | None,
    model: str | None,
    block_size: int | None,
    target: Target | None,
    status: str | None,
    limit: int,
    pooled: bool,
    sql: bool,
    table_format: str,
    as_json: bool,
) -> None:
    """The trials, oldest first."""
    from pagegen.db import statements

    wanted: dict[str, Any] = {
        "spec": spec_of(model), "block_size": block_size, "target": target,
        "status": Status(status) if status else None,
    }  # fmt: skip
    with output.database(url, read_only=True) as db:
        if sql:
            output.statement(statements.text_of(db, statements.listing(limit=limit, **wanted)), as_json)
            return
        shown, matching = statements.newest(db, limit, **wanted)
        if pooled:
            shown = statements.of_same_questions(db, shown, **wanted)
    if pooled:
        _show_pooled(shown, table_format, as_json)
        return

    def text() -> str:
        columns = {
            "created_at": "when", "heads": "heads", "head_dim": "dim", "kv_dtype": "cache", "block_size": "block",
            "target": "target", "variant": "variant", "batch": "batch", "status": "status", "median_us": "median us",
        }  # fmt: skip
        rows = [{**_trial(m), "block_size": f"{m.layout.block_size} {m.layout.order}"} for m in shown]
        return output.table(rows, columns, table_format) + f"\n{len(shown)} of {matching} trials"

    output.show({"trials": [_trial(m) for m in shown], "matching": matching}, as_json, text)


def _show_pooled(found: list[Measurement], table_format: str, as_json: bool) -> None:
    from pagegen.db.pooling import pools_of

    pools = [
        {
            **{k: v for k, v in _trial(pool.trial).items() if k not in ("created_at", "status", "detail")},
            "samples_us": list(pool.samples_us),
            "median_us": pool.median_us,
            "sources": [asdict(source) for source in pool.sources],
            "conflict": pool.conflict,
        }
        for pool in pools_of(found)
    ]
    columns = {
        "heads": "heads", "block_size": "block", "target": "target", "variant": "variant", "batch": "batch",
        "trials": "trials", "samples": "samples", "median_us": "median us", "conflict": "conflict",
    }  # fmt: skip
    rows = [{**p, "trials": len(p["sources"]), "samples": len(p["samples_us"])} for p in pools]
    output.show({"pools": pools}, as_json, lambda: output.table(rows, columns, table_format))


def _trial(m: Measurement) -> dict[str, Any]:
    contexts = m.workload.context_lens
    queries = "" if m.workload.is_decode else f", {m.workload.total_q} queries"
    return {
        "created_at": m.created_at,
        "heads": f"{m.spec.num_q_heads}/{m.spec.num_kv_heads}",
        "head_dim": m.spec.head_dim,
        "kv_dtype": m.spec.to_dict()["kv_dtype"],
        "block_size": m.layout.block_size,
        "order": m.layout.order,
        "target": str(m.target),
        "device": m.device.name,
        "variant": m.variant.name,
        "batch": f"{len(contexts)} x {sum(contexts) / len(contexts):.0f} tokens{queries}",
        "status": m.status.value,
        "median_us": m.median_us,
        "samples_us": list(m.samples_us),
        "regime": m.regime,
        "detail": m.detail,
        "code_hash": m.code_hash,
    }
