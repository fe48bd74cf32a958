"""Hooks on real models: training is bit-identical, all torch hooks are removed, and stopping never interrupts an update."""

from __future__ import annotations

import copy
import gc
import logging
import math
import pickle
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

from model_examples import BY_NAME, PROGRAMS, Program
from sonde import HookBuilder, Hooks, SondeError, TrainingStopped
from sonde.tools.hooks import HookEvent
from training_harness import OPTIMIZERS, digest, hook_counts, one_step, process_state, python, train

pytestmark = pytest.mark.torch


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "sonde"]


def everything(folder: Path) -> list[HookBuilder]:
    """Every trigger and every action except stopping, on every layer."""
    return [
        HookBuilder("inspect").trigger("every_forward").action("inspect_tensor"),
        HookBuilder("containers too").trigger("every_forward").action("inspect_tensor").layer_patterns("*"),
        HookBuilder("track").trigger("every_backward").action("track_gradients").layer_patterns("*"),
        HookBuilder("keep").every_n_steps(2).snapshot_to(folder, max_files=5),
        HookBuilder("call").trigger("every_backward").callback(lambda event: event.stats),
        HookBuilder("alert").when("nan or grad_norm >= 0").alert("info", "output"),
        HookBuilder("anomaly").trigger("on_anomaly").alert("info"),
        HookBuilder("pause").every_n_steps(3).action("pause_training"),
        HookBuilder("broken").trigger("every_forward").callback(lambda event: 1 / 0),
        HookBuilder("stop").when("grad_norm < 0 or loss > 1e30").action("stop_training"),
    ]


def hooked(folder: Path, made: list[Hooks]) -> Any:
    def observe(model: nn.Module, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        hooks = Hooks()
        for builder in everything(folder):
            hooks.register_hook(builder.build())
        made.append(hooks)
        return hooks.attach(model, optimizer)

    return observe


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW fused"])
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_training_with_hooks_is_bit_identical(program: Program, optimizer: str, tmp_path: Path) -> None:
    made: list[Hooks] = []
    assert train(program, OPTIMIZERS[optimizer], hooked(tmp_path, made)) == train(program, OPTIMIZERS[optimizer])
    status = {each.name: each for each in made[0].status().values()}
    assert made[0].current_step == 4
    assert status["inspect"].executions
    assert status["track"].executions
    assert status["alert"].executions
    assert status["broken"].state == "retired"
    assert {each.name for each in status.values() if each.faults} == {"broken"}
    assert list(tmp_path.glob("keep_*.npz"))


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_every_torch_hook_is_removed(program: Program, tmp_path: Path) -> None:
    model = program.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = hook_counts(model, optimizer)
    state = process_state()
    with hooked(tmp_path, [])(model, optimizer) as hooks:
        assert hook_counts(model, optimizer) != before
        one_step(program, model, optimizer)
    assert hook_counts(model, optimizer) == before
    assert process_state() == state
    hooks.detach()
    one_step(program, model, optimizer)
    assert hooks.current_step == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_sets_of_hooks_on_one_model_can_be_removed_in_any_order(order: tuple[int, int], tmp_path: Path) -> None:
    program = BY_NAME["mlp"]
    model = program.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = hook_counts(model, optimizer)
    both: list[Hooks] = []
    for _ in order:
        hooked(tmp_path, both)(model, optimizer)
    one_step(program, model, optimizer)
    assert [hooks.current_step for hooks in both] == [1, 1]
    for index in order:
        both[index].detach()
    assert hook_counts(model, optimizer) == before


def test_torch_hooks_are_only_on_selected_layers() -> None:
    model = BY_NAME["transformer"].build()
    hooks = Hooks()
    hook_id = hooks.register_hook(
        HookBuilder("x").trigger("every_forward").action("inspect_tensor").layer_patterns("body.layers.*.linear1").build()
    )
    hooks.attach(model)
    assert [name for name, module in model.named_modules() if module._forward_hooks] == ["body.layers.0.linear1", "body.layers.1.linear1"]
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert hooks.status()[hook_id].layers == ("body.layers.0.linear1", "body.layers.1.linear1")
    hooks.remove_hook(hook_id)
    assert not any(module._forward_hooks for module in model.modules())
    hooks.register_hook(HookBuilder("y").every_n_steps(1).alert("info").build())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    hooks.detach()


def test_a_hook_that_is_done_is_removed_at_the_end_of_the_step() -> None:
    program = BY_NAME["mlp"]
    model = program.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hooks = Hooks()
    hook = HookBuilder("x").trigger("every_forward").action("inspect_tensor").layer_patterns(["0", "2"]).max_executions(3).build()
    hooks.register_hook(hook)
    with hooks.attach(model, optimizer):
        one_step(program, model, optimizer)
        assert model[0]._forward_hooks
        one_step(program, model, optimizer)
        assert not any(module._forward_hooks for module in model.modules())
        one_step(program, model, optimizer)
    assert [result.layer for result in hooks.results] == ["0", "2", "0"]


def test_a_pattern_that_matches_nothing_warns_once_with_the_nearest_names(caplog: pytest.LogCaptureFixture) -> None:
    model = BY_NAME["transformer"].build()
    hooks = Hooks()
    hooks.register_hook(HookBuilder("x").trigger("every_forward").action("inspect_tensor").layer_patterns("body.layer.0.linear1").build())
    hooks.attach(model)
    hooks.register_hook(HookBuilder("y").trigger("every_forward").action("inspect_tensor").layer_patterns("head").build())
    (text,) = messages(caplog)
    assert "'body.layer.0.linear1' matches nothing" in text
    assert "body.layers.0.linear1" in text
    hooks.detach()


def test_neither_the_model_nor_its_outputs_are_kept_alive(tmp_path: Path) -> None:
    model = BY_NAME["mlp"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    made: list[Hooks] = []
    hooked(tmp_path, made)(model, optimizer)
    outputs: list[weakref.ref[torch.Tensor]] = []
    model.register_forward_hook(lambda module, args, output: outputs.append(weakref.ref(output)))
    one_step(BY_NAME["mlp"], model, optimizer)
    assert [output() for output in outputs] == [None]
    alive = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert alive() is None
    made[0].detach()


def test_a_copy_of_a_hooked_model_is_not_hooked(tmp_path: Path) -> None:
    model = BY_NAME["mlp"].build()
    made: list[Hooks] = []
    hooked(tmp_path, made)(model, None)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied(torch.ones(2, 6))
    assert made[0].results == []
    model(torch.ones(2, 6))
    assert made[0].results
    made[0].detach()


# -- what is measured ------------------------------------------------------------------------------


def test_outputs_and_gradients_are_measured_at_the_time_of_the_hook() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    hooks = Hooks()
    hooks.register_hook(HookBuilder("out").trigger("every_forward").action("inspect_tensor").layer_patterns("0").build())
    hooks.register_hook(HookBuilder("grad").trigger("every_backward").action("inspect_tensor").layer_patterns(["0", "2"]).build())
    x = torch.randn(5, 4)
    with hooks.attach(model):
        model(x).square().sum().backward()
    hidden = F.linear(x, model[0].weight, model[0].bias).detach().double()
    out = F.linear(hidden.relu().float(), model[2].weight, model[2].bias).detach().double()
    before_relu = (2 * out) @ model[2].weight.detach().double() * (hidden > 0)
    forward, last, first = hooks.results
    assert (forward.layer, last.layer, first.layer) == ("0", "2", "0")
    assert forward.stats.l2 == pytest.approx(hidden.norm().item(), rel=1e-5)
    assert forward.stats.min == pytest.approx(hidden.min().item(), rel=1e-5)  # before the ReLU overwrote it
    assert last.stats.l2 == pytest.approx((2 * out).norm().item(), rel=1e-5)
    assert first.stats.l2 == pytest.approx(before_relu.norm().item(), rel=1e-5)


def test_a_shared_module_fires_at_each_call_under_one_name() -> None:
    model = BY_NAME["shared"].build()
    hooks = Hooks()
    hooks.register_hook(HookBuilder("x").trigger("every_forward").action("inspect_tensor").layer_patterns(["block", "again"]).build())
    with hooks.attach(model):
        BY_NAME["shared"].loss(model)
    assert [result.layer for result in hooks.results] == ["block"] * 3


def test_every_tensor_of_a_structured_output_is_measured_with_its_index() -> None:
    model = BY_NAME["dict output"].build()
    hooks = Hooks()
    for trigger in ("every_forward", "every_backward"):
        hooks.register_hook(HookBuilder(trigger).trigger(trigger).action("inspect_tensor").layer_patterns("halves").build())
    with hooks.attach(model):
        BY_NAME["dict output"].loss(model).backward()
    assert sorted((result.item, result.is_forward) for result in hooks.results) == [
        ("left", False), ("left", True), ("rest.0", False), ("rest.0", True),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["checkpointed", "checkpointed reentrant"])
def test_recomputation_is_not_a_second_forward_and_gradients_are_measured_once(name: str) -> None:
    program = BY_NAME[name]
    model = program.build()
    hooks = Hooks()
    for trigger in ("every_forward", "every_backward"):
        hooks.register_hook(HookBuilder(trigger).trigger(trigger).action("inspect_tensor").layer_patterns("block.0").build())
    with hooks.attach(model):
        program.loss(model).backward()
    assert [result.is_forward for result in hooks.results] == [True, False]


def test_a_model_that_is_one_layer_has_the_name_of_its_class() -> None:
    model = nn.Linear(2, 1)
    hooks = Hooks()
    hooks.register_hook(HookBuilder("x").trigger("every_forward").action("inspect_tensor").build())
    with hooks.attach(model):
        model(torch.ones(1, 2))
    assert [result.layer for result in hooks.results] == ["Linear"]


def test_evaluation_without_gradients_is_a_forward_without_a_backward() -> None:
    model = BY_NAME["mlp"].build()
    hooks = Hooks()
    hooks.register_hook(HookBuilder("x").trigger("on_anomaly").alert("error").build())
    with hooks.attach(model):
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                model(torch.full((1, 6), math.nan))
    assert {(alert.where, alert.count) for alert in hooks.alerts} == {(str(index), 2) for index in range(5)}


class Overflowing(nn.Module):
    """Divides by a variance that becomes zero when a batch is constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.head = nn.Linear(4, 4), Scale(), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.scale(self.first(x)))


class Scale(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(0)) / x.var(0).sqrt()


def test_the_first_layer_with_a_real_nan_is_alerted_first(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Overflowing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hooks = Hooks()
    hooks.register_hook(HookBuilder("nan").trigger("on_anomaly").alert("critical").action("stop_training").build())
    weights = []
    with pytest.raises(TrainingStopped) as raised, hooks.attach(model, optimizer):  # noqa: PT012 - the loop is what is stopped
        for step in range(10):
            x = torch.randn(8, 4) if step != 5 else torch.ones(8, 4)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            weights.append(digest(model.state_dict()))
            optimizer.step()
    assert (raised.value.layer, raised.value.step, raised.value.num_updates) == ("scale", 5, 5)
    assert len(weights) == 6
    assert digest(model.state_dict()) == weights[5]  # the NaN never reached the parameters
    assert all(p.isfinite().all() for p in model.parameters())
    assert hooks.alerts[0].where == "scale"
    assert messages(caplog)[0].startswith("sonde: nan: NaN or Inf in the output at scale in step 5 (inf ")


@pytest.mark.parametrize("patterns", [None, "2.*"])
def test_a_gradient_of_a_parameter_that_overflows_is_an_anomaly_before_it_is_used(patterns: str | None) -> None:
    """All outputs and their gradients are finite; only the sum over the batch that makes a weight's gradient is not."""
    model = BY_NAME["mlp"].build()
    optimizers = [torch.optim.SGD(model[index].parameters(), lr=0.01) for index in (0, 2)]
    hook = HookBuilder("broken").trigger("on_anomaly").alert("critical").action("stop_training")
    hooks = Hooks()
    hooks.register_hook((hook if patterns is None else hook.layer_patterns(patterns)).build())
    before = digest(model[2].state_dict())
    with hooks.attach(model, optimizers), pytest.raises(TrainingStopped) as raised:  # noqa: PT012
        BY_NAME["mlp"].loss(model).backward()
        optimizers[0].step()
        model[2].bias.grad[3] = math.inf
        optimizers[1].step()
    assert (raised.value.layer, raised.value.step) == ("2.bias", 1)  # the first optimizer had ended step 0
    assert [str(alert) for alert in hooks.alerts] == ["NaN or Inf in the gradient at 2.bias in step 1 (inf 1, nan 0, num 8)"]
    assert digest(model[2].state_dict()) == before


# -- steps and stopping ----------------------------------------------------------------------------


def test_the_norm_of_all_gradients_is_checked_before_the_update() -> None:
    torch.manual_seed(0)
    model = BY_NAME["mlp"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    norms: list[float] = []
    hooks = Hooks()
    hooks.register_hook(HookBuilder("norm").when("grad_norm >= 0").callback(lambda event: norms.append(event.values["grad_norm"])).build())
    hooks.register_hook(HookBuilder("steep").when("grad_norm > 1e3 and step > 2 and lr < 1").action("stop_training").build())
    before = ""
    with pytest.raises(TrainingStopped, match=r"grad_norm \d.*lr 0\.01") as raised, hooks.attach(model, optimizer):  # noqa: PT012
        for step in range(10):
            optimizer.zero_grad()
            (BY_NAME["mlp"].loss(model) * (1e6 if step == 4 else 1)).backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            before = digest(model.state_dict())
            optimizer.step()
            assert norms[-1] == pytest.approx(norm.item(), rel=1e-5)
    assert (raised.value.step, raised.value.num_updates, raised.value.layer) == (4, 4, "")
    assert digest(model.state_dict()) == before


def test_a_logged_loss_can_stop_and_the_loop_may_continue_after_it() -> None:
    program = BY_NAME["mlp"]
    model = program.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hooks = Hooks()
    hooks.register_hook(HookBuilder("patience").when("loss is not finite").action("stop_training").max_executions(1).build())
    stopped = 0
    with hooks.attach(model, optimizer):
        for step in range(5):
            optimizer.zero_grad()
            loss = program.loss(model)
            loss.backward()
            hooks.log(loss=loss if step != 2 else math.inf)
            try:
                optimizer.step()
            except TrainingStopped:
                stopped += 1
    assert stopped == 1
    assert hooks.current_step == 4


def test_lbfgs_is_stopped_after_its_whole_step() -> None:
    """The closure runs in the middle of an update: a stop requested there is raised after the update."""
    torch.manual_seed(0)
    x = torch.randn(20, 6)

    def play(hooks: Hooks | None) -> tuple[str, int]:
        torch.manual_seed(1)
        model = BY_NAME["mlp"].build()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
        calls = 0

        def closure() -> torch.Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        if hooks is None:
            optimizer.step(closure)
        else:
            with pytest.raises(TrainingStopped), hooks.attach(model, optimizer):
                optimizer.step(closure)
        return digest(model.state_dict()), calls

    hooks = Hooks()
    hooks.register_hook(HookBuilder("at once").trigger("every_forward").action("stop_training").build())
    assert play(hooks) == play(None)


def test_an_optimizer_inside_backward_is_never_interrupted_and_the_next_forward_stops() -> None:
    model = BY_NAME["mlp"].build()
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    hooks = Hooks()
    hooks.register_hook(HookBuilder("x").trigger("every_backward").layer_patterns("4").action("stop_training").build())
    before = [p.clone() for p in model.parameters()]
    with hooks.attach(model, list(optimizers.values())):
        BY_NAME["mlp"].loss(model).backward()
        assert all(not torch.equal(old, p) for old, p in zip(before, model.parameters()))
        with pytest.raises(TrainingStopped):
            BY_NAME["mlp"].loss(model)
        BY_NAME["mlp"].loss(model)


def test_accumulated_steps_and_several_optimizers_are_counted_by_the_first() -> None:
    model = BY_NAME["mlp"].build()
    first, second = (torch.optim.SGD(model[index].parameters(), lr=0.01) for index in (0, 2))
    fired: list[int] = []
    hooks = Hooks()
    hooks.register_hook(HookBuilder("x").every_n_steps(2).callback(lambda event: fired.append(event.step)).build())
    with hooks.attach(model, [first, second]):
        for _ in range(5):
            for _ in range(3):
                BY_NAME["mlp"].loss(model).backward()
            first.step()
            second.step()
        with pytest.raises(SondeError, match="the attached optimizer counts the steps"):
            hooks.step()
    assert hooks.current_step == 5
    assert fired == [0, 2, 4]


def test_without_an_optimizer_step_counts_and_gradients_come_from_the_model() -> None:
    model = nn.Linear(2, 1, bias=False)
    norms: list[float] = []
    hooks = Hooks()
    hooks.register_hook(HookBuilder("x").when("grad_norm > 0").callback(lambda event: norms.append(event.values["grad_norm"])).build())
    with hooks.attach(model):
        hooks.step()  # no gradient yet: the condition cannot be evaluated
        model(torch.tensor([[3.0, 4.0]])).sum().backward()
        hooks.step()
    assert norms == [5.0]
    assert hooks.current_step == 2


def test_hooks_are_attached_to_one_model_at_a_time() -> None:
    hooks = Hooks()
    with hooks.attach(nn.Linear(1, 1)), pytest.raises(SondeError, match="already attached to a model"):
        hooks.attach(nn.Linear(1, 1))
    hooks.attach(nn.Linear(1, 1)).detach()


def test_an_exception_of_the_user_removes_the_hooks() -> None:
    model = BY_NAME["mlp"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = hook_counts(model, optimizer)
    hooks = Hooks()
    hooks.register_hook(HookBuilder("x").trigger("on_anomaly").action("stop_training").build())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), hooks.attach(model, optimizer):
        model(torch.ones(2, 5))
    assert hook_counts(model, optimizer) == before


def test_an_uncaught_stop_ends_the_program_with_a_message(tmp_path: Path) -> None:
    code = """
        import torch, sonde
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
        hooks = sonde.Hooks()
        hooks.register_hook(sonde.HookBuilder("diverged").when("not finite").action(sonde.HookAction.STOP_TRAINING).build())
        with hooks.attach(model, optimizer):
            for step in range(100):
                optimizer.zero_grad()
                model(torch.ones(4, 2)).square().mean().backward()
                optimizer.step()
                print(step, flush=True)
    """
    result = python(code, tmp_path)
    assert result.returncode == 1
    assert "TrainingStopped: the hook 'diverged' stopped the training in step" in result.stderr
    assert len(result.stdout.split()) < 10


# -- threads, torch.compile, transforms ------------------------------------------------------------


def test_a_callback_that_calls_the_model_does_not_recurse() -> None:
    model = BY_NAME["mlp"].build()
    called: list[str] = []

    def again(event: HookEvent) -> None:
        called.append(event.layer)
        model(torch.ones(1, 6))

    hooks = Hooks()
    hooks.register_hook(HookBuilder("x").trigger("every_forward").layer_patterns("2").callback(again).build())
    with hooks.attach(model):
        model(torch.ones(1, 6))
    assert called == ["2"]
    assert hooks.status()["x-1"].faults == 0


def test_eight_threads_through_one_model_are_counted_exactly() -> None:
    model = BY_NAME["mlp"].build()
    hooks = Hooks()
    hooks.register_hook(HookBuilder("f").trigger("every_forward").layer_patterns("2").action("inspect_tensor").build())
    hooks.register_hook(HookBuilder("b").trigger("every_backward").layer_patterns("2").action("track_gradients").build())

    def work() -> None:
        for _ in range(20):
            torch.autograd.grad(model(torch.ones(2, 6)).sum(), list(model.parameters()))

    with hooks.attach(model):
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [status.executions for status in hooks.status().values()] == [160, 160]
    assert len(hooks.gradients["2"]) == 160


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.last = nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.relu(self.first(x)))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("when", ["before", "after", "running"])
def test_compiled_code_is_compiled_as_often_as_without_hooks(
    when: str, fullgraph: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def play(with_hooks: bool) -> tuple[int, int, list[float]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        counter = CompileCounter()
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made: list[Hooks] = []
        attach = hooked(tmp_path, made)
        if with_hooks and when == "before":
            attach(model, optimizer)
        compiled = torch.compile(model, backend=counter, fullgraph=fullgraph)
        if with_hooks and when == "after":
            attach(compiled, optimizer)
        losses = []
        for step in range(5):
            if with_hooks and when == "running" and step == 2:
                attach(compiled, optimizer)
            optimizer.zero_grad()
            loss = compiled(torch.randn(5, 3)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        for hooks in made:
            assert hooks.current_step == (3 if when == "running" else 5)
            if when != "before":  # hooks registered before compiling are part of the graph, and their removal recompiles
                hooks.detach()
        compiled(torch.randn(5, 3))
        return counter.frame_count, counter.op_count, losses

    bare = play(False)
    caplog.clear()
    assert play(True) == bare
    assert bare[0] == 1
    if when != "before":
        assert "the whole model: inside torch.compile the outputs of layers are not measured" in messages(caplog)[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracing_and_functional_transforms_are_not_affected(tmp_path: Path) -> None:
    model = BY_NAME["mlp"].build()
    plain = str(torch.jit.trace(model, torch.ones(1, 6)).graph)
    weights = dict(model.named_parameters())

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    expected = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, torch.ones(3, 6))
    made: list[Hooks] = []
    with hooked(tmp_path, made)(model, None):
        assert str(torch.jit.trace(model, torch.ones(1, 6)).graph).count("aten::") == plain.count("aten::")
        found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, torch.ones(3, 6))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


class Ragged(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor([x[0, :1], x[1]], layout=self.layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_a_tensor_that_cannot_be_measured_has_a_reason_and_is_not_a_failure(layout: torch.layout, tmp_path: Path) -> None:
    model = Ragged()
    model.layout = layout
    hooks = Hooks()
    hooks.register_hook(HookBuilder("x").trigger("every_forward").action("inspect_tensor").snapshot_to(tmp_path).build())
    hooks.register_hook(HookBuilder("y").trigger("on_anomaly").alert("error").build())
    with hooks.attach(model):
        for _ in range(5):
            model(torch.full((2, 3, 4), math.nan))
    assert [result.stats.unsupported for result in hooks.results] == ["nested and jagged tensors are not measured"] * 10
    assert hooks.results[1].value == "nested and jagged tensors are not measured"
    assert [(status.executions, status.faults) for status in hooks.status().values()] == [(5, 0), (0, 0)]


def test_a_layer_hook_that_fails_is_disabled_and_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a strange output")

    model = BY_NAME["mlp"].build()
    hooks = Hooks()
    hooks.register_hook(HookBuilder("x").trigger("every_forward").layer_patterns("2").action("inspect_tensor").build())
    with hooks.attach(model):
        monkeypatch.setattr(hooks, "on_tensor", broken)
        for _ in range(3):
            model(torch.ones(1, 6))
    assert messages(caplog) == ["the output of 2 is not observed any more: RuntimeError: a strange output"]


def test_per_step_hooks_register_nothing_on_layers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sonde")
    program = BY_NAME["mlp"]
    model = program.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hooks = Hooks()
    hooks.register_hook(HookBuilder("tick").every_n_steps(2).alert("info", "tick").build())
    with hooks.attach(model, optimizer):
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        for _ in range(4):
            one_step(program, model, optimizer)
    assert [alert.count for alert in hooks.alerts] == [2]
    assert messages(caplog) == ["sonde: tick: tick in step 0", "sonde: tick: tick in step 2, 2 times since step 0"]
