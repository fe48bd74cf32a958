"""Time and memory side by side: medians with their spread, and what is slower, faster or unchanged by that spread.

The steps of a run are cut into blocks. How far the medians of blocks lie apart shows how much a machine wavers; a change that is
smaller than that is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sonde.events import Frame, Kind
from sonde.run_view import RunView
from sonde.runlog.format import FRAME

Direction = Literal["same", "slight", "more", "less", "unclear", "only in A", "only in B", "unknown"]

BLOCKS = 8
ENOUGH = 2 * BLOCKS  # steps: fewer are too few to tell
CHANGED = 0.10  # of the median: the same program on a machine with other guests differs by as much as this
CHANGED_MEMORY = 0.05  # memory wavers less
CLEAR = 0.5  # of the wider spread must lie between the two
MATTERS = 0.02  # of a whole step: a phase that changes by less may change as it likes
PLAIN = 20  # steps without observation: where there are as many, only they are timed, for observing empties caches
Floats = npt.NDArray[np.float64]
OURS = "sonde_ms"  # not the training's
SIZES = {"_bytes": 1.0, "_mb": float(1 << 20)}  # names of scalars that are amounts of memory, and their unit in bytes


@dataclass(frozen=True, slots=True)
class Spread:
    """A number that was taken in many steps: its median (of what is rare, its mean), and between which values that of most blocks lies."""

    median: float
    low: float
    high: float
    num: int


@dataclass(frozen=True, slots=True)
class Change:
    """One time or one amount in both runs."""

    name: str
    unit: str  # "ms" or "bytes"
    a: Spread | None
    b: Spread | None
    direction: Direction  # B, seen from A

    @property
    def ratio(self) -> float:
        """B over A; NaN where one of them is missing or nothing."""
        return self.b.median / self.a.median if self.a and self.b and self.a.median > 0 else float("nan")


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast both runs were, and what they took. The first of the times is the whole step."""

    times: tuple[Change, ...]
    memory: tuple[Change, ...]
    steps_per_s: tuple[float, float]  # over the whole training, pauses and all, without Sonde's own time
    samples_per_s: tuple[float, float]  # NaN where the size of a batch is not known

    @property
    def step(self) -> Change | None:
        return next((change for change in self.times if change.name == "step"), None)


def compare_pace(a: RunView, b: RunView) -> Pace:
    whole = Change("step", "ms", spread_of(_own_step(a)), spread_of(_own_step(b)), "unknown")
    whole_ms = whole.a.median if whole.a else 0.0
    whole = _judged(whole, CHANGED, MATTERS * whole_ms)
    phases = [name for name in dict.fromkeys([*a.steps, *b.steps]) if name.endswith("_ms") and name not in (OURS, "step_ms")]
    times = [whole] if whole.a or whole.b else []
    for name in phases:
        spreads = spread_of(_plain(a, name)), spread_of(_plain(b, name))
        if all(spread is None or spread.median == 0 for spread in spreads):  # most steps do not: validation, checkpoints
            spreads = spread_of(a.steps[name], np.mean), spread_of(b.steps[name], np.mean)
        change = Change(name.removesuffix("_ms"), "ms", *spreads, "unknown")
        if any(spread and spread.median > 0 for spread in (change.a, change.b)):
            times.append(_judged(change, CHANGED, MATTERS * whole_ms))
    rates = tuple(one.num_steps / one.total_s if one.total_s > 0 else float("nan") for one in (a, b))
    samples = tuple(rate * _batch_size(one) for rate, one in zip(rates, (a, b)))
    return Pace(tuple(times), tuple(_memory(a, b)), (rates[0], rates[1]), (samples[0], samples[1]))


def spread_of(values: Floats, middle: Callable[[Floats], np.floating[Any]] = np.median) -> Spread | None:
    """None where nothing was measured. The farthest block on each side is left out: warming up, or a pause of the user's."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    blocks = sorted(float(middle(block)) for block in np.array_split(finite, BLOCKS) if len(block))
    inner = blocks[1:-1] if len(blocks) > 2 else blocks
    return Spread(float(middle(finite)), inner[0], inner[-1], len(finite))


def _judged(change: Change, least_share: float, least: float) -> Change:
    return Change(change.name, change.unit, change.a, change.b, direction_of(change.a, change.b, least_share, least))


def direction_of(a: Spread | None, b: Spread | None, least_share: float, least: float) -> Direction:
    """B, seen from A: changed where it is by more than both `least`, and by more than either of them wavers.

    "slight" is not the same, but so little of a whole step that it does not matter.
    """
    if a is None or b is None or min(a.num, b.num) < ENOUGH:
        return "unknown"
    difference = b.median - a.median
    if abs(difference) <= least_share * a.median:
        return "same"
    if abs(difference) <= least:
        return "slight"
    clear = CLEAR * max(a.high - a.low, b.high - b.low)  # a machine that wavers so much between blocks wavers between runs as well
    if b.low > a.high + clear:
        return "only in B" if a.high == 0 else "more"
    if b.high < a.low - clear:
        return "only in A" if b.high == 0 else "less"
    return "unclear"


def _own_step(view: RunView) -> Floats:
    ours = _plain(view, OURS)
    return _plain(view, "step_ms") - (np.nan_to_num(ours) if len(ours) else 0.0)


def _plain(view: RunView, name: str) -> Floats:
    """Of steps that were not observed, where there are enough of them."""
    values = view.steps[name]
    plain = view.steps["observed"] != 1
    return values[plain] if np.count_nonzero(plain) >= PLAIN else values


def _memory(a: RunView, b: RunView) -> list[Change]:
    sizes = sizes_of(a), sizes_of(b)
    changes = []
    for title in dict.fromkeys([*sizes[0], *sizes[1]]):
        one, other = (spread_of(some[title]) if title in some else None for some in sizes)
        if any(spread and spread.high > 0 for spread in (one, other)):
            changes.append(_judged(Change(title, "bytes", one, other, "unknown"), CHANGED_MEMORY, 0.0))
    return changes


def sizes_of(view: RunView) -> dict[str, Floats]:
    """The amounts of memory that were taken, in bytes: `rss`, `cuda` …"""
    found = {}
    for name in view.steps:
        suffix = next((suffix for suffix in SIZES if name.endswith(suffix)), None)
        if suffix is not None:
            found[name.removesuffix(suffix).replace("_", " ")] = view.steps[name] * SIZES[suffix]
    return found


def times_of(view: RunView) -> dict[str, Spread]:
    """The whole step and its phases, by name; what most steps do not do (validation, checkpoints) by its mean."""
    found = {"step": spread_of(_own_step(view))}
    for name in view.steps:
        if name.endswith("_ms") and name not in (OURS, "step_ms"):
            usual = spread_of(_plain(view, name))
            found[name.removesuffix("_ms")] = usual if usual and usual.median else spread_of(view.steps[name], np.mean)
    return {name: spread for name, spread in found.items() if spread and spread.median > 0}


def _batch_size(view: RunView) -> float:
    """Samples per step: known where one model is fed once per backward. What a loader handed out says it best."""
    models = {site.model for site in view.sites.values() if site.kind == "output"}
    paths = sorted(site.path for site in view.sites.values() if site.kind == "input")
    forwards, backwards = view.steps["forwards"], view.steps["backwards"]
    if len(models) > 1 or not paths or not len(forwards) or not np.array_equal(forwards, backwards):
        return float("nan")
    wanted = next(site.id for site in view.sites.values() if site.path == paths[0])  # "batch.…" comes before "input.…"
    sizes = [
        float(frame["size"][place[0]])
        for frame in view.process.contents(FRAME, Kind.BATCH)
        if isinstance(frame, Frame) and "size" in frame.fields and len(place := np.flatnonzero(frame.sites == wanted))
    ]
    return float(np.mean(sizes) * np.mean(forwards)) if sizes else float("nan")
