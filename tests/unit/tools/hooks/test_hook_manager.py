"""Hooks without a model: execute_hooks, results, actions, failures and limits."""

from __future__ import annotations

import json
import logging
import math
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from sonde import AlertSeverity, HookAction, HookBuilder, Hooks, HookTrigger, SondeError, TrainingStopped
from sonde.tools.hooks import HookEvent, HookResult

pytestmark = pytest.mark.torch


def inspect(name: str = "look") -> HookBuilder:
    return HookBuilder(name).trigger(HookTrigger.EVERY_FORWARD).action(HookAction.INSPECT_TENSOR)


def hooks_with(*builders: HookBuilder, **options: Any) -> Hooks:
    hooks = Hooks(**options)
    for builder in builders:
        hooks.register_hook(builder.build())
    return hooks


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "sonde"]


def test_a_pattern_that_matches_no_layer_is_logged_once_and_is_in_the_status(caplog: pytest.LogCaptureFixture) -> None:
    hooks = hooks_with(inspect().layer_patterns(["atention.*", "mlp"]), inspect("other").layer_patterns("head"))
    assert hooks.execute_hooks("head", [1.0])
    assert hooks.execute_hooks("attention.0", [1.0]) == []
    assert messages(caplog) == ["sonde: the hook 'look' did not run: no layer so far matches 'atention.*', 'mlp'; the first was 'head'."]
    look, other = hooks.status().values()
    assert "no layer so far matches 'atention.*', 'mlp'" in str(look)
    assert "no layer" not in str(other)


def test_the_status_of_an_attached_hook_says_that_its_patterns_match_no_layer() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    hooks = hooks_with(inspect().layer_patterns("atention.*"), inspect("other").layer_patterns("0").max_executions(1))
    with hooks.attach(model):
        model(torch.ones(1, 2))
        model(torch.ones(1, 2))
    look, other = hooks.status().values()
    assert "no layer of the model matches 'atention.*'" in str(look)
    assert "matches" not in str(other)  # also now that it is done


def test_values_given_by_hand_decide_a_hook_that_is_evaluated_once_per_step() -> None:
    hooks = hooks_with(HookBuilder("high").when("loss > 0.5").callback(lambda event: event.step))
    assert hooks.execute_hooks("head", [1.0]) == hooks.execute_hooks("head", [1.0], metadata={"loss": 0.1}) == []
    assert [result.value for result in hooks.execute_hooks("head", [1.0], metadata={"loss": 0.9, "step": 7})] == [7]


@pytest.mark.parametrize(("arguments", "said"), [({"shape": 3}, "shape holds the sizes"), ({"metadata": 3}, "metadata holds values")])
def test_arguments_of_execute_hooks_that_cannot_be_meant_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(SondeError, match=said):
        hooks_with(inspect()).execute_hooks("a", [1.0], **arguments)


# -- running ---------------------------------------------------------------------------------------


def test_the_documented_snippet_runs_as_written() -> None:
    hook = (
        HookBuilder("attention")
        .trigger(HookTrigger.EVERY_FORWARD)
        .action(HookAction.INSPECT_TENSOR)
        .layer_patterns(["attention.*"])
        .max_executions(100)
        .build()
    )
    hooks = Hooks()
    hook_id = hooks.register_hook(hook)
    tensor = torch.randn(4, 8, dtype=torch.float64)
    results = hooks.execute_hooks("attention.0", tensor, tensor.shape, True, None)
    (result,) = results
    assert (result.hook, result.layer, result.shape, result.action) == (hook_id, "attention.0", (4, 8), HookAction.INSPECT_TENSOR)
    assert result.stats is not None
    assert result.stats.mean == pytest.approx(tensor.mean().item(), rel=1e-12)
    assert result.stats.l2 == pytest.approx(tensor.norm().item(), rel=1e-12)
    assert hooks.results == results
    assert len(hooks.execute_hooks("attention_layer_1", tensor)) == 1  # as a regular expression
    assert hooks.execute_hooks("mlp.0", tensor) == []


@pytest.mark.parametrize("value", [[1.0, -2.0, math.nan], np.array([1.0, -2.0, math.nan]), torch.tensor([1.0, -2.0, math.nan])])
def test_lists_arrays_and_tensors_are_accepted(value: Any) -> None:
    (result,) = hooks_with(inspect()).execute_hooks("a", value)
    assert (result.stats.l1, result.stats.nan, result.shape) == (3.0, 1, (3,))


def test_a_flat_tensor_with_its_shape_keeps_that_shape() -> None:
    (result,) = hooks_with(inspect()).execute_hooks("a", [0.0] * 6, shape=(2, 3))
    assert result.shape == (2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda hooks: hooks.execute_hooks("a", "text"), "is not a tensor"),
        (lambda hooks: hooks.execute_hooks("a", [1.0], shape=(2, 3)), r"has 1 elements, but shape=\(2, 3\) has 6"),
        (lambda hooks: hooks.execute_hooks(7, [1.0]), "a layer name is a string"),
        (lambda hooks: hooks.execute_hooks("a", [1.0], metadata={"loss": "high"}), "loss must be a number"),
        (lambda hooks: hooks.log(loss=[1, 2]), "loss must be a number"),
        (lambda hooks: hooks.log(loss=torch.ones(3)), "loss must be a number"),
        (lambda hooks: hooks.register_hook(inspect()), r"needs a hook from HookBuilder\(name\)….build\(\), not HookBuilder"),
        (lambda hooks: hooks.remove_hook("look-2"), "(?s)no hook is named 'look-2'.*look-1"),
        (lambda hooks: setattr(hooks, "on_pause", 3), "on_pause must be a function"),
        (lambda hooks: hooks.send_alerts_to(3), "alerts go to a function or to a web address"),
        (lambda hooks: hooks.send_alerts_to(print, at_least="loud"), "no severity 'loud'"),
        (lambda hooks: hooks.attach("model"), "attach takes a torch.nn.Module, not a str"),
        (lambda hooks: hooks.attach(torch.nn.Linear(1, 1), "sgd"), "optimizer must be a torch.optim.Optimizer"),
        (lambda hooks: Hooks(max_results=0), "max_results must be a whole number"),
    ],
)
def test_a_wrong_argument_raises_a_clear_error(call: Callable[[Hooks], object], message: str) -> None:
    with pytest.raises(SondeError, match=message):
        call(hooks_with(inspect()))


def test_after_max_executions_a_hook_is_done() -> None:
    hooks = hooks_with(inspect().max_executions(3))
    assert [len(hooks.execute_hooks("a", [1.0])) for _ in range(5)] == [1, 1, 1, 0, 0]
    (status,) = hooks.status().values()
    assert (status.state, status.executions) == ("done", 3)


def test_threads_share_the_executions() -> None:
    fired: list[str] = []
    hooks = hooks_with(inspect().callback(lambda event: fired.append(event.layer)).max_executions(100))
    threads = [threading.Thread(target=lambda: [hooks.execute_hooks("a", [1.0]) for _ in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fired) == 100


def test_a_removed_hook_does_not_fire() -> None:
    hooks = Hooks()
    first, second = hooks.register_hook(inspect("a").build()), hooks.register_hook(inspect("b").build())
    hooks.remove_hook(first)
    assert [result.hook for result in hooks.execute_hooks("x", [1.0])] == [second]


def test_only_the_latest_results_are_stored() -> None:
    hooks = hooks_with(inspect(), max_results=10)
    for step in range(25):
        hooks.execute_hooks("a", [1.0], metadata={"step": step})
    assert [result.step for result in hooks.results] == list(range(15, 25))


def test_triggers_and_conditions_decide_which_hooks_fire() -> None:
    hooks = hooks_with(
        HookBuilder("forward").trigger("every_forward").action("inspect_tensor"),
        HookBuilder("backward").trigger("every_backward").action("inspect_tensor"),
        HookBuilder("third").every_n_steps(3).action("inspect_tensor"),
        HookBuilder("large").when("l2 > 10").action("inspect_tensor"),
        HookBuilder("steep").when("grad_norm > 10 and step > 1").action("inspect_tensor"),
        HookBuilder("bad").trigger("on_anomaly").action("inspect_tensor"),
        HookBuilder("costly").trigger("every_forward").when("loss > 2").action("inspect_tensor"),
    )

    def fired(value: float, is_forward: bool = True, **metadata: float) -> set[str]:
        results = hooks.execute_hooks("a", [value], is_forward=is_forward, metadata=metadata)
        return {result.hook.partition("-")[0] for result in results}

    assert fired(1.0, step=1) == {"forward"}
    assert fired(1.0, step=3) == {"forward", "third"}
    assert fired(50.0, step=1, loss=3.0) == {"forward", "large", "costly"}
    assert fired(50.0, is_forward=False, step=1) == {"backward"}
    assert fired(50.0, is_forward=False, step=2) == {"backward", "steep"}
    assert fired(math.nan, step=1) == {"forward", "bad"}
    assert fired(-math.inf, is_forward=False, step=2) == {"backward", "bad", "steep"}


def test_a_condition_that_could_never_be_evaluated_is_in_the_status() -> None:
    hooks = hooks_with(HookBuilder("x").trigger("every_forward").when("loss > 2 and epoch > 1").action("inspect_tensor"))
    assert hooks.execute_hooks("a", [1.0]) == []
    (status,) = hooks.status().values()
    assert status.unknown == ("epoch", "loss")
    assert "its condition could not be decided: no value for epoch, loss" in str(status)
    hooks.log(loss=torch.tensor(3.0, requires_grad=True), epoch=2)
    assert len(hooks.execute_hooks("a", [1.0])) == 1
    assert "could not be decided" not in str(*hooks.status().values())


def test_a_tensor_is_measured_only_if_other_values_do_not_decide_the_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []
    from sonde.tools.hooks import hook_events

    original = hook_events.fast_statistics
    monkeypatch.setattr(hook_events, "fast_statistics", lambda tensor: measured.append(1) or original(tensor))
    hooks = hooks_with(HookBuilder("x").when("step > 100 and l2 > 0").action("inspect_tensor"), inspect("y").when("l2 > 0 and step > 50"))
    hooks.execute_hooks("a", [1.0], metadata={"step": 5})
    assert measured == []
    assert len(hooks.execute_hooks("a", [1.0], metadata={"step": 101})) == 2
    assert measured == [1]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, dtype=torch.bool), torch.arange(4), torch.ones(2, dtype=torch.complex64), torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3).to(torch.float8_e4m3fn), torch.zeros(0), torch.eye(3).to_sparse(), torch.ones(2, 2, requires_grad=True),
        torch.empty(3, device="meta"),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tensor.layout} {tensor.device}",
)  # fmt: skip
def test_every_tensor_has_statistics_or_a_reason(tensor: Any) -> None:
    hooks = hooks_with(inspect(), HookBuilder("bad").trigger("on_anomaly").action("alert"), inspect("large").when("l2 > 100"))
    (result,) = hooks.execute_hooks("a", tensor)
    assert result.stats is not None
    assert result.stats.unsupported if tensor.is_meta else result.stats.num == tensor.numel()
    assert hooks.alerts == []


# -- actions ---------------------------------------------------------------------------------------


def test_gradient_norms_are_stored_by_layer_and_non_finite_ones_unchanged() -> None:
    hooks = hooks_with(HookBuilder("x").trigger("every_backward").action("track_gradients"))
    for step, values in enumerate(([3.0, 4.0], [math.inf, 1.0], [math.nan, math.inf])):
        hooks.execute_hooks("a", values, is_forward=False, metadata={"step": step})
    hooks.execute_hooks("a", [1.0], is_forward=True)
    assert list(hooks.gradients) == ["a"]
    assert hooks.gradients["a"][:2] == [(0, 5.0), (1, math.inf)]
    assert math.isnan(hooks.gradients["a"][2][1])


def test_an_alert_contains_its_values_and_is_in_the_result(caplog: pytest.LogCaptureFixture) -> None:
    hooks = hooks_with(HookBuilder("steep").when("grad_norm > 10").alert(AlertSeverity.ERROR, "steep here").layer_patterns("a"))
    heard: list[str] = []
    hooks.send_alerts_to(lambda alert: heard.append(str(alert)))
    (result,) = hooks.execute_hooks("a", [30.0, 40.0], is_forward=False, metadata={"step": 4})
    assert heard == ["steep here at a in step 4 (grad_norm 50)"]
    assert messages(caplog) == ["sonde: steep: steep here at a in step 4 (grad_norm 50)"]
    assert result.value == hooks.alerts[0]


@pytest.mark.parametrize(
    ("builder", "is_forward", "message"),
    [
        (HookBuilder("x").trigger("on_anomaly"), True, "NaN or Inf in the output at a in step 0 (inf 0, nan 1, num 2)"),
        (HookBuilder("x").trigger("on_anomaly"), False, "NaN or Inf in the gradient at a in step 0 (inf 0, nan 1, num 2)"),
        (HookBuilder("x").when("not finite and step >= 0"), True, "not finite and step >= 0 at a in step 0 (inf 0, nan 1)"),
        (HookBuilder("my name").trigger("every_forward"), True, "my name at a in step 0"),
    ],
)
def test_an_alert_without_a_message_contains_the_condition(builder: HookBuilder, is_forward: bool, message: str) -> None:
    hooks = hooks_with(builder.action("alert"))
    hooks.execute_hooks("a", [math.nan, 1.0], is_forward=is_forward)
    assert [str(alert) for alert in hooks.alerts] == [message]


def test_a_callback_gets_the_tensor_and_its_return_value_is_in_the_result() -> None:
    captured: list[tuple[Any, ...]] = []

    def look(event: HookEvent) -> float:
        assert event.tensor is not None
        assert not torch.is_grad_enabled()
        assert not event.tensor.requires_grad
        captured.append((event.layer, event.step, event.is_forward, event.shape, event.metadata["batch"], event.values["max"]))
        return float(event.tensor.sum())

    hooks = hooks_with(HookBuilder("x").trigger("every_forward").callback(look))
    (result,) = hooks.execute_hooks("a", torch.ones(2, 3, requires_grad=True), metadata={"batch": "7", "step": 2})
    assert result.value == 6.0
    assert captured == [("a", 2, True, (2, 3), "7", 1.0)]
    assert torch.is_grad_enabled()


def test_stored_results_keep_no_tensor_alive() -> None:
    hooks = hooks_with(
        HookBuilder("x").trigger("every_forward").callback(lambda event: event.tensor).action("inspect_tensor").alert("info", "output")
    )
    memory = np.ones(3)
    alive = weakref.ref(memory)
    results = hooks.execute_hooks("a", torch.from_numpy(memory))
    del memory
    assert alive() is not None  # the caller holds the return value of the callback
    del results
    assert alive() is None
    assert hooks.results[0].value == "Tensor of shape (3,)"


def test_a_callback_that_executes_hooks_does_not_fire_itself() -> None:
    hooks = Hooks()
    inner: list[list[HookResult]] = []
    hooks.register_hook(
        HookBuilder("x").trigger("every_forward").callback(lambda event: inner.append(hooks.execute_hooks("b", [1.0]))).build()
    )
    hooks.execute_hooks("a", [1.0])
    assert inner == [[]]


def test_pausing_calls_on_pause() -> None:
    hooks = hooks_with(HookBuilder("x").when("nan").action("pause_training"))
    paused: list[str] = []
    hooks.on_pause = lambda event: paused.append(repr(event))
    hooks.execute_hooks("a", [math.nan])
    assert paused == ["<HookEvent: output of a in step 0, shape (1,)>"]


def test_pausing_without_a_console_is_logged_once_and_training_continues(caplog: pytest.LogCaptureFixture) -> None:
    hooks = hooks_with(HookBuilder("x").when("nan").action("pause_training"))
    for _ in range(3):
        (result,) = hooks.execute_hooks("a", [math.nan])
        assert result.error == ""
    (text,) = messages(caplog)
    assert "would pause at a in step 0 (nan (nan 1)), but there is no console" in text


def test_stopping_waits_for_a_safe_point_and_happens_once() -> None:
    hooks = hooks_with(HookBuilder("enough").when("nan").action("stop_training"))
    hooks.step()
    hooks.execute_hooks("a", [math.nan])
    assert hooks.stop_requested is not None
    with pytest.raises(TrainingStopped, match=r"the hook 'enough' stopped the training in step 1 at a: nan \(nan 1\)\.") as raised:
        hooks.step()
    stopped = raised.value
    assert (stopped.hook, stopped.layer, stopped.step, stopped.exit_code) == ("enough", "a", 1, 1)
    assert isinstance(stopped, SondeError)
    hooks.step()


def test_a_callback_may_raise_training_stopped() -> None:
    def decide(event: HookEvent) -> None:
        raise TrainingStopped("I have enough steps.")

    hooks = hooks_with(HookBuilder("mine").trigger("every_forward").callback(decide))
    (result,) = hooks.execute_hooks("a", [1.0])
    assert result.error == ""
    with pytest.raises(TrainingStopped, match=r"'mine' stopped the training in step 0 at a: I have enough steps\.$"):
        hooks.step()


# -- snapshots -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "dtype"),
    [
        (torch.tensor([[1.5, math.nan], [math.inf, -0.0]]), "float32"),
        (torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16), "bfloat16"),
        (torch.tensor([1.5, 448.0]).to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (torch.tensor([1 + 2j, 3]).conj(), "complex64"),
        (torch.tensor([[0.0, 2.0]]).to_sparse(), "float32"),
        (torch.ones(2, 3, requires_grad=True).T, "float32"),
        (torch.zeros(0, 3), "float32"),
        (torch.tensor(3), "int64"),
    ],
    ids=str,
)
def test_a_snapshot_is_read_back_unchanged_without_pickle(tensor: Any, dtype: str, tmp_path: Path) -> None:
    hooks = hooks_with(HookBuilder("keep").trigger("every_forward").snapshot_to(tmp_path / "deep" / "down"))
    (result,) = hooks.execute_hooks("encoder/0", tensor, metadata={"step": 12, "loss": math.nan})
    assert result.value == tmp_path / "deep" / "down" / "keep_encoder-0_step000012_forward.npz"
    with np.load(result.value, allow_pickle=False) as file:
        values, about = file["values"], json.loads(str(file["about"]))
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    expected = (dense if dtype.startswith(("float32", "complex", "int")) else dense.float()).resolve_conj().numpy()
    np.testing.assert_array_equal(values, expected)
    assert values.shape == tuple(tensor.shape)
    assert (about["layer"], about["step"], about["pass"], about["dtype"]) == ("encoder/0", 12, "forward", dtype)
    assert about["metadata"]["loss"] == "NaN"


def test_snapshots_are_bounded_in_number_and_size_with_a_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hooks = hooks_with(HookBuilder("keep").trigger("every_forward").snapshot_to(tmp_path, max_files=2, max_mb=0.001))
    (large,) = hooks.execute_hooks("a", torch.ones(1000))
    assert large.value == "it has 0.004 MB, more than the limit of 0.001 MB: see max_mb of snapshot_to"
    values = [hooks.execute_hooks("a", torch.ones(10))[0].value for _ in range(3)]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["keep_a_step000000_forward-2.npz", "keep_a_step000000_forward.npz"]
    assert "2 snapshots were written already" in values[2]
    assert len(messages(caplog)) == 1
    assert "max_mb" in str(*hooks.status().values())


def test_a_layer_name_never_leads_out_of_the_directory(tmp_path: Path) -> None:
    hooks = hooks_with(HookBuilder("../up").trigger("every_forward").snapshot_to(tmp_path / "in"))
    for name in ("../../etc/passwd", "..", "", "a\x00b", "n" * 500, "\ud800"):
        (result,) = hooks.execute_hooks(name, [1.0])
        assert result.error == "", name
        assert result.value.resolve().parent == (tmp_path / "in").resolve()
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_directory_that_cannot_be_created_is_refused_at_registration(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SondeError, match="cannot be made"):
        hooks_with(HookBuilder("keep").trigger("every_forward").snapshot_to(tmp_path / "file" / "x"))


def test_a_disk_that_fails_later_does_not_reach_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hooks = hooks_with(HookBuilder("keep").trigger("every_forward").snapshot_to(tmp_path / "gone"))
    (tmp_path / "gone").rmdir()
    (result,) = hooks.execute_hooks("a", [1.0])
    assert "cannot be written" in result.error
    assert len(messages(caplog)) == 1


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ValueError, MemoryError, RecursionError, torch.OutOfMemoryError])
def test_a_hook_that_raises_is_logged_once_and_retired_after_three(kind: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def broken(event: HookEvent) -> None:
        calls.append(1)
        raise kind("my mistake")

    hooks = hooks_with(HookBuilder("bad").trigger("every_forward").callback(broken), inspect("good"))
    for _ in range(6):
        assert any(result.action is HookAction.INSPECT_TENSOR for result in hooks.execute_hooks("a", [1.0]))
    assert len(calls) == 3
    bad, good = hooks.status().values()
    assert (bad.state, bad.faults, good.state) == ("retired", 3, "active")
    assert bad.last_error == f"{kind.__name__}: my mistake"
    (text,) = messages(caplog)
    assert "the hook 'bad' failed at a in step 0" in text
    assert str(bad) == f"bad-1: retired, fired 3 times; 3 failures, the last: {kind.__name__}: my mistake"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_keyboard_interrupt_and_system_exit_pass_and_leave_the_hooks_usable(kind: type[BaseException]) -> None:
    def interrupted(event: HookEvent) -> None:
        raise kind

    hooks = hooks_with(HookBuilder("x").trigger("every_forward").callback(interrupted).max_executions(1), inspect())
    with pytest.raises(kind):
        hooks.execute_hooks("a", [1.0])
    assert len(hooks.execute_hooks("a", [1.0])) == 1


def test_a_failing_on_pause_does_not_reach_the_training() -> None:
    hooks = hooks_with(HookBuilder("x").trigger("every_forward").action("pause_training"))
    hooks.on_pause = lambda event: 1 / 0
    (result,) = hooks.execute_hooks("a", [1.0])
    assert result.error.startswith("ZeroDivisionError")


def test_nothing_is_logged_without_an_issue(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "sonde")
    hooks = hooks_with(inspect())
    hooks.execute_hooks("a", [1.0])
    hooks.detach()
    assert messages(caplog) == []


def test_clear_drops_results_alerts_and_gradients_and_leaves_the_hooks() -> None:
    hooks = hooks_with(HookBuilder("x").trigger("every_backward").action("track_gradients").action("alert"))
    hooks.execute_hooks("a", [1.0], is_forward=False)
    assert [len(stored) for stored in (hooks.results, hooks.alerts, hooks.gradients)] == [2, 1, 1]
    hooks.clear()
    assert not any((hooks.results, hooks.alerts, hooks.gradients))
    assert hooks.execute_hooks("a", [1.0], is_forward=False)
    assert [alert.count for alert in hooks.alerts] == [1]
