"""Kernels that were compiled on another machine: a folder with a manifest, which a process loads where all of it fits.

A folder holds, for each kernel, its generated source and the shared library made of it, both named by the source's
sha256, and `manifest.json`, which names every file's hash, the templates' hash, pagegen's version, the compiler, its
flags and the CPU features it could use. A library is loaded where the source that this process renders has the hash of
the manifest's and the library's bytes have theirs; a folder that fits this machine in part only, or that someone else
could have written, is not used, and a log line says why. Nothing of a folder is a path, and nothing of it is evaluated.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import logging
import os
import platform
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagegen import __version__, private, settings
from pagegen.codegen import templates
from pagegen.spec import AttentionSpec, CacheLayout, DispatchRule, Target, check
from pagegen.targets import cpu_features, ready

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
VERSION = 1
# 20,000 kernels with their rules; a file that never ends is not read to its end.
MAX_MANIFEST_BYTES = 64 << 20
MAX_LIBRARY_BYTES = 256 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_HEAD = ("version", "pagegen", "target", "machine", "code_hash", "compiler", "flags", "cpu_features")
_MANIFEST = (*_HEAD, "kernels", "rules")
_KERNEL = ("name", "source", "library")
_RULE = ("spec", "layout", "rule")


class Refused(ValueError):
    """A folder of artefacts, or a library in it, that this process does not load; the message is one line of why."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One compiled kernel: its name for people, the sha256 of its source and of its library."""

    name: str
    source: str
    library: str

    def __post_init__(self) -> None:
        check.text("name of a kernel", self.name)
        for name in ("source", "library"):
            if not _DIGEST.fullmatch(check.text(name, getattr(self, name))):
                raise ValueError(f"{name} must be a sha256 in hexadecimal digits, got {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class Head:
    """What a folder was made by, and for what."""

    pagegen: str
    machine: str
    code_hash: str
    compiler: str
    flags: tuple[str, ...]
    cpu_features: tuple[str, ...]
    target: str = "cpu"
    version: int = VERSION

    def __post_init__(self) -> None:
        check.integer("version", self.version)
        for name in ("pagegen", "machine", "code_hash", "compiler", "target"):
            check.text(name, getattr(self, name))
        for name in ("flags", "cpu_features"):
            object.__setattr__(self, name, check.instances(name, getattr(self, name), str))

    def misfit(self) -> str | None:
        """Why kernels of this head do not run here as they did where they were made, or None where they do."""
        code_hash = templates.digest(templates.CPP)
        for what, made, here in (
            ("a manifest of version", self.version, VERSION),
            ("kernels for", self.target, "cpu"),
            ("kernels of pagegen", self.pagegen, __version__),
            ("kernels for machines of", self.machine, platform.machine()),
            ("kernels of the templates", self.code_hash, code_hash),
        ):
            if made != here:
                return f"it holds {what} {check.shown(made)}, not {here}"
        missing = sorted(set(self.cpu_features) - set(cpu_features.names()))
        return f"this CPU lacks {', '.join(map(check.shown, missing))}" if missing else None


@dataclass(frozen=True, kw_only=True)
class Artefacts:
    """A folder whose manifest was read and fits. `kernels` by the sha256 of their source; `digest` is the
    manifest's."""

    path: Path
    digest: str
    head: Head
    kernels: dict[str, Kernel]
    rules: dict[tuple[AttentionSpec, CacheLayout], DispatchRule]

    def load(self, kernel: Kernel) -> ctypes.CDLL:
        """Loads a library whose bytes are those of the manifest. Raises Refused."""
        file = f"{kernel.source}.so"
        try:
            with opened(self.path) as folder:
                if hashlib.sha256(folder.read(file, at_most=MAX_LIBRARY_BYTES)).hexdigest() != kernel.library:
                    raise Refused(f"{file} is not the library that the manifest names")
                return ctypes.CDLL(folder.place(file))
        except (OSError, ValueError) as error:  # another libc or libgomp, too
            raise Refused(str(error)) from error


def opened(path: Path) -> private.Folder:
    """A folder of artefacts: this user's or the system's, writable by nobody else. Raises OSError."""
    return private.open_folder(path, owners=(os.geteuid(), private.ROOT))


def read(path: Path, sha256: str = "") -> Artefacts:
    """Reads a folder's manifest, whose hash must be `sha256` where one is given. Raises Refused with the reason."""
    try:
        with opened(path) as folder:
            text = folder.read(MANIFEST, at_most=MAX_MANIFEST_BYTES)
    except (OSError, ValueError) as error:
        raise Refused(str(error)) from error
    digest = hashlib.sha256(text).hexdigest()
    if sha256 and digest != sha256.lower():
        raise Refused(f"its manifest has the sha256 {digest}, not {check.shown(sha256)}")
    head, kernels, rules = parse(text)
    misfit = head.misfit()
    if misfit is not None:
        raise Refused(misfit)
    return Artefacts(path=path, digest=digest, head=head, kernels=kernels, rules=rules)


def parse(
    text: bytes,
) -> tuple[Head, dict[str, Kernel], dict[tuple[AttentionSpec, CacheLayout], DispatchRule]]:
    """What a manifest says. Raises Refused for what is none."""
    try:
        data = check.fields("a manifest", json.loads(text), _MANIFEST, _MANIFEST)
        head = Head(**{name: data[name] for name in _HEAD})
        kernels = [Kernel(**check.fields("a kernel", one, _KERNEL, _KERNEL)) for one in _listed(data, "kernels")]
        rules = {}
        for one in _listed(data, "rules"):
            check.fields("a rule", one, _RULE, _RULE)
            spec, layout = AttentionSpec.from_dict(one["spec"]), CacheLayout.from_dict(one["layout"])
            rules[spec, layout] = DispatchRule.from_dict(one["rule"])
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        raise Refused(f"its manifest cannot be read: {check.first_line(error)}") from error
    return head, {kernel.source: kernel for kernel in kernels}, rules


def _listed(data: dict[str, Any], name: str) -> list[Any]:
    check.instance(name, data[name], list)
    found: list[Any] = data[name]
    return found


# ---- what this process uses ---------------------------------------------------------------------------------

_used: dict[Path, Artefacts] = {}
_using = threading.Lock()


def use(path: str | os.PathLike[str]) -> Artefacts | None:
    """From now on this process takes the kernels that a folder holds from there. None, with one log line that says why,
    where the folder cannot be used: its kernels are then compiled. `PAGEGEN_ARTEFACTS_SHA256`, where it is set, must be
    the manifest's hash."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"artefacts must be a folder's path, got {type(path).__name__} {path!r}")
    return _use(Path(path).absolute(), settings.artefacts_sha256())


def _use(path: Path, sha256: str) -> Artefacts | None:
    try:
        found = read(path, sha256)
    except Refused as error:
        say_once(f"the artefacts in {path} are not used: {error}; kernels are compiled here")
        return None
    with _using:
        changed = _used.get(path) != found
        _used[path] = found
    if changed:
        _forget_compilers()
    return found


def _forget_compilers() -> None:
    """What was found without artefacts (no compiler, say) is asked again."""
    from pagegen.targets import cpu, cpu_probes

    cpu.forget()
    cpu_probes.library.cache_clear()


@functools.cache
def _from_settings(place: str, sha256: str) -> None:
    if place:
        _use(Path(place).absolute(), sha256)


def in_use() -> tuple[Artefacts, ...]:
    """The folders that this process takes kernels from: that of `PAGEGEN_ARTEFACTS`, and those that `use` was given."""
    _from_settings(settings.artefacts(), settings.artefacts_sha256())
    with _using:
        return tuple(_used.values())


def forget() -> None:
    """Uses no folder any more; what is loaded stays loaded."""
    with _using:
        _used.clear()
    _from_settings.cache_clear()
    _forget_compilers()


def load(source: str, name: str) -> ctypes.CDLL | None:
    """The library of a source from a folder in use; None, with a log line where there are such folders, for one that
    must be compiled."""
    folders = in_use()
    if not folders:
        return None
    digest = hashlib.sha256(source.encode()).hexdigest()
    why = f"{_listing(folders)} holds no such kernel"
    for used in folders:
        kernel = used.kernels.get(digest)
        if kernel is not None:
            try:
                library = used.load(kernel)
            except Refused as error:
                why = f"{used.path}: {error}"
            else:
                ready.shipped_library(name)
                return library
    say_once(f"{name} is compiled here: {why}")
    return None


def rule(spec: AttentionSpec, layout: CacheLayout, target: Target) -> DispatchRule | None:
    """The dispatch rule that the artefacts in use were built for, the latest folder's first; None where there is
    none."""
    if target.kind != "cpu":
        return None
    for used in reversed(in_use()):
        found = used.rules.get((spec, layout))
        if found is not None:
            reason = f"shipped with the artefacts in {used.path}: {found.reason}"
            return DispatchRule(clauses=found.clauses, reason=reason, distance=found.distance, evidence=found.evidence)
    return None


def compiler() -> str | None:
    """The compiler that made the artefacts in use; None where there are none."""
    return next((used.head.compiler for used in in_use()), None)


def _listing(folders: Iterable[Artefacts]) -> str:
    return " and ".join(str(used.path) for used in folders)


@functools.cache
def say_once(what: str) -> None:
    """Logs a line once a process."""
    log.warning("%s", what)
