"""What `pagegen demo` prints for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagegen.cli import output

if TYPE_CHECKING:
    from pagegen_autotune import Report

    from pagegen.db import BlockSizeRow


def text(document: dict[str, Any], report: Report, rows: list[BlockSizeRow]) -> str:
    return "\n\n".join(
        [
            _tuning(report),
            _block_sizes(report, rows),
            f"{document['model']}\nkernels: {document['kernel']}",
            *(f"> {a['prompt']} ({a['prompt_tokens']} tokens)\n{a['answer']}" for a in document["answers"]),
            _verdict(document),
            _runs(document["runs"]),
            "seconds: " + ", ".join(f"{name} {s:.0f}" for name, s in document["seconds"].items()),
        ]
    )


def _tuning(report: Report) -> str:
    """What tuning did, in a line; `pagegen tune` shows each choice."""
    trials = sum(report.trials.values())
    found = f", {report.resumed} found in the database" if report.resumed else ""
    gains = ", ".join(f"{row.layout.block_size}: {row.speedup:.3f}" for row in report.rows)
    left = f"; {len(report.left_out)} parts of the search left out (--json names them)" if report.left_out else ""
    return (
        f"tuned on {report.profile} for {report.device.name} ({report.device.target}): {trials} trials{found} in "
        f"{report.seconds:.0f} s{left}\nspeed-up over the default variants by block size: {gains}"
    )


def _block_sizes(report: Report, rows: list[BlockSizeRow]) -> str:
    cells = [
        {
            "block_size": row.block_size,
            "kind": row.kind,
            "step_us": f"{row.step_us:.1f}",
            "p99_us": f"{row.p99_us:.1f}",
            "tokens_per_s": f"{row.tokens_per_s:.0f}",
            "waste": f"{100 * row.waste_share:.2f}",
            "metadata": f"{row.metadata_bytes:.0f}",
        }
        for row in rows
    ]
    columns = {
        "block_size": "block size", "kind": "times", "step_us": "us a layer", "p99_us": "p99 us",
        "tokens_per_s": "attention tokens/s", "waste": "waste %", "metadata": "metadata B/seq",
    }  # fmt: skip
    return f"best block size for {report.profile}: {rows[0].block_size}\n\n{output.table(cells, columns)}"


def _verdict(document: dict[str, Any]) -> str:
    count = sum(len(a["tokens"]) for a in document["answers"])
    if document["identical"]:
        return f"all {count} greedy tokens are those of {document['compared_with']}"
    return f"tokens DIFFER from {document['compared_with']}: {document['first_difference']}"


def _runs(runs: list[dict[str, Any]]) -> str:
    cells = [
        {
            "name": run["name"],
            "tokens": sum(run["new_tokens"]),
            "server": f"{run['server_tokens_per_s']:.1f}",
            "latency": " / ".join(f"{s:.2f}" for s in run["latencies_s"]),
        }
        for run in runs
    ]
    columns = {"name": "run", "tokens": "new tokens", "server": "server tokens/s", "latency": "request latency s"}
    note = (
        "server tokens/s: new tokens of all requests over the whole time; request latency: until a request's last\n"
        "token, from the start that all share, or one at a time from its own"
    )
    return f"{output.table(cells, columns)}\n{note}"
