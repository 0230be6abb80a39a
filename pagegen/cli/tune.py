"""`pagegen tune`: finds the best variants for a model's traffic and keeps them in the database."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pagegen.cli import options, output
from pagegen.cli.option_types import DurationType, count
from pagegen.spec import Device, Target
from pagegen.spec.layout import ORDERS, USUAL_BLOCK_SIZES

if TYPE_CHECKING:
    from pagegen_autotune.report import Report

_USUAL = ",".join(map(str, USUAL_BLOCK_SIZES))


@click.command()
@options.model_options
@options.profile_option
@options.target_option
@options.device_option
@options.block_sizes_option(default=_USUAL, show_default=True)
@click.option(
    "--order", "orders", type=click.Choice(ORDERS), multiple=True, default=["NHD"], show_default=True,
    help="Memory order inside a block; may be given twice.",
)  # fmt: skip
@click.option("--budget", type=DurationType(), help="Time to spend (90s, 5m, 1h); as long as it takes by default.")
@click.option("--trials", type=count(), help="The most trials (a variant on a batch) to spend.")
@click.option(
    "--objective", type=click.Choice(["mean", "p99", "cvar"]), default="mean", show_default=True,
    help="Choose by the expected step time, its 99th percentile, or the mean of its slowest 5 %.",
)  # fmt: skip
@click.option(
    "--strategy", type=click.Choice(["guided", "coordinate", "exhaustive"]), default="guided", show_default=True,
    help="Search where a model of the trials so far expects gains, around the default variant, or measure every legal "
    "variant.",
)  # fmt: skip
@click.option(
    "--revalidate", is_flag=True,
    help="Measure the best stored variants again where the compiler or driver changed since; no search.",
)  # fmt: skip
@click.option("--top", type=count(), default=3, show_default=True, help="How many, with --revalidate.")
@click.option(
    "--ray", "address", metavar="auto|HOST:PORT",
    help="Tune every distinct device of a running Ray cluster, equal ones side by side.",
)  # fmt: skip
@click.option("--devices", metavar="NAMES", help="Of a cluster, only these: targets or parts of names, by commas.")
@options.url_option
@output.json_option
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    layer: str | None,
    q_dtype: str | None,
    kv_dtype: str | None,
    kv_scales: str,
    kv_zero_points: bool,
    profile_name: str,
    target: Target,
    device: str | None,
    block_sizes: tuple[int, ...],
    orders: tuple[str, ...],
    budget: float | None,
    trials: int | None,
    objective: str,
    strategy: str,
    revalidate: bool,
    top: int,
    address: str | None,
    devices: str | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Finds the variants that serve a model best under a traffic profile.

    Every trial is kept in the database, and a run that was stopped goes on where it stopped. For a GPU that is not in
    this machine, variants are ranked by the cost model and compiled; the result is marked as predicted.

    With --ray, devices are found by what the nodes of a cluster report, and --target is of no use: --devices chooses.
    A node that is lost costs what it was measuring, which another measures anew. The budget holds for each device.

    With --revalidate, block sizes and orders are the stored ones, and so is the objective where none is named: see
    `pagegen db verify` for what is stale.
    """
    spec = options.model_spec(model, layer, q_dtype, kv_dtype, kv_scales, kv_zero_points)
    profile = options.profile_of(profile_name)
    if target.kind == "interpreter":
        raise click.BadParameter(
            "the interpreter's times mean nothing: name cpu, or a GPU such as sm_90", param_hint="--target"
        )
    wanted = _cluster_options(ctx, address, devices, revalidate)
    _revalidate_options(ctx, revalidate)
    if address is None:
        _search_options(options.known_device(target, device), trials, strategy)
    from pagegen_autotune.fleet import FleetReport, tune_fleet
    from pagegen_autotune.measured import TuneError
    from pagegen_autotune.revalidate import revalidate as measure_again
    from pagegen_autotune.tuner import tune

    with output.plain_failures():
        try:
            report: Report | FleetReport
            if address is not None:
                report = tune_fleet(
                    spec, profile, address=address, devices=wanted, block_sizes=block_sizes, db=url, budget_s=budget,
                    orders=orders, strategy=strategy, objective=objective, budget_trials=trials,
                )  # fmt: skip
            elif revalidate:
                report = measure_again(
                    spec, profile, target=target, db=url, budget_s=budget, k=top,
                    objective=objective if options.is_given(ctx, "objective") else None,
                )  # fmt: skip
            else:
                report = tune(
                    spec, profile, block_sizes=block_sizes, target=target, db=url, budget_s=budget, orders=orders,
                    strategy=strategy, objective=objective, budget_trials=trials, device=device,
                )  # fmt: skip
        except TuneError as error:
            raise output.Failure(str(error)) from error
    output.show({"model": model, **report.to_dict()}, as_json, lambda: str(report))
    if report.interrupted:
        raise output.Failure("stopped before the end; run the same command again, and it goes on where it stopped")


def _cluster_options(
    ctx: click.Context, address: str | None, devices: str | None, revalidate: bool
) -> tuple[str, ...]:  # fmt: skip
    """The names that --devices gives. Raises UsageError for options that do not go together."""
    if address is None:
        if devices is not None:
            raise click.UsageError("--devices chooses among the devices of a cluster: it goes with --ray")
        return ()
    if revalidate:
        raise click.UsageError("--revalidate measures on this machine alone: run it without --ray on each device")
    for name in ("target", "device"):
        if options.is_given(ctx, name):
            raise click.UsageError(f"--{name} is for this machine: with --ray, --devices names those of the cluster")
    names = tuple(name.strip() for name in (devices or "").split(","))
    if devices is not None and not all(names):
        raise click.BadParameter(f"must be names such as sm_90,H100, got {devices!r}", param_hint="--devices")
    return tuple(name for name in names if name)


def _search_options(device: Device, trials: int | None, strategy: str) -> None:
    """Raises UsageError for options of a search by measuring, where nothing can be measured."""
    from pagegen_autotune.tuner import is_present

    from pagegen import targets

    given = ["--trials"] * (trials is not None) + ["--strategy"] * (strategy != "guided")
    if given and not (is_present(device.target) and device == targets.current_device(device.target)):
        raise click.UsageError(
            f"{' and '.join(given)} is for what is measured, and nothing is timed for {device.name} "
            f"({device.target}), which is not here: leave it out"
        )


def _revalidate_options(ctx: click.Context, revalidate: bool) -> None:
    """Raises UsageError for options that would say nothing: what is measured again is what was stored."""
    if not revalidate:
        if options.is_given(ctx, "top"):
            raise click.UsageError("--top says how many --revalidate measures again: it goes with --revalidate")
        return
    searching = {"block_sizes": "--block-sizes", "orders": "--order", "trials": "--trials", "strategy": "--strategy",
                 "device": "--device"}  # fmt: skip
    given = [option for name, option in searching.items() if options.is_given(ctx, name)]
    if given:
        raise click.UsageError(f"{', '.join(given)} is for a search: --revalidate measures what was stored, as it was")
