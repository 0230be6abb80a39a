"""What a Python function reads besides its arguments, and the same function over other tensors.

A function's code names globals and cells. Neither is changed here: a function with its own cells and globals is made
beside the user's.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor

CAPTURED_DTYPES = (torch.float32, torch.int32, torch.int64, torch.bool)
MAX_RANK = 3
MAX_ELEMENTS = 2**31  # kernels index captured tensors with 32 bits
_CELL_READS = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_GLOBAL_READS = ("LOAD_GLOBAL", "LOAD_NAME")
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# Packages whose functions, classes and modules are taken to stay what they are.
_FIXED_PACKAGES = sys.stdlib_module_names | {"torch", "numpy", "pagegen"}


@dataclass(frozen=True)
class Capture:
    """A tensor that a function captured: its name there, how many dimensions it has, and its dtype."""

    name: str
    rank: int
    dtype: torch.dtype


@dataclass
class Closure:
    """A function, the values that its code reads by name and those of its `defaults`, as they were when it was looked
    at. A value that is a Python function itself is held as its own `Closure`."""

    function: FunctionType
    values: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """The captured tensors by name, in the order in which the code first reads them, those of the functions that it
        calls included. A name that several functions give to different tensors is numbered: starts, starts_2."""
        found: dict[str, Tensor] = {}
        for closure in self._walk():
            for name, value in closure._items():
                if isinstance(value, Tensor) and not any(value is other for other in found.values()):
                    found[_unused(name, found)] = value
        return found

    def constants(self) -> dict[str, Any]:
        """The plain numbers and strings in the function's own cells: what a factory made it with."""
        names = self.function.__code__.co_freevars
        return {n: v for n, v in self.values.items() if n in names and isinstance(v, (bool, int, float, str))}

    def bound(self, stand_ins: Sequence[Any]) -> Callable[..., Any]:
        """The function over `stand_ins` instead of its captured tensors, in the order of `tensors`."""
        originals = [id(tensor) for tensor in self.tensors().values()]
        return self._rebuilt(dict(zip(originals, stand_ins, strict=True)), {})

    def fingerprint(self) -> tuple[Any, ...]:
        """Equal for functions that do the same: their code, the numbers they captured or have as defaults, and the
        names, ranks and dtypes of the tensors. Other captured objects count by identity."""
        closures = list(self._walk())
        places = {id(closure): i for i, closure in enumerate(closures)}
        names = {id(tensor): name for name, tensor in self.tensors().items()}
        return tuple((_code_key(c.function.__code__), _values_key(c._items(), places, names)) for c in closures)

    def reads_objects(self) -> bool:
        """Whether something is read whose contents may change unseen by `fingerprint`: a dict, an instance, a class, a
        module or function of a package that is neither the function's own nor known to be fixed."""
        return any(
            any(not _is_fixed(value) for _, value in closure._items())
            or bool(closure.function.__dict__)
            or any(package not in _FIXED_PACKAGES for package in _imports(closure.function.__code__))
            for closure in self._walk()
        )

    def _items(self) -> Iterator[tuple[str, Any]]:
        yield from self.values.items()
        yield from self.defaults.items()

    def _walk(self, seen: set[int] | None = None) -> Iterator[Closure]:
        seen = set() if seen is None else seen
        if id(self) not in seen:
            seen.add(id(self))
            yield self
            for _, value in self._items():
                if isinstance(value, Closure):
                    yield from value._walk(seen)

    def _rebuilt(self, stand_ins: Mapping[int, Any], made: dict[int, FunctionType]) -> FunctionType:
        if id(self) in made:  # a function that calls itself
            return made[id(self)]
        code, old = self.function.__code__, self.function.__closure__ or ()
        cells = tuple(
            CellType() if name in self.values else cell for name, cell in zip(code.co_freevars, old, strict=True)
        )
        scope = dict(self.function.__globals__)
        new = FunctionType(code, scope, self.function.__name__, None, cells)
        new.__dict__.update(self.function.__dict__)
        made[id(self)] = new

        def replaced(value: Any) -> Any:
            value = value._rebuilt(stand_ins, made) if isinstance(value, Closure) else value
            return stand_ins.get(id(value), value)

        by_name = dict(zip(code.co_freevars, cells, strict=True))
        for name, value in self.values.items():
            if name in by_name:
                by_name[name].cell_contents = replaced(value)
            else:
                scope[name] = replaced(value)
        positional = len(self.function.__defaults__ or ())
        defaults = [(name, replaced(value)) for name, value in self.defaults.items()]
        new.__defaults__ = tuple(value for _, value in defaults[:positional]) or None
        new.__kwdefaults__ = dict(defaults[positional:]) or None
        return new


def closure_of(function: FunctionType, made: dict[int, Closure] | None = None) -> Closure:
    """What `function` reads by name now. Of the functions among it those are looked into that came in a cell or belong
    to the same package; a library's are left as they are."""
    made = {} if made is None else made
    if id(function) in made:
        return made[id(function)]
    closure = made[id(function)] = Closure(function)

    def looked_into(value: Any, *, own: bool) -> Any:
        if isinstance(value, FunctionType) and (own or _akin(value, function)):
            return closure_of(value, made)
        if isinstance(value, (Tensor, ModuleType)):
            return value
        inner = getattr(value, "closure", None)  # of a Modifier, which is called like its function
        return inner if isinstance(inner, Closure) else value

    for name, value in _reads(function).items():
        closure.values[name] = looked_into(value, own=name in function.__code__.co_freevars)
    for name, value in _defaults(function).items():
        closure.defaults[name] = looked_into(value, own=True)
    return closure


def _defaults(function: FunctionType) -> dict[str, Any]:
    """The defaults by parameter: first those of `__defaults__`, which are of the last positional parameters."""
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    values = function.__defaults__ or ()
    last = positional[len(positional) - len(values) :]
    return {**dict(zip(last, values, strict=True)), **(function.__kwdefaults__ or {})}


def _is_fixed(value: Any) -> bool:
    """Whether a value that a function reads by name is known by what a fingerprint holds of it."""
    if isinstance(value, (Tensor, Closure, *_CONSTANTS)):
        return True
    if isinstance(value, tuple):
        return all(isinstance(part, _CONSTANTS) or (isinstance(part, tuple) and _is_fixed(part)) for part in value)
    if isinstance(value, ModuleType):
        return _package(value.__name__) in _FIXED_PACKAGES
    if isinstance(value, BuiltinFunctionType):  # a builtin method of an object reads that object
        return value.__self__ is None or isinstance(value.__self__, (ModuleType, type))
    if isinstance(value, (FunctionType, type)):
        return _package(value.__module__) in _FIXED_PACKAGES
    return isinstance(value, MethodDescriptorType)


def _package(module: str | None) -> str:
    return str(module).split(".")[0]


def _imports(code: CodeType) -> Iterator[str]:
    """The packages that the code imports while it runs."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            yield _package(instruction.argval)
        elif isinstance(instruction.argval, CodeType):
            yield from _imports(instruction.argval)


def _akin(one: FunctionType, other: FunctionType) -> bool:
    return _package(one.__module__) == _package(other.__module__)


def check_captured(name: str, tensor: Tensor) -> Capture:
    """The tensor as a `Capture`. Raises TypeError or ValueError for one that no kernel takes, naming it."""
    if tensor.dtype not in CAPTURED_DTYPES:
        kinds = ", ".join(str(d).removeprefix("torch.") for d in CAPTURED_DTYPES)
        raise TypeError(
            f"captured tensor {name} must be one of {kinds}, got {str(tensor.dtype).removeprefix('torch.')}"
        )
    if not 1 <= tensor.dim() <= MAX_RANK:
        raise ValueError(f"captured tensor {name} must have 1 to {MAX_RANK} dimensions, got {tensor.dim()}")
    if not tensor.is_contiguous():
        raise ValueError(f"captured tensor {name} must be contiguous, got strides {tensor.stride()}")
    if not name.isascii():
        raise ValueError(f"captured tensor {name} must have a name in ASCII: generated C++ and Triton code use it")
    if tensor.numel() == 0:
        raise ValueError(f"captured tensor {name} must have elements, got shape {list(tensor.shape)}")
    if tensor.numel() >= MAX_ELEMENTS:
        raise ValueError(f"captured tensor {name} must have fewer than 2^31 elements, got shape {list(tensor.shape)}")
    return Capture(name, tensor.dim(), tensor.dtype)


def _reads(function: FunctionType) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    found: dict[str, Any] = {}
    for name, is_cell in _names(function.__code__):
        scope = cells if is_cell else function.__globals__
        if name in scope and not (name in cells and not is_cell):
            found.setdefault(name, scope[name])
    return {**found, **{name: value for name, value in cells.items() if name not in found}}


def _names(code: CodeType) -> Iterator[tuple[str, bool]]:
    """(name, whether a cell) of what the code reads, in order; the code of functions inside it included."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in _CELL_READS or instruction.opname in _GLOBAL_READS:
            yield instruction.argval, instruction.opname in _CELL_READS
        elif isinstance(instruction.argval, CodeType):
            yield from _names(instruction.argval)


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def _code_key(code: CodeType) -> tuple[Any, ...]:
    constants = tuple(_code_key(c) if isinstance(c, CodeType) else (type(c), repr(c)) for c in code.co_consts)
    return (code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, constants)


def _values_key(
    items: Iterator[tuple[str, Any]], places: Mapping[int, int], names: Mapping[int, str]
) -> tuple[Any, ...]:
    return tuple((name, *_value_key(value, places, names)) for name, value in items)


def _value_key(value: Any, places: Mapping[int, int], names: Mapping[int, str]) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        return ("tensor", names[id(value)], value.dim(), value.dtype)
    if isinstance(value, Closure):
        return ("function", places[id(value)])
    if isinstance(value, _CONSTANTS) or (isinstance(value, tuple) and _is_fixed(value)):
        return (type(value), repr(value))
    return ("object", id(value))
