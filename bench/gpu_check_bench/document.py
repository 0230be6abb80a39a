"""The document of a run: written whole after every row, so that whatever ends the run loses nothing."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cache_bench.document import as_text

from gpu_check_bench.parts import Part

Row = dict[str, Any]
# How a part ended. "cut": its time was over before its last case; "not run": no time, or the run was stopped.
NOT_RUN, RUNNING, DONE, CUT = "not run", "running", "done", "cut"
ITS_CASES = "its cases"  # in place of a case: what failed was making them


class Document:
    """`rows` holds a row a case; `parts` how each part ended. `path` None writes nothing."""

    def __init__(self, path: Path | None, head: Row, parts: Sequence[Part]) -> None:
        self.path = path
        self.head = head
        self.environment: Row = {}
        self.aims: list[Row] = []
        self.rows: list[Row] = []
        self.seconds = 0.0
        self.unwritten = ""
        self.parts: dict[str, Row] = {
            part.name: {"question": part.question, "state": NOT_RUN, "seconds": 0.0, "left": []} for part in parts
        }

    def began(self, part: str) -> None:
        if self.parts[part]["state"] == NOT_RUN:
            self.parts[part]["state"] = RUNNING

    def add(self, part: str, case: str, row: Row, seconds: float) -> None:
        self.rows.append({"part": part, "case": case, "seconds": seconds, **row})
        self.write()

    def cut(self, part: str, left: Sequence[str]) -> None:
        """The time of a part was over before these cases."""
        self.parts[part]["state"] = CUT
        self.parts[part]["left"] += [name for name in left if name not in self.parts[part]["left"]]
        self.write()

    def ended(self, part: str, seconds: float) -> None:
        """One of a part's processes has no case left."""
        found = self.parts[part]
        found["seconds"] = max(found["seconds"], seconds)
        if found["state"] == RUNNING:
            found["state"] = DONE
        self.write()

    def done(self) -> set[tuple[str, str]]:
        """What need not run again."""
        return {(row["part"], row["case"]) for row in self.rows if row["case"] != ITS_CASES}

    def failed(self) -> set[tuple[str, str]]:
        """The cases that have an error."""
        return {(row["part"], row["case"]) for row in self.rows if "error" in row}

    def of(self, part: str) -> list[Row]:
        return [row for row in self.rows if row["part"] == part]

    def to_dict(self) -> Row:
        """JSON-ready."""
        for name, found in self.parts.items():
            rows = self.of(name)
            found["cases"], found["failed"] = len(rows), sum("error" in row for row in rows)
        return {
            **self.head,
            "seconds": round(self.seconds, 1),
            "environment": self.environment,
            "aims": self.aims,
            "parts": self.parts,
            "rows": self.rows,
        }

    def write(self) -> None:
        """Publishes the document, as far as the disk takes it: the run goes on, and `unwritten` says what failed."""
        try:
            self.publish()
            self.unwritten = ""
        except OSError as error:
            self.unwritten = f"{self.path} cannot be written: {error.strerror or error}"

    def publish(self) -> None:
        """Writes the document: a reader sees the last one or this one, whole. Raises OSError."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(as_text(self.to_dict()))
            Path(temporary).replace(self.path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise


def stamp() -> str:
    """Now, ISO 8601 in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
