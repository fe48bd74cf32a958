"""Module timers change nothing: not the numbers, the fast paths or the modules; their own errors do not reach the model."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from sonde.capture.layer_timing import autograd_node_timers  # noqa: E402
from sonde.capture.layer_timing.autograd_node_timers import AutogradNodeTimers  # noqa: E402
from sonde.capture.layer_timing.forward_timers import ModuleTimers  # noqa: E402
from sonde.capture.layer_timing.layer_call_trace import LayerCallTrace  # noqa: E402
from sonde.capture.layer_timing.layer_times_from_trace import evaluate  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def timers_of(model: nn.Module) -> ModuleTimers:
    return ModuleTimers(model.modules(), roots=[0])


def running(read: Callable[[], int] | None = None) -> LayerCallTrace:
    trace = LayerCallTrace(read) if read is not None else LayerCallTrace()
    trace.start()
    return trace


def test_outputs_and_gradients_are_the_same_to_the_bit() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    expected = model(x)
    grads = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    trace = running()
    with timers_of(model).installed(trace, only_roots=False):
        output = model(x)
    AutogradNodeTimers(trace).install([output])
    trace.start_backward()
    found = torch.autograd.grad(output.square().sum(), list(model.parameters()))
    trace.end_backward()
    assert torch.equal(output, expected)
    assert all(torch.equal(a, b) for a, b in zip(found, grads))
    assert len(trace.calls) > 5
    assert len(trace.marks) > 10


def test_a_module_keeps_its_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    trace = running()
    with torch.no_grad(), timers_of(layer).installed(trace, only_roots=False):
        layer(torch.randn(2, 5, 16))
    assert len(trace.calls) == 1  # the fused kernel calls no module inside


def test_the_signature_of_forward_is_unchanged() -> None:
    model = nn.Conv2d(1, 1, 1)
    expected = inspect.signature(model.forward)
    with timers_of(model).installed(running(), only_roots=False):
        assert inspect.signature(model.forward) == expected


@pytest.mark.parametrize("only_roots", [False, True])
def test_nothing_of_the_timers_is_on_a_module_or_on_its_copies(only_roots: bool) -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2)
    before = [dict(vars(module)) for module in model.modules()]
    with timers_of(model).installed(running(), only_roots=only_roots):
        assert [dict(vars(module)) for module in model.modules()] == before
        file = io.BytesIO()
        torch.save(model, file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit.trace
            copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.jit.trace(model, x)]
    copies.append(torch.load(io.BytesIO(file.getvalue()), weights_only=False))
    assert b"sonde" not in file.getvalue()
    assert all(torch.equal(each(x), model(x)) for each in copies)
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks
    assert "__call__" not in vars(nn.Sequential)


def test_a_timer_on_the_root_alone_times_no_other_module() -> None:
    class Named(nn.Sequential): ...

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()), Named(nn.ReLU()))
    trace = running()
    with timers_of(model).installed(trace, only_roots=True):
        model(torch.ones(1, 2))
        nn.Sequential(model, nn.Identity())(torch.ones(1, 2))
    assert [call.layer for call in trace.calls] == [0, 0]
    assert trace.is_outermost


def test_a_class_with_its_own_call_gets_it_back() -> None:
    class Own(nn.Module):
        def __call__(self, x: Any) -> Any:
            return super().__call__(x) + 1

        def forward(self, x: Any) -> Any:
            return x

    model, trace, original = Own(), running(), Own.__call__
    with timers_of(model).installed(trace, only_roots=True):
        assert model(1) == 2
        assert Own.__call__ is original
    assert vars(Own)["__call__"] is original
    assert len(trace.calls) == 1


def test_keyword_arguments_of_the_outermost_call_reach_the_context() -> None:
    class Keywords(nn.Module):
        def forward(self, *, x: Any, scale: float = 1.0) -> Any:
            return x * scale

    model, received = Keywords(), []

    def context(args: Any, kwargs: Any) -> Any:
        received.append((args, kwargs))
        return contextlib.nullcontext()

    trace, x = LayerCallTrace(context=context), torch.ones(2)
    trace.start()
    with timers_of(model).installed(trace, only_roots=False):
        model(x=x, scale=2.0)
    assert received == [((), {"x": x, "scale": 2.0})]


def test_a_call_that_ends_by_a_base_exception_is_dropped() -> None:
    class Interrupted(nn.Module):
        def forward(self, x: Any) -> Any:
            raise KeyboardInterrupt

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = Interrupted(), nn.Identity()

        def forward(self, x: Any) -> Any:
            try:
                return self.inner(x)
            except KeyboardInterrupt:
                return self.last(x)

    model, trace = Outer(), running()
    with timers_of(model).installed(trace, only_roots=False):
        model(torch.ones(1))
        assert trace.is_outermost
    costs = evaluate(trace)
    assert [layer for layer, cost in costs.layers.items() if cost.calls] == [0, 2]  # the outer module and its last


def test_the_users_filters_for_warnings_stay_as_they_are() -> None:
    before = list(warnings.filters)
    with timers_of(nn.Identity()).installed(running(), only_roots=False):
        warnings.simplefilter("ignore", ResourceWarning)
        added = warnings.filters[0]
    assert list(warnings.filters) == [added, *(each for each in before if each != added)]


@pytest.mark.parametrize("only_roots", [False, True])
def test_two_profiles_of_one_model_may_end_in_any_order(only_roots: bool) -> None:
    model = nn.Linear(2, 2)
    first, second = running(), running()
    one, two = timers_of(model), timers_of(model)
    one.install(first, only_roots=only_roots)
    two.install(second, only_roots=only_roots)
    model(torch.ones(1, 2))
    one.remove()
    model(torch.ones(1, 2))
    two.remove()
    assert (len(first.calls), len(second.calls)) == (1, 2)
    assert "__call__" not in vars(nn.Linear)


@pytest.mark.parametrize("good_readings", [0, 1, 4])
def test_a_clock_that_fails_does_not_reach_the_model(good_readings: int) -> None:
    left = iter(range(good_readings))

    def read() -> int:
        for number in left:
            return number
        raise OSError("the clock is gone")

    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3)
    expected = model(x)
    trace = running(read)
    with timers_of(model).installed(trace, only_roots=False):
        assert torch.equal(model(x), expected)
        assert torch.equal(model(x), expected)
    assert trace.failure == "OSError: the clock is gone"


def test_an_error_of_the_model_reaches_the_user_unchanged() -> None:
    class Fails(nn.Module):
        def forward(self, x: Any) -> Any:
            raise KeyError("theirs")

    model = nn.Sequential(nn.Identity(), Fails())
    trace = running()
    with pytest.raises(KeyError, match="theirs"), timers_of(model).installed(trace, only_roots=False):
        model(torch.ones(1))
    assert trace.is_outermost
    assert trace.failure == ""


def test_another_thread_is_not_recorded() -> None:
    import threading

    model, trace = nn.Linear(2, 2), running()
    with timers_of(model).installed(trace, only_roots=False):
        thread = threading.Thread(target=model, args=(torch.ones(1, 2),))
        thread.start()
        thread.join()
    assert trace.calls == []


def test_a_call_that_is_not_accepted_is_not_recorded() -> None:
    model, trace, outputs = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), running(), []

    def on_output(layer: int, args: Any, output: Any) -> None:
        outputs.append((layer, args[0].shape, output.shape))

    timers = ModuleTimers(model.modules(), accepts=torch.is_grad_enabled, on_output=on_output)
    with timers.installed(trace, only_roots=False):
        with torch.no_grad():
            model(torch.ones(5, 2))
        model(torch.ones(1, 2))
    assert [call.layer for call in trace.calls] == [0, 1, 2]
    assert outputs == [(1, (1, 2), (1, 3)), (2, (1, 3), (1, 3)), (0, (1, 2), (1, 3))]


class Clock:
    """A clock that moves only when it is told to, and that stands still while the timers work."""

    def __init__(self) -> None:
        self.now = self.excluded = 0

    def read(self) -> int:
        return self.now - self.excluded

    def set_back(self, reading: int) -> None:
        self.excluded = self.now - reading

    def work(self, ns: int) -> None:
        self.now += ns


def test_the_work_of_the_timers_does_not_count_where_the_clock_can_be_set_back() -> None:
    clock = Clock()

    class Inner(nn.Module):
        def forward(self, x: Any) -> Any:
            clock.work(1000)
            return x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Any) -> Any:
            clock.work(100)
            return self.inner(self.inner(x))

    def accepts() -> bool:
        clock.work(7)
        return True

    def on_output(layer: int, args: Any, output: Any) -> None:
        clock.work(30)

    model, trace = Outer(), LayerCallTrace(clock.read, set_back=clock.set_back)
    trace.start()
    with ModuleTimers(model.modules(), accepts=accepts, on_output=on_output).installed(trace, only_roots=False):
        model(torch.ones(1))
    costs = evaluate(trace).layers
    assert (costs[0].forward, costs[1].forward) == (2100, 2000)
    assert clock.excluded == 3 * 37


def test_the_clock_is_set_back_after_each_mark_of_a_node() -> None:
    readings: list[int] = []
    trace = LayerCallTrace(iter(range(100)).__next__, set_back=readings.append)
    trace.start()
    loss = torch.ones(1, requires_grad=True).exp().sum()
    AutogradNodeTimers(trace).install([loss])
    trace.start_backward()
    loss.backward()
    trace.end_backward()
    assert readings == [reading for reading, _ in trace.marks[1:]]  # the first is the start of the backward
    assert len(readings) == 2


@pytest.mark.parametrize(("limit", "is_complete"), [(3, False), (5, True)])
def test_a_graph_that_is_too_large_for_hooks_on_all_nodes_is_reported(
    monkeypatch: pytest.MonkeyPatch, limit: int, is_complete: bool
) -> None:
    monkeypatch.setattr(autograd_node_timers, "MAX_NODES", limit)
    timers = AutogradNodeTimers(running())
    timers.install([torch.ones(1, requires_grad=True).exp().exp().exp().exp()])
    assert timers.is_complete == is_complete
