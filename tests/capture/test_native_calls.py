"""What torch calls in every step is answered by the native kernel; what torch.compile reads is the Python of it."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

import sonde
from sonde.capture import beat, patches, watched_model
from sonde.capture.dynamo import answered_natively

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


def test_a_step_that_is_not_observed_has_one_frame_of_ours(tmp_path):
    model, optimizer = made()
    with sonde.watch(model, optimizer, to=tmp_path, every=10_000):
        train(150, model, optimizer)
        seen = frames_of_ours(40, model, optimizer)
    assert [name for name, num in seen.items() if num >= 40] == ["_zero_grad.<locals>.zero_grad"]


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
        (watched_model._Entering(whole, lambda *args: heard.append(("enters", args))), module, (1,), {"k": 2}),
        (watched_model._Entering(whole, lambda *args: heard.append(("enters", args))), module, (1,), None),
        (watched_model._Leaving(whole, lambda *args: heard.append(("leaves", args))), module, (1,), "output"),
        (patches._OptimizerBegins(), optimizer, (optimizer,), {}),
        (patches._OptimizerBegins(), optimizer, (optimizer, print), {}),
        (patches._OptimizerBegins(), optimizer, (optimizer,), {"closure": print}),
        (patches._OptimizerBegins(), optimizer, (optimizer, None), {"grad_scaler": 1}),
        (patches._OptimizerEnded(), optimizer, (optimizer,), {}),
    ]
    listener: Any = Listener()
    patches.listen(listener)
    try:
        assert [hook(*args) for hook, *args in given] == [None] * len(given)
        natively, heard = heard, []
        assert [type(hook).__call__(hook, *args) for hook, *args in given] == [None] * len(given)
    finally:
        patches.unlisten(listener)
    assert heard == natively
    assert [name for name, _ in heard] == ["enters", "leaves", *["begins"] * 4, "ended"]
    assert [args[1] for name, args in heard if name == "begins"] == [False, True, True, False]


class Hears:
    """Notes backwards, and raises where it is asked to."""

    def __init__(self, **errors: BaseException) -> None:
        self.heard: list[Any] = []
        self._errors = errors

    def backward_begins(self, tensors: Any) -> None:
        self._hear("begins", tensors)

    def backward_ended(self) -> None:
        self._hear("ended")

    def _hear(self, name: str, *given: Any) -> None:
        self.heard.append((name, *given))
        if name in self._errors:
            raise self._errors[name]


def by_native(backward: Any, *args: Any, **kwargs: Any) -> Any:
    return backward(*args, **kwargs)


def by_python(backward: Any, *args: Any, **kwargs: Any) -> Any:
    return type(backward).__call__(backward, *args, **kwargs)


@pytest.mark.parametrize("way", [by_native, by_python])
@pytest.mark.parametrize(
    ("errors", "in_backward", "expected", "heard"),
    [
        ({}, None, None, ["begins", "ended"]),
        ({}, ValueError, ValueError, ["begins", "ended"]),
        ({"begins": KeyboardInterrupt()}, None, KeyboardInterrupt, ["begins"]),
        ({"ended": KeyboardInterrupt()}, None, KeyboardInterrupt, ["begins", "ended"]),
        ({"ended": KeyboardInterrupt()}, ValueError, KeyboardInterrupt, ["begins", "ended"]),
    ],
)
def test_backward_passes_on_what_it_is_given_and_what_comes_of_it(way, errors, in_backward, expected, heard):
    given: list[Any] = []

    def original(*args: Any, **kwargs: Any) -> str:
        given.append((args, kwargs))
        if in_backward:
            raise in_backward
        return "answer"

    listener: Any = Hears(**errors)
    patches.listen(listener)
    try:
        if expected is None:
            assert way(patches._Backward(original), 1, 2, inputs=3) == "answer"
        else:
            with pytest.raises(expected):
                way(patches._Backward(original), 1, 2, inputs=3)
    finally:
        patches.unlisten(listener)
    assert [name for name, *_ in listener.heard] == heard
    assert listener.heard[0] == ("begins", 1)
    assert given == ([((1, 2), {"inputs": 3})] if "begins" not in errors else [])


def test_a_backward_inside_of_a_backward_is_not_heard():
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            with torch.enable_grad():
                torch.ones(1, requires_grad=True).sum().backward()
            return gradients[0] * 2

    listener: Any = Hears()
    patches.listen(listener)
    try:
        x = torch.ones(1, requires_grad=True)
        Again.apply(x).sum().backward()
        torch.autograd.backward(tensors=x.sum())
    finally:
        patches.unlisten(listener)
    assert [name for name, *_ in listener.heard] == ["begins", "ended"] * 2


def test_backward_still_looks_like_torchs_own(tmp_path):
    own = torch.autograd.backward
    with sonde.watch(nn.Linear(1, 1), to=tmp_path):
        ours = torch.autograd.backward
        assert ours is not own
        assert (ours.__name__, ours.__module__, ours.__doc__) == (own.__name__, own.__module__, own.__doc__)
        assert inspect.signature(ours) == inspect.signature(own)
        assert copy.deepcopy(ours) is ours
        kept = pickle.dumps(ours)
    assert torch.autograd.backward is own
    assert pickle.loads(kept) is own


@pytest.mark.filterwarnings("ignore")  # torch's own, about what it compiles
@pytest.mark.parametrize("watching", [False, True])
def test_a_compiled_step_with_its_backward_has_as_many_pieces(tmp_path, watching):
    from torch._dynamo.testing import CompileCounter

    def pieces(watch: bool) -> tuple[int, float]:
        torch._dynamo.reset()
        model, optimizer = made()
        counter = CompileCounter()

        @torch.compile(backend=counter)
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        with sonde.watch(model, optimizer, to=tmp_path) if watch else contextlib.nullcontext():
            losses = [step(torch.ones(4, 3)).item() for _ in range(12)]
        torch._dynamo.reset()
        return counter.frame_count, losses[-1]

    assert pieces(watching) == pieces(False)


def test_an_error_in_a_native_call_is_raised():
    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    whole: Any = object()
    with pytest.raises(ZeroDivisionError):
        watched_model._Leaving(whole, fail)(nn.Linear(1, 1), (), None)
    with pytest.raises(TypeError):
        watched_model._Leaving(whole, fail)(nn.Linear(1, 1))  # type: ignore[call-arg] # which Python says


def test_while_torch_exports_python_is_called(monkeypatch):
    heard: list[Any] = []
    whole: Any = object()
    hook = watched_model._Leaving(whole, lambda *args: heard.append(args))
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
