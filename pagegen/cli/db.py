"""`pagegen db`: the tuning database, looked at and looked after."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pagegen.cli import db_trials, output
from pagegen.cli.option_types import TargetType, count
from pagegen.cli.options import target_option, url_option
from pagegen.spec import Target

if TYPE_CHECKING:
    from pagegen.db import Database, TransferReport
    from pagegen.db.staleness import Staleness


@click.group()
def command() -> None:
    """Looks at the tuning database, moves records in and out, checks and prunes it."""


command.add_command(db_trials.command)


@command.command()
@url_option
@output.format_option
@output.json_option
def stats(url: str | None, table_format: str, as_json: bool) -> None:
    """How much the database holds."""
    with output.database(url, read_only=True) as db:
        found = db.stats()

    def text() -> str:
        flat = [
            {
                "what": f"{key.replace('_', ' ')}: {name}" if isinstance(value, dict) else key.replace("_", " "),
                "value": shown,
            }
            for key, value in found.items()
            if key != "read_only"  # how this command opened it: tells people nothing of the database
            for name, shown in (value.items() if isinstance(value, dict) else [("", value)])
        ]
        return output.table(flat, {"what": "what", "value": "value"}, table_format)

    output.show(found, as_json, text)


@command.command()
@url_option
@output.json_option
def conflicts(url: str | None, as_json: bool) -> None:
    """Where the database contradicts itself: trials of one question, portfolios of one kernel. Nothing is dropped."""
    from pagegen.db.conflicts import portfolio_conflicts, trial_conflicts

    with output.database(url, read_only=True) as db, db.store.reading() as connection:
        found = [*trial_conflicts(connection), *portfolio_conflicts(connection)]
    document = {"conflicts": [{"what": c.what, "answers": list(c.answers)} for c in found]}
    output.show(document, as_json, lambda: "\n".join(map(str, found)) or "no conflicts")


@command.command("export")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--as", "kind", type=click.Choice(["jsonl", "t4"]), default="jsonl", show_default=True,
    help="Everything as JSON lines, or the trials as T4 results, one file a problem in the folder PATH.",
)  # fmt: skip
@url_option
@output.json_option
def export_(path: Path, kind: str, url: str | None, as_json: bool) -> None:
    """Writes every record to PATH as JSON lines, in an order that diffs well; or the trials as T4 results."""
    from pagegen.db import t4

    if path.is_dir() and kind == "jsonl":
        raise click.BadParameter(f"must name a file, got the folder {path}", param_hint="PATH")
    with output.database(url, read_only=True) as db:
        if kind == "t4":
            files = [str(file) for file in t4.export(db.own.trials(), path)]
            output.show({"path": str(path), "files": files}, as_json, lambda: f"{len(files)} files in {path}")
            return
        count = db.export(path)
    output.show({"path": str(path), "records": count}, as_json, lambda: f"{count} records in {path}")


@command.command("import")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@url_option
@output.json_option
def import_(path: Path, url: str | None, as_json: bool) -> None:
    """Adds the records of an exported file, or of T4 results: a file or a folder of them."""
    with output.database(url, read_only=False) as db:
        report = db.import_(path)
    _show_transfer(report, str(path), as_json)


@command.command()
@click.argument("other")
@url_option
@output.json_option
def merge(other: str, url: str | None, as_json: bool) -> None:
    """Adds everything of the database OTHER (a file or URL)."""
    with output.database(url, read_only=False) as db:
        report = db.merge(other)
    _show_transfer(report, other, as_json)


def _show_transfer(report: TransferReport, source: str, as_json: bool) -> None:
    document = {
        "added": report.added,
        "present": report.present,
        "malformed": list(report.malformed),
        "ignored": list(report.ignored),
        "conflicts": list(report.conflicts),
    }
    output.show(document, as_json, lambda: f"{report.added} records added, {report.present} there already")
    for note in report.ignored:
        output.note(f"kept, and ignored: {note}")
    for conflict in report.conflicts:
        output.note(f"conflict, both kept: {conflict}")
    for problem in report.malformed:
        output.note(f"left out: {problem}")
    if report.malformed:
        raise output.Failure(
            f"{len(report.malformed)} records of {source} cannot be read and were left out; the others are in"
        )


@command.command()
@url_option
@output.json_option
def verify(url: str | None, as_json: bool) -> None:
    """Checks pages, keys, rows and times; exit code 1 when something is wrong. Says which portfolios a new compiler or
    driver made stale, and which the templates left behind: neither is a fault of the database."""
    from pagegen.db.staleness import VALID

    with output.database(url, read_only=True) as db:
        problems = db.verify()
        states = list(_staleness(db))
        name = db.name
    stale = [s for s in states if s.state != VALID]

    def text() -> str:
        told = [f"{s.state}: {s.place}: {s.why}" for s in stale]
        told += [f"{VALID}: {len(states) - len(stale)} of the {len(states)} portfolios in use"]
        return "\n".join([*(problems or [f"{name} is sound"]), *told])

    document = {"database": name, "problems": problems, "stale": [s.to_dict() for s in stale]}
    output.show(document, as_json, text)
    if problems:
        raise output.Failure(f"{name} has {len(problems)} problems: export what can be read and import it elsewhere")


def _staleness(db: Database) -> list[Staleness]:
    """The state of the portfolios; of targets that are not here, by their templates alone."""
    from pagegen_autotune.measure import environment_of
    from pagegen_autotune.tuner import is_present

    from pagegen import targets
    from pagegen.db import DatabaseError
    from pagegen.db.staleness import staleness

    here: dict[Target, dict[str, str] | None] = {}

    def environment(target: Target) -> dict[str, str] | None:
        if target not in here:
            here[target] = environment_of(target) if is_present(target) else None
        return here[target]

    try:
        return staleness(db, code_hash=targets.code_hash, environment=environment)
    except DatabaseError:  # damage that stops the reading is among the problems already
        return []


@command.command()
@url_option
@target_option
@click.option("--keep", multiple=True, help="A code hash to keep; the present templates' by default. May be repeated.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@output.json_option
def prune(url: str | None, target: Target, keep: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Removes the trials and portfolios of templates that are no more.

    A hash may be given by its first characters. One that the database does not hold is refused: with it everything
    would go."""
    from pagegen import targets

    kept = keep or (targets.code_hash(target),)
    with output.database(url, read_only=dry_run) as db:
        removed = db.prune(target=target, keep=kept, dry_run=dry_run)
    verb = "would go" if dry_run else "removed"
    document = {"target": str(target), "kept_code_hashes": list(kept), "dry_run": dry_run, "removed": removed}
    output.show(
        document, as_json, lambda: f"{verb}: " + ", ".join(f"{count} {name}" for name, count in removed.items())
    )


@command.command()
@url_option
@click.option("--to", type=count(), help="The schema version; the present one by default.")
@click.option("--lossy", is_flag=True, help="Go back though rows have no place in that version, and are lost.")
@output.json_option
def migrate(url: str | None, to: int | None, lossy: bool, as_json: bool) -> None:
    """Leads a database of another version of the schema to the present one, or back for an older pagegen.

    Writing to an older database does so by itself; this is for one that is only read from now on. What an older version
    has no place for is named, and goes with --lossy only."""
    from pagegen.db.schema import SCHEMA_VERSION

    if lossy and to is None:
        raise click.UsageError("--lossy is for going back: it goes with --to")
    if to is not None and to > SCHEMA_VERSION:
        raise click.BadParameter(f"must be at most the present version {SCHEMA_VERSION}, got {to}", param_hint="--to")
    with output.database(url, read_only=False) as db:
        version = SCHEMA_VERSION if to is None else to
        if version != SCHEMA_VERSION:
            db.store.migrate(version, lossy=lossy)
        name = db.name
    output.show({"database": name, "schema_version": version}, as_json, lambda: f"{name} has schema version {version}")


@command.command()
@output.json_option
def roles(as_json: bool) -> None:
    """Prints the SQL that gives a shared PostgreSQL database its roles: one that reads, for serving, and one that adds,
    for tuners. For psql."""
    from pagegen import db

    sql = Path(db.__file__).with_name("roles.sql").read_text(encoding="utf-8")
    output.show({"sql": sql}, as_json, lambda: sql.rstrip("\n"))


@command.command()
@click.argument("url")
@click.option("--to", "path", type=click.Path(dir_okay=False, path_type=Path), help="The mirror's file; one of yours.")
@click.option("--target", type=TargetType(), help="Only this target.")
@click.option("--anew", is_flag=True, help="Read everything again, not only what came since the last time.")
@output.json_option
def pull(url: str, path: Path | None, target: Target | None, anew: bool, as_json: bool) -> None:
    """Copies what serving needs of the server at URL into a local file, which answers while the server is down.

    Without --to the file is found by itself where that URL is to be read and does not answer. With it, name the file
    in PAGEGEN_DB."""
    from pagegen.db import mirror

    try:
        mirror.place_for(url)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="URL") from error
    with output.plain_failures():
        found = mirror.pull(url, path, target=target, anew=anew)
    came = f"{found.added} new records, {found.portfolios} portfolios and {found.trials} trials in {found.path}"
    output.show(asdict(found), as_json, lambda: came)
