"""Generated Python as importable modules: triton compiles functions that live in files."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from pagegen import settings
from pagegen.targets import ready


@functools.lru_cache(maxsize=4096)
def import_source(source: str) -> ModuleType:
    """The module of a generated source, written once to the cache folder under its hash.

    A file that is there is compared with the source before it is run, and published anew if it differs.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()[:32]
    path = settings.cache_dir() / "triton" / f"pagegen_{digest}.py"
    if not path.is_file() or path.read_text(encoding="utf-8") != source:
        _publish(path, source)
    name = f"pagegen._generated.k{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"the generated kernel {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    ready.module(module)
    return module


def _publish(path: Path, source: str) -> None:
    """Writes a file whole: another process sees the old one, none, or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(source)
    Path(temporary).replace(path)
