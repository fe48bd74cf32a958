"""Runs training steps of a model on the user's inputs, profiles them, and restores the model and the optimizer bit by bit."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter, perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn

from sonde.capture.layer_timing.layer_call_trace import ReadCounter
from sonde.capture.save_and_restore_model import state_restored
from sonde.capture.training_callbacks import suspended
from sonde.capture.zero_grad_tracking import optimizer_parameters
from sonde.errors import SondeError
from sonde.profiler import ProfileReport
from sonde.profiler.build_profile_report import build_report, dtype_and_device
from sonde.profiler.choose_timed_modules import TimedModules
from sonde.profiler.run_and_time_steps import ProfileRecorder, StepKind, StepRecordings, plan_steps
from sonde.profiler.run_forward_pass import input_errors_explained
from sonde.statistics.find_tensors import find_tensors
from sonde.statistics.private_torch_api import is_compiled, preserve_versions, unwrap_compiled

MAX_EXTRA_S = 1.0  # of additional steps if other programs disturbed some; at most as long as the planned steps took

Loss = Callable[[Any], Tensor]


def profile_model(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, loss: Loss | None, optimizer: torch.optim.Optimizer | None,
    warmup: int, repeats: int, backward: bool, read: ReadCounter | None = None,
) -> tuple[ProfileReport, StepRecordings]:  # fmt: skip
    """The report, and the recordings that it is built from. See Profiler.profile; `read` replaces the wall clock."""
    compiled = any(is_compiled(module) for module in model.modules())
    body = unwrap_compiled(model) or model
    dtype, device = dtype_and_device([*body.parameters(), *(tensor for _, tensor in find_tensors((args, kwargs)))])
    with ExitStack() as undo:
        undo.enter_context(suspended())  # a session that watches this model must not record these steps
        if compiled:
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        undo.enter_context(_restored(body, optimizer, (args, kwargs)))
        modules = TimedModules.of({"": body}, eager=True)
        recorder = ProfileRecorder(modules, excluded=[*body.parameters(), *body.buffers()], read=read or clock(device))
        step = _StepRunner(body, args, kwargs, loss, optimizer, recorder, backward)
        start = perf_counter()
        for kind in plan_steps(warmup, repeats):
            step.run(kind)
        until = perf_counter() + min(perf_counter() - start, MAX_EXTRA_S)
        while recorder.recordings.num_undisturbed < repeats and perf_counter() < until:
            step.run("bare")
            step.run("timed")
        notes = [*step.notes]
        if not backward:
            notes.append("only the forward was timed, without gradients")
        if compiled:
            notes.append("compiled parts were run uncompiled: the layers inside compiled code cannot be timed")
        report = build_report(recorder.recordings, modules, title=type(body).__name__, dtype=dtype, device=device, notes=notes)
        return report, recorder.recordings


def clock(device: torch.device) -> Callable[[], int]:
    """The clock for a device. On an asynchronous device each reading waits until the device is idle."""
    if device.type == "cpu" or not torch.accelerator.is_available():
        return perf_counter_ns

    def waiting() -> int:  # pragma: no cover - no device here to try it on
        torch.accelerator.synchronize(device)
        return perf_counter_ns()

    return waiting


class _StepRunner:
    """Runs one training step of the model and reports its phases to the recorder."""

    def __init__(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], loss: Loss | None, optimizer: torch.optim.Optimizer | None,
        recorder: ProfileRecorder, backward: bool,
    ) -> None:  # fmt: skip
        self._model, self._args, self._kwargs, self._loss = model, args, kwargs, loss
        self._optimizer, self._recorder, self._backward = optimizer, recorder, backward
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.notes: dict[str, None] = {}  # a set in order

    def run(self, kind: StepKind) -> None:
        self._recorder.start_step(kind)
        try:
            with torch.set_grad_enabled(self._backward):
                self._run_step()
        except BaseException:
            self._recorder.end_step(discard=True)
            raise
        self._recorder.end_step()

    def _run_step(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        with input_errors_explained():
            output = self._recorder.run_forward(self._model, self._args, self._kwargs)
        if self._backward:
            loss = self._loss_of(output)
            del output
            if loss is None:
                return
            self._recorder.start_backward(loss)
            try:
                loss.backward()  # type: ignore[no-untyped-call]
            finally:
                self._recorder.end_backward()
        if self._optimizer is not None:
            self._recorder.start_phase("optimizer")
            self._optimizer.step()
            self._recorder.end_phase("optimizer")

    def _loss_of(self, output: Any) -> Tensor | None:
        """The user's loss, or the output's own `.loss`, or the sum of the outputs, whose gradient costs the same."""
        value: Any = self._loss(output) if self._loss is not None else getattr(output, "loss", None)
        if not isinstance(value, Tensor) or value.numel() != 1:
            if self._loss is not None:
                raise SondeError(
                    "The loss function must return one number that depends on the parameters, "
                    "for instance loss=lambda output: cross_entropy(output, targets)."
                )
            parts = [tensor for _, tensor in find_tensors(output) if tensor.requires_grad]
            value = sum(part.abs().sum() if part.is_complex() else part.sum() for part in parts) if parts else None
            if parts:
                self.notes["no loss was given: the backward started at the sum of the outputs"] = None
        if value is None or not value.requires_grad:
            self.notes["no output of the model requires a gradient: there is no backward to time"] = None
            return None
        scalar: Tensor = value.reshape(())
        return scalar


@contextmanager
def _restored(model: nn.Module, optimizer: torch.optim.Optimizer | None, inputs: Any) -> Iterator[None]:
    """Restores parameters, gradients, the optimizer's state and the gradients of the inputs; `state_restored` restores the rest. The model
    is not copied: the loss function may refer to it, and some models cannot be copied. The optimizer uses a copy of its state."""
    leaves = {id(p): p for p in (*model.parameters(), *(optimizer_parameters(optimizer) if optimizer is not None else ()))}
    leaves |= {id(tensor): tensor for _, tensor in find_tensors(inputs) if tensor.is_leaf and tensor.requires_grad}
    with ExitStack() as undo:
        if optimizer is not None:
            written = tuple(p for p in leaves.values() if not nn.parameter.is_lazy(p))
            undo.enter_context(preserve_versions(written))
            for leaf in written:
                undo.callback(leaf.detach().copy_, leaf.detach().clone())
            state, groups = optimizer.state, optimizer.param_groups
            undo.callback(_restore_optimizer, optimizer, state, groups, [dict(group) for group in groups])
            copied = type(state)(state.default_factory)
            for key, value in state.items():
                copied[key] = copy.deepcopy(value, {id(p): p for p in leaves.values()})
            optimizer.state = copied
        for leaf in leaves.values():
            undo.callback(setattr, leaf, "grad", leaf.grad)
        undo.enter_context(state_restored([model]))
        for leaf in leaves.values():
            leaf.grad = None
        yield


def _restore_optimizer(optimizer: torch.optim.Optimizer, state: Any, groups: list[dict[str, Any]], contents: list[dict[str, Any]]) -> None:
    optimizer.state, optimizer.param_groups = state, groups
    for group, content in zip(groups, contents):
        group.clear()
        group.update(content)
