"""Folders that belong to one user: what lies in them is executed, so who can write there can run code as that user.

A folder is opened once and judged by its descriptor; every file in it is then named relative to that descriptor, opened
without following a link, and judged before it is read. Nobody who can rename a folder higher up can put another in its
place between the judgement and the use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

FILE_MODE, FOLDER_MODE = 0o600, 0o700
# Nobody but the owner: members of a group are other people.
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
ROOT = 0


class NotPrivate(PermissionError):
    """A folder or file that someone else owns or can write, or that is no plain file. The message says which and why,
    in one line."""


class Folder:
    """An open folder that `owners` alone (numbers of users) can write. Close it, or use it as a context manager.

    `path` names it to people; nothing is opened by it again. `fd` is its descriptor.
    """

    def __init__(self, path: Path, fd: int, owners: tuple[int, ...]) -> None:
        self.path = path
        self.owners = owners
        self.fd = fd

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.fd)

    def place(self, name: str) -> str:
        """A path of a file for whoever takes no descriptor (a loader, a compiler). On Linux it goes through this
        folder's descriptor and is good while the folder is open, in this process and, as a working folder, in its
        children."""
        through = f"/proc/self/fd/{self.fd}"
        return os.path.join(through if os.path.isdir(through) else str(self.path), name)  # noqa: PTH118, PTH112

    def read(self, name: str, *, at_most: int | None = None) -> bytes:
        """A file's content. Raises FileNotFoundError, NotPrivate for a link, a file that someone else owns or can write
        or that is no plain file, and ValueError for one of more than `at_most` bytes."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe would wait
        try:
            fd = os.open(name, flags, dir_fd=self.fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise NotPrivate(f"{self.path / name} must be a plain file, not a link") from error
            raise
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise NotPrivate(f"{self.path / name} must be a plain file")
            _judge(self.path / name, status, self.owners)
            if at_most is not None and status.st_size > at_most:
                raise ValueError(f"{self.path / name} must have at most {at_most} bytes, got {status.st_size}")
            with open(fd, "rb", closefd=False) as file:  # noqa: PTH123  a descriptor and not a path
                return file.read()
        finally:
            os.close(fd)

    def write(self, name: str, content: bytes, *, mode: int = FILE_MODE, synced: bool = False) -> None:
        """Makes a new file, by default one that nobody else can read; `synced` waits for the disk. Raises
        FileExistsError, or OSError for a full disk."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, mode, dir_fd=self.fd), "wb") as file:  # noqa: PTH123
            os.fchmod(file.fileno(), mode)  # whatever the umask is
            file.write(content)
            if synced:
                file.flush()
                os.fsync(file.fileno())

    def restrict(self, name: str) -> None:
        """Takes a file that another program made with the user's umask from everybody else. Raises OSError."""
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self.fd)
        try:
            os.fchmod(fd, FILE_MODE)
        finally:
            os.close(fd)

    def publish(self, name: str, content: bytes, *, mode: int = FILE_MODE) -> None:
        """Writes a file that appears whole: another process sees the old one, none, or the new one."""
        scratch = f".{name[:100]}.{secrets.token_hex(8)}.tmp"
        try:
            self.write(scratch, content, mode=mode, synced=True)
            os.replace(scratch, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)  # noqa: PTH105  relative to a descriptor
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(scratch, dir_fd=self.fd)  # noqa: PTH108
            raise

    def make(self, prefix: str) -> Folder:
        """Makes and opens a folder in this one, with a name of its own that begins with `prefix`."""
        name = prefix + secrets.token_hex(8)
        os.mkdir(name, FOLDER_MODE, dir_fd=self.fd)  # noqa: PTH102
        return self.inner(name)

    def inner(self, name: str) -> Folder:
        """Opens a folder in this one. Raises FileNotFoundError or NotPrivate."""
        return Folder(self.path / name, _open(self.path / name, name, self.owners, self.fd), self.owners)

    def rename(self, name: str, target: str) -> None:
        """Renames what is in this folder. Raises OSError where `target` is a folder that holds something."""
        os.rename(name, target, src_dir_fd=self.fd, dst_dir_fd=self.fd)  # noqa: PTH104

    def names(self) -> list[str]:
        """What is in the folder, sorted."""
        return sorted(os.listdir(self.fd))  # noqa: PTH208

    def age_s(self, name: str, now: float) -> float:
        """How long ago something in the folder was changed. Raises OSError where it is gone."""
        return now - os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_mtime  # noqa: PTH116

    def remove(self, name: str) -> None:
        """Removes a file, or a folder of plain files, as far as it can be removed."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self.fd)  # noqa: PTH108
            return
        with contextlib.suppress(OSError), self.inner(name) as folder:
            for file in folder.names():
                os.unlink(file, dir_fd=folder.fd)  # noqa: PTH108
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=self.fd)  # noqa: PTH106


def own_folder(path: Path) -> Folder:
    """Opens a folder of this user, which is made with its parents (0700) where there is none.

    Raises NotPrivate for one that another user owns or that others can write, and OSError where it cannot be made.
    """
    path = path.absolute()
    missing = [parent for parent in (path, *path.parents) if not parent.exists()]
    for parent in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process makes it, too
            parent.mkdir(mode=FOLDER_MODE)
    return open_folder(path, owners=(os.geteuid(),))


def own_path(path: Path) -> Path:
    """`path`, for libraries that take nothing else, when it is such a folder; made and refused as `own_folder` does."""
    with own_folder(path):
        return path


def open_folder(path: Path, *, owners: tuple[int, ...]) -> Folder:
    """Opens a folder that is there. Raises FileNotFoundError, NotADirectoryError, or NotPrivate where someone other
    than `owners` owns it or can write it. Links on the way to it are followed: whose the folder is, is what counts."""
    return Folder(path, _open(path, str(path), owners, None), owners)


def _open(path: Path, name: str, owners: tuple[int, ...], beside: int | None) -> int:
    follow = 0 if beside is None else os.O_NOFOLLOW
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | follow, dir_fd=beside)
    try:
        _judge(path, os.fstat(fd), owners)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _judge(path: Path, status: os.stat_result, owners: tuple[int, ...]) -> None:
    if status.st_uid not in owners:
        raise NotPrivate(f"{path} belongs to user {status.st_uid}, and what lies there is executed as {os.geteuid()}")
    if status.st_mode & _OTHERS_WRITE:
        raise NotPrivate(f"{path} must be writable by you alone, since what lies there is executed: chmod go-w it")


@contextlib.contextmanager
def scratch(folder: Folder, prefix: str) -> Iterator[Folder]:
    """A folder in `folder` that is removed at the end."""
    work = folder.make(prefix)
    try:
        with work:
            yield work
    finally:
        folder.remove(work.path.name)
