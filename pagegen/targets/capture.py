"""CUDA graphs: what must not happen while one is captured."""

from __future__ import annotations

import torch


def refuse_in_capture(what: str, remedy: str) -> None:
    """Raises RuntimeError while a CUDA graph is being captured: compiling or reading a file there would break the
    capture, or hide seconds in it. The message says `what` is missing and the `remedy`."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{what}: {remedy} before capturing a CUDA graph")
