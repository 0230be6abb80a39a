"""`ChoiceDigest`: what a choice of kernels rests on, for comparing the processes of a job."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ChoiceDigest:
    """What a rank's choice rests on: `fields` by name, each a short text that is equal where the thing is.

    "rule" is the dispatch rule itself, so ranks whose `hex` is equal choose alike; the others tell why they do not.
    """

    fields: Mapping[str, str] = field(hash=False)

    @property
    def hex(self) -> str:
        """sha256 over the fields, as hex."""
        return hashlib.sha256(json.dumps(dict(self.fields), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, str]:
        """Plain JSON-ready fields, as another process takes them."""
        return dict(self.fields)
