"""The steps that the step profiler measured in detail, and what a change would save, for the rules about speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

from sonde.events import Severity, StepProfile
from sonde.rules._shared.event_rows import amount
from sonde.run_view import RunView
from sonde.run_view.step_times import MAX_PROFILES, core_share

Item = TypeVar("Item")

FEWEST_PROFILES = 2  # a machine that is busy with another program is not busy twice in the same line
SMALL_MS = 0.1  # a line that takes less each time: a torch call on a small tensor takes 2 to 10 µs, a line has a few of them
BIG_GAIN = 0.4  # from here on it is a warning: to take 1.7 times as long as needed is probably a mistake, less may be a choice


def regular_profiles(view: RunView) -> list[StepProfile]:
    """Profiles of steps that were not chosen because they are slow."""
    return evenly_spaced([profile for profile in view.events(StepProfile) if profile.reason != "slow"])


def slow_profiles(view: RunView) -> list[StepProfile]:
    """Profiles of slow steps that come at equal distances."""
    return evenly_spaced([profile for profile in view.events(StepProfile) if profile.reason == "slow"])


def evenly_spaced(items: Sequence[Item]) -> list[Item]:
    """At most MAX_PROFILES of them, from the first on."""
    return list(items[:: -(-len(items) // MAX_PROFILES) or 1])


def last_machine(profiles: Sequence[StepProfile]) -> Mapping[str, Any]:
    """The threads of torch, the cores and the load, as last measured; empty if they are not known."""
    return profiles[-1].machine if profiles else {}


def too_many_threads(machine: Mapping[str, Any]) -> bool:
    """Whether torch computes with more threads than there are cores; a container may have less than one core."""
    cores = amount(machine, "cores")
    return cores > 0 and amount(machine, "threads") > max(cores, 1)


def step_ms(profile: StepProfile) -> float:
    """What all lines of the step took."""
    return sum(amount(line, "ms") for line in profile.lines) or 1.0


def is_small(line: Mapping[str, Any], profile: StepProfile) -> bool:
    """Whether the line takes little time each time it runs."""
    return core_share(profile.machine) * amount(line, "ms") <= SMALL_MS * amount(line, "num")


def median_shares(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By place, the median over the profiled steps; a place that a step does not name has the share 0 there."""
    places = dict.fromkeys(place for step in shares for place in step)
    return {place: median(step.get(place, 0.0) for step in shares) for place in places}


def severity_of(gain: float) -> Severity:
    return Severity.WARNING if gain >= BIG_GAIN else Severity.INFO


def with_gain(fix: str, gain: float) -> str:
    return f"{fix}; that should save about {100 * gain:.0f} % of the time"
