"""What every command shares: `--json`, tables, and errors as one line."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from tabulate import tabulate, tabulate_formats

from pagegen.spec import check

if TYPE_CHECKING:
    from pagegen.db import Database

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")

# What would move a terminal's cursor, change its colours or title, or turn the order of what is read: all but tab and
# new line. Names come from databases and traces of others.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# A spreadsheet takes a cell that begins so for a formula, and formulas can run programs.
_FORMULA = ("=", "+", "-", "@", "\t")
# Two of tabulate's print names as they are into a page's or a document's source.
FORMATS = tuple(sorted(set(tabulate_formats) - {"unsafehtml", "latex_raw"}))

format_option = click.option(
    "--format", "table_format", type=click.Choice(FORMATS), default="simple", metavar="FORMAT",
    show_default=True, help="How tables look: github, pipe, html, latex, tsv or another of tabulate's.",
)  # fmt: skip
sql_option = click.option("--sql", is_flag=True, help="Print the statement that is asked, and ask nothing.")


class Failure(click.ClickException):
    """A command that cannot do its work: one line that says what to do, exit code 1."""

    exit_code = 1

    def format_message(self) -> str:
        return plain(super().format_message()).replace("\n", " ")


def plain(text: str) -> str:
    """Text as a terminal may have it: controls other than tab and new line are escaped."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def note(text: str) -> None:
    """A line on standard error."""
    click.echo(plain(text).replace("\n", "\\n"), err=True)


@contextmanager
def plain_failures() -> Iterator[None]:
    """Turns what a database, a file or an argument is wrong about into one line and exit code 1."""
    from pagegen.db import DatabaseError

    try:
        yield
    except DatabaseError as error:
        raise Failure(str(error)) from error
    except OSError as error:
        if error.filename is None:
            raise Failure(check.first_line(error)) from error
        raise Failure(f"{error.filename} cannot be used ({error.strerror}): name another file or folder") from error
    except ValueError as error:
        raise Failure(check.first_line(error)) from error


@contextmanager
def database(url: str | None, *, read_only: bool) -> Iterator[Database]:
    """The database that `--db` names, opened; what is wrong with it is one line."""
    from pagegen.db import open_db

    with plain_failures(), open_db(url, read_only=read_only) as db:
        yield db


def show(document: Any, as_json: bool, text: Callable[[], str]) -> None:
    """Prints `document` as JSON, or the text for people."""
    click.echo(json.dumps(document, indent=1) if as_json else plain(text()))


def statement(sql: str, as_json: bool) -> None:
    """Prints what `--sql` asks to see."""
    show({"sql": sql}, as_json, lambda: sql)


def table(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], table_format: str = "simple",
    *, last_width: int | None = None,
) -> str:  # fmt: skip
    """Rows as a table; `columns` maps a row's keys to headings, in order. A missing value prints as "-". `table_format`
    is one of tabulate's. The last column goes on in further lines beyond `last_width` characters."""
    cells = [[_cell(row.get(key), table_format) for key in columns] for row in rows]
    if last_width is not None:
        cells = [[*row, "\n".join(textwrap.wrap(str(last), last_width)) or last] for *row, last in cells]
    return str(tabulate(cells, headers=list(columns.values()), tablefmt=table_format))


def _cell(value: Any, table_format: str) -> Any:
    """A missing value as "-", text as one line that is no formula; numbers as they are."""
    if value is None:
        return "-"
    if not isinstance(value, str):
        return value
    line = value.replace("\r", "\\r").replace("\n", "\\n")
    return f"'{line}" if table_format == "tsv" and line.startswith(_FORMULA) and not _is_number(line) else line


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
