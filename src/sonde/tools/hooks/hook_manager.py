"""Hooks: registers hooks, attaches them to a model, runs them, and stores a bounded history of results."""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from sonde.condition_expressions import STEP_NAMES
from sonde.errors import SondeError, require_count
from sonde.layer_name_patterns import require_name
from sonde.render.safe_write import make_folder
from sonde.statistics import reductions
from sonde.statistics.find_tensors import read_scalar
from sonde.tools.hook_that_never_raises import require_module
from sonde.tools.hooks.alerts import TIMEOUT_S, Alert, Webhook
from sonde.tools.hooks.attach_hooks_to_layers import Attachment, in_backward
from sonde.tools.hooks.hook_actions import ActionContext, HookStatus, RegisteredHook, stored_value
from sonde.tools.hooks.hook_builder import AlertSeverity, HookSpec, HookTrigger, parse_choice
from sonde.tools.hooks.hook_events import HookEvent, HookResult, TrainingStopped
from sonde.tools.tensors.describe_tensor import as_tensor

MAX_RESULTS = 1000

_log = logging.getLogger("sonde")


class Hooks:
    """Runs hooks on a model: `register_hook(hook)`, then `with hooks.attach(model, optimizer):` around the loop, or `execute_hooks(…)`. An
    exception in a hook never reaches the training: it is logged once, and after a few failures the hook is disabled (see `status()`).
    `read_loss` returns the loss for conditions, where the user logs none; a session passes its own."""

    def __init__(self, *, max_results: int = MAX_RESULTS, read_loss: Callable[[], float | None] = lambda: None) -> None:
        self._context = ActionContext()
        self._hooks: dict[str, RegisteredHook] = {}
        self._names: frozenset[str] = frozenset()  # names used in conditions
        self._results: deque[HookResult] = deque(maxlen=require_count(max_results, "max_results"))
        self._num_registered = 0
        self._attachment: Attachment | None = None
        self._plan: dict[tuple[str, bool], list[RegisteredHook]] = {}  # hooks by layer and pass (True: forward)
        self._num_active = 0  # at the last update of the plan
        self._logged: dict[str, float] = {}  # values from `log`
        self._read_loss = read_loss
        self._step = 0
        self._is_updating = False  # an optimizer step is running, so training cannot stop here
        self._thread = threading.local()

    def register_hook(self, hook: HookSpec) -> str:
        """Activates a hook. Returns its id, which `remove_hook` takes and results contain."""
        if not isinstance(hook, HookSpec):
            raise SondeError(f"register_hook needs a hook from HookBuilder(name)….build(), not {type(hook).__name__}.")
        if hook.directory is not None:
            make_folder(hook.directory)
        self._num_registered += 1
        registered = RegisteredHook(f"{hook.name}-{self._num_registered}", hook)
        self._hooks[registered.id] = registered
        self._update_plan()
        return registered.id

    def remove_hook(self, hook_id: str) -> None:
        """Removes a hook, and the torch hooks that only it needed."""
        self._hooks.pop(require_name(hook_id, self._hooks, "hook"))
        self._update_plan()

    def status(self) -> dict[str, HookStatus]:
        """State and counters of every registered hook by id; `print(*hooks.status().values(), sep="\\n")` prints them."""
        return {each.id: each.status for each in self._hooks.values()}

    @property
    def results(self) -> list[HookResult]:
        """The latest results, oldest first, without tensors."""
        return list(self._results)

    @property
    def alerts(self) -> list[Alert]:
        """Every alert once, with the number of times it was raised."""
        return self._context.alerts.history

    @property
    def webhooks(self) -> list[Webhook]:
        """The web addresses of `send_alerts_to`, with `num_sent`, `num_failed` and `num_dropped`."""
        return self._context.alerts.webhooks

    @property
    def gradients(self) -> dict[str, list[tuple[int, float]]]:
        """Results of TRACK_GRADIENTS: by layer, pairs of step and gradient norm, oldest first."""
        return {layer: list(norms) for layer, norms in self._context.gradients.items()}

    def clear(self) -> None:
        """Drops stored results, alerts and gradient norms. Hooks stay registered, with their counters."""
        self._results.clear()
        self._context.alerts.clear()
        self._context.gradients.clear()

    @property
    def current_step(self) -> int:
        """The current step, from 0."""
        return self._step

    @property
    def stop_requested(self) -> TrainingStopped | None:
        """The exception that the next safe point raises, or None."""
        return self._context.stop

    @property
    def on_pause(self) -> Callable[[HookEvent], object] | None:
        """The function that is called when a hook pauses the training. Training continues when it returns."""
        return self._context.on_pause

    @on_pause.setter
    def on_pause(self, function: Callable[[HookEvent], object] | None) -> None:
        if function is not None and not callable(function):
            raise SondeError(f"on_pause must be a function of one event, or None, not {function!r}.")
        self._context.on_pause = function

    def send_alerts_to(
        self, target: Callable[[Alert], object] | str, *, at_least: AlertSeverity = AlertSeverity.INFO, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Delivers alerts to a function, or as JSON to a web address from a background thread, in addition to the log."""
        self._context.alerts.send_to(target, at_least=parse_choice(at_least, AlertSeverity, "severity"), timeout_s=timeout_s)

    def attach(self, model: nn.Module, optimizer: Any = None) -> Self:
        """Registers torch hooks on the selected layers. The first optimizer counts the steps; without one, call `step()`, or attach the
        model once more with its optimizer."""
        require_module(model, "attach", "Pass the model itself.")
        optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
        for each in optimizers:
            if not isinstance(each, torch.optim.Optimizer):
                raise SondeError(f"optimizer must be a torch.optim.Optimizer or a list of them, not {type(each).__name__}.")
        if self.needs_optimizer and optimizers and self._attachment is not None and self._attachment.is_of(model):
            self._attachment.add_optimizers(optimizers)
            return self
        if self._attachment is not None:
            raise SondeError("these hooks are already attached to a model. Call detach() first, or create another Hooks().")
        self._attachment = Attachment(model, optimizers, self)
        self._update_plan()
        return self

    @property
    def needs_optimizer(self) -> bool:
        """True if the hooks are attached to a model without an optimizer: the steps are then counted by `step()`."""
        return self._attachment is not None and not self._attachment.has_optimizer

    def detach(self) -> None:
        """Removes all torch hooks. Results, alerts and counters stay; a second call does nothing."""
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.remove()
        self._plan, self._context.stop, self._is_updating = {}, None, False
        self._context.alerts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def log(self, **values: Any) -> None:
        """Sets values for conditions: `hooks.log(loss=loss, epoch=epoch)`, best before the optimizer step."""
        for name, value in values.items():
            if name in STEP_NAMES:
                self._logged[name] = _number(name, value)

    def step(self) -> None:
        """Ends a step in a loop without an optimizer. Raises `TrainingStopped` if a hook requested it."""
        if self._attachment is not None and self._attachment.has_optimizer:
            raise SondeError("the attached optimizer counts the steps. Remove step(), or attach the model without its optimizer.")
        self._run_per_step_hooks()
        self._end_step()
        self.raise_requested_stop()

    def execute_hooks(
        self, layer_name: str, tensor: Any, shape: Sequence[int] | None = None, is_forward: bool = True,
        metadata: Mapping[str, Any] | None = None,
    ) -> list[HookResult]:  # fmt: skip
        """Runs the hooks of this layer on a tensor, array or list, as if it were an output of the layer (or its gradient). Values in
        `metadata` named step, epoch, loss, lr or grad_norm are used by conditions; a hook that is otherwise evaluated once per
        step runs here if they decide it. Returns the results. A hook whose patterns match no
        layer so far is logged once, and `status()` says it."""
        if not isinstance(layer_name, str):
            raise SondeError(f"a layer name is a string, not {layer_name!r}.")
        values = as_tensor(tensor)
        if metadata is not None and not isinstance(metadata, Mapping):
            raise SondeError(f"metadata holds values by name, such as {{'step': 7}}, not {metadata!r:.100}.")
        wanted = None if shape is None else _checked_shape(shape)
        if wanted is not None and math.prod(wanted) != values.numel():
            raise SondeError(f"the tensor of {layer_name!r} has {values.numel()} elements, but shape={wanted} has {math.prod(wanted)}.")
        known = {name: _number(name, value) for name, value in (metadata or {}).items() if name in STEP_NAMES}
        step = int(known.get("step", self._step))
        due = [
            each
            for each in self._hooks.values()
            if (each.matches(layer_name, is_forward) or each.hook.is_decided_by(known)) and each.is_due(step)
        ]
        known = self._known(step, is_forward) | known
        return self._run(due, HookEvent(layer_name, values, known, step=step, is_forward=is_forward, shape=wanted, metadata=metadata))

    def is_due(self, layer: str, *, is_forward: bool) -> bool:
        """True if a hook on this layer is due in this step. Always False inside of a callback."""
        return not self._is_busy and any(each.is_due(self._step) for each in self._plan.get((layer, is_forward), ()))

    def on_tensor(self, layer: str, item: str, tensor: torch.Tensor, *, is_forward: bool, step: int) -> None:
        """Runs the due hooks on an output or gradient of a layer."""
        due = [each for each in self._plan.get((layer, is_forward), ()) if each.is_due(step)]
        if any(each.hook.trigger is HookTrigger.ON_ANOMALY for each in due) and reductions.check_finite([tensor])[1] < 0:
            due = [each for each in due if each.hook.trigger is not HookTrigger.ON_ANOMALY]  # the usual case: one fast read
        if due:
            self._run(due, HookEvent(layer, tensor, self._known(step, is_forward), step=step, is_forward=is_forward, item=item))

    @property
    def _is_busy(self) -> bool:
        return getattr(self._thread, "is_busy", False)

    def _update_plan(self, *, is_training: bool = False) -> None:
        """Registers the torch hooks that active hooks need and removes the others."""
        active = [each for each in self._hooks.values() if each.state == "active"]
        self._num_active = len(active)
        self._names = frozenset().union(*(each.hook.condition.names for each in active if each.hook.condition is not None))
        for each in self._hooks.values():
            each.layers = ()
        if self._attachment is not None:
            self._plan = self._attachment.update(active, keep_uncalled=is_training)

    def _known(self, step: int, is_forward: bool) -> dict[str, float]:
        known = {**self._step_values(), "step": float(step), "forward": float(is_forward), "backward": float(not is_forward)}
        known.pop("grad_norm", None)  # a logged value is of the whole model, not of this layer
        return known

    def _step_values(self) -> dict[str, float]:
        """What the user logged, and loss and learning rate if a condition uses them."""
        values = dict(self._logged)
        loss = self._read_loss() if "loss" in self._names and "loss" not in values else None
        rate = self._attachment.learning_rate() if "lr" in self._names and self._attachment is not None else None
        return values | {name: value for name, value in (("loss", loss), ("lr", rate)) if value is not None}

    def _run(self, due: Sequence[RegisteredHook], event: HookEvent) -> list[HookResult]:
        if not due or self._is_busy:  # a callback may run the model
            return []
        self._thread.is_busy = True
        try:
            with torch.no_grad():
                results = [result for each in due for result in self._run_one(each, event)]
        finally:
            self._thread.is_busy = False
        self._results.extend(replace(result, value=stored_value(result.value)) for result in results)
        return results

    def _run_one(self, registered: RegisteredHook, event: HookEvent) -> Iterator[HookResult]:
        def result(value: Any, error: str = "") -> HookResult:
            # The statistics only if they were measured: a result does not trigger a measurement.
            place = (event.layer, event.step, event.is_forward, event.item, event.shape)
            return HookResult(registered.id, action, *place, event._stats, value, error)

        action = registered.hook.actions[0]
        try:
            if not registered.applies_to(event) or not registered.claim():
                return
            for action in registered.hook.actions:
                yield result(self._context.run_action(action, registered, event))
        except TrainingStopped as stop:  # a callback may raise it to stop the training
            yield result(self._context.request_stop(str(stop).rstrip("."), registered.hook, event))
        except Exception as failure:
            registered.record_failure(failure, event)
            yield result(None, registered.last_error)

    def on_optimizer_step_start(self, optimizer: int) -> None:
        """Runs the hooks of the whole step; then it is safe to stop."""
        self._run_per_step_hooks(optimizer)
        self.raise_requested_stop()
        self._is_updating = True

    def on_optimizer_step_end(self, optimizer: int) -> None:
        self._is_updating = False
        if optimizer == 0:
            self._end_step()
        self.raise_requested_stop()

    def _run_per_step_hooks(self, optimizer: int = 0) -> None:
        try:
            on_anomaly = [each for each in self._hooks.values() if each.hook.trigger is HookTrigger.ON_ANOMALY and each.is_due(self._step)]
            if on_anomaly and self._attachment is not None:
                for name, gradient in self._attachment.nonfinite_gradients(optimizer):
                    matching = [each for each in on_anomaly if each.hook.matches(name, is_forward=False)]
                    self._run(matching, HookEvent(name, gradient, self._known(self._step, False), step=self._step, is_forward=False))
            due = [each for each in self._hooks.values() if each.hook.is_per_step and each.is_due(self._step)]
            if due and optimizer == 0:
                known = {**self._step_values(), "step": float(self._step)}
                needs_norm = any(each.hook.condition is not None and "grad_norm" in each.hook.condition.names for each in due)
                norm = self._attachment.gradient_norm() if self._attachment is not None and needs_norm else None
                known |= {"grad_norm": norm} if norm is not None else {}
                self._run(due, HookEvent("", None, known, step=self._step))
        except Exception as error:
            _log.warning("sonde: hooks could not be evaluated in step %d (%s: %s).", self._step, type(error).__name__, error)

    def _end_step(self) -> None:
        self._step += 1
        try:
            if sum(each.state == "active" for each in self._hooks.values()) != self._num_active:
                self._update_plan(is_training=True)
        except Exception as error:
            _log.warning("sonde: finished hooks could not be removed (%s: %s).", type(error).__name__, error)

    def raise_requested_stop(self) -> None:
        """Raises a requested stop at the safe points: before an update, after it, and at the model's next call outside of backward."""
        stop = self._context.stop
        if stop is None or self._is_updating or in_backward():
            return
        self._context.stop = None
        stop.num_updates = self._step
        raise stop


def _checked_shape(shape: Any) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in shape)
    except (TypeError, ValueError):
        raise SondeError(f"shape holds the sizes of the tensor, such as (2, 3), not {shape!r:.100}.") from None


def _number(name: str, value: Any) -> float:
    try:
        number = read_scalar(value)
        return float(value) if number is None else number
    except (TypeError, ValueError, RuntimeError):
        raise SondeError(f"{name} must be a number or a tensor with one element, not {value!r:.100}.") from None
