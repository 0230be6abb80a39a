"""What every command shares: `--json`, tables, and errors as one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
from tabulate import tabulate, tabulate_formats

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")

format_option = click.option(
    "--format", "table_format", type=click.Choice(tabulate_formats), default="simple", metavar="FORMAT",
    show_default=True, help="How tables look: github, pipe, html, latex, tsv or another of tabulate's.",
)  # fmt: skip
sql_option = click.option("--sql", is_flag=True, help="Print the statement that is asked, and ask nothing.")


class Failure(click.ClickException):
    """A command that cannot do its work: one line that says what to do, exit code 1."""

    exit_code = 1


@contextmanager
def plain_failures() -> Iterator[None]:
    """Turns what a database, a file or an argument is wrong about into one line and exit code 1."""
    from pagegen.db import DatabaseError

    try:
        yield
    except DatabaseError as error:
        raise Failure(str(error)) from error
    except (OSError, ValueError) as error:
        raise Failure(str(error).splitlines()[0]) from error


def show(document: Any, as_json: bool, text: Callable[[], str]) -> None:
    """Prints `document` as JSON, or the text for people."""
    click.echo(json.dumps(document, indent=1) if as_json else text())


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], table_format: str = "simple") -> str:
    """Rows as a table; `columns` maps a row's keys to headings, in order. A missing value prints as "-". `table_format`
    is one of tabulate's."""
    cells = [["-" if row.get(key) is None else row[key] for key in columns] for row in rows]
    return str(tabulate(cells, headers=list(columns.values()), tablefmt=table_format))
