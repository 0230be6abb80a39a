"""Why a kernel could not be had."""

from __future__ import annotations


class CompileError(RuntimeError):
    """A compiler refused a generated kernel, or could not be run.

    `target` and `variant_name` say which kernel, `detail` is the compiler's first error in one line.
    """

    def __init__(self, target: str, variant_name: str, detail: str) -> None:
        super().__init__(target, variant_name, detail)
        self.target = target
        self.variant_name = variant_name
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.variant_name} does not compile for {self.target}: {self.detail}"


class CannotBuild(CompileError):
    """Nothing can be compiled here just now, whatever the kernel: no compiler runs, or what it makes cannot be kept."""


class Unsupported(ValueError):
    """No generated kernel serves a spec on a target; `reason` is a sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
