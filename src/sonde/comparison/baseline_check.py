"""A run departs from its baseline: its loss or gradients leave their bands for good, it is slower, or it needs more memory.

What it finds    a run that is worse than the runs that its baseline was made of.
Why it matters   no other rule may find anything: a loss that ends a third higher falls like any other, and 30 ms more per
                 step are easy to overlook.
How it knows     the baseline has bands by step that contain four of five losses. A loss departs if its median is outside of
                 the band by more than the tolerance (10 %) in every window up to the end; gradients depart if they are larger
                 or smaller by half. Less than a hundredth of the range of the curve does not count. A time or an amount of
                 memory departs if it is larger by the tolerance, and by half of the wider spread.
Known problems   another seed gives another curve: a baseline of several runs (sonde baseline A B C) contains their seeds.
                 Times on another machine, or with another number of threads, are not compared. What is better (a lower loss,
                 a faster step) is reported as information. Steps beyond the end of the baseline are not compared.
Fix              find out what changed with sonde compare; if the change is intended, make a new baseline.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from sonde.comparison.baseline_file import GRADIENT, Baseline, curve_of, cut_as, machine_of, memory_of, trained
from sonde.comparison.loss_curves import Floats, Side, Steps, Window, distances_that_matter, ends_outside
from sonde.comparison.speed_and_memory import ENOUGH, MATTERS, direction_of, step_times
from sonde.errors import SondeError
from sonde.events import Finding, Severity
from sonde.formatting import listing, number, size
from sonde.report import Report, Unevaluated, diagnose
from sonde.rules.rule import Rule
from sonde.run_view import RunView
from sonde.runlog.run_reader import Run

RULE = "departs-from-baseline"
TOLERANCE = 0.10  # as much as the same program differs from day to day on a machine with other guests
GRADIENTS = 0.5  # of their norm: with other batches it differs by tens of percent where all is well
LEAST_OF_RANGE = 0.01  # a loss that fell from 2 to 0.005 with one seed and to 0.006 with another has learnt the same
NEW_BASELINE = "make a new baseline if this is intended"
EVERYTHING = frozenset({"loss", "gradients", "times", "memory"})


def check_against_baseline(
    run: Run | Path | str,
    baseline: Baseline,
    *,
    tolerance: float = TOLERANCE,
    checks: Collection[str] = EVERYTHING,
    shared_process: bool = False,
    rules: Sequence[Rule] | None = None,
) -> Report:
    """Diagnose a run and add the findings of the rule `departs-from-baseline`.

    Args:
        tolerance: Share by which a number may differ from the baseline.
        checks: Some of "loss", "gradients", "times" and "memory".
        shared_process: The process does other work too, so its memory is not that of the training and is not compared.
        rules: The other rules to evaluate; by default all.
    """
    if not tolerance >= 0:  # NaN is not
        raise SondeError(f"a run cannot stay within {tolerance} of its baseline: give a share, such as 0.1 for ten percent.")
    source = run if isinstance(run, Run) else Run(run)
    report = diagnose(source, rules)
    view = trained(source)
    results: list[Finding | str] = []  # findings, and reasons why something was not evaluated
    for name in baseline.curves:
        if ("gradients" if name == GRADIENT else "loss") in checks:
            results += _check_curve(view, baseline, name, tolerance)
    if "times" in checks:
        reason = _why_times_differ(view, baseline)
        results += [f"times are not compared: {reason}"] if reason else _check_times(view, baseline, tolerance)
    if "memory" in checks:
        results += _check_memory(view, baseline, tolerance, without=("rss",) if shared_process else ())
    return _with_departures(report, [one for one in results if isinstance(one, Finding)], [one for one in results if isinstance(one, str)])


def _check_curve(view: RunView, baseline: Baseline, name: str, tolerance: float) -> Iterator[Finding | str]:
    steps, values = curve_of(view, name)
    pairs = [(band, window) for band, window in zip(baseline.curves[name], cut_as(baseline.curves[name], steps, values)) if window]
    bands, curve = [band for band, _ in pairs], [window for _, window in pairs]
    if not curve:
        yield f"{_title(name)} has next to no steps in common with the baseline"
        return
    share = max(tolerance, GRADIENTS) if name == GRADIENT else tolerance
    side, index = ends_outside(bands, curve, matters=share, least_of_range=LEAST_OF_RANGE)
    if index >= 0:
        distances = distances_that_matter(bands, matters=share, least_of_range=LEAST_OF_RANGE)
        step = _first_outside(steps, values, bands, index, distances)
        yield _left_band(name, side, step, bands[-1], curve[-1], len(baseline.runs))


def _check_times(view: RunView, baseline: Baseline, tolerance: float) -> Iterator[Finding | str]:
    before, now = baseline.times, step_times(view)
    whole, whole_now = before.get("step"), now.get("step")
    if whole is None or whole_now is None or min(whole.num, whole_now.num) < ENOUGH:
        yield f"times need at least {ENOUGH} steps on both sides"
        return
    direction = direction_of(whole, whole_now, tolerance, 0.0)
    if direction not in ("more", "less"):
        return
    is_slower, ratio = direction == "more", whole_now.median / whole.median
    changes = {name: now[name].median - spread.median for name, spread in before.items() if name != "step" and name in now}
    phases = [
        f"{name} {number(before[name].median)} to {number(now[name].median)} ms"
        for name, change in sorted(changes.items(), key=lambda item: -abs(item[1]))
        if abs(change) > MATTERS * whole.median and (change > 0) == is_slower
    ]
    most = f"; most of it in {listing(phases, 2)}" if phases else ""
    yield Finding(
        RULE, Severity.WARNING if is_slower else Severity.INFO, "", int(view.step_numbers[0]),
        f"a step takes {number(whole_now.median)} ms, {number(ratio)} times the {number(whole.median)} ms of the baseline{most}",
        "see where the time goes with: sonde profile script.py" if is_slower else NEW_BASELINE,
        {"what": "step time", "baseline_ms": whole.median, "run_ms": whole_now.median, "ratio": ratio},
    )  # fmt: skip


def _check_memory(view: RunView, baseline: Baseline, tolerance: float, *, without: Collection[str]) -> Iterator[Finding]:
    now = memory_of(view)
    for name, before in baseline.memory.items():
        after = now.get(name)
        if after is None or name in without or direction_of(before, after, tolerance, 0.0) not in ("more", "less"):
            continue
        is_more, ratio = after.median > before.median, after.median / before.median
        title = {"rss": "the process", "cuda": "the GPU"}.get(name, name)
        yield Finding(
            RULE, Severity.WARNING if is_more else Severity.INFO, "", int(view.step_numbers[0]),
            f"{title} holds {size(after.median)}, {number(ratio)} times the {size(before.median)} of the baseline",
            "see what fills the memory with: sonde memory script.py" if is_more else NEW_BASELINE,
            {"what": f"memory {name}", "baseline_bytes": before.median, "run_bytes": after.median, "ratio": ratio},
        )  # fmt: skip


def _with_departures(report: Report, departures: Sequence[Finding], reasons: Sequence[str]) -> Report:
    root = report.findings[0] if report.findings else None
    if root is not None and root.severity.rank >= Severity.ERROR.rank:  # a defect explains why the curves differ
        curves = [replace(one, evidence={**one.evidence, "consequence_of": root.rule}) for one in departures if "side" in one.evidence]
        others = [one for one in departures if "side" not in one.evidence]
        family = 1 + sum(one.evidence.get("consequence_of") == root.rule for one in report.findings)
        findings = (*report.findings[:family], *curves, *report.findings[family:], *others)
    else:
        findings = (*sorted(departures, key=lambda one: (-one.severity.rank, one.step)), *report.findings)
    is_worse = any(one.severity.rank >= Severity.WARNING.rank for one in departures)
    return replace(
        report,
        findings=findings,
        verdict="problems" if is_worse else report.verdict,
        why_unknown="" if is_worse else report.why_unknown,
        clear=report.clear if departures or reasons else (*report.clear, RULE),
        not_evaluated=(*report.not_evaluated, *(Unevaluated(RULE, reason) for reason in reasons)),
    )


def _left_band(name: str, side: Side, step: int, band: Window, end: Window, num_runs: int) -> Finding:
    usual = f"{number(band.low)} to {number(band.high)}"
    whose = "the baseline" if num_runs == 1 else f"the {num_runs} runs of the baseline"
    evidence: dict[str, float | str] = {
        "what": name, "side": side, "end": end.median, "baseline": band.median, "baseline_low": band.low, "baseline_high": band.high,
    }  # fmt: skip
    severity, fix = Severity.ERROR, "see what changed with: sonde compare BEFORE NOW"
    if side == "finite":
        severity, fix = Severity.INFO, "make a new baseline of a healthy run"
        cause = f"{_title(name)} of the baseline is not finite from step {step} on, and here it is {number(end.median)}"
    elif side == "not finite":
        fix = "find the cause with: sonde diagnose"
        cause = f"{_title(name)} is not finite from step {step} on, where {whose} has {usual}"
    else:
        where = "above" if side == "higher" else "below"
        cause = f"{_title(name)} leaves the band of {whose} at step {step} and stays {where} it: {number(end.median)} at the end, "
        cause += f"where {usual} is usual"
        if name == GRADIENT:
            severity = Severity.WARNING
        elif side == "lower":
            severity, fix = Severity.INFO, NEW_BASELINE
    return Finding(RULE, severity, "", step, cause, fix, evidence)


def _first_outside(steps: Steps, values: Floats, bands: Sequence[Window], index: int, distances: Sequence[float]) -> int:
    """The first step outside of the bands: in the window `index`, or before it if the end of the window before is outside already."""
    before = max(index - 1, 0)
    is_near = (steps >= bands[before].first) & (steps <= bands[index].last)
    near, numbers = steps[is_near], values[is_near]
    # One step in five of the baseline itself is outside of its band: outside is what differs by the tolerance too.
    (low_before, high_before), (low, high) = (
        (min(bands[i].low, bands[i].median - distances[i]), max(bands[i].high, bands[i].median + distances[i])) for i in (before, index)
    )
    is_here = near >= bands[index].first
    is_inside = (numbers >= np.where(is_here, low, low_before)) & (numbers <= np.where(is_here, high, high_before))  # NaN is outside
    start = int(np.argmax(is_here))
    if is_inside[start]:
        return int(near[start + int(np.argmin(is_inside[start:]))])
    inside_before = np.flatnonzero(is_inside[:start])
    return int(near[inside_before[-1] + 1 if len(inside_before) else 0])


def _why_times_differ(view: RunView, baseline: Baseline) -> str:
    """Why times cannot be compared; empty if they can."""
    if not baseline.machine or machine_of(view) != baseline.machine:
        return "the baseline was made on another machine"
    threads = str(view.process.manifest.get("threads", ""))
    return "" if threads == baseline.threads else f"{threads} threads here, {baseline.threads or 'several numbers of them'} in the baseline"


def _title(name: str) -> str:
    return "the gradient norm" if name == GRADIENT else "the loss" if name == "loss" else f"the loss {name}"
