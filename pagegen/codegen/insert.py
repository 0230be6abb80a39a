"""Writing traced score and mask functions into the Triton templates."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import libcst as cst
import torch

from pagegen.codegen import prune
from pagegen.modifiers import Capture, find
from pagegen.spec import AttentionSpec

# The parameter that stands for the captured tensors in a template.
CAPTURES = "captures"


def mask_bounds(spec: AttentionSpec) -> tuple[Any, Any]:
    """The first key that the spec's mask function may allow a query and the one after the last, as expressions; None
    where there is no such bound."""
    modifier = find(spec.mask_mod, "mask")
    if modifier is None:
        return None, None
    from pagegen.modifiers import mask_range, trace

    low, high = mask_range(trace(modifier).expression)
    return low, high


def captured_names(spec: AttentionSpec) -> tuple[str, ...]:
    """The launcher's parameters for the captured tensors, in the order of a call's captures."""
    return tuple(f"{kind}_{capture.name}" for kind, capture in _captures(spec))


def captured_dtypes(spec: AttentionSpec) -> tuple[torch.dtype, ...]:
    """Their dtypes."""
    return tuple(capture.dtype for _, capture in _captures(spec))


def modifiers(text: str, spec: AttentionSpec) -> str:
    """A template's text with the spec's functions in place of the identities, and their captured tensors as
    parameters."""
    if spec.score_mod is None and spec.mask_mod is None:
        return text
    module = cst.parse_module(text)
    changed = module.visit(_Bodies(_expressions(spec))).visit(_Parameters(_captures(spec)))
    assert isinstance(changed, cst.Module)
    return changed.code


def _captures(spec: AttentionSpec) -> tuple[tuple[str, Capture], ...]:
    found = []
    for kind, name in (("score", spec.score_mod), ("mask", spec.mask_mod)):
        modifier = find(name, kind)
        if modifier is not None:
            found += [(kind, capture) for capture in modifier.captures]
    return tuple(found)


@functools.cache
def _expressions(spec: AttentionSpec) -> dict[str, str]:
    """What each of the template's functions is to return."""
    from pagegen.modifiers import print_triton, trace

    found = {}
    for kind, name in (("score", spec.score_mod), ("mask", spec.mask_mod)):
        modifier = find(name, kind)
        if modifier is not None:
            found[f"{kind}_mod"] = print_triton(trace(modifier).expression, kind)
    for side, bound in zip(("mask_low", "mask_high"), mask_bounds(spec), strict=True):
        if bound is not None:
            found[side] = print_triton(bound, "mask")
    return found


class _Bodies(cst.CSTTransformer):
    """Gives functions other expressions to return."""

    def __init__(self, expressions: dict[str, str]) -> None:
        self.expressions = expressions

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        expression = self.expressions.get(updated_node.name.value)
        if expression is None:
            return updated_node
        body = updated_node.body
        assert isinstance(body, cst.IndentedBlock)
        result = cst.parse_statement(f"return {expression}\n")
        return updated_node.with_changes(body=body.with_changes(body=[body.body[0], result]))


class _Parameters(cst.CSTTransformer):
    """Writes the captured tensors out: a pointer and sizes in kernels, a tensor in host functions."""

    def __init__(self, captures: Sequence[tuple[str, Capture]]) -> None:
        self.captures = captures
        self.in_kernel = False

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.in_kernel = bool(node.decorators)

    def leave_Parameters(self, original_node: cst.Parameters, updated_node: cst.Parameters) -> cst.Parameters:
        params: list[cst.Param] = []
        for param in updated_node.params:
            if param.name.value == CAPTURES:
                params += [param.with_changes(name=cst.Name(name)) for name in self._names(self.in_kernel)]
            else:
                params.append(param)
        return updated_node.with_changes(params=prune.relist(updated_node.params, params))

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        args: list[cst.Arg] = []
        for arg in updated_node.args:
            if arg.keyword is not None and arg.keyword.value == CAPTURES:
                args += [self._argument(arg, name) for name in self._names(in_kernel=True)]
            else:
                args.append(arg)
        return updated_node.with_changes(args=prune.relist(updated_node.args, args))

    def _names(self, in_kernel: bool) -> list[str]:
        names = []
        for kind, capture in self.captures:
            name = f"{kind}_{capture.name}"
            sizes = [f"{name}_size_{i}" for i in range(capture.rank)]
            names += [f"{name}_ptr", *sizes] if in_kernel else [name]
        return names

    def _argument(self, arg: cst.Arg, name: str) -> cst.Arg:
        """One argument of a call: its own name in a kernel, what the host takes it from in a launch."""
        value = name
        if not self.in_kernel:
            tensor, _, size = name.partition("_size_")
            value = f"{tensor}.shape[{size}]" if size else name.removesuffix("_ptr")
        return arg.with_changes(keyword=cst.Name(name), value=cst.parse_expression(value))
