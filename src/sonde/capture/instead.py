"""How something is put in the place of a module's forward, and taken out again.

A forward hook would do, but a module with hooks takes a slower way through torch, and some modules then leave their fast path.
Several may stand in one place, one on top of the other, and leave in any order.
"""

from __future__ import annotations

import copy
from functools import partial
from operator import itemgetter
from types import MethodType
from typing import Any


class StandIn:
    """What is put in has the real forward of the class, a weak reference to the module, and what the instance had in this place."""

    __slots__ = ()
    forward: Any  # the function of the module's class
    module: Any  # a weak reference
    under: Any  # None: the instance had no forward of its own

    def put_in(self, attributes: dict[str, Any]) -> None:
        top = attributes.get("forward")
        while isinstance(top, StandIn):
            if top is self:
                return  # it was not taken out, for whatever reason
            top = top.under
        self.under = attributes.get("forward")
        attributes["forward"] = self

    def take_out(self, attributes: dict[str, Any]) -> None:
        """Whoever stands on top of this one takes its place."""
        top = attributes.get("forward")
        if top is not self:
            while isinstance(top, StandIn) and top.under is not self:
                top = top.under
            if isinstance(top, StandIn):
                top.under = self.under
        elif self.under is None:
            del attributes["forward"]
        else:
            attributes["forward"] = self.under
        self.under = None

    # A module that is copied or pickled in the middle of a forward takes the real forward with it, bound to the copy.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = memo.get(id(self.module()), self.module())
        return copy.deepcopy(self.under, memo) if self.under is not None else MethodType(self.forward, module)

    def __reduce__(self) -> Any:
        return (itemgetter(0), ((self.under,),)) if self.under is not None else (partial, (self.forward, self.module()))
