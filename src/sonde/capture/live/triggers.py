"""Numbers that a user wants to have of a step (`session.metric`), and conditions that turn switches on for a while (`session.when`).

Both are looked at between two steps. What a user's function raises stays here; one that keeps failing is taken out, and that is said.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sonde.capture.error_isolation import Faults
from sonde.capture.live.switches import Switches
from sonde.capture.recorder import Journal
from sonde.capture.step_tracker import Loop
from sonde.conditions import STEP_NAMES, Condition, parse_condition
from sonde.errors import SondeError
from sonde.spike_detection import Leap
from sonde.statistics.tensor_utils import read_scalar

NAMED = ("loss_spike", "gradient_spike", "nonfinite", "slow_step")
SLOW = 2.5  # times the usual step, as for the x-ray: noise of a busy machine is mostly below
SLOW_NS = 2_000_000  # and so much longer
SETTLED = 8  # steps before a step may be slow
MEMORY = 0.9  # of the running average of the usual step

_log = logging.getLogger("sonde")


@dataclass(slots=True)
class Metric:
    name: str
    function: Callable[..., Any]
    takes_session: bool
    every: int


@dataclass(slots=True)
class Trigger:
    text: str
    condition: Condition | None  # None: one of `NAMED`
    then: tuple[str, ...]
    for_steps: int
    until: int = -1  # the last step that the switches are on for
    turned_on: tuple[str, ...] = ()  # those that were off before


class Triggers:
    def __init__(self, switches: Switches, session: object) -> None:
        self._switches, self._session = switches, session
        self._metrics: dict[str, Metric] = {}
        self._triggers: list[Trigger] = []
        self._told: set[str] = set()  # named conditions that hold in the step under way
        self._usual_ns = 0.0
        self._loop: Loop | None = None

    def connect(self, loop: Loop, journal: Journal, faults: Faults) -> None:
        self._loop, self._journal, self._faults = loop, journal, faults
        self._listen()

    def spiked(self, what: str, where: str, leap: Leap, step: int) -> None:
        self._told.add(f"{what}_spike")

    def add_metric(self, name: str, function: Callable[..., Any], every: int) -> None:
        if not isinstance(name, str) or not name:
            raise SondeError(f'a metric has a name, for instance "accuracy", not {name!r}.')
        if not callable(function):
            raise SondeError(f"the metric {name!r} needs a function that returns a number, not {type(function).__name__}.")
        _check_steps("every", every)
        self._metrics[name] = Metric(name, function, _takes_one(function), every)
        self._listen()

    def add_trigger(self, condition: str, then: tuple[str, ...], for_steps: int) -> None:
        _check_steps("for_steps", for_steps)
        read = None if condition in NAMED else parse_condition(condition)
        strange = sorted(read.names - set(STEP_NAMES)) if read is not None else []
        if strange:
            raise SondeError(
                f"{strange[0]} is about the tensor of a layer, and this condition is asked of whole steps.\n"
                f"It may use: {', '.join(STEP_NAMES)}; or be one of {', '.join(NAMED)}."
            )
        self._triggers.append(Trigger(condition, read, then, for_steps))
        self._listen()

    def _listen(self) -> None:
        if self._loop is not None and self.step_ended not in self._switches.also and (self._metrics or self._triggers):
            self._switches.also.append(self.step_ended)
            self._loop.quiet_until_ns = 0

    # -- between two steps -----------------------------------------------------------------------------

    def step_ended(self, step: int, training_ns: int) -> None:
        try:
            for metric in self._metrics.values():
                if step % metric.every == 0:
                    self._measure(metric, step)
            if self._triggers:
                self._decide(step, training_ns)
        finally:
            self._told.clear()

    def _measure(self, metric: Metric, step: int) -> None:
        if ("metric", metric.name) in self._faults.retired:
            return
        loop = self._loop
        assert loop is not None
        loop.deaf, was_deaf = True, loop.deaf  # a metric may call the model: that is not the training
        try:
            number = read_scalar(metric.function(self._session) if metric.takes_session else metric.function())
            if number is not None:
                self._journal.log(step, {metric.name: number})
        except Exception as error:
            self._faults.caught("metric", metric.name, error)
        finally:
            loop.deaf = was_deaf

    def _decide(self, step: int, training_ns: int) -> None:
        scalars = self._journal.scalars
        values = {name: scalars[name] for name in ("loss", "lr", "grad_norm") if not math.isnan(scalars[name])} | {"step": float(step)}
        self._note(step, training_ns)
        for trigger in self._triggers:
            holds = trigger.text in self._told if trigger.condition is None else trigger.condition.decide(values)
            if holds:
                self._turn_on(trigger, step)
            elif 0 <= trigger.until <= step:
                self._switches.ask(trigger.turned_on, False, f"when {trigger.text}: over")
                trigger.until, trigger.turned_on = -1, ()

    def _note(self, step: int, training_ns: int) -> None:
        loop = self._loop
        assert loop is not None
        if loop._guard.said_bad:
            self._told.add("nonfinite")
        if step > SETTLED and training_ns > SLOW * self._usual_ns + SLOW_NS:
            self._told.add("slow_step")
        else:
            self._usual_ns += (1 - MEMORY if step > SETTLED else 1) * (training_ns - self._usual_ns)

    def _turn_on(self, trigger: Trigger, step: int) -> None:
        if trigger.until < 0:
            _log.info("sonde: %s holds at step %d: %s on for %d steps.", trigger.text, step, ", ".join(trigger.then), trigger.for_steps)
            self._journal.event("condition", step, condition=trigger.text, then=list(trigger.then), for_steps=trigger.for_steps)
        off = tuple(name for name in trigger.then if not self._switches.is_on(name))
        if trigger.until < 0 or off:
            trigger.turned_on = tuple(dict.fromkeys((*trigger.turned_on, *off)))
            self._switches.ask(off, True, f"when {trigger.text}")
        trigger.until = step + trigger.for_steps


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
