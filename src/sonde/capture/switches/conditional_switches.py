"""Metrics of the user's (`session.metric`), and conditions that turn switches on for a while (`session.when`).

Both are evaluated between two steps. An error in a user's function does not reach the training; a function that keeps failing is disabled.
"""

import inspect
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sonde.capture.incident_types import Incident, SpikeIncident
from sonde.capture.logged_values import MAX_REFUSED, read_logged
from sonde.capture.probes.probe import Probe, ProbeContext
from sonde.capture.step_profiler.step_profiler import MEMORY, SLOW, SLOW_NS, WARMUP
from sonde.capture.switches.debug_switches import Switches
from sonde.capture.training_callbacks import suspended
from sonde.condition_expressions import STEP_NAMES, Condition, parse_condition
from sonde.errors import SondeError
from sonde.events import ConditionMet, NotMeasured

NAMED = ("loss_spike", "gradient_spike", "nonfinite", "slow_step")

_log = logging.getLogger("sonde")


@dataclass(slots=True)
class Trigger:
    """A condition, and the switches that it turns on."""

    text: str
    condition: Condition | None  # None: one of `NAMED`
    then: tuple[str, ...]
    for_steps: int
    until: int = -1  # the last step that the switches are on for
    turned_on: tuple[str, ...] = ()  # those that were off before


class Triggers:
    """Metrics of the user's and conditions that turn switches on, evaluated between two steps. `session` is passed to metrics."""

    def __init__(self, switches: Switches, session: object) -> None:
        self._switches, self._session = switches, session
        self._metrics: dict[str, tuple[Callable[[], Any], int]] = {}  # by name: the function of the user's, called every so many steps
        self._refused: set[str] = set()  # names of metrics that returned something that is not one number
        self._triggers: list[Trigger] = []
        self.holding: set[str] = set()  # named conditions that hold in the running step
        self._usual_ns = 0.0

    @property
    def has_any(self) -> bool:
        return bool(self._metrics or self._triggers)

    def add_metric(self, name: str, function: Callable[..., Any], every: int) -> None:
        if not isinstance(name, str) or not name:
            raise SondeError(f'a metric has a name, for instance "accuracy", not {name!r}.')
        if not callable(function):
            raise SondeError(f"the metric {name!r} needs a function that returns a number, not {type(function).__name__}.")
        _check_steps("every", every)
        self._metrics[name] = (partial(function, self._session) if _takes_one(function) else function, every)

    def add_trigger(self, condition: str, then: tuple[str, ...], for_steps: int) -> None:
        _check_steps("for_steps", for_steps)
        parsed = None if condition in NAMED else parse_condition(condition)
        unknown = sorted(parsed.names - set(STEP_NAMES)) if parsed is not None else []
        if unknown:
            raise SondeError(
                f"{unknown[0]} is about the tensor of a layer, and this condition is asked of whole steps.\n"
                f"It may use: {', '.join(STEP_NAMES)}; or be one of {', '.join(NAMED)}."
            )
        self._triggers.append(Trigger(condition, parsed, then, for_steps))

    def on_step_end(self, context: ProbeContext, training_ns: int) -> None:
        step = context.state.number
        try:
            for name, (function, every) in self._metrics.items():
                if step % every == 0:
                    self._measure(context, name, function)
            if self._triggers:
                self._update_named(context, training_ns)
                for trigger in self._triggers:
                    self._update(context, trigger)
        finally:
            self.holding.clear()

    def _measure(self, context: ProbeContext, name: str, function: Callable[[], Any]) -> None:
        if context.isolation.is_disabled("metric", name):
            return
        try:
            with suspended():  # a metric may call the model: that is not the training
                logged = read_logged({name: function()})
                numbers = logged.numbers | {each: float(value.item()) for each, value in logged.on_device.items()}
            if numbers:
                context.recorder.log(context.state.number, numbers)
            texts = dict.fromkeys(logged.texts, "it was a text, and one number per step is recorded: session.log records texts")
            for each, reason in (texts | logged.refused).items():
                self._warn_refused(context, each, reason)
        except Exception as error:
            context.isolation.report("metric", name, error)

    def _warn_refused(self, context: ProbeContext, name: str, reason: str) -> None:
        """What a metric returned is not recorded: said once for each name, here and in the report."""
        if name not in self._refused and len(self._refused) < MAX_REFUSED:
            self._refused.add(name)
            _log.warning("sonde: session.metric does not record %r: %s.", name, reason)
            context.recorder.emit(NotMeasured(probe="session.metric", where=name, reason=reason), context.state.number)

    def _update_named(self, context: ProbeContext, training_ns: int) -> None:
        """Which of the named conditions hold in the step that ends."""
        if context.state.nonfinite:
            self.holding.add("nonfinite")
        is_settled = context.state.number > WARMUP
        if is_settled and training_ns > SLOW * self._usual_ns + SLOW_NS:
            self.holding.add("slow_step")
        else:
            self._usual_ns += (1 - MEMORY if is_settled else 1) * (training_ns - self._usual_ns)

    def _update(self, context: ProbeContext, trigger: Trigger) -> None:
        step, scalars = context.state.number, context.state.scalars
        values = {name: scalars[name] for name in ("loss", "lr", "grad_norm") if not math.isnan(scalars[name])} | {"step": float(step)}
        holds = trigger.text in self.holding if trigger.condition is None else trigger.condition.decide(values)
        if holds:
            self._turn_on(context, trigger)
        elif 0 <= trigger.until <= step:
            self._switches.request(trigger.turned_on, False, f"when {trigger.text}: over")
            trigger.until, trigger.turned_on = -1, ()

    def _turn_on(self, context: ProbeContext, trigger: Trigger) -> None:
        step = context.state.number
        if trigger.until < 0:
            _log.info("sonde: %s holds at step %d: %s on for %d steps.", trigger.text, step, ", ".join(trigger.then), trigger.for_steps)
            event = ConditionMet(condition=trigger.text, switches=list(trigger.then), for_steps=trigger.for_steps)
            context.recorder.emit(event, step)
        off = tuple(name for name in trigger.then if not self._switches.is_on(name))
        if trigger.until < 0 or off:
            trigger.turned_on = tuple(dict.fromkeys((*trigger.turned_on, *off)))
            self._switches.request(off, True, f"when {trigger.text}")
        trigger.until = step + trigger.for_steps


class TriggerProbe(Probe):
    """Evaluates metrics and triggers at the end of each step; spikes are incidents."""

    name = "triggers"

    def __init__(self, context: ProbeContext, triggers: Triggers) -> None:
        super().__init__(context)
        self._triggers = triggers

    @property
    def is_enabled(self) -> bool:
        return self._triggers.has_any

    def on_incident(self, incident: Incident, is_confirmed: bool) -> None:
        if isinstance(incident, SpikeIncident):
            self._triggers.holding.add(f"{incident.what}_spike")

    def on_step_timed(self, training_ns: int) -> None:
        self._triggers.on_step_end(self._context, training_ns)


def _takes_one(function: Callable[..., Any]) -> bool:
    """fn(session) rather than fn()."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.default is each.empty and each.kind in positional for each in parameters)


def _check_steps(name: str, num: int) -> None:
    if not isinstance(num, int) or isinstance(num, bool) or num < 1:
        raise SondeError(f"{name} is a number of steps from 1 on, not {num!r}.")
