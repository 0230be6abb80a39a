"""Writes docs/results.md from what is stored below bench/results: every figure of the page is one of those files'.

    python bench/results_page.py [--check]

A bench that has no file yet is listed as not measured, and so is a GPU. A test fails where page and files differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from results_pages import cache, cpu, fleets, others, paging
from results_pages.claims import Document, Section, table, verdict

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "bench" / "results", ROOT / "docs" / "results.md"
# What is measured: a file, what makes it, and what it says. A new bench is a line here.
MEASURED: tuple[tuple[str, str, Callable[[Document], Section]], ...] = (
    ("cpu.json", "bench/cpu.py", cpu.section),
    ("block-size.json", "bench/block_size.py", paging.block_size),
    ("serving.json", "bench/serving.py", paging.serving),
    ("cascade.json", "bench/cascade.py", paging.cascade),
    ("cache.json", "bench/cache.py", cache.section),
    ("database.json", "bench/database.py", others.database),
    ("host-cost.json", "bench/host_cost.py", others.host_cost),
    ("tuning-efficiency.json", "bench/tuning.py", others.tuning),
    ("fleet.json", "bench/fleet.py", fleets.fleet),
    ("scale.json", "bench/scale.py", fleets.scale),
)
NOT_MEASURED: tuple[tuple[str, str, Callable[[Document], Section]], ...] = (
    ("block-size.json", "bench/block_size.py", paging.simulated),
    ("cost-model.json", "bench/cost_model.py", others.predicted),
    ("scale.json", "bench/scale.py", fleets.scaled),
)
HEAD = """# Results

Written by `python bench/results_page.py` from the files in `bench/results`, which hold every sample, the method and the
environment; not edited by hand. A speed "over" another is how many times as fast pagegen is: above 1, it is faster.
Medians, where nothing else is said.
"""


def render(folder: Path) -> str:
    """The page of the documents in `folder`."""
    measured, absent = _sections(folder, MEASURED)
    modelled, _ = _sections(folder, NOT_MEASURED)
    devices = [
        others.gpu(_read(path), f"gpu/{path.name}")
        for path in sorted((folder / "gpu").glob("*.json"))
        if not _read(path)["dry_run"]
    ]
    lines = [HEAD, *_not_reached([*measured, *devices, *modelled])]
    lines += ["## Measured on a GPU", ""]
    if devices:
        for one in devices:
            lines += _section(one, "###")
    else:
        lines += [
            "Nothing measured on a GPU yet. `python bench/gpu_check.py` does it, in 8 minutes, and writes what this",
            "part would show. What is said of GPUs below is predicted, or checked without one.", "",
        ]  # fmt: skip
    lines += ["## Measured on a CPU", ""]
    for one in measured:
        lines += _section(one, "###")
    if absent:
        lines += ["### Not measured yet", "", *(f"- `{source}`: `{script}` writes it" for source, script in absent), ""]
    lines += ["## Simulated and predicted", "", "Nothing here was timed as a whole; what it rests on is said.", ""]
    for one in modelled:
        lines += _section(one, "###")
    return "\n".join(lines).rstrip() + "\n"


def _sections(
    folder: Path, wanted: tuple[tuple[str, str, Callable[[Document], Section]], ...]
) -> tuple[list[Section], list[tuple[str, str]]]:
    """What the files that are there say, and (file, script) of those that are not."""
    found = [make(_read(folder / name)) for name, _, make in wanted if (folder / name).exists()]
    return found, [(name, script) for name, script, _ in wanted if not (folder / name).exists()]


def _not_reached(sections: list[Section]) -> list[str]:
    rows = [(one.title, c.what, c.found, c.asked, c.limit) for one in sections for c in one.claims if c.met is False]
    asked = sum(claim.met is not None for one in sections for claim in one.claims)
    head = ["## Asked and not reached", "", f"Of {asked} figures that were asked for, {len(rows)} are not reached.", ""]
    return [*head, *table(("part", "what", "found", "asked", "limit, measured"), rows), ""] if rows else head


def _section(one: Section, level: str) -> list[str]:
    # paths, not links: the site is built of docs/ alone
    drawn = f", drawn in `bench/results/{one.figure}`" if one.figure else ""
    lines = [f"{level} {one.title}", "", f"{one.said} By `{one.command}`, in `bench/results/{one.source}`{drawn}.", ""]
    lines += [line for note in one.notes for line in (note, "")]
    rows = [(claim.what, claim.found, claim.asked, verdict(claim)) for claim in one.claims]
    if any(claim.asked for claim in one.claims):
        return [*lines, *table(("what", "found", "asked", ""), rows), ""]
    return [*lines, *table(("what", "found"), [row[:2] for row in rows]), ""]


def _read(path: Path) -> Document:
    document: Document = json.loads(path.read_text(encoding="utf-8"))
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is not current")
    options = parser.parse_args()
    page = render(RESULTS)
    if not options.check:
        PAGE.write_text(page, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
        sys.exit("docs/results.md is not what bench/results says: run python bench/results_page.py")


if __name__ == "__main__":
    main()
