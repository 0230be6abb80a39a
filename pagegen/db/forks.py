"""Databases and fork: SQLite keeps its locks on a file in the process's memory, which a child inherits as they are.

A fork therefore waits until no other thread is in a transaction on a file, and holds new ones up meanwhile: only a
thread that is in one may begin another, since it may need that to end the first. What is open then all the same (the
forking thread's own transaction, or one that does not end in time) makes the file unusable for writing in the child:
its SQLite believes for ever that somebody holds the lock. A server's connections stay the parent's: a child leaves them
as they are and makes its own.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

WAIT_S = 10.0


class Holder(Protocol):
    """A store, as far as forks concern it."""

    path: Path | None

    def release(self) -> None: ...

    def leave(self) -> None: ...


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
_gate = threading.Condition()
_inside: dict[tuple[int, int], Path] = {}  # (thread, a number of its own) -> the file of an open transaction
_forking: list[int] = []  # the threads that wait to fork
_locked_for_ever: set[Path] = set()


def watch(holder: Holder) -> None:
    """Has what a store keeps open released before every fork: a child may not even close what its parent opened."""
    _holders.add(holder)


@contextmanager
def transaction(path: Path) -> Iterator[None]:
    """Stands around every transaction on a SQLite file."""
    me, marker = threading.get_ident(), object()
    with _gate:
        if _forking and not _is_inside(me):
            _gate.wait_for(lambda: not _forking)
        _inside[me, id(marker)] = path
    try:
        yield
    finally:
        with _gate:
            _inside.pop((me, id(marker)), None)
            _gate.notify_all()


def undisturbed() -> threading.Condition:
    """A lock, for the moment that a kept connection is opened or closed: no fork happens meanwhile, which would leave
    the child with a half-open one, or with a lock that nobody gives up."""
    return _gate


def _is_inside(thread: int) -> bool:
    return any(other == thread for other, _ in _inside)


def is_lost(path: Path) -> bool:
    """Whether this process was forked inside a transaction on the file and can never write to it."""
    return path in _locked_for_ever


def _before() -> None:
    me = threading.get_ident()
    _gate.acquire()
    _forking.append(me)
    _gate.wait_for(lambda: all(thread == me for thread, _ in _inside), timeout=WAIT_S)
    for holder in list(_holders):
        holder.release()


def _in_parent() -> None:
    _forking.remove(threading.get_ident())
    _gate.notify_all()
    _gate.release()


def _in_child() -> None:
    _locked_for_ever.update(_inside.values())
    _inside.clear()
    _forking.clear()
    _gate.release()
    for holder in list(_holders):
        holder.leave()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
