"""`Claim`: a figure beside what was asked for; `Section`: the claims of one stored document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """`found` in words with its unit; `asked` is what the project set out to reach ("" where nothing was asked), `met`
    whether it is reached (None where nothing was asked, or the figure is not known). `limit` is what the machine gives
    at most, as far as it was measured."""

    what: str
    found: str
    asked: str = ""
    met: bool | None = None
    limit: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """What one document says. `source` is its path below bench/results, `command` makes it; `said` is when and on what
    it was measured."""

    title: str
    source: str
    command: str
    said: str
    claims: tuple[Claim, ...]
    notes: tuple[str, ...] = ()
    figure: str = ""


def at_least(what: str, value: float, asked: float, form: str = "{:.2f}", more: str = "") -> Claim:
    """A figure that should be no less than `asked`."""
    found = form.format(value) + (f" ({more})" if more else "")
    return Claim(what=what, found=found, asked=f"at least {form.format(asked)}", met=value >= asked)


def at_most(what: str, value: float, asked: float, form: str = "{:.2f}", more: str = "") -> Claim:
    """A figure that should be no more than `asked`."""
    found = form.format(value) + (f" ({more})" if more else "")
    return Claim(what=what, found=found, asked=f"at most {form.format(asked)}", met=value <= asked)


def said(document: Document, how: str = "Measured") -> str:
    """When and on what a document was measured, as far as it says; or how else it came about."""
    environment = document.get("environment", {})
    when = environment.get("date") or document.get("started", "")[:10]
    parts = [f"{how} {f'on {when}' if when else '(date not recorded)'}"]
    device = document.get("device") or environment.get("cpu")
    threads = environment.get("threads", environment.get("cores"))
    if device:
        parts.append(f"on {device}" + (f", {threads} threads" if threads else ""))
    versions = [f"{name} {environment[name]}" for name in ("torch", "triton", "sqlite") if environment.get(name)]
    load = environment.get("load_average_before", environment.get("load_average"))
    parts += versions + ([f"load average {load} at the start"] if load is not None else [])
    text = ", ".join(parts).replace(", on", " on", 1) + "."
    return text + (" A quick run: fewer and smaller cases." if document.get("quick") else "")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; bars within cells are escaped."""
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return lines + [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]


def verdict(claim: Claim) -> str:
    """ "reached", "**not reached**" or nothing."""
    return "" if claim.met is None else "reached" if claim.met else "**not reached**"
