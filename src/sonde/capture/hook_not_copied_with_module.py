"""Hooks that are not copied with their module."""

import contextlib
from typing import Any


class UncopiedHook:
    """Base of hooks whose copies and pickles are a function of the standard library that does nothing: a copy of a hooked module is not
    hooked, and loads where Sonde is not installed."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __deepcopy__(self, memo: Any) -> Any:
        return contextlib.nullcontext().__exit__
