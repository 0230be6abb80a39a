"""`pagegen build`: compiles a model's kernels here, to be shipped to machines without a compiler."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pagegen.cli import options, output
from pagegen.cli.option_types import TargetType
from pagegen.spec import CacheLayout, Target

if TYPE_CHECKING:
    from pagegen.selection.shipping import Built

GPU = (
    "{target} is no CPU: Triton compiles a GPU's kernels at their first launch, for the alignment of the very call, so "
    "what was compiled without that GPU need not be what it asks for. Build where the GPU is: call pagegen.prepare "
    "there and ship Triton's own cache folder (TRITON_CACHE_DIR)"
)


@click.command()
@options.model_options
@options.block_sizes_option(required=True)
@options.order_option
@click.option("--target", type=TargetType(), default="cpu", show_default=True, help="What to compile for: this CPU.")
@click.option(
    "-o", "--output", "folder", type=click.Path(file_okay=False, path_type=Path), required=True,
    help="The folder to write, or to add to.",
)  # fmt: skip
@options.url_option
@output.json_option
def command(
    model: str,
    layer: str | None,
    q_dtype: str | None,
    kv_dtype: str | None,
    kv_scales: str,
    kv_zero_points: bool,
    block_sizes: tuple[int, ...],
    order: str,
    target: Target,
    folder: Path,
    url: str | None,
    as_json: bool,
) -> None:
    """Compiles the variants that the database chooses for a model, for CPUs that can do what this one can.

    The folder holds sources, libraries and a manifest with every hash. A process uses it that has PAGEGEN_ARTEFACTS
    set, or calls pagegen.prepare(..., artefacts=FOLDER); PAGEGEN_ARTEFACTS_SHA256 pins the manifest that it accepts.
    """
    spec = options.model_spec(model, layer, q_dtype, kv_dtype, kv_scales, kv_zero_points)
    if target.kind != "cpu":
        raise click.BadParameter(GPU.format(target=target), param_hint="--target")
    from pagegen.selection.shipping import build
    from pagegen.targets.errors import CompileError

    wanted = [(spec, CacheLayout(block_size=size, order=order)) for size in block_sizes]
    with output.plain_failures():
        try:
            built = build(wanted, folder, db=url)
        except CompileError as error:
            raise output.Failure(str(error)) from error
    document = {
        "model": model,
        "path": str(built.path),
        "manifest_sha256": built.sha256,
        "kernels": [asdict(kernel) for kernel in built.kernels],
        "compiled": list(built.compiled),
        "rules": len(built.rules),
        "needs": {"machine": built.head.machine, "cpu_features": list(built.head.cpu_features)},
    }
    output.show(document, as_json, lambda: _text(built))


def _text(built: Built) -> str:
    rules = f"the choices of {len(built.rules)} tuned block sizes" if built.rules else "no tuned choice"
    return (
        f"{len(built.compiled)} kernels by {built.head.compiler}, and {rules}, in {built.path}\n"
        f"use them with PAGEGEN_ARTEFACTS={built.path}\n"
        f"and accept these alone with PAGEGEN_ARTEFACTS_SHA256={built.sha256}"
    )
