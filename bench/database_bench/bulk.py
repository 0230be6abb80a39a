"""How quickly do many trials come in and go out, and how many bytes does one take?"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagegen.db import Database, open_db

Row = dict[str, Any]
TABLES_SHOWN = 8  # and indexes, the largest


def imported(lines: Path, file: Path) -> Iterator[Row]:
    """Imports the lines into a new file: how long it took, and how large it is then."""
    with open_db(file) as db:
        start, cpu = time.perf_counter(), time.process_time()
        report = db.import_(lines)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        counts = db.stats()["rows"]
    assert not report.malformed, report.malformed[:3]
    trials = counts["trials"]
    yield {
        "what": "bulk import", "asked_for": "at least 20,000 trials/s", "trials_per_s": round(trials / seconds),
        "trials_per_cpu_s": round(trials / cpu), "seconds": round(seconds, 1), "records": report.added,
        "malformed": len(report.malformed), "rows": counts,
    }  # fmt: skip
    pages = _bytes_by_table(file)
    yield {
        "what": "size", "asked_for": "bytes a trial, stated", "bytes_a_trial": round(file.stat().st_size / trials),
        "file_mib": round(file.stat().st_size / 2**20), "export_bytes_a_trial": round(lines.stat().st_size / trials),
        "largest": {name: round(size / trials) for name, size in pages.items()},
    }  # fmt: skip


def _bytes_by_table(file: Path) -> dict[str, int]:
    """Bytes of the largest tables and indexes, when all that was written is in the file itself."""
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    largest = "SELECT name, sum(pgsize) FROM dbstat GROUP BY name ORDER BY 2 DESC LIMIT ?"
    found = dict(connection.execute(largest, (TABLES_SHOWN,)))
    connection.close()
    return found


def exported(db: Database, file: Path) -> Row:
    """Exports everything."""
    start = time.perf_counter()
    count = db.export(file)
    return {"what": "export", "asked_for": "", "records_per_s": round(count / (time.perf_counter() - start))}
