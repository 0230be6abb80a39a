"""The process that compiles and runs candidates for `pagegen_autotune.isolated`: a bench behind a connection.

Whatever a candidate does to this process, the tuner's goes on. It ends with its parent, and when the connection closes.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch

from pagegen_autotune.faults import MachineFault
from pagegen_autotune.interrupt import SIGNALS
from pagegen_autotune.measure import Bench, classify

# prctl(2): the signal that this process gets when its parent ends. A kernel that never returns reads no connection.
_PR_SET_PDEATHSIG = 1


def main(descriptor: int) -> None:
    """Answers questions until the connection closes: first how to make the bench, then its calls, one at a time."""
    _end_with_parent()
    connection = Connection(descriptor)
    try:
        make, arguments, options, threads = connection.recv()
        torch.set_num_threads(threads)
        bench: Bench = make(*arguments, **options)
        connection.send((bench.regime, bench.environment, bench.workers))
        while True:
            name, arguments = connection.recv()
            connection.send(_answer(bench, name, arguments))
    except EOFError:
        return


def _answer(bench: Bench, name: str, arguments: tuple[Any, ...]) -> Any:
    """What a call returns, the class and the first line of what it raised, or the machine's fault."""
    try:
        return True, getattr(bench, name)(*arguments)
    except Exception as error:  # a candidate may fail in any way: its failure is its result
        try:
            return False, classify(error)
        except MachineFault as fault:
            return False, fault


def _end_with_parent() -> None:
    # The tuner's to answer: it ends this process. Service managers send theirs to every process, and one that ended by
    # that would be taken for a candidate's fault.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
