"""What is imported: a file that was exported, T4 results, or a folder of them; opened once, so that a pipe will do."""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagegen.db import t4, transfer


def named_records(path: Path) -> Iterator[tuple[str, Any]]:
    """(name, record) of everything at `path`, as `transfer.absorb` takes them; of a line or a result that cannot be
    read comes what is wrong with it. Raises OSError for a file that cannot be read, ValueError for one file of T4
    results of another tuner's kernels and for a folder without any."""
    if path.is_dir():
        yield from t4.of_folder(path)
        return
    with path.open("rb") as file:
        head = [file.readline().removeprefix(codecs.BOM_UTF8)]
        while head[-1].isspace():
            head.append(file.readline())
        if _begins_t4(head[-1].strip()):
            yield from t4.of_text(path.name, b"".join([*head, file.read()]))
        else:
            yield from transfer.lines(itertools.chain(head, file))


def _begins_t4(line: bytes) -> bool:
    """Whether a file's first line begins one JSON object over several lines, or is one with results: an export has one
    record a line."""
    if line.startswith(b"{") and line.endswith((b"{", b"[", b",")):
        return True
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "results" in found and "record" not in found
