"""One row of a trace from one line of CSV or JSONL; what is wrong with a line is told as `BadRow`."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from pagegen_autotune.prefix_runs import Runs

REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens")
HASH_IDS = "prefix_hash_ids"
HEADER = ",".join(REQUIRED) + f"[,{HASH_IDS}]"
# 16 Mi tokens: more than the longest context any model declares (10 M)
MAX_TOKENS = 2**24
# epoch seconds are about 1.8e9, epoch milliseconds about 1.8e12
MAX_ARRIVAL_S = 1e11
# a prompt of 1 M tokens in blocks of 16 with ids of 7 digits takes half of it
MAX_LINE_BYTES = 2**20
_MAX_ID = 2**64 - 1

# Nearly all rows of nearly all traces; whatever is not so plain is read with more care, and slower: 3 times.
_PLAIN_ROW = re.compile(rb"(\d{1,11}(?:\.\d*)?)?,([1-9]\d{0,6}),(\d{1,7})(?:,([\d -]*))?\r?\n?")
_PLAIN_OBJECT = re.compile(
    rb'\{"arrival_s": ?(?:((?:0|[1-9]\d{0,10})(?:\.\d+)?)|null), ?"prompt_tokens": ?([1-9]\d{0,6}), ?'
    rb'"output_tokens": ?(0|[1-9]\d{0,6})(?:, ?"prefix_hash_ids": ?"([\d -]*)")?\}\r?\n?'
)
_PLAIN_IDS = re.compile(r"\d{1,19}(?:-\d{1,19})?(?: \d{1,19}(?:-\d{1,19})?)*")
_PLAIN_RUN = re.compile(r"(\d+)(?:-(\d+))?")


class BadRow(ValueError):
    """What is wrong with one line; the reader adds file and line number."""


class Row(NamedTuple):
    """One request; `arrival_s` is None where the trace has no times, `runs` are inclusive runs of block ids."""

    arrival_s: float | None
    prompt_tokens: int
    output_tokens: int
    runs: Runs


def csv_parser(header: bytes) -> Callable[[bytes], Row]:
    """The parser of the rows under this header line. Raises BadRow where it is not a trace's header."""
    names = [name.strip() for name in _fields(header)]
    for name in names:
        if name not in (*REQUIRED, HASH_IDS):
            raise BadRow(f"the header must be {HEADER}, got the column {short(name)} in {short(header)}")
        if names.count(name) > 1:
            raise BadRow(f"the header must be {HEADER}, got {name} twice")
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise BadRow(f"the header must be {HEADER}, got no {' and no '.join(missing)} in {short(header)}")

    plain = names in ([*REQUIRED], [*REQUIRED, HASH_IDS])
    with_ids = HASH_IDS in names

    def parse(line: bytes) -> Row:
        found = _PLAIN_ROW.fullmatch(line) if plain else None
        if found is not None and (found[4] is not None) == with_ids:
            return _plain_row(found)
        fields = [field.strip() for field in _fields(line)]
        if fields == names:
            raise BadRow("expected a row, got the header once more")
        if len(fields) != len(names):
            raise BadRow(f"expected {len(names)} fields ({','.join(names)}), got {len(fields)} in {short(line)}")
        return _row(dict(zip(names, fields, strict=True)))

    return parse


def jsonl_row(line: bytes) -> Row:
    """The row in one JSON object. Raises BadRow."""
    found = _PLAIN_OBJECT.fullmatch(line)
    if found is not None:
        return _plain_row(found)
    try:
        value = _JSON.decode(_text(line))
    except RecursionError as error:
        raise BadRow("expected a flat JSON object, got one nested too deep") from error
    except json.JSONDecodeError as error:
        raise BadRow(f"expected one JSON object, got {short(line)} ({error.msg})") from error
    except ValueError as error:
        raise error if isinstance(error, BadRow) else BadRow(f"expected one JSON object: {error}") from error
    if not isinstance(value, dict):
        raise BadRow(f"expected one JSON object, got {short(line)}")
    for name in value:
        if name not in (*REQUIRED, HASH_IDS):
            raise BadRow(f"the keys must be {HEADER}, got {short(name)}")
    missing = [name for name in REQUIRED[1:] if name not in value]
    if missing:
        raise BadRow(f"the keys must be {HEADER}, got no {' and no '.join(missing)}")
    return _row(value)


def short(value: Any) -> str:
    """A value as text of at most 60 characters, for messages."""
    text = value.decode("utf-8", "replace").rstrip("\r\n") if isinstance(value, bytes) else value
    shown = repr(text)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _plain_row(found: re.Match[bytes]) -> Row:
    arrival, prompt = found[1], int(found[2])
    runs = _runs((found[4] or b"").decode(), prompt)
    return Row(None if arrival is None else float(arrival), prompt, int(found[3]), runs)


def _row(fields: dict[str, Any]) -> Row:
    prompt = _tokens("prompt_tokens", fields["prompt_tokens"], at_least=1)
    output = _tokens("output_tokens", fields["output_tokens"], at_least=0)
    return Row(_arrival(fields.get("arrival_s")), prompt, output, _runs(fields.get(HASH_IDS), prompt))


def _arrival(value: Any) -> float | None:
    if value is None or value == "":
        return None
    expected = f"arrival_s must be seconds from 0 to {MAX_ARRIVAL_S:.0e}, or empty in every row, got {short(value)}"
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or "_" in str(value):
        raise BadRow(expected)
    try:
        seconds = float(value)
    except (ValueError, OverflowError) as error:
        raise BadRow(expected) from error
    if not math.isfinite(seconds) or not 0 <= seconds <= MAX_ARRIVAL_S:
        raise BadRow(expected)
    return seconds


def _tokens(name: str, value: Any, *, at_least: int) -> int:
    number = _whole(value)
    if number is None or not at_least <= number <= MAX_TOKENS:
        raise BadRow(f"{name} must be an integer from {at_least} to {MAX_TOKENS}, got {short(value)}")
    return number


def _whole(value: Any) -> int | None:
    """A non-negative integer written plainly, or None: int() would also take "1_000", "+5" and other digits."""
    if isinstance(value, int):
        return None if isinstance(value, bool) or value < 0 else value
    plain = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20
    return int(value) if plain else None


def _runs(value: Any, prompt_tokens: int) -> Runs:
    if value is None or value == "":
        return ()
    if isinstance(value, str) and _PLAIN_IDS.fullmatch(value):
        found = tuple([(int(first), int(last or first)) for first, last in _PLAIN_RUN.findall(value)])
        if all(first <= last for first, last in found) and sum(b - a + 1 for a, b in found) <= prompt_tokens:
            return found
    if not isinstance(value, (str, list)):
        raise BadRow(f"{HASH_IDS} must be ids separated by spaces or a list of ids, got {short(value)}")
    runs = tuple(_run(item) for item in (value.split() if isinstance(value, str) else value))
    blocks = sum(last - first + 1 for first, last in runs)
    if blocks > prompt_tokens:
        raise BadRow(f"{HASH_IDS} must name at most one block a prompt token ({prompt_tokens}), got {blocks}")
    return runs


def _run(item: Any) -> tuple[int, int]:
    ends = item.split("-") if isinstance(item, str) else [item]
    first, last = _whole(ends[0]), _whole(ends[-1])
    if len(ends) > 2 or first is None or last is None or not first <= last <= _MAX_ID:
        raise BadRow(f"{HASH_IDS} must hold ids from 0 to 2^64-1 or runs a-b with a <= b, got {short(item)}")
    return first, last


def _fields(line: bytes) -> list[str]:
    try:
        return next(csv.reader([_text(line).rstrip("\r\n")]))
    except csv.Error as error:
        raise BadRow(f"expected comma-separated fields, got {short(line)} ({error})") from error


def _text(line: bytes) -> str:
    if len(line) > MAX_LINE_BYTES:
        raise BadRow(f"expected at most {MAX_LINE_BYTES} bytes a line, got more, starting {short(line[:40])}")
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow(f"expected UTF-8, got {short(line[:40])}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise BadRow(f"expected each key once, got {short([key for key, _ in pairs])}")
    return found


_JSON = json.JSONDecoder(object_pairs_hook=_once)
