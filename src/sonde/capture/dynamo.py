"""Sonde and torch.compile. Code of ours that runs inside somebody's compiled function is left as it is by torch.compile.

Between the pieces that it compiles, torch.compile looks at every function that is called there and would compile ours as well: more frames
and graph breaks than without us, and a switchboard that believes for good that it is being compiled, and stays silent. So our functions are
marked as not worth a look, once, when they are put in; a step that is not compiled never notices. Where a call is compiled *into* a piece,
`torch.compiler.is_compiling()` tells us.

For that, what torch calls must be Python, which takes time in every step. Of a few classes only torch.compile reads the `__call__`, and the
native kernel answers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import nn

Class = TypeVar("Class", bound=type)


def inside(model: Any) -> nn.Module | None:
    """The module within the wrapper of torch.compile; None where there is no wrapper. A model's own __getattr__, which may do anything, is
    not asked."""
    found = vars(model).get("_modules", {}).get("_orig_mod") if isinstance(model, nn.Module) else None
    return found if isinstance(found, nn.Module) else None


def skip_in_dynamo(function: Callable[..., Any], *, with_all_it_calls: bool) -> None:
    """torch.compile does not look at this function, nor at what it calls unless that is the user's."""
    code = getattr(function, "__code__", None)
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        if isinstance(code, CodeType):
            inside = _FrameAction.SKIP if with_all_it_calls else _FrameAction.DEFAULT
            set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, inside))
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return  # another torch: then it compiles a few functions of ours too


def answered_natively(what: str, variables: dict[str, Any] | None = None) -> Callable[[Class], Class]:
    """The native kernel answers calls of the objects of this class, as its `__call__` would (_kernel_calls.h)."""

    def mark(of: Class) -> Class:
        if os.environ.get("SONDE_NATIVE", "1") != "0":
            try:
                from sonde.capture._kernel import take_calls

                take_calls(of, what, vars(torch.compiler), variables)
            except ImportError:  # built without a compiler
                pass
        return of

    return mark
