"""A training departs from its baseline: its loss or its gradients leave their bands for good, it is slower, or it takes more memory.

What it finds    a run that does worse than the runs that its baseline was made of.
Why it matters   nothing else may look wrong: a loss that ends a third higher falls like any other, and nobody notices a
                 step that takes 30 ms more.
How it knows     the baseline holds bands by step: between which values four in five losses lie. A loss departs where its
                 median lies outside of the band, and by more than the tolerance (10 %), in every stretch to the end;
                 gradients depart where they are half as large again, or half as large. Less than a hundredth of all that the
                 curve covered is none. A time or an amount of memory
                 departs where it is more by the tolerance, and by half of what either of them wavers.
Known problems   another seed draws another curve: a baseline of several runs (sonde baseline A B C) is as wide as their
                 seeds make it. Times of another machine, or with another number of threads, are not judged. What is
                 better (a lower loss, a faster step) is mentioned and is no problem. A run that is longer than its
                 baseline is judged as far as that goes.
Fix              find out what changed with sonde compare; where the change is meant, make a new baseline.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sonde.comparison.baseline import GRADIENT, Baseline, curve_of, cut_as, machine_of, memory_of, trained
from sonde.comparison.curves import Floats, Side, Steps, Window, distances_that_matter, ends_outside
from sonde.comparison.pace import ENOUGH, MATTERS, Spread, direction_of, times_of
from sonde.errors import SondeError
from sonde.events import Finding, Severity
from sonde.formatting import listing, number, size
from sonde.report import Report, Unevaluated, diagnose
from sonde.rules.rule import Rule
from sonde.run_view import RunView
from sonde.runlog.reader import Run

RULE = "departs-from-baseline"
TOLERANCE = 0.10  # as much as the same program differs from day to day on a machine with other guests
GRADIENTS = 0.5  # of their norm: with other batches it differs by tens of percent where all is well
LEAST_OF_RANGE = 0.01  # a loss that fell from 2 to 0.005 with one seed and to 0.006 with another has learnt the same
EVERYTHING = frozenset({"loss", "gradients", "times", "memory"})


@dataclass(frozen=True, slots=True)
class _Judge:
    baseline: Baseline
    tolerance: float

    def losses(self, view: RunView, names: Sequence[str]) -> Iterator[Finding | str]:
        """Findings, and reasons why something cannot be told."""
        for name in names:
            steps, values = curve_of(view, name)
            pairs = [pair for pair in zip(self.baseline.curves[name], cut_as(self.baseline.curves[name], steps, values)) if pair[1]]
            bands, curve = [band for band, _ in pairs], [window for _, window in pairs if window]
            if not curve:
                yield f"{_title(name)} has next to no steps in common with the baseline"
                continue
            share = max(self.tolerance, GRADIENTS) if name == GRADIENT else self.tolerance
            side, place = ends_outside(bands, curve, matters=share, least_of_range=LEAST_OF_RANGE)
            if place >= 0:
                distances = distances_that_matter(bands, matters=share, least_of_range=LEAST_OF_RANGE)
                step = _first_outside(steps, values, bands, place, distances)
                yield _left(name, side, step, bands[-1], curve[-1], len(self.baseline.runs))

    def times(self, view: RunView) -> Iterator[Finding | str]:
        before, now = self.baseline.times, times_of(view)
        whole, whole_now = before.get("step"), now.get("step")
        if whole is None or whole_now is None or min(whole.num, whole_now.num) < ENOUGH:
            yield f"times need at least {ENOUGH} steps on both sides"
            return
        direction = direction_of(whole, whole_now, self.tolerance, 0.0)
        if direction not in ("more", "less"):
            return
        ratio = whole_now.median / whole.median
        changed = sorted(
            ((name, now[name].median - spread.median) for name, spread in before.items() if name != "step" and name in now),
            key=lambda one: -abs(one[1]),
        )
        phases = [
            f"{name} {number(before[name].median)} to {number(now[name].median)} ms"
            for name, difference in changed
            if abs(difference) > MATTERS * whole.median and (difference > 0) == (ratio > 1)
        ]
        most = f"; most of it in {listing(phases, 2)}" if phases else ""
        slower = direction == "more"
        yield Finding(
            RULE, Severity.WARNING if slower else Severity.INFO, "", int(view.step_numbers[0]),
            f"a step takes {number(whole_now.median)} ms, {_times(ratio)} the {number(whole.median)} ms of the baseline{most}",
            "see where the time goes with: sonde profile script.py" if slower else "make a new baseline if this is to stay so",
            {"what": "step time", "baseline_ms": whole.median, "run_ms": whole_now.median, "ratio": ratio},
        )  # fmt: skip

    def memory(self, view: RunView, *, ours_alone: bool) -> Iterator[Finding | str]:
        now = memory_of(view)
        for name, before in self.baseline.memory.items():
            after = now.get(name)
            if after is None or (ours_alone and name == "rss"):
                continue
            direction = direction_of(before, after, self.tolerance, 0.0)
            if direction in ("more", "less"):
                yield _memory(name, before, after, int(view.step_numbers[0]))


def judge_against(
    run: Run | Path | str,
    baseline: Baseline,
    *,
    tolerance: float = TOLERANCE,
    checks: Collection[str] = EVERYTHING,
    shared_process: bool = False,
    rules: Sequence[Rule] | None = None,
) -> Report:
    """What is wrong with a run, and in what it departs from its baseline.

    `checks` are some of "loss", "gradients", "times" and "memory". In a process that others use too (`shared_process`), what the process
    takes in all is not the training's.
    """
    if not tolerance >= 0:  # NaN is not
        raise SondeError(f"a run cannot stay within {tolerance} of its baseline: give a share, such as 0.1 for ten percent.")
    source = run if isinstance(run, Run) else Run(run)
    report = diagnose(source, rules)
    view = trained(source)
    judging = _Judge(baseline, tolerance)
    told: list[Finding | str] = []
    names = [name for name in baseline.curves if ("gradients" if name == GRADIENT else "loss") in checks]
    told += judging.losses(view, names)
    if "times" in checks:
        elsewhere = _elsewhere(view, baseline)
        told += [f"times are not compared: {elsewhere}"] if elsewhere else judging.times(view)
    if "memory" in checks:
        told += judging.memory(view, ours_alone=shared_process)
    return _with(report, [one for one in told if isinstance(one, Finding)], [one for one in told if isinstance(one, str)])


def _with(report: Report, departures: Sequence[Finding], reasons: Sequence[str]) -> Report:
    root = report.findings[0] if report.findings else None
    if root is not None and root.severity.rank >= Severity.ERROR.rank:
        # What is wrong by itself is why the loss is not what it was.
        follows = [one for one in departures if "side" in one.evidence]
        marked = [replace(one, evidence={**one.evidence, "consequence_of": root.rule}) for one in follows]
        others = [one for one in departures if "side" not in one.evidence]
        family = 1 + sum(one.evidence.get("consequence_of") == root.rule for one in report.findings)
        findings = (*report.findings[:family], *marked, *report.findings[family:], *others)
    else:
        findings = (*sorted(departures, key=lambda one: (-one.severity.rank, one.step)), *report.findings)
    worse = any(one.severity.rank >= Severity.WARNING.rank for one in departures)
    return replace(
        report,
        findings=findings,
        verdict="problems" if worse else report.verdict,
        why_unknown="" if worse else report.why_unknown,
        clear=report.clear if departures or reasons else (*report.clear, RULE),
        not_evaluated=(*report.not_evaluated, *(Unevaluated(RULE, reason) for reason in reasons)),
    )


def _left(name: str, side: Side, step: int, band: Window, end: Window, num_runs: int) -> Finding:
    usual = f"{number(band.low)} to {number(band.high)}"
    whose = "the baseline" if num_runs == 1 else f"the {num_runs} runs of the baseline"
    evidence: dict[str, float | str] = {
        "what": name, "side": side, "end": end.median, "baseline": band.median, "baseline_low": band.low, "baseline_high": band.high,
    }  # fmt: skip
    if side == "finite":
        cause = f"{_title(name)} of the baseline is not finite from step {step} on, and here it is {number(end.median)}"
        return Finding(RULE, Severity.INFO, "", step, cause, "make a new baseline of a run that is well", evidence)
    if side == "not finite":
        cause = f"{_title(name)} is not finite from step {step} on, where {whose} has {usual}"
        return Finding(RULE, Severity.ERROR, "", step, cause, "what made it is said by: sonde diagnose", evidence)
    where = "above" if side == "higher" else "below"
    ending = f"{number(end.median)} at the end, where {usual} is usual"
    cause = f"{_title(name)} leaves the band of {whose} at step {step} and stays {where} it: {ending}"
    if name != GRADIENT and side == "lower":
        return Finding(RULE, Severity.INFO, "", step, cause, "make a new baseline if this is to stay so", evidence)
    severity = Severity.WARNING if name == GRADIENT else Severity.ERROR
    return Finding(RULE, severity, "", step, cause, "see what changed with: sonde compare BEFORE NOW", evidence)


def _memory(name: str, before: Spread, after: Spread, step: int) -> Finding:
    ratio = after.median / before.median
    title = {"rss": "the process", "cuda": "the GPU"}.get(name, name)
    cause = f"{title} holds {size(after.median)}, {_times(ratio)} the {size(before.median)} of the baseline"
    more = ratio > 1
    fix = "see what fills the memory with: sonde memory script.py" if more else "make a new baseline if this is to stay so"
    sizes: dict[str, float | str] = {"baseline_bytes": before.median, "run_bytes": after.median, "ratio": ratio}
    return Finding(RULE, Severity.WARNING if more else Severity.INFO, "", step, cause, fix, {"what": f"memory {name}", **sizes})


def _first_outside(steps: Steps, values: Floats, bands: Sequence[Window], place: int, distances: Sequence[float]) -> int:
    """From the beginning of the first stretch outside: back over the steps that are outside already, or on to the first that is."""
    before, band = bands[max(place - 1, 0)], bands[place]
    there = (steps >= before.first) & (steps <= band.last)
    some, numbers = steps[there], values[there]
    here = some >= band.first
    # One step in five of the baseline itself lies outside of its band: outside is what differs by the tolerance too.
    (low, high), (low_before, high_before) = (
        (min(one.low, one.median - distance), max(one.high, one.median + distance))
        for one, distance in ((band, distances[place]), (before, distances[max(place - 1, 0)]))
    )
    outside = ~((numbers >= np.where(here, low, low_before)) & (numbers <= np.where(here, high, high_before)))  # a NaN is
    at = int(np.argmax(here))
    if not outside[at]:
        return int(some[at + int(np.argmax(outside[at:]))])
    while at > 0 and outside[at - 1]:
        at -= 1
    return int(some[at])


def _elsewhere(view: RunView, baseline: Baseline) -> str:
    """Why times cannot be compared; empty where they can."""
    if not baseline.machine or machine_of(view) != baseline.machine:
        return "the baseline was made on another machine"
    threads = str(view.process.manifest.get("threads", ""))
    return "" if threads == baseline.threads else f"{threads} threads here, {baseline.threads or 'several numbers of them'} in the baseline"


def _title(name: str) -> str:
    return "the gradient norm" if name == GRADIENT else "the loss" if name == "loss" else f"the loss {name}"


def _times(ratio: float) -> str:
    return f"{number(ratio)} times"
