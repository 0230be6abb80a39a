"""Child processes that use a database at once, started together, each telling what it has stored."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Child:
    """A forked process and the pipe that it tells through; `failure` is the end of what it told, "" for none."""

    pid: int
    reader: int
    told: bytes = b""

    def finish(self) -> str:
        """Waits for the end; returns why it failed, or ""."""
        self.told += b"".join(iter(lambda: os.read(self.reader, 65536), b""))
        os.close(self.reader)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if code == 0:
            return ""
        return f"exit code {code}: {self.told.decode(errors='replace')[-2000:]}"


def started(work: Callable[[Callable[[bytes], None]], None]) -> Child:
    """Forks a child that runs `work(tell)`."""
    reader, told = os.pipe()
    pid = os.fork()
    if pid:
        os.close(told)
        return Child(pid, reader)
    code = 1
    try:
        os.close(reader)
        work(lambda said: os.write(told, said) and None)
        code = 0
    except BaseException:
        os.write(told, traceback.format_exc().encode()[-4000:])
    finally:
        os._exit(code)


def together(works: list[Callable[[Callable[[bytes], None]], None]]) -> list[str]:
    """Runs each in a process of its own, all let go at one moment; returns the failures."""
    gate, opener = os.pipe()
    children = []
    for work in works:

        def gated(tell: Callable[[bytes], None], work: Callable[[Callable[[bytes], None]], None] = work) -> None:
            os.close(opener)  # ours keeps it open for all
            os.read(gate, 1)
            work(tell)

        children.append(started(gated))
    os.close(opener)
    failures = [failure for child in children if (failure := child.finish())]
    os.close(gate)
    return failures
