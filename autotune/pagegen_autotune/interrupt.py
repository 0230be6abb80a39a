"""Ctrl-C, SIGTERM and a terminal that closes as a flag, so that the work at hand ends at a clean point."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

# What asks a run to end: Ctrl-C, a service manager, a terminal or connection that closes (not on Windows).
SIGNALS = [number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]


class StopSignal:
    """While entered, the first of SIGNALS sets `requested`; `check` then raises KeyboardInterrupt. A second
    one acts as it did before, so that a hang can still be broken. Outside the main thread Python delivers no signals,
    and nothing is changed."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.getsignal(number)
                # None: a handler that C code installed and Python cannot put back; SIG_IGN: the caller (nohup) wants it
                if before not in (None, signal.SIG_IGN):
                    self._before[number] = before
                    signal.signal(number, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def check(self) -> None:
        """Raises KeyboardInterrupt once a stop was requested."""
        if self.requested:
            raise KeyboardInterrupt

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Puts the handlers of SIGNALS back that a library replaces. They are installed anew even where Python
    knows of no change: `ray.init` puts one for SIGTERM beneath Python, which prints a stack and aborts."""
    main = threading.current_thread() is threading.main_thread()
    before = [(number, signal.getsignal(number)) for number in SIGNALS] if main else []
    try:
        yield
    finally:
        for number, handler in before:
            if handler is not None:  # None: one that C code installed before, which Python cannot put back
                signal.signal(number, handler)
