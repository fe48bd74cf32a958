"""Where the time of a step goes, by a monotonic clock, with Sonde's own time apart.

Every moment belongs to the innermost phase that is under way, so the phases of a step and Sonde's own time add up to the step. Outside of
all phases the time is validation from the first forward without gradients until the training goes on; otherwise it is other.
"""

import math
from collections.abc import Callable
from time import perf_counter_ns

OTHER, VALIDATION = "other_ms", "validation_ms"
_SCALARS = {phase: f"{phase}_ms" for phase in ("data", "transfer", "forward", "backward", "optimizer", "checkpoint")}
_UNKNOWN = dict.fromkeys((*_SCALARS.values(), OTHER, VALIDATION), math.nan)
_TRAINING = ("forward", "backward", "optimizer")  # the start of one of these ends a validation


class PhaseTimer:
    """Adds up the phases of the running step in its scalars."""

    __slots__ = ("_is_validating", "_mark_ns", "_phases", "_scalars", "_step_start_ns", "entered_ns", "is_recorded", "on_change", "own_ns")

    def __init__(self, scalars: dict[str, float], *, is_recorded: bool) -> None:
        self._scalars = scalars
        self.is_recorded = is_recorded
        self.own_ns = 0  # Sonde's time in the running step
        self.on_change: Callable[[str, bool], None] | None = None  # called with the phase, and whether it starts
        self._phases = [OTHER]  # innermost last
        self._mark_ns = 0  # up to here the time is accounted for, on a clock that stands still while Sonde works
        self.entered_ns = 0  # when the callback that runs now was called: since then the time is Sonde's own
        self._step_start_ns = 0
        self._is_validating = False

    def start(self, phase: str) -> None:
        if self.on_change is not None:
            self.on_change(phase, True)
        self._account()
        if self._is_validating and phase in _TRAINING:
            self._is_validating, self._phases[0] = False, OTHER
        self._phases.append(_SCALARS[phase])

    def stop(self, phase: str) -> None:
        """The phase ended when Sonde was called. Sonde's hooks inside of the phase are not part of it."""
        name = _SCALARS[phase]
        if name in self._phases:
            self._account()
            self._phases.remove(name)  # another thread may have started one meanwhile
            if self.on_change is not None:
                self.on_change(phase, False)

    def start_validation(self) -> None:
        """A forward without gradients, before the step has trained anything."""
        if not self._is_validating:
            self._account()
            self._is_validating, self._phases[0] = True, VALIDATION

    def touch(self) -> None:
        """The first step starts with the first call that belongs to a training, not with the script."""
        if not self._step_start_ns:
            self._step_start_ns = self._mark_ns = self.entered_ns
            self.own_ns = 0

    def exclude(self, ns: int) -> None:
        """So much time, until now, belongs to no step: neither to the training nor to what Sonde costs a step."""
        self.entered_ns += ns
        if self._step_start_ns:
            self._step_start_ns += ns
            self._mark_ns += ns

    def restart(self) -> None:
        """After a pause, the running step starts now."""
        del self._phases[1:]
        self._mark_ns = self._step_start_ns = self.entered_ns = perf_counter_ns()
        self.own_ns = 0

    def finish_step(self) -> tuple[int, int]:
        """Write the step's times into its scalars; returns its length and Sonde's part of it. What follows counts to the next step: a frame
        cannot hold the time that its own writing takes."""
        self._account()
        now = perf_counter_ns()
        own_ns = self.own_ns + now - self.entered_ns
        step_ns = now - self._step_start_ns if self._step_start_ns else 0
        del self._phases[1:]
        self._mark_ns = self._step_start_ns = self.entered_ns = now
        self.own_ns = 0
        if not self.is_recorded:
            self._scalars.update(_UNKNOWN)
        self._scalars["step_ms"] = step_ns / 1e6
        self._scalars["sonde_ms"] = own_ns / 1e6
        return step_ns, own_ns

    def _account(self) -> None:
        """The time since the last change belongs to the innermost phase."""
        now = self.entered_ns - self.own_ns
        if self._step_start_ns and now > self._mark_ns:
            self._scalars[self._phases[-1]] += (now - self._mark_ns) / 1e6
        self._mark_ns = now
