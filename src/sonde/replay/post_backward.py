"""Between backward and the update, the user's code may change the gradients: clip them, scale them, divide them by their norm.

Where the step run again ends in good gradients, these statements are run again too, on gradients of our own. Only those are that write to
gradients and do nothing else; whatever else stands there (a print, a log, a scheduler) is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from sonde.capture.call_site import is_library
from sonde.nonfinite.origin import Origin
from sonde.nonfinite.tracer import NonFiniteTracer, is_finite
from sonde.replay.backward_call_site import names_of, since_backward
from sonde.replay.rerun import Rerun, gradients_by_leaf
from sonde.replay.statement_effects import MAX_DEPTH, Resolve, effects_of, lookup, objection, place_of, source_of

_CLIPS = frozenset({"clip_grad_norm_", "clip_grad_value_"})


def made_afterwards(frame: FrameType, rerun: Rerun, models: Mapping[str, nn.Module]) -> tuple[Origin | None, str]:
    """The operation between backward and now that made a gradient bad; or None, and why that is not known."""
    stretches = []
    for at, statements in since_backward(frame):
        names = names_of(at)
        taken = []
        for statement in statements:
            if writes_gradients(statement, partial(lookup, names)):
                reason = _objection(statement, partial(lookup, names))
                if reason:
                    return None, f"line {statement.lineno} changes gradients and was not run again: {reason}"
                taken.append(statement)
        if taken:
            code = compile(ast.fix_missing_locations(ast.Module(body=taken, type_ignores=[])), at.f_code.co_filename, "exec")
            stretches.append((code, names))
    if not stretches:
        return None, ""
    with NonFiniteTracer(models) as tracer:
        fresh = gradients_by_leaf(rerun())
        with _own_gradients(fresh, models.values()):
            for code, names in stretches:
                exec(code, dict(names))
            bad = [leaf.grad for leaf, _ in fresh if leaf.grad is not None and not is_finite(leaf.grad)]
            return tracer.origin_of(bad) if bad else None, ""


@contextmanager
def _own_gradients(fresh: list[tuple[Tensor, Tensor]], models: Iterable[nn.Module]) -> Iterator[None]:
    """Parameters have these gradients inside, or none; their own are not touched."""
    every = {id(p): p for model in models for p in model.parameters()} | {id(leaf): leaf for leaf, _ in fresh}
    before = [(p, p.grad) for p in every.values() if p.is_leaf and not nn.parameter.is_lazy(p)]
    try:
        for p, _ in before:
            p.grad = None
        for leaf, gradient in fresh:
            leaf.grad = gradient.detach().clone(memory_format=torch.preserve_format)
        yield
    finally:
        for p, gradient_before in before:
            p.grad = gradient_before


# -- which statements they are ------------------------------------------------------------------------------------------------------------


def writes_gradients(statement: ast.AST, resolve: Resolve, depth: int = 0) -> bool:
    """Does it write to a `.grad`, itself or in a function of the user's that it calls?"""
    if any(is_gradient(place, statement) for place in effects_of(statement).makes | _made_inside(statement)):
        return True
    for call in (part for part in ast.walk(statement) if isinstance(part, ast.Call)):
        place = place_of(call.func)
        if place.rpartition(".")[2] in _CLIPS:
            return True
        function = _of_the_user(resolve(place)) if place and depth < MAX_DEPTH else None
        tree = source_of(function) if function is not None else None
        inside = tree.body if tree is not None else []
        if function is not None and any(writes_gradients(part, _globals_of(function), depth + 1) for part in inside):
            return True
    return False


def is_gradient(place: str, within: ast.AST) -> bool:
    """`p.grad`, `p.grad.data`, or a name that was given such a thing in these statements: `g` of `for g in [p.grad for p in …]`."""
    return "grad" in place.split(".")[1:] or place.partition(".")[0] in _aliases(within)


def _made_inside(statement: ast.AST) -> set[str]:
    return {place for part in ast.walk(statement) if isinstance(part, ast.stmt) for place in effects_of(part).makes}


def _aliases(within: ast.AST) -> set[str]:
    found: set[str] = set()
    for _ in range(2):  # an alias of an alias
        for part in ast.walk(within):
            if isinstance(part, ast.Assign):
                targets, value = part.targets, part.value
            elif isinstance(part, (ast.For, ast.comprehension)):
                targets, value = [part.target], part.iter
            else:
                continue
            if _is_made_of_gradients(value, found):
                found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


def _is_made_of_gradients(value: ast.expr, known: set[str]) -> bool:
    """The gradients themselves, not what is computed from them."""
    if isinstance(value, (ast.ListComp, ast.GeneratorExp)):
        return _is_made_of_gradients(value.elt, known)
    if isinstance(value, (ast.List, ast.Tuple)):
        return any(_is_made_of_gradients(item, known) for item in value.elts)
    place = place_of(value)
    return "grad" in place.split(".")[1:] or place in known


def _objection(statement: ast.stmt, resolve: Resolve) -> str:
    """Why it must not be run again although it writes gradients: it does something else besides."""
    for place in effects_of(statement).makes | _made_inside(statement):
        is_own = "." not in place and place not in effects_of(statement).changes
        if not (is_own or is_gradient(place, statement) or isinstance(resolve(place), ModuleType)):
            return f"it changes {place} too"
    return _aside(statement, resolve) or objection(
        statement, resolve, lambda value: isinstance(value, nn.Module), allowed=lambda place: "grad" in place.split(".")[1:]
    )


def _aside(statement: ast.AST, resolve: Resolve, depth: int = 0) -> str:
    """A call whose result nobody uses is made for its effect: that must be on gradients."""
    for part in ast.walk(statement):
        if not isinstance(part, ast.Expr) or not isinstance(part.value, ast.Call):
            continue
        place = place_of(part.value.func)
        function = _of_the_user(resolve(place)) if place else None
        tree = source_of(function) if function is not None and depth < MAX_DEPTH else None
        if function is not None and tree is not None:
            found = next((why for inner in tree.body if (why := _aside(inner, _globals_of(function), depth + 1))), "")
            if found:
                return found
        elif not (isinstance(part.value.func, ast.Attribute) and part.value.func.attr.endswith("_")):
            return f"line {part.lineno} does something else besides"
    return ""


def _of_the_user(function: Any) -> FunctionType | None:
    plain = function.__func__ if isinstance(function, MethodType) else function
    return plain if isinstance(plain, FunctionType) and not is_library(plain.__code__.co_filename) else None


def _globals_of(function: FunctionType) -> Resolve:
    return partial(lookup, function.__globals__)
