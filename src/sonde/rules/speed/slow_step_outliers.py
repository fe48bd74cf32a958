"""Every n steps, one takes several times as long as the others.

What it finds    slow steps that come at equal distances: something is done every n-th step, and costs as much as many steps.
Why it matters   the average step is what counts, and a progress bar does not show it.
How it knows     a step is slow if it takes 2.5 times the median so far. Slow steps count if they come regularly: of the steps at equal
                 distances, six or more, four in five are slow, and of the others hardly any. The phase that grew most and a profile of one
                 such step show where the time goes.
Known problems   validations and checkpoints have rules of their own and are left out. A wait for new workers at an epoch's start is
                 input-bound.
Fix              do it less often, or make it cheaper.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sonde.formatting import number
from sonde.rules._shared.profiled_steps import severity_of, step_profiles, with_gain
from sonde.rules._shared.read_event_tables import amount, text
from sonde.rules.rule import Clear, NotEvaluated, Result, Rule
from sonde.run_view import RunView
from sonde.run_view.step_times import TRAINING, phase_ms, sample_stride

SLOW = 2.5  # times the usual step: on a busy machine single steps are slower too, but not at equal distances
SLOW_MS = 2.0  # and so much longer
FIRST_MEDIAN = 16  # steps after which it is known what is usual …
NEXT_MEDIAN = 256  # … and steps after which it is computed again: the steps of a run may become longer
FEWEST = 6  # slow steps at equal distances
NEAREST = 4  # steps between them: what happens more often is a part of the usual step
REGULAR = 0.8  # share of the steps at that distance that must be slow …
CHANCE = 0.1  # … and of the others that may be
SAVED = 0.8  # of what they take is promised: it is done less often, not never
MAX_SLOW = 256  # of the last slow steps

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def check(view: RunView) -> Result:
    times = view.times
    if reason := times.reason_not_evaluated:
        return NotEvaluated(reason)
    slow, excess_ms = _slow_steps(np.stack([phase_ms(view, phase)[times.rows] for phase in TRAINING], axis=1))
    numbers = view.step_numbers[times.rows]
    period, is_regular = _period(numbers[slow], last=int(numbers[-1]))
    if not period:
        return Clear()
    by_phase = dict(zip(TRAINING, excess_ms[is_regular].mean(axis=0).tolist()))
    each_ms = sum(by_phase.values())
    share = each_ms / (period * times.total_ms / times.num)
    gain = SAVED * min(share, 1.0)
    if not times.is_worth(gain):
        return Clear()
    steps = numbers[slow][is_regular].tolist()
    phase = max(by_phase, key=lambda name: by_phase[name])
    line = _line_that_grew(view, set(steps))
    source, usual_ms = text(line, "line"), times.usual_ms()
    part = {"other": "outside of forward, backward and update", "data": "waiting for data"}.get(phase, f"in the {phase}")
    return RULE.finding(
        severity_of(gain),
        steps[0],
        cause=f"every {period} steps one takes {number(each_ms + usual_ms)} ms instead of {number(usual_ms)} ms, {part}"
        + (f": {source} took {number(amount(line, 'ms'))} ms of it" if source else ""),
        fix=with_gain(f"do what happens every {period} steps less often, or make it cheaper", gain),
        evidence={
            "gain": gain,
            "share": share,
            "steps_between": period,
            "num_slow": len(steps),
            "slow_ms": each_ms + usual_ms,
            "usual_ms": usual_ms,
            "phase": phase,
            **({"source": source, "source_text": text(line, "text")} if source else {}),
        },
    )


def _slow_steps(phases_ms: Floats) -> tuple[Ints, Floats]:
    """The indices of the last slow steps, and what each phase of them took beyond the median so far. `phases_ms`: (steps, phases)."""
    slow, excess_ms = [np.empty(0, np.int64)], [np.empty((0, phases_ms.shape[1]))]
    refreshed = [FIRST_MEDIAN, *range(NEXT_MEDIAN, len(phases_ms) + 1, NEXT_MEDIAN)]
    starts = [0, *(num - 1 for num in refreshed[1:])]  # the first median is also for the steps before it
    for num, (start, stop) in zip(refreshed, pairwise([*starts, len(phases_ms)])):
        usual_ms = np.median(phases_ms[: num : sample_stride(num)], axis=0)
        is_slow = phases_ms[start:stop].sum(axis=1) > SLOW * usual_ms.sum() + SLOW_MS
        slow.append(start + np.flatnonzero(is_slow))
        excess_ms.append(phases_ms[start:stop][is_slow] - usual_ms)
    return np.concatenate(slow)[-MAX_SLOW:], np.concatenate(excess_ms)[-MAX_SLOW:]


def _period(steps: Ints, last: int) -> tuple[int, npt.NDArray[np.bool_]]:
    """The distance at which slow steps come, and which of them do; 0 if they come irregularly."""
    gaps = Counter(gap for gap in np.diff(steps).tolist() if gap >= NEAREST)
    best, is_best = 0, np.zeros(len(steps), bool)
    for period, _ in gaps.most_common(4):
        residue = Counter((steps % period).tolist()).most_common(1)[0][0]
        is_regular = steps % period == residue
        num, first = int(is_regular.sum()), int(steps[is_regular][0])
        num_possible = (last - first) // period + 1
        is_only_chance = len(steps) - num <= CHANCE * (last - int(steps[0]))  # of the others
        if num >= max(FEWEST, REGULAR * num_possible) and is_only_chance and num > is_best.sum():
            best, is_best = period, is_regular
    return best, is_best


def _line_that_grew(view: RunView, slow_steps: Collection[int]) -> Mapping[str, Any]:
    """Of the profiled slow steps, the line that took the most beyond what it takes in other steps; empty if none was profiled."""
    profiles = [*step_profiles(view, slow=True), *step_profiles(view)]
    others = [{text(line, "line"): amount(line, "ms") for line in each.lines} for each in profiles if each.step not in slow_steps]
    excess_ms: dict[str, float] = {}
    lines: dict[str, Mapping[str, Any]] = {}
    for profile in profiles:
        for line in profile.lines if profile.step in slow_steps else ():
            name = text(line, "line")
            usual_ms = min((other.get(name, 0.0) for other in others), default=0.0)
            excess_ms[name] = excess_ms.get(name, 0.0) + amount(line, "ms") - usual_ms
            lines[name] = line
    return lines[max(excess_ms, key=lambda name: excess_ms[name])] if lines else {}


RULE = Rule("slow-step-outliers", check, page=__doc__)
