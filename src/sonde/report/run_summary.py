"""How a training went, in sentences: learning rate, GradScaler, validation, who stopped it, data and labels. Nothing is judged."""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite

import numpy as np

from sonde.events import EarlyStoppingUpdated, FrameworkTrainingEnded, Started, UpdateSkipped
from sonde.formatting import listing, number
from sonde.run_view import RunView
from sonde.run_view.learning_rate_schedule import LearningRate

VALIDATION = re.compile(r"(?:^|[^a-z])(?:val|valid|validation|eval|dev|test)(?:[^a-z]|$)", re.IGNORECASE)
FEWEST = 3  # evaluations: the best of two means nothing
MAX_NAMES = 16
RISES = 0.9  # of its peak: a rate that begins below is warmed up
ENOUGH_BATCHES = 3  # with labels: fewer do not show how frequent each is
MOST_CLASSES = 1000  # beyond are vocabularies: words are not balanced
_ORDERS = {"random": "shuffled", "sequential": "in the order of the dataset", "stream": "as a stream", "other": "in an order of its own"}

Logged = Mapping[str, Sequence[tuple[int, float]]]


def summarize(view: RunView, logged: Logged) -> Iterator[tuple[str, str]]:
    """A word and a sentence each. `logged`: the series that the user logged, by name: step and value."""
    sentences = {
        "schedule": _learning_rate(view),
        "scaler": _loss_scale(view),
        "validation": _validation(logged),
        "stopped": _stop(view),
        "data": _data(view),
        "labels": _labels(view),
        "sampling": _sampling(view),
    }
    return ((word, sentence) for word, sentence in sentences.items() if sentence)


def _learning_rate(view: RunView) -> str:
    schedule = view.schedule
    rate = max(schedule.rates.values(), key=lambda each: (each.num_changes > 0, each.num), default=None)
    if rate is None or not rate.num_changes:
        return ""
    stepped = [(one.name, one.created.source) for one in schedule.stepped]
    who = listing([f"{name} at {line}" if line else name for name, line in stepped], 2) or "set by hand"
    pace = ""
    if schedule.stepped and schedule.num_steps:
        every = round(schedule.num_updates / (schedule.steps_each + 1))  # the last time is often after the last update
        pace = ", stepped with every update" if schedule.is_stepped_with_every_update else f", stepped about every {every} updates"
    return f"{_course(rate)} ({who}{pace})"


def _course(rate: LearningRate) -> str:
    is_warmed_up = rate.first < RISES * rate.peak
    begins = f"up from {number(rate.first)} to {number(rate.peak)} at step {rate.peak_step}" if is_warmed_up else number(rate.peak)
    if rate.last == rate.peak:
        return begins
    low = f", as low as {number(rate.lowest)} in between" if rate.lowest < 0.5 * rate.last and rate.lowest != rate.first else ""
    return f"{begins}, {number(rate.last)} at the end{low}"


def _loss_scale(view: RunView) -> str:
    column = view.steps["loss_scale"]
    is_scaled = np.isfinite(column)
    scales = column[is_scaled]
    if not len(scales):
        return ""
    num_skipped = int(np.count_nonzero(view.counts("skipped_steps")[is_scaled]))
    skipped = f"{num_skipped} of {len(scales)} updates skipped"
    first, last, lowest, highest = float(scales[0]), float(scales[-1]), float(scales.min()), float(scales.max())
    if lowest == highest:
        return f"scale {number(last)} throughout, {skipped}"
    between = "" if {first, last} >= {lowest, highest} else f" (between {number(lowest)} and {number(highest)})"
    sentence = f"scale {number(first)} at first, {number(last)} at the end{between}, {skipped}"
    overflowed = list(dict.fromkeys(event.where for event in view.events(UpdateSkipped) if event.where))[:MAX_NAMES]
    return f"{sentence}; not finite first: {listing(overflowed)}" if overflowed else sentence


def _validation(logged: Logged) -> str:
    for name, points in logged.items():
        finite = [(value, -step) for step, value in points if isfinite(value)]
        if "loss" not in name.lower() or not VALIDATION.search(name) or len(finite) < FEWEST:
            continue
        best, at = min(finite)
        num_since = sum(step > -at for step, _ in points)
        num_bad = len(points) - len(finite)
        bad = f"; {num_bad} of {len(points)} values are not finite" if num_bad else ""
        if not num_since:
            return f"{name} is best at its last evaluation ({number(best)} at step {-at}){bad}"
        times = f"{num_since} evaluation{'s' * (num_since != 1)}"
        return f"{name} was best at step {-at} ({number(best)}), {times} before the last ({number(points[-1][1])}){bad}"
    return ""


def _stop(view: RunView) -> str:
    stopping = view.events(EarlyStoppingUpdated)
    if stopping and stopping[-1].is_stopped:
        return f"early, by session.early_stopping: {stopping[-1].reason.removeprefix('stopped: ')}"
    framework = view.events(FrameworkTrainingEnded)
    if framework and framework[-1].has_stopped_early:
        return "early, as the framework reports"
    loop = view.epochs.loop
    if loop is None or not view.schedule.has_finished or loop.num_passes >= loop.num_planned:
        return ""
    by = f", which has a break at {listing(loop.break_lines, 2)}" if loop.break_lines else ""
    return f"in round {loop.num_passes} of {loop.num_planned} of the loop at {loop.line}{by}"


def _data(view: RunView) -> str:
    loader = view.training_loader
    if loader.order not in _ORDERS:
        return ""
    batches = f"{loader.num_batches} batch{'es' * (loader.num_batches != 1)}" if loader.num_batches else "batches"
    size = f" of {loader.batch_size}" if loader.batch_size else ""
    workers = f"{loader.num_workers or 'no'} worker{'s' * (loader.num_workers != 1)}"
    return f"{batches}{size} from the DataLoader{loader.at}, {_ORDERS[loader.order]}, {workers}"


def _labels(view: RunView) -> str:
    totals, num_classes = view.labels.totals, view.labels.num_classes
    if view.labels.num_batches < ENOUGH_BATCHES or len(totals) < 2 or num_classes > MOST_CLASSES:
        return ""
    (most, often), *_, (least, rarely) = sorted(totals.items(), key=lambda pair: (-pair[1], pair[0]))
    total = totals.total()
    return (
        f"{len(totals)} of {num_classes} classes in {total:,} inspected labels, "
        f"from {_share(often, total)} (class {most}) to {_share(rarely, total)} (class {least})"
    )


def _sampling(view: RunView) -> str:
    started = next(iter(view.events(Started)), None)
    rate, num_steps = started.sampling_rate if started is not None else None, len(view.steps["observed"])
    if started is None or not rate or not num_steps:
        return ""
    num_observed = int(np.count_nonzero(view.counts("observed")))
    observed = f"{num_observed} of {num_steps:,} steps observed, {_share(num_observed, num_steps)}"
    if num_observed >= int(rate * num_steps):
        return f"{observed}; sampling_rate={rate:g} asks for {_share(rate, 1)}"
    fewer = f"{observed} instead of the {_share(rate, 1)} of sampling_rate={rate:g}"
    advice = f"every={max(1, round(1 / rate))} observes as many at any cost"
    return f"{fewer}: overhead_budget={started.overhead_budget:g} allowed no more; {advice}"


def _share(times: float, total: int) -> str:
    return f"{number(float(f'{100 * times / total:.2g}'))} %"
