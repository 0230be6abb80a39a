"""`pagegen db`: the tuning database, looked at and looked after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagegen.cli import output
from pagegen.cli.options import TargetType, target_option
from pagegen.spec import AttentionSpec, Measurement, Status, Target

if TYPE_CHECKING:
    from pagegen.db import Database, TransferReport

url_option = click.option("--db", "url", help="A database file or URL; PAGEGEN_DB or your own by default.")


@contextmanager
def plain_failures() -> Iterator[None]:
    """Turns what a database, a file or an argument is wrong about into one line and exit code 1."""
    from pagegen.db import DatabaseError

    try:
        yield
    except DatabaseError as error:
        raise output.Failure(str(error)) from error
    except (OSError, ValueError) as error:
        raise output.Failure(str(error).splitlines()[0]) from error


@contextmanager
def _database(url: str | None, *, read_only: bool) -> Iterator[Database]:
    from pagegen.db import open_db

    with plain_failures(), open_db(url, read_only=read_only) as db:
        yield db


@click.group()
def command() -> None:
    """Looks at the tuning database, moves records in and out, checks and prunes it."""


@command.command()
@url_option
@output.json_option
def stats(url: str | None, as_json: bool) -> None:
    """How much the database holds."""
    with _database(url, read_only=True) as db:
        found = db.stats()

    def text() -> str:
        flat = [
            {
                "what": f"{key.replace('_', ' ')}: {name}" if isinstance(value, dict) else key.replace("_", " "),
                "value": shown,
            }
            for key, value in found.items()
            for name, shown in (value.items() if isinstance(value, dict) else [("", value)])
        ]
        return output.table(flat, {"what": "what", "value": "value"})

    output.show(found, as_json, text)


@command.command()
@url_option
@click.option("--model", help="Only trials of this model's attention.")
@click.option("--block-size", type=click.IntRange(min=1), help="Only this block size.")
@click.option("--target", type=TargetType(), help="Only this target.")
@click.option("--status", type=click.Choice([s.value for s in Status]), help="Only trials that ended so.")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="The newest so many.")
@output.json_option
def trials(
    url: str | None,
    model: str | None,
    block_size: int | None,
    target: Target | None,
    status: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """The trials, oldest first."""
    spec = _spec_of(model)
    with _database(url, read_only=True) as db:
        found = db.trials(spec=spec, target=target, status=Status(status) if status else None)
    wanted = [m for m in found if block_size in (None, m.layout.block_size)]
    shown = wanted[-limit:]

    def text() -> str:
        columns = {
            "created_at": "when", "heads": "heads", "head_dim": "dim", "block_size": "block", "target": "target",
            "variant": "variant", "batch": "batch", "status": "status", "median_us": "median us",
        }  # fmt: skip
        rows = [{**_trial(m), "block_size": f"{m.layout.block_size} {m.layout.order}"} for m in shown]
        return output.table(rows, columns) + f"\n{len(shown)} of {len(wanted)} trials"

    output.show({"trials": [_trial(m) for m in shown], "matching": len(wanted)}, as_json, text)


def _spec_of(model: str | None) -> AttentionSpec | None:
    try:
        return None if model is None else AttentionSpec.from_model(model)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--model") from error


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


@command.command("export")
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@url_option
@output.json_option
def export_(path: Path, url: str | None, as_json: bool) -> None:
    """Writes every record to PATH as JSON lines, in an order that diffs well."""
    with _database(url, read_only=True) as db:
        count = db.export(path)
    output.show({"path": str(path), "records": count}, as_json, lambda: f"{count} records in {path}")


@command.command("import")
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@url_option
@output.json_option
def import_(path: Path, url: str | None, as_json: bool) -> None:
    """Adds the records of an exported file."""
    with _database(url, read_only=False) as db:
        report = db.import_(path)
    _show_transfer(report, str(path), as_json)


@command.command()
@click.argument("other")
@url_option
@output.json_option
def merge(other: str, url: str | None, as_json: bool) -> None:
    """Adds everything of the database OTHER (a file or URL)."""
    with _database(url, read_only=False) as db:
        report = db.merge(other)
    _show_transfer(report, other, as_json)


def _show_transfer(report: TransferReport, source: str, as_json: bool) -> None:
    document = {
        "added": report.added,
        "present": report.present,
        "malformed": list(report.malformed),
        "ignored": list(report.ignored),
    }
    output.show(document, as_json, lambda: f"{report.added} records added, {report.present} there already")
    for note in report.ignored:
        click.echo(f"ignored: {note}", err=True)
    for problem in report.malformed:
        click.echo(f"left out: {problem}", err=True)
    if report.malformed:
        raise output.Failure(
            f"{len(report.malformed)} records of {source} cannot be read and were left out; the others are in"
        )


@command.command()
@url_option
@output.json_option
def verify(url: str | None, as_json: bool) -> None:
    """Checks pages, keys, rows and times; exit code 1 when something is wrong."""
    with _database(url, read_only=True) as db:
        problems = db.verify()
        name = db.name
    output.show({"database": name, "problems": problems}, as_json, lambda: "\n".join(problems) or f"{name} is sound")
    if problems:
        raise output.Failure(f"{name} has {len(problems)} problems: export what can be read and import it elsewhere")


@command.command()
@url_option
@target_option
@click.option("--keep", multiple=True, help="A code hash to keep; the present templates' by default. May be repeated.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@output.json_option
def prune(url: str | None, target: Target, keep: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Removes the trials and portfolios of templates that are no more."""
    from pagegen import targets

    kept = keep or (targets.code_hash(target),)
    with _database(url, read_only=dry_run) as db:
        removed = db.prune(target=target, keep=kept, dry_run=dry_run)
    verb = "would go" if dry_run else "removed"
    document = {"target": str(target), "kept_code_hashes": list(kept), "dry_run": dry_run, "removed": removed}
    output.show(
        document, as_json, lambda: f"{verb}: " + ", ".join(f"{count} {name}" for name, count in removed.items())
    )
