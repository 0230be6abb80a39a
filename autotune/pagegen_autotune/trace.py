"""Reads request traces: CSV with a header or JSONL, row by row, 16 bytes a request.

Columns (or keys): `arrival_s` (seconds; empty or null in every row where the source has no times), `prompt_tokens`,
`output_tokens` and optionally `prefix_hash_ids`: block ids separated by spaces, `a-b` an inclusive run; an id names a
block and everything before it. Blank lines are ignored. Lines count from 1, the header included.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from pagegen_autotune.prefix_runs import PrefixRuns, PrefixRunsBuilder, Runs
from pagegen_autotune.reuse import PrefixReuse
from pagegen_autotune.trace_rows import HEADER, MAX_LINE_BYTES, BadRow, Row, csv_parser, jsonl_row

EXAMPLES_KEPT = 5
_BOM = b"\xef\xbb\xbf"
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}


class TraceError(ValueError):
    """A trace that cannot be read as it stands: names the file, the line, what was expected and what came."""


class MalformedRow(TraceError):
    """A row that `skip_bad` would leave out."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """Requests in order of arrival (equal times keep the file's order).

    `arrival_s` float64 [n], not negative and not decreasing, or None where the source has no times; `prompt_tokens`
    int64 [n], at least 1; `output_tokens` int64 [n], at least 0. `reuse_share` is the share of prompt tokens that an
    unlimited prefix cache would have served, in the file's order, None without `prefix_hash_ids`. `prefix_runs` are the
    inclusive runs of those ids, one tuple a request, None unless asked for or where no request has any. `bad_rows`
    counts the rows left out and `bad_examples` says what was wrong with the first few.
    """

    arrival_s: npt.NDArray[np.float64] | None
    prompt_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    reuse_share: float | None = None
    prefix_runs: Sequence[Runs] | None = None
    bad_rows: int = 0
    bad_examples: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.prompt_tokens)
        if n == 0:
            raise ValueError("prompt_tokens must hold at least one request, got none")
        if len(self.output_tokens) != n or (self.arrival_s is not None and len(self.arrival_s) != n):
            raise ValueError(f"output_tokens and arrival_s must have one entry a request ({n})")
        if self.prefix_runs is not None and len(self.prefix_runs) != n:
            raise ValueError(f"prefix_runs must have one entry a request ({n}), got {len(self.prefix_runs)}")
        if self.prompt_tokens.min() < 1 or self.output_tokens.min() < 0:
            raise ValueError("prompt_tokens must be at least 1 and output_tokens at least 0 for every request")
        if self.arrival_s is not None and not np.all(np.diff(self.arrival_s, prepend=0.0) >= 0):
            raise ValueError("arrival_s must not be negative, NaN or decreasing: sort the requests by arrival")

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last, 0 without times."""
        return 0.0 if self.arrival_s is None else float(self.arrival_s[-1] - self.arrival_s[0])

    def take(self, requests: npt.NDArray[Any], arrival_s: npt.NDArray[np.float64] | None) -> Trace:
        """The requests of these indices, arriving at these times."""
        prompts, outputs = self.prompt_tokens[requests], self.output_tokens[requests]
        runs = self.prefix_runs
        if runs is not None:
            runs = (runs if isinstance(runs, PrefixRuns) else PrefixRuns.of(runs)).take(requests)
        return Trace(arrival_s=arrival_s, prompt_tokens=prompts, output_tokens=outputs, prefix_runs=runs)


def read_trace(
    path: str | Path,
    *,
    skip_bad: bool = False,
    keep_prefixes: bool = False,
    on_bytes: Callable[[int], object] | None = None,
) -> Trace:
    """The trace in a CSV or JSONL file (told by `.csv`, `.jsonl` or `.ndjson`, else by the first character).

    Raises OSError where the file cannot be read and MalformedRow naming the first malformed line; with `skip_bad`
    malformed rows are left out and counted, but a wrong header or a file with no good row still raises TraceError.
    `keep_prefixes` keeps the requests' `prefix_hash_ids`, at 16 bytes a run and 8 a request; `on_bytes` is told the
    length of every line read.
    """
    path = Path(path)
    rows = _Rows(runs=PrefixRunsBuilder() if keep_prefixes else None)
    with path.open("rb") as file:
        lines = _lines(file, on_bytes)
        first = next(lines, None)
        if first is None:
            raise TraceError(f"{path} is empty: expected rows of {HEADER}")
        jsonl = _is_jsonl(path, first[1])
        parse = jsonl_row if jsonl else _csv(path, *first)
        if jsonl:
            lines = itertools.chain([first], lines)
        for number, line in lines:
            try:
                rows.add(parse(line))
            except BadRow as error:
                if not skip_bad:
                    raise MalformedRow(f"{path} line {number}: {error}") from error
                rows.reject(f"line {number}: {error}")
    if not rows.prompts:
        found = f"{rows.bad} malformed ones, the first at {rows.examples[0]}" if rows.bad else "a header alone"
        raise TraceError(f"{path} holds no request: expected rows of {HEADER}, got {found}")
    return rows.trace()


def _lines(file: BinaryIO, on_bytes: Callable[[int], object] | None) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank, less a byte order mark; a too long one is cut one byte past the limit."""
    for number in itertools.count(1):
        line = rest = file.readline(MAX_LINE_BYTES + 1)
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        if on_bytes:
            on_bytes(len(line))
        if number == 1:
            line = line.removeprefix(_BOM)
        if line.strip():
            yield number, line


def _is_jsonl(path: Path, first: bytes) -> bool:
    for magic, kind in _COMPRESSED.items():
        if first.startswith(magic):
            raise TraceError(f"{path} must be plain CSV or JSONL, got {kind}: decompress it first")
    suffix = path.suffix.lower()
    return suffix in (".jsonl", ".ndjson") or (suffix != ".csv" and first.lstrip().startswith(b"{"))


def _csv(path: Path, number: int, header: bytes) -> Callable[[bytes], Row]:
    try:
        return csv_parser(header)
    except BadRow as error:
        raise TraceError(f"{path} line {number}: {error}") from error


@dataclass
class _Rows:
    """What has been read so far."""

    arrivals: array[float] = field(default_factory=lambda: array("d"))
    prompts: array[int] = field(default_factory=lambda: array("i"))
    outputs: array[int] = field(default_factory=lambda: array("i"))
    reuse: PrefixReuse = field(default_factory=PrefixReuse)
    runs: PrefixRunsBuilder | None = None
    bad: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Takes a row in. Raises BadRow where some rows have an arrival time and others none."""
        if self.prompts and (row.arrival_s is None) == bool(self.arrivals):
            expected = "a time" if self.arrivals else "no time"
            raise BadRow(f"arrival_s must hold {expected}, as in the rows before, got {row.arrival_s or 'none'}")
        if row.arrival_s is not None:
            self.arrivals.append(row.arrival_s)
        self.prompts.append(row.prompt_tokens)
        self.outputs.append(row.output_tokens)
        self.reuse.see(row.runs, row.prompt_tokens)
        if self.runs is not None:
            self.runs.add(row.runs)

    def reject(self, reason: str) -> None:
        self.bad += 1
        if len(self.examples) < EXAMPLES_KEPT:
            self.examples.append(reason)

    def trace(self) -> Trace:
        arrivals = np.array(self.arrivals, dtype=np.float64)
        prompts, outputs = np.array(self.prompts, dtype=np.int64), np.array(self.outputs, dtype=np.int64)
        share = self.reuse.share
        runs = None if self.runs is None or share is None else self.runs.runs()
        if len(arrivals):
            order = np.argsort(arrivals, kind="stable")
            arrivals, prompts, outputs = arrivals[order], prompts[order], outputs[order]
            runs = None if runs is None else runs.take(order)
        return Trace(
            arrival_s=arrivals if len(arrivals) else None,
            prompt_tokens=prompts,
            output_tokens=outputs,
            reuse_share=share,
            prefix_runs=runs,
            bad_rows=self.bad,
            bad_examples=tuple(self.examples),
        )
