"""Puts a function in the place of a function or method of torch, and undoes it exactly.

`replace` is for functions that only pass the call on when nobody needs them any more; `override` for functions that change what torch does.
Both are undone in any order, and also where somebody else wrapped the function meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sonde.capture.user_source_line import WRAPPER_FILE
from sonde.statistics.private_torch_api import skip_in_dynamo

_INHERITED = object()


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Put `make(original)` in the place of a function of a module or a method of a class. An inherited method (most methods of tensors are
    those of a class of C, which cannot be changed) is put in front of that of the base. Returns a function that undoes it. Where somebody
    has wrapped the made function meanwhile, that stays, and still calls the made one."""
    own = owner.__dict__.get(name, _INHERITED)
    made = make(getattr(owner, name) if own is _INHERITED else own)
    setattr(owner, name, made)

    def undo() -> None:
        if owner.__dict__.get(name) is not made:
            return
        if own is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    return undo


def override(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Like `replace`, for a function that changes what torch does: once it is undone, the original is called, also by those who wrapped it
    meanwhile. The name, the signature and the documentation stay those of the original."""
    is_undone = False

    def make_switch(original: Any) -> Any:
        made = make(original)

        def overridden(*args: Any, **kwargs: Any) -> Any:
            return (original if is_undone else made)(*args, **kwargs)

        hide_from_warnings(overridden)
        skip_in_dynamo(overridden, recursive=False)
        return functools.wraps(original)(overridden)

    restore = replace(owner, name, make_switch)

    def undo() -> None:
        nonlocal is_undone
        is_undone = True
        restore()

    return undo


def hide_from_warnings(function: Any) -> None:
    """`warnings.warn(..., stacklevel=2)` in a patched function of torch must name the user's line, not ours. Python passes over frames of
    its import system when it counts levels, and recognizes them by these two words in the file name; so our wrappers have them there."""
    function.__code__ = function.__code__.replace(co_filename=WRAPPER_FILE)
