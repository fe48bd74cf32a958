"""Running a model by ourselves: steps on the user's own inputs, after which everything is as before, to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter, perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn

from sonde.capture.gradient_state import optimizer_parameters
from sonde.capture.patches import suspended
from sonde.capture.torch_internals import is_compiled
from sonde.errors import SondeError
from sonde.profiler import ProfileReport
from sonde.profiler.build_report import assemble, dtype_and_device
from sonde.profiler.module_timers import Doors
from sonde.profiler.step_recording import Kind, Recorded, Recorder, plan
from sonde.profiler.time_trace import Read
from sonde.profiler.undisturbed_steps import num_quiet
from sonde.replay.restore_state import state_restored
from sonde.statistics.tensor_utils import find_tensors

PATIENCE_S = 1.0  # at most, and as long again at most, for more steps where other programs disturbed some

Loss = Callable[[Any], Tensor]


def measure_alone(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer | None,
    warmup: int,
    repeats: int,
    backward: bool,
    read: Read | None = None,
) -> tuple[ProfileReport, Recorded]:
    """The report, and what it was made from. `read` is the clock, where another than the wall's is wanted."""
    compiled = any(is_compiled(module) for module in model.modules())
    body = getattr(model, "_orig_mod", model)
    dtype, device = dtype_and_device([*body.parameters(), *(tensor for _, tensor in find_tensors((args, kwargs)))])
    with ExitStack() as undo:
        undo.enter_context(suspended())  # a session that watches this model must not take this for training
        if compiled:
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        undo.enter_context(_kept(body, optimizer, (args, kwargs)))
        doors = Doors({"": body}, eager=True)
        recorder = Recorder(doors, left_out=[*body.parameters(), *body.buffers()], read=read or clock(device))
        step = _Step(body, args, kwargs, loss, optimizer, recorder, backward)
        began = perf_counter()
        for kind in plan(warmup, repeats):
            step.run(kind)
        until = perf_counter() + min(perf_counter() - began, PATIENCE_S)
        while num_quiet(recorder.recorded) < repeats and perf_counter() < until:
            step.run("bare")
            step.run("timed")
        if not backward:
            step.notes.append("the forward alone was timed, without gradients")
        if compiled:
            step.notes.append("compiled parts were run uncompiled: inside a compiled model there are no layers to time")
        report = assemble(recorder.recorded, doors, title=type(body).__name__, dtype=dtype, device=device, notes=step.notes)
        return report, recorder.recorded


def clock(device: torch.device) -> Callable[[], int]:
    """On a device that works behind the program's back, a reading waits until it is done."""
    if device.type == "cpu" or not torch.accelerator.is_available():
        return perf_counter_ns

    def waiting() -> int:  # pragma: no cover - no device here to try it on
        torch.accelerator.synchronize(device)
        return perf_counter_ns()

    return waiting


class _Step:
    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        loss: Loss | None,
        optimizer: torch.optim.Optimizer | None,
        recorder: Recorder,
        backward: bool,
    ) -> None:
        self._model, self._args, self._kwargs, self._loss = model, args, kwargs, loss
        self._optimizer, self._recorder, self._backward = optimizer, recorder, backward
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.notes: list[str] = []

    def run(self, kind: Kind) -> None:
        recorder, done = self._recorder, False
        recorder.begin_step(kind)
        try:
            with torch.set_grad_enabled(self._backward):
                self._once()
            done = True
        finally:
            recorder.end_step(keep=done)

    def _once(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        try:
            output = self._model(*self._args, **self._kwargs)
        except Exception as error:
            raise SondeError(
                f"The model could not be run with these inputs: {type(error).__name__}: {error}.\n"
                "Give what its forward takes: a tensor, a tuple of arguments, or a dict of keyword arguments."
            ) from error
        if self._backward:
            loss = self._scalar(output)
            del output
            if loss is None:
                return
            self._recorder.backward_begins(loss)
            try:
                loss.backward()  # type: ignore[no-untyped-call]
            finally:
                self._recorder.backward_ended()
        if self._optimizer is not None:
            self._recorder.begin("optimizer")
            self._optimizer.step()
            self._recorder.end("optimizer")

    def _scalar(self, output: Any) -> Tensor | None:
        """The user's loss; or the model's own; or the sum of what it puts out, whose gradient is as expensive as any other."""
        if self._loss is not None:
            value: Any = self._loss(output)
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise SondeError(
                    "The loss function must give one number that depends on the parameters, "
                    "for instance loss=lambda output: cross_entropy(output, targets)."
                )
        else:
            value = getattr(output, "loss", None)
            if not isinstance(value, Tensor) or value.numel() != 1:
                parts = [tensor for _, tensor in find_tensors(output) if tensor.requires_grad]
                value = sum(part.abs().sum() if part.is_complex() else part.sum() for part in parts) if parts else None
                if parts:
                    self._note("no loss was given: the sum of the outputs was differentiated instead")
        if value is None or not value.requires_grad:
            self._note("nothing that the model puts out depends on a parameter that wants a gradient: there is no backward to time")
            return None
        scalar: Tensor = value.reshape(())
        return scalar

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


@contextmanager
def _kept(model: nn.Module, optimizer: torch.optim.Optimizer | None, inputs: Any) -> Iterator[None]:
    """Parameters, gradients, the optimizer's state and the gradients of inputs; the rest is kept by `state_restored`.

    The model is not copied: a loss may hold on to it, and some models cannot be. The optimizer works on a copy of its state.
    """
    leaves = {id(p): p for p in (*model.parameters(), *(optimizer_parameters(optimizer) if optimizer is not None else ()))}
    leaves |= {id(tensor): tensor for _, tensor in find_tensors(inputs) if tensor.is_leaf and tensor.requires_grad}
    with ExitStack() as undo:
        if optimizer is not None:
            written = tuple(p for p in leaves.values() if not nn.parameter.is_lazy(p))
            undo.enter_context(torch.autograd.grad_mode._unsafe_preserve_version_counter(written))
            for leaf in written:
                undo.callback(_write, leaf, leaf.detach().clone())
            state, groups = optimizer.state, optimizer.param_groups
            undo.callback(_put_back, optimizer, state, groups, [dict(group) for group in groups])
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


def _write(leaf: Tensor, content: Tensor) -> None:
    with torch.no_grad():
        leaf.detach().copy_(content)


def _put_back(optimizer: torch.optim.Optimizer, state: Any, groups: list[dict[str, Any]], contents: list[dict[str, Any]]) -> None:
    optimizer.state, optimizer.param_groups = state, groups
    for group, content in zip(groups, contents):
        group.clear()
        group.update(content)
