"""`pagegen simulate`: what a server would do with each block size, and apart from it what requests would wait for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from pagegen.cli import options, output
from pagegen.cli.option_types import BytesType
from pagegen.spec import Target
from pagegen.spec.models import find_geometry

if TYPE_CHECKING:
    from pagegen_autotune.served import ServedBlockSize
    from pagegen_autotune.trace import Trace

_SERVER = {
    "block_size": "block", "order": "order", "times": "attention", "tokens_per_s": "tokens/s",
    "sequences": "sequences", "preemptions": "preempted", "waste": "waste %", "hits": "prefix hits %",
    "attention_share": "in attention %",
}  # fmt: skip
_REQUESTS = {
    "block_size": "block", "order": "order", "first_p50": "first token p50 ms", "first_p99": "p99 ms",
    "gap_p50": "a token p50 ms", "gap_p99": "p99 ms ", "load_preemptions": "preempted", "rejected": "too large",
}  # fmt: skip


@click.command(context_settings={"show_default": True})
@options.model_options
@options.profile_option
@options.target_option
@options.device_option
@click.option("--memory", type=BytesType(), required=True, help="Memory for the cache over all layers (40GiB).")
@click.option(
    "--weights", type=BytesType(),
    help="Bytes of the model's 16-bit weights (15GiB): what a step takes beside attention, which is else all it takes.",
)  # fmt: skip
@click.option(
    "--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Serve the requests of this trace, in place of ones drawn from the profile's figures.",
)  # fmt: skip
@click.option("--skip-bad", is_flag=True, help="Leave malformed rows of the trace out.")
@click.option(
    "--objective", type=click.Choice(["throughput", "latency"]), default="throughput",
    help="Rank by the server's tokens/s, or by what a token and then the first token waits for (p99).",
)  # fmt: skip
@click.option("--requests", type=click.IntRange(min=100), default=1000, help="Requests to serve.")
@click.option("--max-num-seqs", type=click.IntRange(min=1), default=256, help="Sequences a step.")
@click.option("--max-batch-tokens", type=click.IntRange(min=1), default=2048, help="Tokens a step.")
@click.option(
    "--utilisation", type=click.FloatRange(0, 2, min_open=True), default=0.8,
    help="Share of what the server can do at which the latencies are taken.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of every random draw.")
@options.url_option
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
    memory: int,
    weights: int | None,
    trace: Path | None,
    skip_bad: bool,
    url: str | None,
    table_format: str,
    as_json: bool,
    **choices: Any,
) -> None:
    """Simulates a server with each block size over the same requests.

    Waste, the grain in which prefixes are shared, admissions and preemptions follow from the block size; attention
    takes what was measured at it, or what the cost model predicts. All layers are taken to be alike.
    """
    spec = options.model_spec(model, layer, q_dtype, kv_dtype, kv_scales, kv_zero_points)
    profile = options.profile_of(profile_name)
    meant = options.known_device(target, device)
    if skip_bad and trace is None:
        raise click.UsageError("--skip-bad is for the rows of a trace: it goes with --trace")
    from pagegen_autotune.served import Rest, serve_block_sizes

    with output.plain_failures():
        requests, prefix_block_tokens = (None, None) if trace is None else _requests(trace, skip_bad)
        rest = None if weights is None else Rest.of_weights(weights, meant)
        with tqdm(desc="simulating", unit=" block sizes", file=sys.stderr, leave=False, disable=None) as bar:

            def on_run(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            served = serve_block_sizes(
                spec, target, profile, memory_bytes=memory, trace=requests, prefix_block_tokens=prefix_block_tokens,
                db=url, num_layers=find_geometry(model).attn_layers, rest=rest, on_run=on_run, device=device,
                **choices,
            )  # fmt: skip
    document = {
        "model": model,
        "profile": profile.name,
        "requests_of": "the profile's figures" if trace is None else str(trace),
        "target": str(target),
        "objective": choices["objective"],
        "memory_bytes": memory,
        "weights_bytes": weights,
        "best_block_size": served[0].block_size,
        "rows": [one.to_dict() for one in served],
    }
    output.show(document, as_json, lambda: _text(served, document, table_format))


def _requests(path: Path, skip_bad: bool) -> tuple[Trace, int | None]:
    """The requests of a trace file, and what one of its prefix ids stands for."""
    from pagegen_autotune.profiles import prefix_size
    from pagegen_autotune.trace import TraceError, read_trace

    try:
        trace = read_trace(path, skip_bad=skip_bad, keep_prefixes=True)
    except TraceError as error:
        raise output.Failure(f"{error}{'' if skip_bad else '; --skip-bad leaves malformed rows out'}") from error
    return trace, prefix_size(trace)


def _text(served: list[ServedBlockSize], document: dict[str, Any], table_format: str) -> str:
    rows = [_shown(one) for one in served]
    best = served[0]
    worst = max(one.cost.mean_error for one in served)
    beside = "attention is all that a step takes" if document["weights_bytes"] is None else "weights are read each step"
    return "\n".join(
        [
            f"{document['model']} on {best.attention.device}, requests of {document['requests_of']}, all simulated; "
            f"{beside}",
            "",
            "What the server can do, when all requests wait from the start:",
            "",
            output.table(rows, _SERVER, table_format),
            "",
            "What requests wait for, at the same rate for all:",
            "",
            output.table(rows, _REQUESTS, table_format),
            "",
            f"block size {best.block_size} {best.order} is best for {document['objective']}; the simulation takes "
            f"attention's times from a formula fitted to them, which is {worst:.0%} off in the mean",
        ]
    )


def _shown(one: ServedBlockSize) -> dict[str, Any]:
    first, gap = one.latencies.time_to_first_token_s, one.latencies.inter_token_s
    return {
        "block_size": one.block_size,
        "order": one.order,
        "times": one.attention.kind,
        "tokens_per_s": f"{one.speed.output_tokens_per_s:.0f}",
        "sequences": f"{one.sequences:.1f}",
        "preemptions": one.speed.preemptions,
        "waste": f"{100 * one.waste_share:.2f}",
        "hits": f"{100 * one.hit_share:.1f}",
        "attention_share": f"{100 * one.attention_share:.0f}",
        "first_p50": "-" if first is None else f"{1e3 * first.p50:.1f}",
        "first_p99": "-" if first is None else f"{1e3 * first.p99:.1f}",
        "gap_p50": "-" if gap is None else f"{1e3 * gap.p50:.2f}",
        "gap_p99": "-" if gap is None else f"{1e3 * gap.p99:.2f}",
        "load_preemptions": one.load_figures.preemptions,
        "rejected": one.rejected,
    }
