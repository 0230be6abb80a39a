"""`torch.vmap` over the operators: one call where a batch of calls is one larger batch, else one call each.

`torch.library.register_vmap` refuses schemas whose keyword-only arguments are tensors, so the rules go where it would
put them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import custom_function_call_vmap_helper
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.utils import _pytree as pytree

from pagegen.ops.schemas import LIBRARY

Rule = Callable[[Any, dict[str, Any], dict[str, Any], int], Any]
_PER_SEQUENCE = ("q", "block_table", "seq_lens")
# Of a larger batch they would mean something else: starts and masks have its rows, and a modifier reads which sequence
# of the batch it is in.
_OF_ONE_BATCH = ("query_start_loc", "tree_mask", "score_mod", "mask_mod")


def _loop(operator: Any, given: dict[str, Any], dims: dict[str, Any], size: int) -> Any:
    """A call for each entry of the batch. Raises ValueError where all would write into one tensor."""
    for argument in operator._schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and given.get(argument.name) is not None and dims.get(argument.name) is None:
            raise ValueError(
                f"{argument.name} must be batched as well where {operator._schema.name} is mapped over others: the "
                "calls would write into one tensor"
            )

    if not size and operator._schema.returns:
        raise ValueError(f"{operator._schema.name} must be mapped over at least one entry here, got none")
    results = [_call(operator, {name: _entry(given[name], dims[name], i) for name in given}) for i in range(size)]
    if not operator._schema.returns:
        return None, None
    stacked = pytree.tree_map(lambda *parts: torch.stack(parts), *results)
    return stacked, pytree.tree_map(lambda _: 0, stacked)


def _entry(value: Any, dims: Any, i: int) -> Any:
    """What call `i` gets of an argument: of a mapped tensor, or of the mapped ones in a list, its own part."""
    if isinstance(value, (list, tuple)):
        return [_entry(one, dim, i) for one, dim in zip(value, dims, strict=True)]
    return value if dims is None else value.select(dims, i)


def _attention(operator: Any, given: dict[str, Any], dims: dict[str, Any], size: int) -> Any:
    """A decode step whose queries, tables or lengths are mapped is a step of more sequences."""
    mapped = {name for name, dim in dims.items() if any(d is not None for d in pytree.tree_leaves(dim, _is_none))}
    if not mapped <= set(_PER_SEQUENCE) or any(given.get(name) is not None for name in _OF_ONE_BATCH):
        return _loop(operator, given, dims, size)
    fronts = {name: _front(given[name], dims[name], size) for name in _PER_SEQUENCE}
    each = fronts["q"].shape[1]
    out, lse = _call(operator, {**given, **{name: rows.flatten(0, 1) for name, rows in fronts.items()}})
    lse = lse.unflatten(0, (size, each)) if given.get("return_lse") else lse.new_empty(size, 0)
    return (out.unflatten(0, (size, each)), lse), (0, 0)


def _write(operator: Any, given: dict[str, Any], dims: dict[str, Any], size: int) -> Any:
    """Tokens that are mapped with their slots are more tokens of one call; caches that are mapped too get one each."""
    tokens = ("k", "v", "slot_mapping")
    if any(dims[name] is not None for name in given if name not in tokens) or dims["slot_mapping"] is None:
        return _loop(operator, given, dims, size)
    rows = {name: _front(given[name], dims[name], size).flatten(0, 1) for name in tokens if given[name] is not None}
    _call(operator, {**given, **rows})
    return None, None


def _front(value: Tensor, dim: int | None, size: int) -> Tensor:
    """`value` with the mapped dimension in front, repeated where it is not mapped."""
    return value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)


def _is_none(value: Any) -> bool:
    return value is None


def _call(operator: Any, given: dict[str, Any]) -> Any:
    arguments = operator._schema.arguments
    positional = [given[a.name] for a in arguments if not a.kwarg_only]
    return operator(*positional, **{a.name: given[a.name] for a in arguments if a.kwarg_only and a.name in given})


def _register(name: str, rule: Rule) -> None:
    namespace, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.pagegen, namespace), overload or "default")
    arguments = operator._schema.arguments

    def batched(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**{a.name: value for a, value in zip(arguments, args, strict=False)}, **kwargs}

        def mapped(info: Any, in_dims: Any, operands: dict[str, Any]) -> Any:
            return rule(operator, operands, in_dims[0], info.batch_size)

        def unmapped(operands: dict[str, Any]) -> Any:
            return _call(operator, operands)

        interpreter = retrieve_current_functorch_interpreter()
        # an object with the call of the operator that lies below, as the helper expects one
        return custom_function_call_vmap_helper(interpreter, mapped, unmapped, given)  # type: ignore[arg-type]

    LIBRARY.impl(name, batched, "FuncTorchBatched", with_keyset=True)


for _name, _rule in {
    "paged_attention": _attention,
    "paged_attention.out": _loop,
    "write_kv": _write,
    "rope_write_kv": _loop,
    "update_scales": _loop,
    "copy_blocks": _loop,
    "merge_states": _loop,
    "merge_states.list": _loop,
}.items():
    _register(_name, _rule)
