"""The profile of a step: which lines and layers it spends its time in. It changes nothing and leaves nothing behind."""

from __future__ import annotations

import gc
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sonde
from sonde.capture.choose_observed_steps import OverheadBudget
from training_harness import patched_functions

NUM_STEPS = 14
PROFILED = 11  # the step that is profiled
NAP_S = 0.01


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Training:
    def __init__(self, model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = model if model is not None else Net()
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.losses: list[float] = []

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.arange(8.0).view(2, 4)).square().sum()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def own(self, step: int) -> None:
        """What a test adds to a step."""

    def run(self, session: Any = None) -> None:
        for step in range(NUM_STEPS):
            if session is not None:
                due(session, step == PROFILED - 1)
            self.step()
            self.own(step)


def due(session: Any, now: bool) -> None:
    """The next step is to be profiled, or certainly not."""
    session._tracker.step_profiler.long_ns = 0
    session._tracker.step_profiler.due_ns = 0 if now else 1 << 62


def profiled(training: Training, tmp_path: Path, *, every: int = 1000) -> list[sonde.Event]:
    with sonde.watch(training.model, training.optimizer, to=tmp_path / "run", every=every, strict=True) as session:
        training.run(session)
    return list(sonde.Run(tmp_path / "run").events("xray"))


def line_with(event: Any, text: str) -> dict[str, Any]:
    (line,) = [line for line in event.data["lines"] if text in line["text"]]
    return line


def test_one_step_is_profiled_and_no_other(tmp_path):
    (event,) = profiled(Training(), tmp_path)
    assert event.step == PROFILED


def test_a_line_is_charged_with_what_runs_below_it_and_counted(tmp_path):
    class Napping(Training):
        def own(self, step):
            for _ in range(7):
                time.sleep(NAP_S)

    (event,) = profiled(Napping(), tmp_path)
    line = line_with(event, "time.sleep(NAP_S)")
    assert line["num"] == 7
    assert line["ms"] >= 7e3 * NAP_S
    assert line["function"] == "own"
    assert event.data["lines"][0] == line
    assert line_with(event, "loss.backward()")["num"] == 1


def test_the_lines_of_a_step_add_up_to_it(tmp_path):
    class Napping(Training):
        def own(self, step):
            time.sleep(5 * NAP_S)

    (event,) = profiled(Napping(), tmp_path)
    run = sonde.Run(tmp_path / "run")
    steps, whole = run.scalar("step_ms")
    own = run.scalar("sonde_ms")[1]
    training_ms = (whole - own)[steps.tolist().index(PROFILED)]
    assert sum(line["ms"] for line in event.data["lines"]) == pytest.approx(training_ms, rel=0.1)


def test_more_lines_than_can_be_followed_are_charged_to_the_loop_they_are_in(tmp_path):
    from sonde.capture.step_profiler.line_times import MAX_EVENTS

    class Counting(Training):
        def step(self):
            total = 0
            for number in range(20 * MAX_EVENTS):
                total += number
            super().step()

    (event,) = profiled(Counting(), tmp_path)
    loop = [line for line in event.data["lines"] if line["function"] == "step" and line["num"] > 1000]
    whole = sum(line["ms"] for line in event.data["lines"])
    assert sum(line["ms"] for line in loop) > 0.5 * whole
    assert max(line["num"] for line in loop) <= MAX_EVENTS
    assert line_with(event, "loss.backward()")["num"] == 1  # taken up again with the forward


@pytest.mark.parametrize(
    ("ask", "call"),
    [
        (lambda t: t.item(), ".item()"), (lambda t: float(t), "float()"), (lambda t: t.tolist(), ".tolist()"),
        (lambda t: t.detach().numpy(), ".numpy()"), (lambda t: bool(t > 0), "bool()"), (lambda t: f"{t}", "print"), (repr, "print"),
        (lambda t: t.cpu(), ".cpu()"),
    ],
    ids=["item", "float", "tolist", "numpy", "bool", "format", "repr", "cpu"],
)  # fmt: skip
def test_who_asks_a_tensor_for_its_numbers_is_found_with_the_line(tmp_path, ask, call):
    class Asking(Training):
        def own(self, step):
            for _ in range(3):
                ask(torch.ones(()))

    (event,) = profiled(Asking(), tmp_path)
    found = [wait for wait in event.data["waits"] if wait["call"] == call and wait["num"] == 3]
    assert len(found) == 1
    assert found[0]["line"].startswith("test_step_profiler.py:")
    assert found[0]["ms"] > 0


def test_what_torch_asks_for_itself_is_not_the_users(tmp_path):
    (event,) = profiled(Training(), tmp_path)  # Adam reads its counters
    assert [(wait["call"], wait["text"]) for wait in event.data["waits"]] == [(".item()", "self.losses.append(loss.item())")]


def test_layers_are_timed_and_their_work_is_known(tmp_path):
    (event,) = profiled(Training(), tmp_path)
    layers = {layer["path"]: layer for layer in event.data["layers"]}
    assert {path: layer["multiplications"] for path, layer in layers.items()} == {"first": 2 * 4 * 8, "second": 2 * 8 * 2}
    assert layers["first"]["elements"] == 2 * 4 + 2 * 8 + 4 * 8 + 8
    assert all(layer["forward_ms"] > 0 and layer["backward_ms"] > 0 for layer in layers.values())


class Branches(Net):
    """The short way is left after the long one, and so the engine goes back on it before it."""

    def __init__(self) -> None:
        super().__init__()
        self.long = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)], nn.Linear(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = x * self.first.weight[0, 0]
        return self.second(self.long(shared) + self.first(shared))


class Slowly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)
        return gradient


def test_the_backward_of_a_layer_is_its_own_and_not_that_of_the_branch_beside_it(tmp_path):
    model = Branches()
    model.long[3].register_forward_hook(lambda module, args, output: Slowly.apply(output))
    (event,) = profiled(Training(model), tmp_path)
    layers = {layer["path"]: layer for layer in event.data["layers"]}
    assert layers["first"]["backward_ms"] < 100  # the other branch sleeps for 200


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_where_forwards_are_run_again_the_backward_of_a_layer_is_not_known(tmp_path, use_reentrant):
    class Again(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x.requires_grad_(), use_reentrant=use_reentrant)

    (event,) = profiled(Training(Again()), tmp_path)
    # Reentrant checkpointing runs its first forward under no_grad, which does not count.
    assert [layer["num"] for layer in event.data["layers"]] == ([] if use_reentrant else [1, 1])
    assert all(math.isnan(layer["backward_ms"]) for layer in event.data["layers"])


def test_the_backward_of_every_layer_is_timed(tmp_path):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(30)])
    (event,) = profiled(Training(model), tmp_path)
    assert sum(layer["backward_ms"] > 0 for layer in event.data["layers"]) == 30


def test_a_layer_without_a_backward_has_no_time_for_it(tmp_path):
    model = Net()
    model.first.requires_grad_(False)
    (event,) = profiled(Training(model), tmp_path)
    backward = {layer["path"]: layer["backward_ms"] for layer in event.data["layers"]}
    assert math.isnan(backward["first"])
    assert backward["second"] > 0


def test_forwards_without_gradients_are_not_counted(tmp_path):
    class Teaching(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.teacher = nn.Parameter(torch.ones(1)), nn.Linear(4, 2)  # its own parameter makes the whole model a leaf

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.first(x)
                target = self.teacher(x)
            return self.scale * super().forward(x) - target

    class Validating(Training):
        def step(self) -> None:
            super().step()
            with torch.no_grad():
                self.model(torch.ones(2, 4))

    (event,) = profiled(Validating(Teaching()), tmp_path)
    assert {layer["path"]: layer["num"] for layer in event.data["layers"]} == {"": 1, "first": 1, "second": 1}


def in_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_a_backward_in_another_thread_leaves_that_of_the_layers_unknown(tmp_path):
    class Elsewhere(Training):
        def step(self) -> None:
            self.optimizer.zero_grad()
            loss = self.model(torch.arange(8.0).view(2, 4)).square().sum()
            in_thread(loss.backward)
            self.optimizer.step()

    (event,) = profiled(Elsewhere(), tmp_path)
    assert [layer["num"] for layer in event.data["layers"]] == [1, 1]
    assert all(math.isnan(layer["backward_ms"]) for layer in event.data["layers"])


def test_a_backward_that_another_thread_runs_at_the_same_time_is_not_mixed_with_that_of_the_step(tmp_path):
    class Mixed(Training):
        def step(self) -> None:
            self.optimizer.zero_grad()
            output = self.model(torch.arange(8.0).view(2, 4))
            loss, other = output.square().sum(), output.sum()  # they share nodes
            loss.register_hook(lambda gradient: in_thread(lambda: other.backward(retain_graph=True)))
            loss.backward()
            self.optimizer.step()

    (event,) = profiled(Mixed(), tmp_path)
    assert [layer["num"] for layer in event.data["layers"]] == [1, 1]
    assert all(math.isnan(layer["backward_ms"]) for layer in event.data["layers"])


@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_layer_that_runs_in_another_thread_is_not_timed(tmp_path, has_gradients):
    class Parallel(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def run_first() -> None:
                with torch.set_grad_enabled(has_gradients):
                    outputs.append(torch.tanh(self.first(x)))

            outputs: list[torch.Tensor] = []
            in_thread(run_first)
            return self.second(outputs[0])

    (event,) = profiled(Training(Parallel()), tmp_path)
    assert [layer["path"] for layer in event.data["layers"]] == ["second"]
    # The threads number their autograd nodes separately: a node of the other thread could be taken for one of this layer.
    assert math.isnan(event.data["layers"][0]["backward_ms"]) == has_gradients


def test_the_time_of_a_layer_does_not_include_what_sonde_does_meanwhile(tmp_path):
    class Observed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if session._tracker.step_profiler.is_active:
                time.sleep(0.2)
                session._tracker.timer.own_ns += 200_000_000
            return super().forward(x)

    training = Training(nn.Sequential(Observed(4, 8), nn.Linear(8, 2)))
    with sonde.watch(training.model, training.optimizer, to=tmp_path / "run", every=1000, strict=True) as session:
        training.run(session)
    (event,) = sonde.Run(tmp_path / "run").events("xray")
    assert next(layer for layer in event.data["layers"] if layer["path"] == "0")["forward_ms"] < 100


def test_the_hooks_on_layers_count_as_time_of_sonde(tmp_path):
    during: list[int] = []

    class Deep(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = timer.own_ns
            output = super().forward(x)
            during.append(timer.own_ns - before)
            return output

    training = Training(Deep(*[nn.Linear(4, 4) for _ in range(30)]))
    with sonde.watch(training.model, training.optimizer, to=tmp_path / "run", every=1000, strict=True) as session:
        session._tracker.step_profiler._layers._hook_ns = 1_000_000
        timer = session._tracker.timer
        training.run(session)
    assert during[PROFILED] > 2 * 30 * 1_000_000  # a start and an end for each of 30 layers
    assert during[PROFILED - 1] < 1_000_000


def test_the_machine_is_described(tmp_path):
    (event,) = profiled(Training(), tmp_path)
    machine = event.data["machine"]
    assert machine["threads"] == torch.get_num_threads()
    assert 0 < machine["cores"] <= (os.cpu_count() or 1)


@pytest.mark.parametrize("every", [1000, 1], ids=["plain", "observed too"])
def test_r01_training_is_bit_identical_with_it(tmp_path, every):
    bare, watched = Training(), Training()
    bare.run()
    generator = torch.get_rng_state()
    assert profiled(watched, tmp_path, every=every)
    assert watched.losses == bare.losses
    assert torch.equal(torch.get_rng_state(), generator)
    for one, other in zip(bare.model.parameters(), watched.model.parameters()):
        assert torch.equal(one, other)


def test_r07_nothing_of_it_stays_after_the_step(tmp_path):
    after: list[Any] = []

    class Looking(Training):
        def own(self, step):
            if step in (PROFILED - 2, PROFILED + 1):
                hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in self.model.children()]
                weights = [len(p._post_accumulate_grad_hooks or ()) for p in self.model.parameters()]
                after.append((hooks, weights, patched_functions(), sys._getframe(0).f_trace, sys._getframe(1).f_trace))

    assert profiled(Looking(), tmp_path)
    assert after[0] == after[1]


def test_r08_an_exception_in_the_middle_of_it_leaves_nothing_behind(tmp_path):
    class Failing(Training):
        def own(self, step):
            if step == PROFILED - 1:
                raise RuntimeError("no")

    before = patched_functions()
    training = Failing()
    with pytest.raises(RuntimeError, match="no"):
        profiled(training, tmp_path)
    assert patched_functions() == before
    assert all(not module._forward_hooks for module in training.model.modules())


def test_r07_a_graph_that_lives_longer_than_the_step_has_no_hooks_of_it(tmp_path):
    graphs, traces = [], []

    class Keeping(Training):
        def step(self) -> None:
            self.optimizer.zero_grad()
            loss = self.model(torch.arange(8.0).view(2, 4)).square().sum()
            loss.backward(retain_graph=True)
            if len(graphs) == PROFILED:
                traces.append(weakref.ref(session._tracker.step_profiler._layers._trace))
                assert len(traces[0]().marks) > 5
            graphs.append(loss)
            self.optimizer.step()

    training = Keeping()
    with sonde.watch(training.model, training.optimizer, to=tmp_path / "run", every=1000, strict=True) as session:
        training.run(session)
        gc.collect()
        assert traces[0]() is None


def test_an_error_of_the_layer_timers_reaches_the_log_and_not_the_training(tmp_path, caplog):
    bare, training = Training(), Training()
    bare.run()
    with sonde.watch(training.model, training.optimizer, to=tmp_path / "run", every=1000) as session:
        layers = session._tracker.step_profiler._layers
        layers._add_shapes = lambda *args: 1 / 0
        for _ in range(NUM_STEPS):
            due(session, True)
            training.step()
    assert training.losses == bare.losses
    (retired,) = sonde.Run(tmp_path / "run").events("retired")
    assert retired.data["probe"] == "step_profiler"
    assert "ZeroDivisionError" in retired.data["error"]


def test_a_debugger_that_traces_already_keeps_its_tracer_and_gets_every_event(tmp_path):
    calls = []

    def tracer(frame, event, arg):
        if frame.f_code.co_name == "step" and event == "call":
            calls.append(frame.f_code.co_name)
        return tracer

    training = Training()
    with sonde.watch(training.model, training.optimizer, to=tmp_path / "run", strict=True) as session:
        sys.settrace(tracer)
        try:
            for _ in range(NUM_STEPS):
                due(session, True)
                training.step()
            assert sys.gettrace() is tracer
        finally:
            sys.settrace(None)
    assert len(calls) >= NUM_STEPS
    assert all(event.data["lines"] == [] for event in sonde.Run(tmp_path / "run").events("xray"))


def test_a_child_that_is_forked_in_the_middle_of_it_is_not_traced(tmp_path):
    statuses = []

    class Forking(Training):
        def own(self, step):
            if step == PROFILED - 1:
                child = os.fork()
                if child == 0:
                    os._exit(0 if sys.gettrace() is None else 1)
                statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    assert profiled(Forking(), tmp_path)
    assert statuses == [0]


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_models_are_not_profiled(tmp_path):
    assert profiled(Training(torch.compile(Net(), backend="eager")), tmp_path) == []


def test_where_slow_steps_come_at_equal_distances_the_next_is_profiled(tmp_path):
    training = Training()
    profiled_steps: list[int] = []
    with sonde.watch(training.model, training.optimizer, to=tmp_path / "run", strict=True) as session:
        profiler = session._tracker.step_profiler
        for step in range(1, 80):
            profiler.due_ns = 1 << 62
            slow = (step - 1) % 12 == 10 or step - 1 in (15, 41)  # these two are the machine's own doing
            took_ms = 300 if slow else 10
            profiler.on_step_start(step, took_ms * 1_000_000, is_observed=False)
            if profiler.is_active:
                profiled_steps.append(step)
                profiler.give_up()
    assert profiled_steps == [46, 58, 70]


@pytest.mark.parametrize(("step_ms", "first_look_s"), [(1, 20.0), (10, 0.4)], ids=["small steps", "larger ones"])
def test_the_first_profile_comes_late_where_steps_are_small(tmp_path, step_ms, first_look_s):
    training = Training()
    with sonde.watch(training.model, training.optimizer, to=tmp_path / "run", strict=True) as session:
        profiler, step = session._tracker.step_profiler, 0
        while not profiler.is_active:
            step += 1
            profiler.on_step_start(step, step_ms * 1_000_000, is_observed=False)
        profiler.give_up()
    assert step * step_ms == pytest.approx(1000 * first_look_s, abs=step_ms)


def test_a_step_that_turns_out_bad_is_no_longer_timed_but_explained(tmp_path):
    class Diverging(Training):
        def step(self):
            self.optimizer.zero_grad()
            x = torch.arange(8.0).view(2, 4)
            loss = self.model(x).square().sum()
            if len(self.losses) == PROFILED:
                loss = loss * torch.log(torch.zeros(()) - 1)
            loss.backward()
            self.optimizer.step()
            self.losses.append(0.0)

    assert profiled(Diverging(), tmp_path) == []
    (origin,) = sonde.Run(tmp_path / "run").events("origin")
    assert origin.step == PROFILED
    assert sys.gettrace() is None


def test_where_every_step_is_observed_a_profile_is_put_off_but_not_for_good(tmp_path, monkeypatch):
    training = Training()
    monkeypatch.setattr(OverheadBudget, "should_observe", lambda budget, step: True)  # as where observing costs next to nothing
    with sonde.watch(training.model, training.optimizer, to=tmp_path / "run", strict=True) as session:
        for _ in range(40):
            due(session, True)
            training.step()
    run = sonde.Run(tmp_path / "run")
    assert all(run.scalar("observed")[1][3:])
    assert 1 <= len(list(run.events("xray"))) <= 40 / 8


def test_an_error_inside_of_it_is_isolated_and_recorded(tmp_path, caplog):
    training = Training()
    with sonde.watch(training.model, training.optimizer, to=tmp_path / "run", every=1000) as session:
        profiler = session._tracker.step_profiler
        profiler._cpu.since_last = lambda: 1 / 0
        for _ in range(40):
            due(session, True)
            training.step()
        assert not profiler.is_active
    (retired,) = sonde.Run(tmp_path / "run").events("retired")
    assert retired.data["probe"] == "step_profiler"
    assert len(training.losses) == 40
