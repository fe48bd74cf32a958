"""Forwards are observed through the class of a module: nothing is on the module, so it is copied, saved, traced and compiled as ever."""

from __future__ import annotations

import copy
import inspect
import io
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.optim.swa_utils import AveragedModel

import sonde
from sonde.capture import forward_call_patch, torch_patches, training_callbacks
from training_harness import patched_functions, python

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]

X = torch.linspace(-1, 1, 24).reshape(4, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class Doubled(nn.Module):
    """Has a `__call__` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Recording(training_callbacks.TrainingCallbacks):
    """The forwards that it is called for."""

    def __init__(self) -> None:
        self.starts: list[nn.Module] = []
        self.ends: list[tuple[nn.Module, Any]] = []

    def on_forward_start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.starts.append(module)

    def on_forward_end(self, module: nn.Module, output: Any) -> None:
        self.ends.append((module, output))


@pytest.fixture
def recording() -> Iterator[Recording]:
    """Whatever a test watches with it is unwatched afterwards, and no class of this file is left patched."""
    recording, before = Recording(), set(forward_call_patch._watched_classes)
    yield recording
    for watched in list(forward_call_patch._watched_classes.values()):
        for module, _ in list(watched.entries.values()):
            forward_call_patch.unwatch_forward(module(), recording)  # type: ignore[arg-type]
    assert set(forward_call_patch._watched_classes) == before
    assert "__call__" not in vars(Net)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def train(model: nn.Module, num: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(num):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()


# -- watching --------------------------------------------------------------------------------------


def test_the_forwards_of_a_watched_module_are_reported_with_their_output(recording: Recording) -> None:
    model = net()
    forward_call_patch.watch_forward(model, recording)
    output = model(X)
    assert recording.starts == [model]
    assert recording.ends[0][0] is model
    assert recording.ends[0][1] is output


def test_other_instances_of_the_class_pass(recording: Recording) -> None:
    model, other = net(), net()
    forward_call_patch.watch_forward(model, recording)
    other(X)
    assert not recording.starts
    model(X)
    assert recording.starts == [model]


def test_nothing_is_put_on_the_module(recording: Recording) -> None:
    model, bare = net(), net()
    forward_call_patch.watch_forward(model, recording)
    model(X)
    assert vars(model).keys() == vars(bare).keys()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_failing_forward_ends_without_an_output(recording: Recording) -> None:
    model = net()
    forward_call_patch.watch_forward(model, recording)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(2, 5))
    assert recording.starts == [model]
    assert recording.ends == [(model, None)]


def test_each_subscriber_is_called_once_however_often_it_asks(recording: Recording) -> None:
    model, other = net(), Recording()
    for each in (recording, other, recording):
        forward_call_patch.watch_forward(model, each)
    model(X)
    assert len(recording.starts) == len(other.starts) == 1
    forward_call_patch.unwatch_forward(model, other)
    model(X)
    assert (len(recording.starts), len(other.starts)) == (2, 1)


def test_a_class_with_its_own_call_is_watched_and_restored(recording: Recording) -> None:
    own = vars(Doubled)["__call__"]
    model = Doubled()
    expected = model(X)
    forward_call_patch.watch_forward(model, recording)
    output = model(X)
    assert torch.equal(output, expected)
    assert recording.ends[0][1] is output
    assert Doubled.__call__ is own
    forward_call_patch.unwatch_forward(model, recording)
    assert vars(Doubled)["__call__"] is own


def test_a_subclass_of_a_watched_class_calls_back_once(recording: Recording) -> None:
    class Deeper(Net):
        pass

    base, deeper = net(), Deeper()
    forward_call_patch.watch_forward(base, recording)
    forward_call_patch.watch_forward(deeper, recording)
    deeper(X)
    assert recording.starts == [deeper]
    base(X)
    assert recording.starts == [deeper, base]


class Product:
    def __call__(self, x: Tensor) -> Tensor:
        return 3 * x


class Odd(nn.Module):
    __call__ = Product()  # an object that is not bound to the module


def test_a_call_that_is_no_function_is_called_as_it_is(recording: Recording) -> None:
    model = Odd()
    forward_call_patch.watch_forward(model, recording)
    assert torch.equal(model(X), 3 * X)
    assert recording.starts == [model]


def test_a_scripted_model_is_watched(tmp_path: Path) -> None:
    model = torch.jit.script(net())
    with sonde.watch(model, to=tmp_path, strict=True):
        train(model)
    assert sonde.Run(tmp_path).scalar("forwards")[1].tolist() == [1, 1, 1]


def test_a_graph_of_fx_is_watched_also_after_it_was_made_anew(tmp_path: Path) -> None:
    model, before = torch.fx.symbolic_trace(net()), set(forward_call_patch._watched_classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.watch(model, optimizer, to=tmp_path, strict=True):
        for number in range(6):
            if number == 2:
                model.recompile()
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()
    assert set(forward_call_patch._watched_classes) == before
    forwards = sonde.Run(tmp_path).scalar("forwards")[1].tolist()
    assert forwards[:2] == [1, 1]
    assert forwards[4:] == [1, 1]  # that it is not seen any more is noticed after a step


def test_a_module_that_becomes_another_class_stays_watched(tmp_path: Path) -> None:
    model = nn.LazyLinear(1)
    with sonde.watch(model, to=tmp_path, strict=True):
        with torch.no_grad():
            model(X)
        train(model, 5)
    assert "__call__" not in vars(nn.Linear)
    assert "__call__" not in vars(nn.LazyLinear)
    forwards = sonde.Run(tmp_path).scalar("forwards")[1].tolist()
    assert forwards[2:] == [1, 1, 1]


@pytest.mark.parametrize("name", ["replaced", "deleted"])
def test_a_call_that_somebody_takes_away_while_it_is_watched_does_not_fail(name: str, recording: Recording) -> None:
    class Local(Net):
        pass

    torch._dynamo.reset()
    model = Local()
    fast = torch.compile(model, backend="eager")
    expected = fast(X)
    forward_call_patch.watch_forward(model, recording)
    if name == "replaced":
        Local.__call__ = lambda self, *args: nn.Module.__call__(self, *args)  # type: ignore[method-assign]
    else:
        del Local.__call__
    assert torch.equal(fast(X), expected)
    assert torch.equal(model(X), expected)
    forward_call_patch.unwatch_forward(model, recording)
    assert ("__call__" in vars(Local)) is (name == "replaced")
    torch._dynamo.reset()


def test_a_module_that_becomes_one_of_a_subclass_is_still_reported_once(recording: Recording) -> None:
    """As with parametrizations and FSDP; here another module of the subclass is watched too."""

    class Sharded(Net):
        pass

    model, other = net(), Sharded()
    forward_call_patch.watch_forward(model, recording)
    forward_call_patch.watch_forward(other, recording)
    model.__class__ = Sharded  # type: ignore[assignment]
    assert forward_call_patch.is_forward_watched(model, recording)
    model(X)
    other(X)
    assert recording.starts == [model, other]
    forward_call_patch.unwatch_forward(model, recording)
    assert not forward_call_patch.is_forward_watched(model, recording)
    assert forward_call_patch.is_forward_watched(other, recording)


def test_a_class_of_which_a_watched_module_died_is_restored_with_the_next_that_is_unwatched(recording: Recording) -> None:
    model, other = net(), net()
    forward_call_patch.watch_forward(model, recording)
    forward_call_patch.watch_forward(other, recording)
    del other
    forward_call_patch.unwatch_forward(model, recording)
    assert "__call__" not in vars(Net)


@pytest.mark.parametrize("first", [0, 1], ids=["in order", "the first one last"])
def test_two_sessions_restore_the_class_in_whatever_order_they_are_closed(first: int, tmp_path: Path) -> None:
    model, before = net(), patched_functions()
    sessions = [sonde.watch(model, to=tmp_path / str(number), strict=True) for number in range(2)]
    train(model)
    sessions.pop(first).close()
    train(model)
    assert "__call__" in vars(Net)
    sessions.pop().close()
    assert "__call__" not in vars(Net)
    assert patched_functions() == before
    lasts = sorted(sonde.Run(tmp_path / str(number)).last_step for number in range(2))
    assert lasts == [2, 5]


def test_a_session_that_is_closed_in_another_thread_restores_the_class(tmp_path: Path) -> None:
    model, before = net(), patched_functions()
    session = sonde.watch(model, to=tmp_path / "run", strict=True)
    train(model)
    thread = threading.Thread(target=session.close)
    thread.start()
    thread.join()
    assert "__call__" not in vars(Net)
    assert patched_functions() == before


# -- copies ----------------------------------------------------------------------------------------

COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: torch.load(io.BytesIO(saved(model)), weights_only=False),
    "AveragedModel": lambda model: AveragedModel(model),
}


def saved(model: nn.Module) -> bytes:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_computes_the_same_and_is_not_watched(way: str, recording: Recording) -> None:
    model = net()
    forward_call_patch.watch_forward(model, recording)
    clone = COPIES[way](model)
    assert torch.equal(clone(X), model(X))
    assert recording.starts == [model]


def test_a_saved_model_has_the_same_bytes_watched_and_not(tmp_path: Path) -> None:
    model = net()
    bare = saved(model)
    with sonde.watch(model, to=tmp_path / "run", every=1, strict=True):
        assert saved(model) == bare
        with torch.no_grad():
            model(X)
        assert saved(model) == bare
        assert pickle.dumps(model) == pickle.dumps(model)
    assert saved(model) == bare


LOADING = """
    import pickle, sys
    import torch
    kind, model = pickle.load(open("both.pickle", "rb"))
    print(vars(kind).get("__call__") in (None, torch.nn.Module.__call__), "sonde" in sys.modules)
    print(torch.equal(model(torch.ones(2, 6)), torch.nn.functional.linear(torch.ones(2, 6), model.weight, model.bias)))
"""


def test_a_class_is_pickled_by_value_as_if_it_were_not_watched(recording: Recording, tmp_path: Path) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")

    class Local(nn.Linear):
        pass

    model = Local(6, 1)
    forward_call_patch.watch_forward(model, recording)
    (tmp_path / "both.pickle").write_bytes(cloudpickle.dumps((Local, model)))
    forward_call_patch.unwatch_forward(model, recording)
    loaded = python(LOADING, tmp_path, PYTHONPATH=str(Path(cloudpickle.__file__).parents[1]))
    assert (loaded.stdout, loaded.stderr) == ("True False\nTrue\n", "")


def test_what_stands_for_a_call_is_copied_and_pickled_as_that_call(recording: Recording) -> None:
    model, doubled, own = net(), Doubled(), vars(Doubled)["__call__"]
    for each in (model, doubled):
        forward_call_patch.watch_forward(each, recording)
    assert copy.copy(vars(Net)["__call__"]) is nn.Module.__call__
    assert pickle.loads(pickle.dumps(vars(Net)["__call__"])) is nn.Module.__call__
    assert copy.copy(vars(Doubled)["__call__"]) is own


# -- tracing and compiling -------------------------------------------------------------------------


def traced(model: nn.Module) -> Tensor:
    return torch.jit.trace(model, (X,))(X)  # type: ignore[no-any-return]


def scripted(model: nn.Module) -> Tensor:
    return torch.jit.script(model)(X)  # type: ignore[no-any-return]


def by_fx(model: nn.Module) -> Tensor:
    return torch.fx.symbolic_trace(model)(X)


def exported(model: nn.Module) -> Tensor:
    return torch.export.export(model, (X,)).module()(X)


def compiled(model: nn.Module) -> Tensor:
    return torch.compile(model, fullgraph=True, backend="eager")(X)


MODELS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "the model": lambda model: model,
    "its deepcopy": copy.deepcopy,
    "its average": lambda model: AveragedModel(model),
}
USES = (traced, scripted, by_fx, exported, compiled)


def outcome(use: Callable[[nn.Module], Tensor], model: nn.Module) -> Any:
    """The output, or the error where torch itself cannot do it."""
    torch._dynamo.reset()
    try:
        return use(model).detach().tolist()
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_a_model_is_traced_scripted_and_exported_before_during_and_after_watched_steps(
    use: Callable[[nn.Module], Tensor], which: str, tmp_path: Path
) -> None:
    def outcomes(watch: Callable[[nn.Module], Any]) -> list[Any]:
        model = net()
        found = [outcome(use, MODELS[which](model))]
        with watch(model):
            found.append(outcome(use, MODELS[which](model)))
            train(model)
            found.append(outcome(use, MODELS[which](model)))
            train(model)
        return [*found, outcome(use, MODELS[which](model))]

    bare = outcomes(lambda model: nullcontext())
    assert outcomes(lambda model: sonde.watch(model, to=tmp_path / "run", every=2, strict=True)) == bare
    assert which != "the model" or not any(isinstance(each, str) for each in bare)  # torch can do all of it


def test_the_graph_that_fx_makes_is_that_of_a_model_that_nobody_watches(recording: Recording) -> None:
    model = net()
    bare = torch.fx.symbolic_trace(model).code
    forward_call_patch.watch_forward(model, recording)
    forward_call_patch.watch_forward(model.first, recording)
    assert torch.fx.symbolic_trace(model).code == bare


def test_forwards_that_are_traced_are_none_of_the_training(tmp_path: Path) -> None:
    model = net()
    with sonde.watch(model, to=tmp_path / "run", strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        traced(model)
        model(X).sum().backward()
        optimizer.step()
    assert sonde.Run(tmp_path / "run").scalar("forwards")[1].tolist() == [1]


def num_frames(call: Callable[[Any], Callable[[Tensor], Tensor]], watch: Callable[[nn.Module], Any]) -> tuple[int, int]:
    """Frames and operations that torch.compile compiles in a few steps."""
    torch._dynamo.reset()
    counter, model = CompileCounter(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model):
        function = call((model, counter))
        for _ in range(6):
            optimizer.zero_grad()
            function(X).square().mean().backward()
            optimizer.step()
    torch._dynamo.reset()
    return counter.frame_count, counter.op_count


def in_place(both: Any) -> Callable[[Tensor], Tensor]:
    both[0].compile(backend=both[1], fullgraph=True)
    return both[0]  # type: ignore[no-any-return]


def in_a_function(both: Any) -> Callable[[Tensor], Tensor]:
    model, counter = both
    return torch.compile(lambda x: model(x) * 2, backend=counter, fullgraph=True)


def with_a_break(both: Any) -> Callable[[Tensor], Tensor]:
    model, counter = both

    def function(x: Tensor) -> Tensor:
        y = model(x)
        torch._dynamo.graph_break()
        return model(x) + y

    return torch.compile(function, backend=counter)


WAYS = {
    "torch.compile(model)": lambda both: torch.compile(both[0], backend=both[1], fullgraph=True),
    "model.compile()": in_place,
    "a function that calls it": in_a_function,
    "a function with a graph break": with_a_break,
    "a part of it": lambda both: (setattr(both[0], "first", torch.compile(both[0].first, backend=both[1], fullgraph=True)), both[0])[1],
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's own
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_as_many_frames_are_compiled_as_without_sonde(way: str, every: int, tmp_path: Path) -> None:
    bare = num_frames(WAYS[way], lambda model: nullcontext())
    assert num_frames(WAYS[way], lambda model: sonde.watch(model, to=tmp_path / "run", every=every, strict=True)) == bare
    assert bare[0] >= 1


def test_a_forward_through_the_wrapper_of_torch_compile_is_one_of_the_module_inside(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = net()
    before = vars(torch._dynamo.eval_frame.OptimizedModule).get("__call__")
    with sonde.watch(model, to=tmp_path / "run", strict=True):
        train(torch.compile(model, backend="eager"))
    torch._dynamo.reset()
    run = sonde.Run(tmp_path / "run")
    assert run.scalar("forwards")[1].tolist() == [1, 1, 1]
    assert [event.data["class"] for event in run.events("model")] == ["Net"]
    assert vars(torch._dynamo.eval_frame.OptimizedModule).get("__call__") is before


def test_a_wrapper_that_was_made_before_anybody_watched_is_known_too(recording: Recording) -> None:
    torch._dynamo.reset()
    model = net()
    fast = torch.compile(model, backend="eager")
    fast(X)
    forward_call_patch.watch_forward(model, recording)
    fast(X)
    fast(X)
    assert recording.starts == [model, model]
    torch.compile(net(), backend="eager")(X)
    assert recording.starts == [model, model]
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # torch's own, about what it compiles
def test_a_compiled_step_with_its_backward_and_optimizer_has_as_many_frames(tmp_path: Path) -> None:
    def frames(watch: Callable[..., Any]) -> tuple[int, float]:
        torch._dynamo.reset()
        model, counter = net(), CompileCounter()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        @torch.compile(backend=counter)
        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        with watch(model, optimizer):
            losses = [step(X).item() for _ in range(12)]
        torch._dynamo.reset()
        return counter.frame_count, losses[-1]

    assert frames(lambda *args: sonde.watch(*args, to=tmp_path / "run")) == frames(lambda *args: nullcontext())


# -- patched functions -----------------------------------------------------------------------------


class Backwards(training_callbacks.TrainingCallbacks):
    """Records backwards and steps of optimizers, and raises where a test wants it."""

    def __init__(self, **errors: BaseException) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._errors = errors

    def _record(self, name: str, *args: Any) -> None:
        self.calls.append((name, *args))
        if name in self._errors:
            raise self._errors[name]

    def on_backward_start(self, tensors: Any) -> None:
        self._record("start", tensors)

    def on_backward_end(self) -> None:
        self._record("end")

    def on_optimizer_step_start(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        self._record("step", has_closure)

    def on_clip(self, limit: Any) -> None:
        self._record("clip", limit)


@contextmanager
def subscribed(callbacks: training_callbacks.TrainingCallbacks) -> Iterator[None]:
    torch_patches.subscribe(callbacks)
    try:
        yield
    finally:
        torch_patches.unsubscribe(callbacks)


@pytest.mark.parametrize(
    ("errors", "in_backward", "expected", "names"),
    [
        ({}, None, None, ["start", "end"]),
        ({}, ValueError, ValueError, ["start", "end"]),
        ({"start": KeyboardInterrupt()}, None, KeyboardInterrupt, ["start"]),
        ({"end": KeyboardInterrupt()}, None, KeyboardInterrupt, ["start", "end"]),
        ({"end": KeyboardInterrupt()}, ValueError, KeyboardInterrupt, ["start", "end"]),
    ],
)
def test_backward_passes_its_arguments_on_and_raises_what_torch_raises(errors: Any, in_backward: Any, expected: Any, names: Any) -> None:
    passed: list[Any] = []

    def original(*args: Any, **kwargs: Any) -> str:
        passed.append((args, kwargs))
        if in_backward:
            raise in_backward
        return "answer"

    backward, callbacks = torch_patches._wrap_backward(original), Backwards(**errors)
    with subscribed(callbacks):
        if expected is None:
            assert backward(1, 2, inputs=3) == "answer"
        else:
            with pytest.raises(expected):
                backward(1, 2, inputs=3)
    assert [name for name, *_ in callbacks.calls] == names
    assert callbacks.calls[0] == ("start", 1)
    assert passed == ([((1, 2), {"inputs": 3})] if "start" not in errors else [])


def test_a_backward_inside_of_a_backward_is_part_of_it() -> None:
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            with torch.enable_grad():
                torch.ones(1, requires_grad=True).sum().backward()
            return gradients[0] * 2

    callbacks = Backwards()
    with subscribed(callbacks):
        x = torch.ones(1, requires_grad=True)
        Again.apply(x).sum().backward()
        torch.autograd.backward(tensors=x.sum())
    assert [name for name, *_ in callbacks.calls] == ["start", "end"] * 2


def test_whether_an_optimizer_has_a_closure_is_known_however_it_is_passed() -> None:
    callbacks, model = Backwards(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with subscribed(callbacks):
        optimizer.step()
        optimizer.step(lambda: 0.0)
        optimizer.step(closure=lambda: 0.0)
        optimizer.step(None)
    assert [has_closure for name, has_closure in callbacks.calls] == [False, True, True, False]


def test_the_limit_of_clipping_is_known_however_it_is_passed() -> None:
    callbacks, model = Backwards(), net()
    model(X).sum().backward()
    with subscribed(callbacks):
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.25)
        nn.utils.clip_grad_norm_(model.parameters(), norm_type=2.0, max_norm=0.25)
        nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=0.25)
        nn.utils.clip_grad_value_(model.parameters(), clip_value=0.1)
    assert callbacks.calls == [("clip", 0.5), ("clip", 0.25), ("clip", 0.25), ("clip", 0.25), ("clip", 0.1)]


PATCHED = {
    "backward": lambda: torch.autograd.backward, "zero_grad": lambda: torch.optim.Optimizer.zero_grad, "save": lambda: torch.save,
    "clip": lambda: nn.utils.clip_grad_norm_, "compile": lambda: torch.compile, "init": lambda: torch.optim.Optimizer.__init__,
    "step": lambda: torch.optim.lr_scheduler.StepLR.__init__, "scale": lambda: torch.amp.GradScaler.scale,
}  # fmt: skip


@pytest.mark.parametrize("name", PATCHED)
def test_a_patched_function_has_the_name_the_signature_and_the_documentation_of_torch(name: str, tmp_path: Path) -> None:
    own = PATCHED[name]()
    with sonde.watch(nn.Linear(1, 1), to=tmp_path):
        ours = PATCHED[name]()
        assert ours is not own
        assert (ours.__name__, ours.__qualname__, ours.__module__, ours.__doc__) == (
            own.__name__, own.__qualname__, own.__module__, own.__doc__,
        )  # fmt: skip
        assert inspect.signature(ours) == inspect.signature(own)
        assert copy.deepcopy(ours) is ours
    assert PATCHED[name]() is own


def test_a_patched_function_is_pickled_as_that_of_torch(tmp_path: Path) -> None:
    own = torch.autograd.backward
    with sonde.watch(nn.Linear(1, 1), to=tmp_path):
        pickled = pickle.dumps(torch.autograd.backward)
    assert pickle.loads(pickled) is own


# -- threads and processes -------------------------------------------------------------------------


def test_suspending_calls_nobody_in_this_thread_and_others_in_other_threads(recording: Recording) -> None:
    class Subscriber(training_callbacks.TrainingCallbacks):
        def __init__(self) -> None:
            self.calls: list[tuple[str, int]] = []

        def on_backward_start(self, tensors: Any) -> None:
            self.calls.append(("backward", threading.get_ident()))

        def on_suspend(self) -> None:
            self.calls.append(("suspend", threading.get_ident()))

        def on_resume(self, suspended_ns: int) -> None:
            assert suspended_ns > 0
            self.calls.append(("resume", threading.get_ident()))

    model, subscriber, here = net(), Subscriber(), threading.get_ident()
    forward_call_patch.watch_forward(model, recording)
    torch_patches.subscribe(subscriber)
    try:
        with training_callbacks.suspended():
            model(X).sum().backward()
            assert training_callbacks.subscribers() == ()
            with training_callbacks.suspended():
                model(X).sum().backward()
            assert training_callbacks.subscribers() == ()
            assert not recording.starts
            thread = threading.Thread(target=lambda: model(X).sum().backward())
            thread.start()
            there = thread.ident
            thread.join()
        model(X).sum().backward()
    finally:
        torch_patches.unsubscribe(subscriber)
    assert subscriber.calls == [("suspend", here), ("backward", there), ("resume", here), ("backward", here)]
    assert len(recording.starts) == 2


def test_an_error_while_suspended_resumes_all_the_same() -> None:
    with pytest.raises(ZeroDivisionError), training_callbacks.suspended():
        raise ZeroDivisionError
    assert not training_callbacks._suspended_threads


def test_a_forked_child_has_no_subscribers(recording: Recording) -> None:
    model, subscriber = net(), Recording()
    forward_call_patch.watch_forward(model, recording)
    torch_patches.subscribe(subscriber)
    try:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with torch.no_grad():
                    model(X)
                status = 0 if not training_callbacks.subscribers() and not recording.starts else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch_patches.unsubscribe(subscriber)
    model(X)
    assert recording.starts == [model]


# -- warnings --------------------------------------------------------------------------------------

EARLY_SCHEDULER = """
    import contextlib, sys, warnings
    import torch
    from torch import nn

    def main():
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sonde_or_nothing(model, optimizer):
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(2):
                    optimizer.zero_grad()
                    model(torch.ones(2, 3)).sum().backward()
                    scheduler.step()
                    optimizer.step()
                torch.optim.lr_scheduler.StepLR(optimizer, 2).step(3)
        for each in caught:
            print(each.filename, each.lineno, each.category.__name__, str(each.message)[:40])

    def sonde_or_nothing(model, optimizer):
        if len(sys.argv) == 1:
            return contextlib.nullcontext()
        import sonde
        return sonde.watch(model, optimizer, to=sys.argv[1], every=1, strict=True)

    main()
"""


def test_warnings_of_torch_name_the_users_line(tmp_path: Path) -> None:
    bare, watched = python(EARLY_SCHEDULER, tmp_path), python(EARLY_SCHEDULER, tmp_path, "run")
    assert (bare.returncode, watched.returncode) == (0, 0), bare.stderr + watched.stderr
    assert "train.py" in bare.stdout
    assert "lr_scheduler.step()" in bare.stdout
    assert watched.stdout == bare.stdout


def test_a_warning_that_the_model_issues_names_the_line_that_calls_it(recording: Recording) -> None:
    class Warning_(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            warnings.warn("look out", UserWarning, stacklevel=4)  # forward, _call_impl, _wrapped_call_impl, the caller
            return x

    def caught(model: nn.Module) -> list[tuple[str, int]]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model(X)
        return [(each.filename, each.lineno) for each in found]

    model = Warning_()
    bare = caught(model)
    assert bare[0][0] == __file__
    forward_call_patch.watch_forward(model, recording)
    assert caught(model) == bare
