"""What stands in for a leaf's forward, and what waits for the gradient of its output: in Python, where the native kernel was not built.

The native `Desk`, `Hook` and `Leaf` (_kernel_hooks.h) do the same, and take the common case without calling `slowly`. A forward hook could
take the place of a `Leaf`, but a module with hooks takes a way through torch that costs more than all of the measuring.
"""

from __future__ import annotations

import os
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeVar


class Desk:
    """What the loop shares with the leaves and hooks that it put in: which step is observed, and what all of them have cost."""

    __slots__ = ("fast", "hook_ns", "own_ns", "plain", "steady", "step")

    def __init__(self) -> None:
        self.step = 0  # that is being observed; -1: none
        self.own_ns = 0  # Sonde's time in the step under way
        self.hook_ns = 0  # what torch takes to call a hook
        self.fast = False  # the native ones may take the common case
        self.plain = False  # the step under way is an ordinary one: nothing is observed, and nothing else wants to hear of it
        self.steady = False  # or would be, were it not observed

    def write_to(self, *tables: Any) -> None:
        """Rows and flags of outputs, rows and flags of their gradients: where the native ones write."""


class Hook:
    """SyncPoints on an output for its gradient. On a kept graph it outlives the step, and is then deaf."""

    __slots__ = ("desk", "row", "step")

    def __init__(self, desk: Desk, row: int) -> None:
        self.desk, self.row, self.step = desk, row, -1

    def __call__(self, gradient: Any) -> None:
        desk = self.desk
        if desk.step == self.step:
            started = perf_counter_ns()
            try:
                self.slowly(gradient)
            except Exception as error:
                self.failed(error)
            desk.own_ns += perf_counter_ns() - started + desk.hook_ns

    def slowly(self, gradient: Any) -> None:
        raise NotImplementedError

    def failed(self, error: Exception) -> None:
        raise error


class Leaf:
    """Calls the real forward, then has its output measured."""

    __slots__ = ("calls", "desk", "feeds_relu", "first", "forward", "module", "rectifies", "step", "under")

    def __init__(self, desk: Desk, module: Any, forward: Any) -> None:
        self.desk = desk
        self.module = module  # a weak reference
        self.forward = forward  # the function of its class
        self.under: Any = None  # what the instance had in this place: a forward of its own, or the stand-in of another session
        self.first: Hook | None = None  # of the first call's first tensor, once there is one
        self.step, self.calls = -1, 0
        # A ReLU that is given the output of the leaf before it: the native leaf learns the numbers of both from one reading of that.
        self.rectifies = self.feeds_relu = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.under(*args, **kwargs) if self.under is not None else self.forward(self.module(), *args, **kwargs)
        desk = self.desk
        started = perf_counter_ns()
        if self.step != desk.step:
            self.step, self.calls = desk.step, 0
        try:
            self.slowly(output)
        except Exception as error:
            self.failed(error)
        desk.own_ns += perf_counter_ns() - started
        return output

    def slowly(self, output: Any) -> None:
        raise NotImplementedError

    def failed(self, error: Exception) -> None:
        raise error


Pair = TypeVar("Pair")


def put_in(plan: list[Pair], door: Any, armed: list[Any]) -> list[Pair]:
    """The native one puts in what is simple. Answers with what is left to Python."""
    return plan


def take_out(armed: list[Pair]) -> list[Pair]:
    """And takes it out."""
    return armed


if not TYPE_CHECKING and os.environ.get("SONDE_NATIVE", "1") != "0":
    try:
        from sonde.capture._kernel import Desk, Hook, Leaf, put_in, take_out  # noqa: F401 - the same, faster
    except ImportError:  # built without a compiler
        pass
