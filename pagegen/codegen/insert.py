"""Writing traced score and mask functions into the Triton templates."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst
import torch

from pagegen.codegen import prune, traced
from pagegen.modifiers import Capture
from pagegen.spec import AttentionSpec

# The parameter that stands for the captured tensors in a template.
CAPTURES = "captures"
# The template's functions that return a traced expression.
_FUNCTIONS = {"score": "score_mod", "mask": "mask_mod", "low": "mask_low", "high": "mask_high"}


def captured_names(spec: AttentionSpec) -> tuple[str, ...]:
    """The launcher's parameters for the captured tensors, in the order of a call's captures."""
    return tuple(name for name, _ in traced.captures(spec))


def captured_dtypes(spec: AttentionSpec) -> tuple[torch.dtype, ...]:
    """The dtypes of the captured tensors, in the same order."""
    return tuple(capture.dtype for _, capture in traced.captures(spec))


def modifiers(text: str, spec: AttentionSpec) -> str:
    """A template's text with the spec's functions in place of the identities, and their captured tensors as
    parameters. Raises Untraceable for a function that has no expression."""
    if spec.score_mod is None and spec.mask_mod is None:
        return text
    from pagegen.modifiers import print_triton

    expressions = {_FUNCTIONS[key]: value for key, value in traced.printed(spec, print_triton).items()}
    module = cst.parse_module(text)
    changed = module.visit(_Bodies(expressions)).visit(_Parameters(traced.captures(spec)))
    assert isinstance(changed, cst.Module)
    return changed.code


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
        for name, capture in self.captures:
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
