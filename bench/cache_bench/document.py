"""How a bench's document is written."""

from __future__ import annotations

import json
from typing import Any


def as_text(document: dict[str, Any]) -> str:
    """JSON with one row a line, so that two runs can be compared line by line."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in document["rows"])
    head = json.dumps({**document, "rows": []}, indent=1)
    return head[: head.rindex("[]")] + f"[\n{rows}\n ]\n}}\n"
