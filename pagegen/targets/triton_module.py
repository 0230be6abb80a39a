"""Generated Python as importable modules: triton reads the text of functions from their files.

What runs is the text that this process rendered. The file is for people, tracebacks and profilers: it is written for
the user alone, compared with the text, and neither it nor compiled Python beside it is ever executed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.abc
import importlib.util
import linecache
import logging
import sys
from pathlib import Path
from types import ModuleType

from pagegen import private, settings
from pagegen.targets import ready

log = logging.getLogger(__name__)


class _Rendered(importlib.abc.ExecutionLoader):
    """Imports a text that is in memory; `path` is where a copy lies."""

    def __init__(self, source: str, path: Path) -> None:
        self._source = source
        self._path = path

    def get_filename(self, fullname: str) -> str:
        return str(self._path)

    def get_source(self, fullname: str) -> str:
        return self._source

    def is_package(self, fullname: str) -> bool:
        return False


@functools.lru_cache(maxsize=4096)
def import_source(source: str) -> ModuleType:
    """The module of a generated source, made once a process. A copy lies in the cache folder under the source's hash;
    where none can be kept, a log line says so, and the module works without."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:32]
    path = settings.cache_dir().absolute() / "triton" / f"pagegen_{digest}.py"
    _keep_copy(path, source)
    # what triton's and Python's inspection read; an entry without a time is not compared with the disk
    linecache.cache[str(path)] = (len(source), None, source.splitlines(keepends=True), str(path))
    name = f"pagegen._generated.k{digest}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_Rendered(source, path))
    if spec is None or spec.loader is None:
        raise ImportError(f"the generated kernel {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    ready.module(module)
    return module


def _keep_copy(path: Path, source: str) -> None:
    """Sees to it that the file holds the source; one that does not is published anew."""
    text = source.encode()
    try:
        with private.own_folder(path.parent) as folder:
            try:
                found = folder.read(path.name)
            except FileNotFoundError:
                pass
            except private.NotPrivate as error:
                log.warning("%s; it is written anew", error)
            else:
                if found == text:
                    return
                log.warning("%s is not what was generated; it is written anew", path)
            folder.publish(path.name, text)
    except OSError as error:
        _say_once(f"{error}" if isinstance(error, private.NotPrivate) else f"{path.parent}: {error.strerror}")


@functools.cache
def _say_once(why: str) -> None:
    log.warning("generated kernels run without a copy on the disk, which profilers read (%s)", why)
