"""Replays the statements between `backward` and the update that change gradients: clipping, scaling, dividing by the norm.

They run if the replayed step itself has finite gradients. Only statements that change gradients run; the others (a print, a log, a
scheduler) are left out.
"""

import ast
from collections.abc import Iterable, Mapping
from functools import partial
from types import FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from sonde.nonfinite.operation_tracer import NonFiniteTracer
from sonde.nonfinite.origin_types import Origin
from sonde.replay.rerun_statements import Rerun, gradients_by_leaf
from sonde.replay.statements_that_compute_loss import statements_since_backward, variables_of
from sonde.replay.variables_read_and_written import MAX_DEPTH, Resolve, access_path, effects_of, function_ast, lookup, reason_not_replayable

_CLIP_FUNCTIONS = frozenset({"clip_grad_norm_", "clip_grad_value_"})


def find_origin_after_backward(frame: FrameType, rerun: Rerun, models: Mapping[str, nn.Module]) -> tuple[Origin | None, str]:
    """The operation after `backward` that made a gradient non-finite, or None and the reason if there is one.

    `frame` is the function of the user that called `backward`; `rerun` computes the loss again.
    """
    compiled = []
    for at, statements in statements_since_backward(frame):
        variables = variables_of(at)
        selected = []
        for statement in statements:
            if changes_gradients(statement, partial(lookup, variables)):
                reason = reason_not_replayable(statement)
                if reason:
                    return None, f"line {statement.lineno} changes gradients and was not run again: {reason}"
                selected.append(statement)
        if selected:
            code = compile(ast.fix_missing_locations(ast.Module(body=selected, type_ignores=[])), at.f_code.co_filename, "exec")
            compiled.append((code, variables))
    if not compiled:
        return None, ""
    with NonFiniteTracer(models) as tracer:
        computed = gradients_by_leaf(rerun())
        _set_gradients(computed, models.values())
        for code, variables in compiled:
            exec(code, dict(variables))
        return tracer.origin_of(leaf.grad for leaf, _ in computed if leaf.grad is not None), ""


def _set_gradients(computed: list[tuple[Tensor, Tensor]], models: Iterable[nn.Module]) -> None:
    """Sets `.grad` of the leaves to copies of the computed gradients, of other parameters to None."""
    for p in (p for model in models for p in model.parameters()):
        p.grad = None
    for leaf, gradient in computed:
        leaf.grad = gradient.detach().clone(memory_format=torch.preserve_format)


# ---- selecting the statements


def changes_gradients(statement: ast.AST, resolve: Resolve, depth: int = 0) -> bool:
    """Whether a statement, or a function of the user that it calls, changes a `.grad`."""
    parts = [statement, *(part for part in ast.walk(statement) if isinstance(part, ast.stmt))]
    if any(_is_gradient(path, statement) for part in parts for path in effects_of(part).modifies):
        return True
    for call in (part for part in ast.walk(statement) if isinstance(part, ast.Call)):
        path = access_path(call.func)
        if path.rpartition(".")[2] in _CLIP_FUNCTIONS:
            return True
        called: Any = resolve(path) if path and depth < MAX_DEPTH else None
        function: Any = called.__func__ if isinstance(called, MethodType) else called
        tree = function_ast(function.__code__) if isinstance(function, FunctionType) else None
        if tree is not None and any(changes_gradients(part, partial(lookup, function.__globals__), depth + 1) for part in tree.body):
            return True
    return False


def _is_gradient(path: str, within: ast.AST) -> bool:
    """Whether an access path is `p.grad`, `p.grad.data`, or an alias of one: `g` in `for g in [p.grad for p in …]`."""
    return "grad" in path.split(".")[1:] or path.partition(".")[0] in _gradient_aliases(within)


def _gradient_aliases(within: ast.AST) -> set[str]:
    found: set[str] = set()
    for _ in range(2):  # an alias of an alias
        for part in ast.walk(within):
            if isinstance(part, ast.Assign):
                targets, value = part.targets, part.value
            elif isinstance(part, (ast.For, ast.comprehension)):
                targets, value = [part.target], part.iter
            else:
                continue
            if _holds_gradients(value, found):
                found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


def _holds_gradients(value: ast.expr, aliases: set[str]) -> bool:
    """Whether an expression is a gradient or a collection of gradients, not a value computed from them."""
    if isinstance(value, (ast.ListComp, ast.GeneratorExp)):
        return _holds_gradients(value.elt, aliases)
    if isinstance(value, (ast.List, ast.Tuple)):
        return any(_holds_gradients(item, aliases) for item in value.elts)
    path = access_path(value)
    return "grad" in path.split(".")[1:] or path in aliases
