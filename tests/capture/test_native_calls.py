"""What torch calls in every step is answered by the native kernel; what torch.compile reads is the Python of it."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

import sonde
from sonde.capture import beat, calls, watched
from sonde.capture.uncompiled import answered_natively

pytestmark = [pytest.mark.torch, pytest.mark.skipif(beat.Beat is None, reason="the native kernel was not built")]

OURS = str(Path(sonde.__file__).parent)


def train(num: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(num):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def frames_of_ours(num: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Counter[str]:
    seen: Counter[str] = Counter()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            seen[frame.f_code.co_qualname] += 1

    sys.setprofile(profile)
    try:
        train(num, model, optimizer)
    finally:
        sys.setprofile(None)
    return seen


def test_a_step_that_is_not_observed_has_two_frames_of_ours(tmp_path):
    model, optimizer = made()
    with sonde.watch(model, optimizer, to=tmp_path, every=10_000):
        train(150, model, optimizer)
        seen = frames_of_ours(40, model, optimizer)
    assert [name for name, num in seen.items() if num >= 40] == ["_zero_grad.<locals>.zero_grad", "_backward.<locals>.backward"]


def test_what_is_called_natively_says_what_its_python_says(tmp_path):
    """Of a door and of an optimizer, with and without a closure."""
    heard: list[tuple[str, tuple[Any, ...]]] = []

    class Listener:
        def optimizer_begins(self, *args: Any) -> None:
            heard.append(("begins", args))

        def optimizer_ended(self, *args: Any) -> None:
            heard.append(("ended", args))

    module, optimizer = made()
    whole: Any = object()
    given: list[tuple[Any, ...]] = [
        (watched._Entering(whole, lambda *args: heard.append(("enters", args))), module, (1,), {"k": 2}),
        (watched._Entering(whole, lambda *args: heard.append(("enters", args))), module, (1,), None),
        (watched._Leaving(whole, lambda *args: heard.append(("leaves", args))), module, (1,), "output"),
        (calls._OptimizerBegins(), optimizer, (optimizer,), {}),
        (calls._OptimizerBegins(), optimizer, (optimizer, print), {}),
        (calls._OptimizerBegins(), optimizer, (optimizer,), {"closure": print}),
        (calls._OptimizerBegins(), optimizer, (optimizer, None), {"grad_scaler": 1}),
        (calls._OptimizerEnded(), optimizer, (optimizer,), {}),
    ]
    listener: Any = Listener()
    calls.listen(listener)
    try:
        assert [hook(*args) for hook, *args in given] == [None] * len(given)
        natively, heard = heard, []
        assert [type(hook).__call__(hook, *args) for hook, *args in given] == [None] * len(given)
    finally:
        calls.unlisten(listener)
    assert heard == natively
    assert [name for name, _ in heard] == ["enters", "leaves", *["begins"] * 4, "ended"]
    assert [args[1] for name, args in heard if name == "begins"] == [False, True, True, False]


def test_an_error_in_a_native_call_is_raised():
    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    whole: Any = object()
    with pytest.raises(ZeroDivisionError):
        watched._Leaving(whole, fail)(nn.Linear(1, 1), (), None)
    with pytest.raises(TypeError):
        watched._Leaving(whole, fail)(nn.Linear(1, 1))  # type: ignore[call-arg] # which Python says


def test_while_torch_exports_python_is_called(monkeypatch):
    heard: list[Any] = []
    whole: Any = object()
    hook = watched._Leaving(whole, lambda *args: heard.append(args))
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    hook(nn.Linear(1, 1), (), None)
    assert not heard
    monkeypatch.undo()
    hook(nn.Linear(1, 1), (), None)
    assert len(heard) == 1


def test_a_class_that_is_given_another_call_has_that_one():
    @answered_natively("leaves")
    class Hook:
        watched, call = 0, max

        def __call__(self, module: int, args: Any, output: int) -> str:
            return "of the class"

    assert Hook()(1, 2, 3) is None
    Hook.__call__ = lambda self, *args: "another"  # type: ignore[method-assign]
    assert Hook()(1, 2, 3) == "another"


def test_only_a_class_with_a_call_can_be_answered_for():
    from sonde.capture._kernel import take_calls

    with pytest.raises(TypeError, match="a class with a __call__"):
        take_calls(type("Mute", (), {}), "leaves", vars(torch.compiler))
    with pytest.raises(ValueError, match="sings is none of the calls"):
        take_calls(type("Loud", (), {"__call__": print}), "sings", vars(torch.compiler))
