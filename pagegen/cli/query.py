"""`pagegen query`: the best block size for a model under a profile."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from pagegen.cli import options, output
from pagegen.cli.option_types import BytesType
from pagegen.spec import AttentionSpec, Profile, Target, dtype_name
from pagegen.spec.dtypes import QUERY_DTYPES
from pagegen.spec.models import find_geometry

if TYPE_CHECKING:
    from pagegen.db import BlockSizeRow


@click.command()
@options.model_options
@options.profile_option
@options.target_option
@options.device_option
@click.option("--memory", type=BytesType(), help="Memory for the cache (40GiB): how many sequences it admits.")
@click.option(
    "--objective", type=click.Choice(["throughput", "latency"]), default="throughput", show_default=True,
    help="Rank by the server's tokens/s, or by what a token waits for (p99).",
)  # fmt: skip
@options.url_option
@output.sql_option
@output.format_option
@output.json_option
def command(
    model: str,
    layer: str | None,
    q_dtype: str | None,
    kv_dtype: str | None,
    kv_scales: str,
    kv_zero_points: bool,
    profile_name: str,
    target: Target,
    device: str | None,
    memory: int | None,
    objective: str,
    url: str | None,
    sql: bool,
    table_format: str,
    as_json: bool,
) -> None:
    """The best block size for a model under a traffic profile, with what is measured and what is predicted.

    Times are attention's alone, in one layer; tokens/s and admitted sequences count all of the model's attention
    layers, taken to be alike.
    """
    spec = options.model_spec(model, layer, q_dtype, kv_dtype, kv_scales, kv_zero_points)
    profile = options.profile_of(profile_name)
    num_layers = find_geometry(model).attn_layers
    options.known_device(target, device)
    from pagegen import selection
    from pagegen.db.block_size import TIE

    if sql:
        with output.plain_failures():
            output.statement(_statements(spec, target, device, profile, url), as_json)
        return
    with output.plain_failures():
        rows = selection.best_block_size(
            spec, target, profile, db=url, memory_bytes=memory, objective=objective, num_layers=num_layers,
            device=device,
        )  # fmt: skip
    command_line = f"pagegen tune --model {model} --profile {profile_name} --target {target}"
    if spec.kv_dtype != spec.q_dtype:
        command_line += f" --kv-dtype {dtype_name(spec.kv_dtype)}"
    if spec.kv_scale_granularity != "none":
        command_line += f" --kv-scales {spec.kv_scale_granularity}" + " --kv-zero-points" * spec.kv_zero_points
    if device is not None:
        command_line += f" --device {shlex.quote(device)}"
    document = {
        "model": model,
        "q_dtype": dtype_name(spec.q_dtype),
        "kv_dtype": dtype_name(spec.kv_dtype),
        "profile": profile.name,
        "target": str(target),
        "objective": objective,
        "memory_bytes": memory,
        "num_layers": num_layers,
        "best_block_size": rows[0].block_size,
        "ties": [row.block_size for row in rows if row.step_us <= rows[0].step_us * (1 + TIE)],
        "rows": [row.to_dict() for row in rows],
        "hint": _hint(rows, command_line, _other_dtypes(spec, target, url)),
    }
    output.show(document, as_json, lambda: _text(rows, document, table_format))


def _other_dtypes(spec: AttentionSpec, target: Target, url: str | None) -> list[str]:
    """The query dtypes, in which an unquantised cache is as well, that the same attention was measured with besides
    its own."""
    from pagegen import targets
    from pagegen.db import DatabaseError, open_db

    code = targets.code_hash(target)
    with contextlib.suppress(DatabaseError), open_db(url, read_only=True) as db:  # the rows say what is wrong with it
        others = [dtype for dtype in QUERY_DTYPES if dtype != spec.q_dtype]
        alike = {dtype_name(dtype): spec.replace(q_dtype=dtype) for dtype in others}
        if spec.kv_dtype == spec.q_dtype:
            alike = {name: other.replace(kv_dtype=other.q_dtype) for name, other in alike.items()}
        return [name for name, other in alike.items() if db.measured_layouts(other, target, code)]
    return []


def _hint(rows: list[BlockSizeRow], command_line: str, other_dtypes: Sequence[str]) -> str | None:
    if all(row.kind == "measured" for row in rows):
        return None
    if all(row.measured_share + row.scaled_share == 0 for row in rows):
        if other_dtypes:
            known = " and ".join(other_dtypes)
            return f"all times are predictions: measured was {known} only (--q-dtype); run {command_line}"
        if any(row.reason.startswith("predicted, not measured") for row in rows):  # it was run, without that GPU
            return f"nothing was measured: all times are predictions until {command_line} has run where that GPU is"
        return f"nothing was measured: all times are predictions; run {command_line}"
    if all(row.measured_share + row.scaled_share > 1 - 1e-9 for row in rows):
        return "memory cuts some batches of the profile: their measured times are scaled by the cost model"
    return f"some rows rest on the cost model for part of the traffic; run {command_line}"


def _statements(spec: AttentionSpec, target: Target, named: str | None, profile: Profile, url: str | None) -> str:
    """What is asked of the database: the layouts, then for each its samples with the variants that serve it."""
    from pagegen import selection, targets
    from pagegen.db import open_db, statements
    from pagegen.db.figures import medians_statement

    code, device = targets.code_hash(target), selection.device_for(target, named)
    with open_db(url, read_only=True) as db:
        parts = [
            "-- the block sizes that were measured",
            statements.text_of(db, statements.layouts(spec, target, code)),
        ]
        for layout in db.measured_layouts(spec, target, code):
            rule = selection.rule_for(spec, layout, target, db, device=device)
            statement = medians_statement(spec, layout, device, code, rule.variants, profile.workloads)
            parts += [
                f"-- samples at block size {layout.block_size} {layout.order} on {device.name}",
                statements.text_of(db, statement),
            ]
    return "\n".join(parts)


def _text(rows: list[BlockSizeRow], document: dict[str, Any], table_format: str) -> str:
    columns = {
        "block_size": "block", "order": "order", "times": "times", "step_us": "step us", "p50_us": "p50 us",
        "p99_us": "p99 us", "tokens_per_s": "tokens/s", "waste": "waste %", "metadata_bytes": "metadata B/seq",
        "admitted_sequences": "sequences",
    }  # fmt: skip
    if document["memory_bytes"] is None:
        del columns["admitted_sequences"]
    table = output.table([_shown(row) for row in rows], columns, table_format)
    best = rows[0]
    lines = [
        f"{document['model']} in {document['q_dtype']}, cache {document['kv_dtype']}, on {best.device}, profile "
        f"{document['profile']}, best {document['objective']} first",
        "",
        table,
        "",
        f"block size {best.block_size} {best.order}: {best.reason}",
        *(_tie(document["ties"]) if best.admitted_sequences != 0 else ["no sequence fits this memory"]),
        "step, p50 and p99: attention in one layer; tokens/s: attention in all "
        f"{document['num_layers']} layers and nothing else",
    ]
    return "\n".join([*lines, document["hint"]] if document["hint"] else lines)


def _tie(sizes: Sequence[int]) -> list[str]:
    """What to make of block sizes whose step times are alike."""
    if len(sizes) < 2:
        return []
    return [f"a tie: the step times of block sizes {', '.join(map(str, sizes))} are alike; what they waste decides"]


def _shown(row: BlockSizeRow) -> dict[str, Any]:
    return {
        **row.to_dict(),
        "times": _origin(row),
        "step_us": f"{row.step_us:.1f}",
        "p50_us": f"{row.p50_us:.1f}",
        "p99_us": f"{row.p99_us:.1f}",
        "tokens_per_s": f"{row.tokens_per_s:.0f}",
        "waste": f"{100 * row.waste_share:.2f}",
        "metadata_bytes": f"{row.metadata_bytes:.0f}",
    }


def _origin(row: BlockSizeRow) -> str:
    """Where a row's times come from, in a few words."""
    parts = [(row.measured_share, "measured"), (row.scaled_share, "scaled")]
    told = [f"{share:.0%} {word}" for share, word in parts if share > 0]
    return row.kind if row.kind == "measured" or not told else ", ".join(told)
