"""Two functions of Triton's interpreter that took a third of these tests' time, made to do the same work once.

A kernel's launch puts interpreted functions in the place of `tl`'s own, and takes them out again when it is over. Each
call of a `@triton.jit` function within it looked through all of `tl` again, 1,350 times in one of these tests, and
found nothing left to replace. The NumPy dtype of a Triton one was looked up in a dictionary that was made for it.
"""

from __future__ import annotations

import inspect
import os
from typing import Any


class Patches:
    """Stands in for `_patch_lang`: patches the modules that a function sees once a launch."""

    def __init__(self, interpreter: Any) -> None:
        self._patch = interpreter._patch_lang
        self._empty = interpreter._LangPatchScope
        self._languages = (interpreter.tl, interpreter.tl.core)
        self._patched: set[str] = set()

    def __call__(self, fn: Any) -> Any:
        seen = {m.__name__ for m in fn.__globals__.values() if inspect.ismodule(m) and m in self._languages}
        if seen and seen <= self._patched:
            return self._empty()
        self._patched |= seen
        scope = self._patch(fn)
        restore = scope.restore

        def restored() -> None:  # called for the scope of a launch alone
            restore()
            self._patched.clear()

        scope.restore = restored
        return scope


class Dtypes:
    """Stands in for `_get_np_dtype`: remembers what it says of an element's type."""

    def __init__(self, interpreter: Any) -> None:
        self._find = interpreter._get_np_dtype
        self._found: dict[str, Any] = {}

    def __call__(self, dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in self._found:
            self._found[name] = self._find(dtype.scalar)
        return self._found[name]


if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    interpreter._patch_lang = Patches(interpreter)
    interpreter._get_np_dtype = Dtypes(interpreter)
