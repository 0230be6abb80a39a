"""Options that several commands share, with bad values reported as usage errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from pagegen.cli import output
from pagegen.cli.option_types import BlockSizesType, TargetType, count
from pagegen.spec import AttentionSpec, Device, Profile, Target, Variant
from pagegen.spec.attention import SCALE_GRANULARITIES
from pagegen.spec.layout import ORDERS

Command = TypeVar("Command", bound=Callable[..., Any])


def _place(_: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The place that `--db` names, refused here where it is none: what reads would otherwise go on without it."""
    if value is not None:
        from pagegen.db.errors import BadPlace
        from pagegen.db.places import place_of

        try:
            place_of(value)
        except BadPlace as error:
            raise click.BadParameter(str(error), param=param) from error
    return value


url_option = click.option(
    "--db", "url", callback=_place, help="A database file or URL; PAGEGEN_DB or your own by default."
)
# Traffic of a real chat service: what is tuned for where nothing is said.
profile_option = click.option(
    "--profile", "profile_name", default="azure-conversation", show_default=True,
    help="A shipped profile's name or a profile file.",
)  # fmt: skip


order_option = click.option(
    "--order", type=click.Choice(ORDERS), default="NHD", show_default=True, help="Memory order inside a block."
)


def block_sizes_option(**settings: Any) -> Callable[[Command], Command]:
    """`--block-sizes`; `settings` are click's."""
    return click.option(
        "--block-sizes", type=BlockSizesType(), help="Tokens a cache block; several by commas.", **settings
    )


def model_options(command: Command) -> Command:
    """`--model`, `--layer`, `--q-dtype` and the options of the cache: read them back with `model_spec`."""
    for option in reversed(
        (
            click.option("--model", required=True, help='A known model ("llama-3.1-8b") or its Hugging Face id.'),
            click.option("--layer", type=click.Choice(["full", "sliding"]), help="Which layer of a model that mixes."),
            click.option("--q-dtype", help="Query dtype; the model's own by default."),
            click.option("--kv-dtype", help="Cache dtype; the query dtype by default."),
            click.option(
                "--kv-scales",
                type=click.Choice(SCALE_GRANULARITIES),
                default="none",
                show_default=True,
                help="What has a scale of its own in a float8, int8 or int4 cache.",
            ),
            click.option("--kv-zero-points", is_flag=True, help="An int8 or int4 cache has zero points as well."),
        )
    ):
        command = option(command)
    return command


def model_spec(
    model: str, layer: str | None, q_dtype: str | None, kv_dtype: str | None, kv_scales: str, kv_zero_points: bool
) -> AttentionSpec:
    """The spec that the model options name."""
    try:
        spec = AttentionSpec.from_model(model, layer=layer, q_dtype=q_dtype, kv_dtype=kv_dtype)
        return spec.replace(kv_scale_granularity=kv_scales, kv_zero_points=kv_zero_points)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def profile_of(name: str) -> Profile:
    """The profile that `--profile` names: a shipped one or a file."""
    from pagegen_autotune.profiles import load_profile

    try:
        return load_profile(name)
    except (OSError, ValueError) as error:
        raise click.BadParameter(str(error), param_hint="--profile") from error


def spec_of(model: str | None) -> AttentionSpec | None:
    """The spec that `--model` names, None without one."""
    try:
        return None if model is None else AttentionSpec.from_model(model)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--model") from error


def layout_options(command: Command) -> Command:
    """`--block-size` and `--order`: read them back as `CacheLayout(block_size=..., order=...)`."""
    size = click.option("--block-size", type=count(), required=True, help="Tokens a cache block.")
    return size(order_option(command))


def _or_current(ctx: click.Context, param: click.Parameter, value: Target | None) -> Target:
    try:
        return value or Target.current()
    except ValueError as error:  # PAGEGEN_TARGET names none
        raise output.Failure(f"PAGEGEN_TARGET: {error}") from error


def target_option(command: Command) -> Command:
    """`--target`, by default this machine's."""
    return click.option(
        "--target", type=TargetType(), callback=_or_current, help="sm_90, gfx942, cpu; this machine by default."
    )(command)


def device_option(command: Command) -> Command:
    """`--device`, a product of the target."""
    return click.option(
        "--device",
        help='The product of the target that is meant ("NVIDIA H200", or h200), if it is not in this machine.',
    )(command)


def is_given(ctx: click.Context, name: str) -> bool:
    """Whether the parameter stands on the command line, so that it is no default."""
    return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def known_device(target: Target, device: str | None) -> Device:
    """The device that `--target` and `--device` name; a target of which nothing is known, and a name that is no one
    product of it, are bad usage."""
    from pagegen import selection

    try:
        return selection.device_for(target, device)
    except ValueError as error:
        hint = "--target" if device is None else "--device"
        raise click.BadParameter(str(error), param_hint=hint) from error


def named_variant(name: str, target: Target) -> Variant:
    """The variant that `--variant` names, of the family that `target` takes."""
    try:
        variant = Variant.parse(name)
    except (ValueError, TypeError) as error:
        raise click.BadParameter(str(error), param_hint="--variant") from error
    if variant.family != target.family:
        raise click.BadParameter(f"{target} needs a {target.family} variant, got {name}", param_hint="--variant")
    return variant
