"""`pagegen report`: what a database holds, as one HTML page that needs nothing else."""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import pagegen
from pagegen.cli import output
from pagegen.cli.option_types import TargetType, count
from pagegen.cli.options import spec_of, url_option
from pagegen.spec import Target

if TYPE_CHECKING:
    from pagegen.cli.report_data import Report

# Headings of columns that name a unit or a share.
HEADINGS = {
    "step_us": "step, us a layer", "waste_share": "slots wasted", "tokens_per_s": "tokens/s of attention alone",
    "speedup": "default's time over the choice's", "us": "us a call", "roofline_share": "of the roofline",
}  # fmt: skip
PERCENT = ("waste_share", "regret", "roofline_share")
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>pagegen: {database}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
h2 {{ border-bottom: 1px solid #ccc; margin-top: 2.2rem; }}
h3 {{ font-size: 1rem; margin-bottom: 0.2rem; }}
svg {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; font-size: 0.85rem; }}
td, th {{ padding: 0.1rem 0.7rem 0.1rem 0; text-align: left; }}
.note {{ color: #666; font-size: 0.9rem; }}
</style>
</head>
<body>
<h1>What was tuned</h1>
<p>{summary}</p>
{sections}
</body>
</html>
"""


@click.command()
@click.option(
    "-o", "--output", "path", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The page to write."
)
@click.option("--model", help="Only this model's attention.")
@click.option("--target", type=TargetType(), help="Only this target.")
@click.option("--limit", type=count(), default=5000, show_default=True, help="Draw the newest so many trials.")
@click.option("--specs", type=count(), default=8, show_default=True, help="Block sizes of so many specs.")
@url_option
@output.json_option
def command(
    path: Path, model: str | None, target: Target | None, limit: int, specs: int, url: str | None, as_json: bool
) -> None:
    """Draws the database: block size against step time, waste and tokens/s, rooflines, regret, history, devices."""
    if importlib.util.find_spec("matplotlib") is None:
        raise output.Failure("drawing needs matplotlib: pip install 'pagegen-attention[report]'")
    spec = spec_of(model)
    from pagegen.cli.report_data import gather
    from pagegen.db import open_db
    from pagegen.db.files import whole_file

    with output.plain_failures():
        with open_db(url, read_only=True) as db:
            found = gather(db, spec=spec, target=target, limit=limit, max_specs=specs)
        if not found.trials:
            raise output.Failure(f"nothing to draw: {found.database} has no such trials; run pagegen tune")
        with whole_file(path) as file:
            file.write(page(found))
    document = {"path": str(path), **asdict(found)}
    output.show(document, as_json, lambda: f"{found.shown_trials} trials drawn in {path}")


def page(found: Report) -> str:
    """The report as one HTML page."""
    summary = (
        f"Database {html.escape(found.database)}: {found.trials} trials. Drawn by pagegen {pagegen.__version__}. "
        + " ".join(html.escape(note.capitalize()) + "." for note in found.notes)
    )
    return PAGE.format(database=html.escape(found.database), summary=summary, sections="\n".join(_sections(found)))


def _sections(found: Report) -> Iterator[str]:
    from pagegen.cli import report_figures as figures

    yield _section(
        "Block size", "Dots are measured throughout, crosses rest on the cost model for a part of the traffic.",
        found.block_sizes, "no measured portfolio",
        lambda e: f"{e['spec']} on {e['device']}, profile {e['profile']}", figures.block_sizes,
    )  # fmt: skip
    yield _section(
        "Roofline", "The line is what memory and matrix units allow, for the rates that the device was recorded with.",
        found.roofline, "no trial of a device whose rates are known", lambda e: str(e["device"]), figures.roofline,
    )  # fmt: skip
    for title, note, entries, draw in (
        ("Regret", "The excess over choosing the best variant for every batch: an upper bound, since the best of noisy "
                   "times is too good.", found.regret, figures.regret),
        ("Tuning history", "The time of a batch's first trial (the default's) over the best so far, as the geometric "
                           "mean over a kernel's batches.",
         [e for e in found.history if e["line"]], figures.history),
        ("Devices", "The best variant's times on the batches that were measured on each of a spec's devices.",
         found.devices, figures.devices),
    ):  # fmt: skip
        body = draw(entries) if entries else '<p class="note">Nothing to show.</p>'
        yield f'<h2>{title}</h2>\n<p class="note">{html.escape(note)}</p>\n{body}{_table(title, entries)}'


def _section(
    title: str, note: str, entries: list[dict[str, Any]], without: str, name: Callable[[dict[str, Any]], str],
    draw: Callable[[dict[str, Any]], str],
) -> str:  # fmt: skip
    parts = [f'<h2>{title}</h2>\n<p class="note">{html.escape(note)}</p>']
    for entry in entries:
        parts.append(f"<h3>{html.escape(name(entry))}</h3>\n{draw(entry)}")
        if "rows" in entry:
            parts.append(
                _rows(entry["rows"], ("block_size", "order", "step_us", "waste_share", "tokens_per_s", "kind"))
            )
    return "\n".join(parts if entries else [*parts, f'<p class="note">Nothing to show: {without}.</p>'])


def _table(title: str, entries: list[dict[str, Any]]) -> str:
    columns = {
        "Regret": ("what", "regret", "speedup"),
        "Tuning history": ("what", "trials", "failed", "first", "last"),
        "Devices": ("spec", "device", "batches", "us", "roofline_share"),
    }[title]
    return _rows(entries, columns) if entries else ""


def _rows(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> str:
    def cell(name: str, value: Any) -> str:
        if not isinstance(value, float):
            return html.escape(str(value))
        if name in PERCENT:
            return f"{100 * value:.2f} %"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"

    head = "".join(f"<th>{html.escape(HEADINGS.get(name, name.replace('_', ' ')))}</th>" for name in columns)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{cell(name, row[name])}</td>" for name in columns) + "</tr>" for row in rows
    )
    return f"\n<table>\n<tr>{head}</tr>\n{body}\n</table>"
