"""Score and mask functions by name: the operator's graph can carry a string, but not a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from pagegen.modifiers.closures import Capture, Closure, check_captured, closure_of

PARAMETERS = {
    "score": ("score", "batch", "head", "q_pos", "k_pos"),
    "mask": ("batch", "head", "q_pos", "k_pos"),
}
REGISTERED: dict[str, Modifier] = {}
_FINGERPRINTS: dict[str, tuple[Any, ...]] = {}
# What became of tracing by name: an expression (`tracing.Traced`), or why there is none. By name, which says what a
# modifier computes: a cache of modifiers would keep their tensors alive.
OUTCOMES: dict[str, Any] = {}


@dataclass(frozen=True)
class Modifier:
    """A registered score or mask function. `kind` is "score" or "mask"; call it like the function itself.

    Two modifiers of one name compute the same and differ at most in the tensors that they captured. `tensors` are
    those by name, in the order in which the code first reads them; `captures` is what a kernel must know about them.
    """

    name: str
    kind: str
    function: Callable[..., Any] = field(compare=False)
    tensors: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    captures: tuple[Capture, ...] = field(default=(), compare=False)
    closure: Closure | None = field(default=None, compare=False, repr=False)
    reads_objects: bool = field(default=False, compare=False, repr=False)

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def bound(self, stand_ins: Sequence[Any]) -> Callable[..., Any]:
        """The function over `stand_ins`, one a captured tensor, and over the other names as they were when it was
        registered."""
        return self.function if self.closure is None else self.closure.bound(stand_ins)

    def over(self, tensors: Sequence[Tensor] | None = None) -> Callable[..., Any]:
        """The function over `tensors` (default: the captured ones), in which an index outside of a tensor reads its
        nearest element, as it does in a kernel. Raises ValueError where an object that the function reads has changed
        since it was registered, so that it computes something else now than its kernels do; what it returns raises one
        where the function decides in Python on a value."""
        if self.reads_objects:
            from pagegen.modifiers.tracing import check_unchanged

            check_unchanged(self)
        given = self.tensors.values() if tensors is None else tensors
        function = self.bound([tensor.as_subclass(_Clamped) for tensor in given])

        def called(*args: Any) -> Any:
            try:
                return function(*args)
            except RuntimeError as error:
                if "Boolean value of Tensor" not in str(error):
                    raise
                raise ValueError(
                    f"{self.kind}_mod {self.name} must not decide in Python (if, and, or, not, min, max) on what it is "
                    "given, tensors of many values: use & | ~, torch.where, torch.minimum and torch.maximum"
                ) from error

        return called


class _Clamped(Tensor):
    """A tensor whose indices are moved into it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain tensors

    def __getitem__(self, index: Any) -> Any:
        indices = index if isinstance(index, tuple) else (index,)
        inside = tuple(_nearest(i, size) for i, size in zip(indices, self.shape, strict=False))
        plain = self.as_subclass(Tensor)[inside + indices[len(inside) :]]
        return plain.as_subclass(_Clamped) if len(indices) < self.dim() else plain


def _nearest(index: Any, size: int) -> Any:
    """An index into `size` elements; what is no index of one element (a slice, a condition) stays as it is."""
    if isinstance(index, Tensor) and index.dtype != torch.bool:
        return index.clamp(0, size - 1)
    return min(index, size - 1) if isinstance(index, int) else index


def register(kind: str, function: Callable[..., Any], name: str | None = None) -> Modifier:
    """The modifier of a function, known by `name` (default: where it is defined, with what its factory was given) from
    now on. A function that does something else than the one already known by the name gets a numbered one."""
    if isinstance(function, Modifier):
        raise TypeError(f"a {kind}_mod must be a plain function, got the {function.kind} modifier {function.name}")
    wanted = PARAMETERS[kind]
    found = tuple(inspect.signature(function).parameters)
    if len(found) != len(wanted):
        raise TypeError(f"a {kind}_mod takes ({', '.join(wanted)}), got ({', '.join(found)})")
    closure = closure_of(function) if isinstance(function, FunctionType) else None
    tensors = closure.tensors() if closure else {}
    captures = tuple(check_captured(name, tensor) for name, tensor in tensors.items())
    fingerprint = (kind, *(closure.fingerprint() if closure else (id(function),)))
    wanted_name = name or _default_name(function, closure)
    modifier = Modifier(wanted_name, kind, function, tensors, captures, closure)
    outcome = None
    if closure is None or closure.reads_objects():  # rare: the code does not say what is computed, its trace does
        from pagegen.modifiers.tracing import outcome_of

        modifier = replace(modifier, reads_objects=True)
        outcome, says = outcome_of(modifier)
        fingerprint = (*fingerprint, says) if isinstance(outcome, str) else (kind, captures, says)
    chosen = _free_name(wanted_name, fingerprint)
    modifier = replace(modifier, name=chosen)
    REGISTERED[chosen], _FINGERPRINTS[chosen] = modifier, fingerprint
    if outcome is not None:
        OUTCOMES.setdefault(chosen, outcome)
    return modifier


def _default_name(function: Callable[..., Any], closure: Closure | None) -> str:
    named = getattr(function, "__qualname__", type(function).__qualname__)
    constants = ", ".join(f"{n}={v!r}" for n, v in closure.constants().items()) if closure else ""
    return f"{function.__module__}.{named}" + (f"({constants})" if constants else "")


def _free_name(name: str, fingerprint: tuple[Any, ...]) -> str:
    number, candidate = 1, name
    while _FINGERPRINTS.get(candidate, fingerprint) != fingerprint:
        number += 1
        candidate = f"{name}#{number}"
    return candidate


def score_mod(function: Callable[..., Any]) -> Modifier:
    """Registers `function(score, batch, head, q_pos, k_pos) -> score`, applied to the scaled score before the masks.

    The function is called on tensors that broadcast against each other (the reference) and once on symbols, whose
    result is printed into the kernels: see `pagegen.modifiers.trace` for what it may do. `batch` is the sequence's
    place in the call, `q_pos` and `k_pos` are positions in the sequence; all but `score` are integers.

    Tensors that the function reads from its closure or from globals become arguments of the kernel: float32, int32,
    int64 or bool, contiguous, of 1 to 3 dimensions. Their contents may change between calls; that a name is bound to
    another tensor later is not seen. An index outside of such a tensor reads its nearest element. Python numbers are
    constants, as they were at registration, defaults of parameters too. In a kernel integers have 32 bits and scores
    are float32.

    A function that reads anything else (an item of a dict, an attribute of an object, a class or a module) is traced
    when it is registered, and its kernels compute with what was read then; the reference and the dense path raise
    ValueError once that has changed. Registered again it gets a name of its own. Register outside of functions that
    torch compiles: torch cannot trace the registering itself.

    Raises TypeError or ValueError for another number of parameters and for a captured tensor that no kernel takes.
    """
    return register("score", function)


def mask_mod(function: Callable[..., Any]) -> Modifier:
    """Registers `function(batch, head, q_pos, k_pos) -> bool`: whether the query may attend the key, on top of
    `causal` and `window`. Else as `score_mod`. Keys that the mask provably leaves out (see
    `pagegen.modifiers.mask_range`) are not read. Raises what `score_mod` raises."""
    return register("mask", function)
