"""What a candidate is not to blame for: a machine on which just then nothing can be compiled."""

from __future__ import annotations

import errno

from pagegen.spec import check
from pagegen.targets.errors import CannotBuild, CompileError

# Disks that are full or cannot be written, and a system without further files.
_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE)


class MachineFault(RuntimeError):
    """Nothing can be compiled here just now, whatever the candidate. It is no result of one: stored, it would keep the
    candidate from ever being tried again, on this machine and on all that share the database."""


def machine_fault(error: BaseException | None) -> MachineFault | None:
    """The machine's fault behind what a candidate raised, or None where it is the candidate's own."""
    while error is not None:
        if isinstance(error, MachineFault):
            return error
        if isinstance(error, CannotBuild) or (isinstance(error, OSError) and error.errno in _ERRNOS):
            words = error.detail if isinstance(error, CompileError) else check.class_and_line(error)
            return MachineFault(f"nothing can be compiled here: {words}")
        error = error.__cause__
    return None
