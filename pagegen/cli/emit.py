"""`pagegen emit`: the specialised kernel as one readable file that runs without pagegen."""

from __future__ import annotations

from pathlib import Path

import click

from pagegen.cli import options, output
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant, Target, TritonVariant, Variant


@click.command()
@options.model_options
@options.layout_options
@options.target_option
@click.option("--ragged", is_flag=True, help="The kernel for batches with longer queries, not the decode kernel.")
@click.option("--variant", "variant_name", help="A variant's name; by default the one that would be chosen.")
@click.option("-o", "--output", "path", type=click.Path(dir_okay=False, path_type=Path), help="Write to a file.")
@options.url_option
@output.json_option
def command(
    model: str,
    layer: str | None,
    q_dtype: str | None,
    kv_dtype: str | None,
    kv_scales: str,
    kv_zero_points: bool,
    block_size: int,
    order: str,
    target: Target,
    ragged: bool,
    variant_name: str | None,
    path: Path | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Prints the kernel that pagegen generates for a model, block size and target."""
    spec = options.model_spec(model, layer, q_dtype, kv_dtype, kv_scales, kv_zero_points)
    layout = CacheLayout(block_size=block_size, order=order)
    from pagegen import targets

    reason = targets.unsupported(spec, target)
    if reason is not None:
        raise output.Failure(f"no kernel is generated for {model} on {target}: {reason}")
    if variant_name:
        variant = options.named_variant(variant_name, target)
    else:
        variant = _chosen(spec, layout, target, ragged, url)
    source = render(spec, layout, variant, ragged=ragged)
    if path is not None:
        try:
            path.write_text(source, encoding="utf-8")
        except OSError as error:
            raise output.Failure(f"cannot write {path}: {error.strerror}; choose another file with -o") from error
    document = {"variant": variant.to_dict(), "target": str(target), "file": str(path) if path else None}
    if as_json:
        output.show({**document, "source": source}, True, str)
    elif path is None:
        click.echo(source, nl=False)
    else:
        output.note(f"{path}: {variant.name} for {target}")


def render(spec: AttentionSpec, layout: CacheLayout, variant: Variant, *, ragged: bool) -> str:
    """The source of one variant's kernel."""
    try:
        if isinstance(variant, CppVariant):
            from pagegen.codegen import cpp

            return cpp.render_attention(spec, layout, variant)
        from pagegen.codegen import triton

        assert isinstance(variant, TritonVariant)
        return triton.render_attention(spec, layout, variant, triton.Form(decode=not ragged))
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _chosen(spec: AttentionSpec, layout: CacheLayout, target: Target, ragged: bool, url: str | None) -> Variant:
    from pagegen.selection import rule_for

    rule = rule_for(spec, layout, target, url)
    # a batch of the middle: 32 sequences of 4096 tokens
    return rule.choose(32, 512 if ragged else 1, 4096)
