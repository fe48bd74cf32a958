"""A function of torch is replaced and restored exactly, also where somebody else wraps it meanwhile."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from sonde.capture.monkeypatch import override, replace

pytestmark = pytest.mark.torch


class Base:
    def size(self, scale: int = 1) -> int:
        """The size."""
        return scale


class Derived(Base):
    pass


def doubled(original: Any) -> Any:
    return lambda *args: 2 * original(*args)


@pytest.mark.parametrize("put_in", [replace, override])
@pytest.mark.parametrize("owner", [Base, Derived])
def test_a_method_is_replaced_and_restored_exactly(put_in: Callable[..., Any], owner: type[Base]) -> None:
    before = dict(vars(owner))
    undo = put_in(owner, "size", doubled)
    assert owner().size(3) == 6
    undo()
    assert owner().size(3) == 3
    assert dict(vars(owner)) == before  # an inherited method is inherited again


def test_undoing_twice_is_allowed() -> None:
    original = vars(Base)["size"]
    undo = override(Base, "size", doubled)
    undo()
    undo()
    assert vars(Base)["size"] is original


def test_the_wrapper_of_somebody_else_stays_and_reaches_the_original() -> None:
    original = vars(Base)["size"]
    undo = override(Base, "size", doubled)
    ours = vars(Base)["size"]
    theirs = Base.size = lambda self, scale=1: 10 * ours(self, scale)  # type: ignore[method-assign]
    try:
        assert Base().size(3) == 60
        undo()
        assert vars(Base)["size"] is theirs
        assert Base().size(3) == 30
    finally:
        Base.size = original  # type: ignore[method-assign]


@pytest.mark.parametrize("first", [0, 1], ids=["the inner one first", "the outer one first"])
def test_two_overrides_are_undone_in_any_order(first: int) -> None:
    undos = [override(Base, "size", doubled) for _ in range(2)]
    assert Base().size(3) == 12
    undos.pop(first)()
    assert Base().size(3) == 6
    undos.pop()()
    assert Base().size(3) == 3


def test_an_overridden_function_has_the_signature_and_the_documentation_of_the_original() -> None:
    undo = override(Base, "size", doubled)
    try:
        assert str(inspect.signature(Base.size)) == "(self, scale: 'int' = 1) -> 'int'"
        assert Base.size.__doc__ == "The size."
    finally:
        undo()


def test_a_function_of_torch_is_restored_after_a_compiled_model_was_called_inside() -> None:
    original = nn.Module.__call__
    calls = []

    def wrap(original: Any) -> Any:
        def __call__(module: nn.Module, *args: Any) -> Any:
            calls.append(type(module))
            return original(module, *args)

        return __call__

    torch._dynamo.reset()
    model, x = nn.Linear(2, 1), torch.ones(1, 2)
    undo = override(nn.Module, "__call__", wrap)
    try:
        assert torch.equal(torch.compile(model, backend="eager")(x), nn.functional.linear(x, model.weight, model.bias))
    finally:
        undo()
    assert calls
    assert nn.Module.__call__ is original
    torch._dynamo.reset()
