"""`pagegen profile`: workload profiles from traces, and the ones at hand."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
from pagegen_autotune.profiles import BATCHES, UTILISATION, distil, load_profile, prefix_size, shipped_profiles
from pagegen_autotune.simulation import BLOCK_TOKENS, Server
from pagegen_autotune.trace import MalformedRow, Trace, TraceError, read_trace
from tqdm import tqdm

from pagegen.cli import options, output
from pagegen.spec import Profile

_SERVER = Server()
_BATCH_COLUMNS = {
    "weight": "weight",
    "kind": "kind",
    "sequences": "sequences",
    "queries": "queries",
    "longest_query": "longest query",
    "context": "context tokens",
    "median": "median context",
    "longest": "longest context",
}
_LIST_COLUMNS = {"name": "name", "batches": "batches", "requests": "requests", "source": "source", "licence": "licence"}
_NOT_SHARED = (
    "the lengths of the prompts do not tell how many tokens a prefix id stands for: nothing was shared; "
    "name it with --prefix-block-tokens"
)
_Function = TypeVar("_Function", bound=Callable[..., Any])


@click.group()
def command() -> None:
    """Workload profiles: weighted batches that stand for real traffic."""


def _finite(_: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """click's FloatRange lets nan through, which no comparison refuses."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{parameter.name} must be a finite number, got {value}")
    return value


def _server_options(function: _Function) -> _Function:
    """The simulated server and the load it is put under."""
    positive = click.IntRange(min=1)
    for option in reversed(
        [
            click.option("--max-num-seqs", type=positive, default=_SERVER.max_num_seqs, help="Sequences a step."),
            click.option("--max-batch-tokens", type=positive, help="Tokens a step: 512, or one a sequence if more."),
            click.option(
                "--kv-tokens",
                type=positive,
                default=_SERVER.kv_tokens,
                help="Tokens that the cache holds.",
            ),
            click.option("--block-tokens", type=positive, default=BLOCK_TOKENS, help="Tokens a block of the cache."),
            click.option(
                "--utilisation",
                type=click.FloatRange(0, 2, min_open=True),
                callback=_finite,
                default=UTILISATION,
                help="Scale the arrival rate to this share of what the server can finish.",
            ),
            click.option(
                "--rate-scale",
                type=click.FloatRange(0, min_open=True),
                callback=_finite,
                help="Scale the arrival rate by this, in place of --utilisation.",
            ),
        ]
    ):
        function = option(function)
    return function


@command.command("import", context_settings={"show_default": True})
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--output", "target", required=True, type=click.Path(path_type=Path), help="File to write.")
@click.option("--name", help="Name of the profile, by default the trace file's.")
@click.option("--skip-bad", is_flag=True, help="Leave malformed rows out, and say how many.")
@_server_options
@click.option(
    "--prefix-reuse/--no-prefix-reuse", default=True, help="Let prompts share what their prefix_hash_ids say."
)
@click.option(
    "--prefix-block-tokens", type=click.IntRange(min=1), show_default=False,
    help="Tokens that one of prefix_hash_ids stands for, where the lengths of the prompts do not tell.",
)  # fmt: skip
@click.option("--batches", type=click.IntRange(min=2), default=BATCHES, help="Most batches to keep.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of every random draw.")
@click.option("--source", default="", show_default=False, help="Where the trace comes from, kept in the profile.")
@click.option("--licence", default="", show_default=False, help="Licence of the trace, kept in the profile.")
@output.json_option
def import_(
    trace: Path,
    target: Path,
    name: str | None,
    skip_bad: bool,
    max_num_seqs: int,
    max_batch_tokens: int | None,
    kv_tokens: int,
    block_tokens: int,
    prefix_reuse: bool,
    prefix_block_tokens: int | None,
    as_json: bool,
    **choices: Any,
) -> None:
    """Makes a profile of TRACE by simulating continuous batching over it.

    TRACE is CSV with the header arrival_s,prompt_tokens,output_tokens[,prefix_hash_ids], or JSONL with these keys.
    arrival_s is in seconds, or empty in every row: requests are then admitted as the server has room.
    """
    _refuse_idle_options(click.get_current_context(), name, prefix_reuse, prefix_block_tokens)
    if max_batch_tokens is None:
        max_batch_tokens = max(_SERVER.max_batch_tokens, max_num_seqs)
    try:
        server = Server(
            max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens, kv_tokens=kv_tokens,
            block_tokens=block_tokens,
        )  # fmt: skip
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if not target.parent.is_dir() or target.is_dir():
        raise output.Failure(f"{target} cannot be written: name a file in a folder that exists with -o")
    if target.exists() and target.samefile(trace):
        raise click.UsageError(f"-o must name another file than the trace, got {target} for both")
    requests = _read(trace, skip_bad, keep_prefixes=prefix_reuse)
    if prefix_block_tokens is not None and requests.prefix_runs is None:
        raise click.UsageError(f"--prefix-block-tokens is for prefix_hash_ids, and {trace} has none")
    size = prefix_size(requests) if prefix_block_tokens is None else prefix_block_tokens
    reuse = None if requests.prefix_runs is None else size
    profile = _distil(trace, requests, server, name=name or trace.stem, prefix_block_tokens=reuse, **choices)
    try:
        profile.save(target)
    except OSError as error:
        raise output.Failure(f"{target} cannot be written ({error.strerror}): name another file with -o") from error
    bad = {"bad_rows": requests.bad_rows, "bad_examples": list(requests.bad_examples)}
    document = {**_summary(profile), "file": str(target), **bad, "figures": profile.figures}
    if requests.prefix_runs is not None and reuse is None:
        document["hint"] = _NOT_SHARED
    hint = f"{document['hint']}\n" if "hint" in document else ""
    output.show(document, as_json, lambda: f"{_skipped(requests)}{_text(profile)}\n\n{hint}written to {target}")


def _refuse_idle_options(
    ctx: click.Context, name: str | None, prefix_reuse: bool, prefix_block_tokens: int | None
) -> None:
    """Raises UsageError for options of which one would be dropped for the other, and a name that is none."""
    if options.is_given(ctx, "rate_scale") and options.is_given(ctx, "utilisation"):
        raise click.UsageError("--rate-scale takes the place of --utilisation: name one of them")
    if prefix_block_tokens is not None and not prefix_reuse:
        raise click.UsageError("--prefix-block-tokens says how prompts share: it does not go with --no-prefix-reuse")
    if name is not None and not name.strip():
        raise click.BadParameter(f"must be a name, got {name!r}", param_hint="--name")


@command.command("list")
@output.json_option
def list_(as_json: bool) -> None:
    """Lists the profiles that ship with pagegen."""
    rows = [_summary(load_profile(name)) for name in shipped_profiles()]
    output.show({"profiles": rows}, as_json, lambda: output.table(rows, _LIST_COLUMNS))


@command.command("show")
@click.argument("profile", metavar="NAME|FILE")
@output.json_option
def show(profile: str, as_json: bool) -> None:
    """Shows the figures and batches of a shipped profile or of a profile file."""
    try:
        found = load_profile(profile)
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{error}; `pagegen profile list` names the shipped profiles") from error
    output.show(found.to_dict(), as_json, lambda: _text(found))


def _bar(desc: str, unit: str, total: int | None = None) -> Any:
    """A progress bar on standard error, where that is a terminal."""
    return tqdm(desc=desc, unit=unit, total=total, unit_scale=True, file=sys.stderr, leave=False, disable=None)


def _read(path: Path, skip_bad: bool, *, keep_prefixes: bool) -> Trace:
    try:
        with _bar("reading", "B", path.stat().st_size) as bar:
            return read_trace(path, skip_bad=skip_bad, keep_prefixes=keep_prefixes, on_bytes=bar.update)
    except TraceError as error:
        hint = "; --skip-bad leaves malformed rows out" if isinstance(error, MalformedRow) else ""
        raise output.Failure(f"{error}{hint}") from error
    except OSError as error:
        raise output.Failure(f"{path} cannot be read ({error.strerror}): name a readable file") from error


def _distil(path: Path, requests: Trace, server: Server, **choices: Any) -> Profile:
    with _bar("simulating", " requests") as bar:

        def on_finished(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        try:
            return distil(requests, server=server, on_finished=on_finished, **choices)
        except ValueError as error:
            raise output.Failure(f"{path}: {error}") from error


def _skipped(requests: Trace) -> str:
    if not requests.bad_rows:
        return ""
    more = requests.bad_rows - len(requests.bad_examples)
    lines = [*requests.bad_examples, f"and {more} more"] if more else requests.bad_examples
    rows = "1 malformed row" if requests.bad_rows == 1 else f"{requests.bad_rows} malformed rows"
    return f"{rows} left out:\n" + "".join(f"  {line}\n" for line in lines) + "\n"


def _summary(profile: Profile) -> dict[str, Any]:
    return {
        "name": profile.name,
        "batches": len(profile.workloads),
        "requests": profile.figures.get("requests"),
        "source": profile.source,
        "licence": profile.licence,
    }


def _text(profile: Profile) -> str:
    """The profile for people; of figures, which are free in form, distributions as a table and the rest by name."""
    figures = profile.figures
    spreads = [{"tokens": key, **value} for key, value in figures.items() if isinstance(value, dict) and "p50" in value]
    rest = {key: value for key, value in figures.items() if not isinstance(value, dict) or "p50" not in value}
    parts = ["\n".join(f"{key}: {value}" for key, value in _summary(profile).items() if value not in (None, ""))]
    if spreads:
        parts.append(output.table(spreads, {key: key.replace("tokens", "") for key in spreads[0]}))
    parts.append("\n".join(_lines(rest)))
    parts.append(output.table([_batch(load, weight) for load, weight in profile], _BATCH_COLUMNS))
    return "\n\n".join(part for part in parts if part)


def _lines(figures: dict[str, Any]) -> list[str]:
    lines = []
    for key, value in figures.items():
        if key == "requests" or value is None:
            continue
        shown = ", ".join(f"{k} {v}" for k, v in value.items() if v is not None) if isinstance(value, dict) else value
        lines.append(f"{key.replace('_', ' ')}: {str(shown).replace('_', ' ')}")
    return lines


def _batch(load: Any, weight: float) -> dict[str, Any]:
    return {
        "weight": f"{weight:.3f}",
        "kind": "decode" if load.is_decode else "mixed",
        "sequences": load.num_seqs,
        "queries": load.total_q,
        "longest_query": load.max_query_len,
        "context": load.total_context,
        "median": int(np.median(load.context_lens)),
        "longest": load.max_context_len,
    }
