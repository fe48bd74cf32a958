"""The steps that the step profiler measured in detail, and what a change would save, for the rules about speed."""

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import median
from typing import Any, TypeVar

from sonde.events import Severity, StepProfile
from sonde.formatting import number
from sonde.rules._shared.read_event_tables import amount
from sonde.rules.rule import Clear, Result, Rule
from sonde.run_view import RunView
from sonde.run_view.step_times import MAX_PROFILES, core_share

Item = TypeVar("Item")

FEWEST_PROFILES = 2  # a machine that is busy with another program is not busy twice in the same line
SMALL_MS = 0.1  # a line that takes less each time: a torch call on a small tensor takes 2 to 10 µs, a line has a few of them
BIG_GAIN = 0.4  # from here on it is a warning: to take 1.7 times as long as needed is probably a mistake, less may be a choice


def step_profiles(view: RunView, *, slow: bool = False) -> list[StepProfile]:
    """Profiles of steps that were not chosen because they are slow, or of those that were."""
    return evenly_spaced([profile for profile in view.events(StepProfile) if (profile.reason == "slow") == slow])


def reason_without_profiles(view: RunView, profiles: Sequence[StepProfile]) -> str:
    """Why the profiled steps say nothing; empty if they do."""
    is_short = len(profiles) < FEWEST_PROFILES
    return view.times.reason_not_evaluated or (f"fewer than {FEWEST_PROFILES} steps were profiled" if is_short else "")


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


def too_often(rule: Rule, view: RunView, phase: str, num: int, fewer: int, *, what: str, verb: str, part: str, call: str) -> Result:
    """A finding if a phase that comes before `num` of the steps should come `fewer` times less often.

    Args:
        what, verb, part: "torch.save", "save", "less at a time": words of the finding.
        call: The kind of call whose line is named.
    """
    times, share = view.times, view.times.share(phase)
    gain = share * (1 - 1 / fewer)
    if num < 2 or not times.is_worth(gain):
        return Clear()
    every = times.num / num
    return rule.finding(
        severity_of(gain),
        times.first_step,
        cause=f"{100 * share:.0f} % of the time is {what}{view.call_sites.at(call)}: it comes every {number(round(every, 1))} steps and "
        f"takes {number(times.totals[phase] / num)} ms, a training step {number(times.usual_ms())} ms",
        fix=with_gain(f"{verb} {fewer} times less often (every {ceil(every * fewer)} steps), or {part}", gain),
        evidence={
            "gain": gain,
            f"{phase}_share": share,
            f"num_{phase}s": num,
            "steps_between": every,
            "times_less_often": fewer,
            **view.call_sites.evidence(call),
        },
    )
