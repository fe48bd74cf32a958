"""Hooks: registers hooks, puts them on a model, runs them, and keeps what came of it, within bounds."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from sonde.conditions import STEP_NAMES
from sonde.errors import SondeError
from sonde.statistics import reductions
from sonde.statistics.tensor_utils import read_scalar
from sonde.tools.fast_statistics import as_tensor
from sonde.tools.hooks.alerts import Alert
from sonde.tools.hooks.attachment import Attachment, checked
from sonde.tools.hooks.hook import AlertSeverity, Hook, HookTrigger
from sonde.tools.hooks.hook_actions import Desk, HookStatus, Registered, kept
from sonde.tools.hooks.hook_builder import chosen
from sonde.tools.hooks.hook_events import HookEvent, HookResult, TrainingStopped
from sonde.tools.hooks.module_hooks import in_backward
from sonde.tools.hooks.tensor_snapshots import make_directory
from sonde.tools.hooks.webhook import TIMEOUT_S, Webhook
from sonde.tools.layer_patterns import require_name

MAX_RESULTS = 1000

_log = logging.getLogger("sonde")


class Hooks:
    """`hooks.register_hook(hook)`, then `with hooks.attach(model, optimizer):` around the loop, or `hooks.execute_hooks(…)` by hand.

    A hook that raises never reaches the training: it is logged once, taken out after a few failures, and `status()` shows it.
    """

    def __init__(self, *, max_results: int = MAX_RESULTS) -> None:
        if isinstance(max_results, bool) or not isinstance(max_results, int) or max_results < 1:
            raise SondeError(f"max_results is a whole number from 1 on, such as {MAX_RESULTS}, not {max_results!r}.")
        self._desk = Desk()
        self._hooks: dict[str, Registered] = {}
        self._names: frozenset[str] = frozenset()  # what conditions ask about
        self._results: deque[HookResult] = deque(maxlen=max_results)
        self._num_registered = 0
        self._attachment: Attachment | None = None
        self._plan: dict[tuple[str, bool], list[Registered]] = {}  # who stands on which layer, forward or backward
        self._num_active = 0  # when last planned
        self._told: dict[str, float] = {}
        self._step = 0
        self._is_updating = False  # an optimizer's step is under way: no point to stop at
        self._thread = threading.local()

    # -- what there is -----------------------------------------------------------------------------

    def register_hook(self, hook: Hook) -> str:
        """From now on it fires. The id is for `remove_hook` and appears in results."""
        if not isinstance(hook, Hook):
            raise SondeError(f"register_hook needs a Hook, as HookBuilder(name)….build() makes it, not {type(hook).__name__}.")
        if hook.directory is not None:
            make_directory(hook.directory)
        self._num_registered += 1
        registered = Registered(f"{hook.name}-{self._num_registered}", hook)
        self._hooks[registered.id] = registered
        self._changed()
        return registered.id

    def remove_hook(self, hook_id: str) -> None:
        """It fires no more; torch hooks that only it needed are removed."""
        self._hooks.pop(require_name(hook_id, self._hooks, "hook"))
        self._changed()

    def status(self) -> dict[str, HookStatus]:
        """Every registered hook by its id. `print(*hooks.status().values(), sep="\\n")` is for reading."""
        return {each.id: each.status for each in self._hooks.values()}

    @property
    def results(self) -> list[HookResult]:
        """What hooks did, oldest first: the last of them, without any tensor."""
        return list(self._results)

    @property
    def alerts(self) -> list[Alert]:
        """Every alert once, with how often it was raised."""
        return self._desk.alerts.history

    @property
    def webhooks(self) -> list[Webhook]:
        """How sending went: `num_sent`, `num_failed`, `num_dropped`."""
        return self._desk.alerts.webhooks

    @property
    def gradients(self) -> dict[str, list[tuple[int, float]]]:
        """What TRACK_GRADIENTS kept: by layer, the step and the norm of the gradient, oldest first."""
        return {layer: list(norms) for layer, norms in self._desk.gradients.items()}

    @property
    def current_step(self) -> int:
        """The step under way, from 0."""
        return self._step

    @property
    def stop_requested(self) -> TrainingStopped | None:
        """What will be raised at the next safe point, if anything."""
        return self._desk.stop

    @property
    def on_pause(self) -> Callable[[HookEvent], object] | None:
        """Who is called when a hook pauses the training. It returns when the training may go on."""
        return self._desk.on_pause

    @on_pause.setter
    def on_pause(self, function: Callable[[HookEvent], object] | None) -> None:
        if function is not None and not callable(function):
            raise SondeError(f"on_pause must be a function of one event, or None, not {function!r}.")
        self._desk.on_pause = function

    def send_alerts_to(
        self, target: Callable[[Alert], object] | str, *, at_least: AlertSeverity = AlertSeverity.INFO, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Besides the log: to a function, or as JSON to a web address, from a thread that the training never waits for."""
        self._desk.alerts.send_to(target, at_least=chosen(at_least, AlertSeverity, "severity"), timeout_s=timeout_s)

    # -- on a model --------------------------------------------------------------------------------

    def attach(self, model: nn.Module, optimizer: Any = None) -> Self:
        """Put torch hooks on the layers that some hook selects. The first optimizer's steps are the steps; without one, call `step()`."""
        optimizers = checked(model, optimizer)
        if self._attachment is not None:
            raise SondeError("these hooks are attached to a model already. Call detach() first, or make another Hooks().")
        self._attachment = Attachment(model, optimizers, self)
        self._attachment.connect(self._before_update, self._after_update)
        self._changed()
        return self

    def detach(self) -> None:
        """Remove every torch hook. Results, alerts and counts stay; detaching twice is fine."""
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.remove()
        self._plan, self._desk.stop, self._is_updating = {}, None, False
        self._desk.alerts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.detach()

    def log(self, **values: Any) -> None:
        """Tell numbers that conditions may ask about: `hooks.log(loss=loss, epoch=epoch)`, best before the optimizer's step."""
        for name, value in values.items():
            if name in STEP_NAMES:
                self._told[name] = _number(name, value)

    def step(self) -> None:
        """One step is over, in a loop without an optimizer. Raises `TrainingStopped` where a hook asked for it."""
        if self._attachment is not None and self._attachment.has_optimizer:
            raise SondeError("steps are counted by the attached optimizer. Leave step() out, or attach the model without its optimizer.")
        self._ask_per_step()
        self._end_step()
        self._stop_if_asked()

    def execute_hooks(
        self,
        layer_name: str,
        tensor: Any,
        shape: Sequence[int] | None = None,
        is_forward: bool = True,
        metadata: Mapping[str, Any] | None = None,
    ) -> list[HookResult]:
        """Run the hooks that concern this layer on a tensor, array or list, as if the layer had put it out (or got it as a gradient).

        Numbers in `metadata` named step, epoch, loss, lr or grad_norm are what conditions see.
        """
        if not isinstance(layer_name, str):
            raise SondeError(f"a layer is named by a text, not by {layer_name!r}.")
        given = as_tensor(tensor)
        wanted = None if shape is None else tuple(int(size) for size in shape)
        if wanted is not None and math.prod(wanted) != given.numel():
            raise SondeError(f"{layer_name!r} was given {given.numel()} numbers, but shape={wanted} has {math.prod(wanted)}.")
        known = {name: _number(name, value) for name, value in (metadata or {}).items() if name in STEP_NAMES}
        step = int(known.get("step", self._step))
        concerned = [each for each in self._hooks.values() if _concerns(each.hook, layer_name, is_forward) and each.is_due(step)]
        event = HookEvent(
            layer_name, given, self._known(step, is_forward) | known, step=step, is_forward=is_forward, shape=wanted, metadata=metadata
        )
        return self._run(concerned, event)

    # -- what taps tell ----------------------------------------------------------------------------

    def wants(self, layer: str, *, is_forward: bool) -> bool:
        """Whether a hook on this layer is due in this step. Nothing is, inside of a callback."""
        return not self._is_busy and any(each.is_due(self._step) for each in self._plan.get((layer, is_forward), ()))

    def passed(self, layer: str, item: str, tensor: torch.Tensor, *, is_forward: bool, step: int) -> None:
        """A tensor went by."""
        due = [each for each in self._plan.get((layer, is_forward), ()) if each.is_due(step)]
        if any(each.hook.trigger is HookTrigger.ON_ANOMALY for each in due) and reductions.check_finite([tensor])[1] < 0:
            due = [each for each in due if each.hook.trigger is not HookTrigger.ON_ANOMALY]  # nearly always: one fast read, no more
        if due:
            self._run(due, HookEvent(layer, tensor, self._known(step, is_forward), step=step, is_forward=is_forward, item=item))

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        return getattr(self._thread, "is_busy", False)

    def _changed(self, *, by_itself: bool = False) -> None:
        """Hooks came, went or finished: what they need is put on, what nobody needs is taken off."""
        active = [each for each in self._hooks.values() if each.state == "active"]
        self._num_active = len(active)
        self._names = frozenset().union(*(each.hook.condition.names for each in active if each.hook.condition is not None))
        for each in self._hooks.values():
            each.layers = ()
        if self._attachment is not None:
            plan = self._attachment.plan(active, self._stop_if_asked, careful=by_itself)
            both = [(layer, is_forward) for layer in plan for is_forward in (True, False)]
            self._plan = {key: [each for each in plan[key[0]] if _listens(each.hook, key[1])] for key in both}

    def _known(self, step: int, is_forward: bool) -> dict[str, float]:
        known = {**self._told, "step": float(step), "forward": float(is_forward), "backward": float(not is_forward)}
        known.pop("grad_norm", None)  # the one that was told is of the whole model
        return self._with_learning_rate(known)

    def _with_learning_rate(self, known: dict[str, float]) -> dict[str, float]:
        if "lr" in self._names and self._attachment is not None:
            rate = self._attachment.learning_rate()
            if rate is not None:
                known["lr"] = rate
        return known

    def _run(self, due: Sequence[Registered], event: HookEvent) -> list[HookResult]:
        if not due or self._is_busy:  # a callback may call the model
            return []
        results: list[HookResult] = []
        self._thread.is_busy = True
        try:
            with torch.no_grad():
                for each in due:
                    self._one(each, event, results)
        finally:
            self._thread.is_busy = False
        self._results.extend(replace(result, value=kept(result.value)) for result in results)
        return results

    def _one(self, registered: Registered, event: HookEvent, results: list[HookResult]) -> None:
        action = registered.hook.actions[0]
        value, error = None, ""
        try:
            if not registered.holds(event) or not registered.claim():
                return
            for action in registered.hook.actions:
                value = self._desk.perform(action, registered, event)
                results.append(_result(registered, action, event, value))
        except TrainingStopped as stop:  # a callback may ask for the end in this way
            value = self._desk.ask_to_stop(str(stop).rstrip("."), registered.hook, event)
            results.append(_result(registered, action, event, value))
        except Exception as failure:
            registered.failed(failure, event)
            error = registered.last_error
            results.append(_result(registered, action, event, None, error))

    # -- steps -------------------------------------------------------------------------------------

    def _before_update(self, optimizer: int) -> None:
        """An optimizer is about to step: hooks that speak of the whole step are asked, and it is a safe point to stop."""
        self._ask_per_step(optimizer)
        self._stop_if_asked()
        self._is_updating = True

    def _after_update(self, optimizer: int) -> None:
        self._is_updating = False
        if optimizer == 0:
            self._end_step()
        self._stop_if_asked()

    def _ask_per_step(self, optimizer: int = 0) -> None:
        try:
            on_anomaly = [each for each in self._hooks.values() if each.hook.trigger is HookTrigger.ON_ANOMALY and each.is_due(self._step)]
            if on_anomaly and self._attachment is not None:
                for name, gradient in self._attachment.bad_gradients(optimizer):
                    concerned = [each for each in on_anomaly if _concerns(each.hook, name, is_forward=False)]
                    self._run(concerned, HookEvent(name, gradient, self._known(self._step, False), step=self._step, is_forward=False))
            due = [each for each in self._hooks.values() if each.hook.is_per_step and each.is_due(self._step)]
            if due and optimizer == 0:
                known = self._with_learning_rate({**self._told, "step": float(self._step)})
                asked = any(each.hook.condition is not None and "grad_norm" in each.hook.condition.names for each in due)
                norm = self._attachment.gradient_norm() if self._attachment is not None and asked else None
                known |= {"grad_norm": norm} if norm is not None else {}
                self._run(due, HookEvent("", None, known, step=self._step))
        except Exception as error:
            _log.warning("sonde: hooks could not be asked in step %d (%s: %s).", self._step, type(error).__name__, error)

    def _end_step(self) -> None:
        self._step += 1
        try:
            if sum(each.state == "active" for each in self._hooks.values()) != self._num_active:
                self._changed(by_itself=True)
        except Exception as error:
            _log.warning("sonde: finished hooks could not be taken off (%s: %s).", type(error).__name__, error)

    def _stop_if_asked(self) -> None:
        """The safe points: before an update, after it, at the model's next call. Never within an update or a backward pass."""
        stop = self._desk.stop
        if stop is None or self._is_updating or in_backward():
            return
        self._desk.stop = None
        stop.num_updates = self._step
        raise stop


def _listens(hook: Hook, is_forward: bool) -> bool:
    return hook.on_forward if is_forward else hook.on_backward


def _concerns(hook: Hook, layer: str, is_forward: bool) -> bool:
    return _listens(hook, is_forward) and (hook.patterns is None or hook.patterns.matches(layer))


def _number(name: str, value: Any) -> float:
    try:
        number = read_scalar(value)
        return float(value) if number is None else number
    except (TypeError, ValueError, RuntimeError):
        raise SondeError(f"{name} must be a number or a tensor with one element, not {value!r:.100}.") from None


def _result(registered: Registered, action: Any, event: HookEvent, value: Any, error: str = "") -> HookResult:
    stats = event._stats  # what was measured anyway: nobody measures for a result alone
    return HookResult(
        registered.id, action, event.layer, event.step, event.is_forward, event.item, event.shape, stats, value, error
    )
