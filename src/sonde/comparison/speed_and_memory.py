"""Time and memory of two runs: medians with their spread, and which of them changed by more than that spread.

The steps of a run are cut into blocks. The spread of their medians shows how much the machine varies; smaller changes are noise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sonde.events import Kind
from sonde.run_view import RunView

Direction = Literal["same", "slight", "more", "less", "unclear", "only in A", "only in B", "unknown"]

BLOCKS = 8
ENOUGH = 2 * BLOCKS  # steps: fewer are too few to judge
CHANGED = 0.10  # of the median: the same program on a machine with other guests differs by as much as this
CHANGED_MEMORY = 0.05  # memory varies less
CLEAR = 0.5  # of the wider spread must lie between the two
MATTERS = 0.02  # of a whole step: a smaller change of a phase is negligible
UNOBSERVED = 20  # steps: if there are as many, only they are timed, because observing a step evicts caches
OWN_MS = "sonde_ms"
UNITS = {"_bytes": 1.0, "_mb": float(1 << 20)}  # bytes per unit, by the ending of a scalar's name

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spread:
    """A number measured in many steps: its median (its mean, if most steps have none), and the range of the same over most blocks."""

    median: float
    low: float
    high: float
    num: int


@dataclass(frozen=True, slots=True)
class Change:
    """One time or one amount of memory in both runs."""

    name: str
    unit: str  # "ms" or "bytes"
    a: Spread | None
    b: Spread | None
    direction: Direction  # of B relative to A

    @property
    def ratio(self) -> float:
        """B over A; NaN if one of them is missing or zero."""
        return self.b.median / self.a.median if self.a and self.b and self.a.median > 0 else float("nan")


@dataclass(frozen=True, slots=True)
class SpeedAndMemory:
    """Times and memory of both runs. The first of the times is the whole step."""

    times: tuple[Change, ...]
    memory: tuple[Change, ...]
    steps_per_s: tuple[float, float]  # over the whole training including pauses, without Sonde's own time
    samples_per_s: tuple[float, float]  # NaN if the size of a batch is not known

    @property
    def step(self) -> Change | None:
        return next((change for change in self.times if change.name == "step"), None)


def compare_speed_and_memory(a: RunView, b: RunView) -> SpeedAndMemory:
    rates = tuple(view.num_steps / view.total_s if view.total_s > 0 else float("nan") for view in (a, b))
    samples = tuple(rate * _batch_size(view) for rate, view in zip(rates, (a, b)))
    return SpeedAndMemory(_times(a, b), _memory(a, b), (rates[0], rates[1]), (samples[0], samples[1]))


def _times(a: RunView, b: RunView) -> tuple[Change, ...]:
    spreads = {"step": (spread_of(_step_ms(a)), spread_of(_step_ms(b)))}
    for name in dict.fromkeys([*_phases(a), *_phases(b)]):
        medians = spread_of(_unobserved(a, name)), spread_of(_unobserved(b, name))
        is_rare = all(spread is None or spread.median == 0 for spread in medians)  # most steps do not: validation, checkpoints
        spreads[name.removesuffix("_ms")] = (spread_of(a.steps[name], np.mean), spread_of(b.steps[name], np.mean)) if is_rare else medians
    whole_ms = spreads["step"][0].median if spreads["step"][0] else 0.0
    return tuple(
        Change(name, "ms", one, other, direction_of(one, other, CHANGED, MATTERS * whole_ms))
        for name, (one, other) in spreads.items()
        if any(spread and (spread.median > 0 or name == "step") for spread in (one, other))
    )


def _memory(a: RunView, b: RunView) -> tuple[Change, ...]:
    in_a, in_b = memory_sizes(a), memory_sizes(b)
    pairs = {name: (in_a.get(name), in_b.get(name)) for name in dict.fromkeys([*in_a, *in_b])}
    return tuple(
        Change(name, "bytes", one, other, direction_of(one, other, CHANGED_MEMORY, 0.0))
        for name, (one, other) in pairs.items()
        if any(spread and spread.high > 0 for spread in (one, other))
    )


def step_times(view: RunView) -> dict[str, Spread]:
    """Milliseconds of the whole step and of its phases, by name; the mean of what most steps do not do (validation, checkpoints)."""
    spreads = {"step": spread_of(_step_ms(view))}
    for name in _phases(view):
        usual = spread_of(_unobserved(view, name))
        spreads[name.removesuffix("_ms")] = usual if usual and usual.median else spread_of(view.steps[name], np.mean)
    return {name: spread for name, spread in spreads.items() if spread and spread.median > 0}


def memory_sizes(view: RunView) -> dict[str, Spread]:
    """Bytes in use, by name: `rss`, `cuda` …"""
    found = {}
    for name in view.steps:
        ending = next((ending for ending in UNITS if name.endswith(ending)), None)
        if ending is not None and (spread := spread_of(view.steps[name] * UNITS[ending])) is not None:
            found[name.removesuffix(ending).replace("_", " ")] = spread
    return found


def _phases(view: RunView) -> list[str]:
    return [name for name in view.steps if name.endswith("_ms") and name not in (OWN_MS, "step_ms")]


def _step_ms(view: RunView) -> Floats:
    """Of the training alone, without Sonde's own time."""
    own_ms = _unobserved(view, OWN_MS)
    return _unobserved(view, "step_ms") - (np.nan_to_num(own_ms) if len(own_ms) else 0.0)


def spread_of(values: Floats, middle: Callable[[Floats], np.floating[Any]] = np.median) -> Spread | None:
    """None if nothing was measured. The lowest and the highest block are left out: warm-up, or a pause of the user."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    blocks = sorted(float(middle(block)) for block in np.array_split(finite, BLOCKS) if len(block))
    inner = blocks[1:-1] if len(blocks) > 2 else blocks
    return Spread(float(middle(finite)), inner[0], inner[-1], len(finite))


def direction_of(a: Spread | None, b: Spread | None, least_share: float, least: float) -> Direction:
    """How B differs from A: changed if by more than `least_share` of A, by more than `least` and by more than the spreads of both.

    "slight" is a change below `least`.
    """
    if a is None or b is None or min(a.num, b.num) < ENOUGH:
        return "unknown"
    difference = abs(b.median - a.median)
    if difference <= least_share * a.median:
        return "same"
    if difference <= least:
        return "slight"
    clear = CLEAR * max(a.high - a.low, b.high - b.low)  # a machine that varies so much between blocks varies between runs as well
    if b.low > a.high + clear:
        return "only in B" if a.high == 0 else "more"
    if b.high < a.low - clear:
        return "only in A" if b.high == 0 else "less"
    return "unclear"


def _unobserved(view: RunView, name: str) -> Floats:
    """Of steps that were not observed, if there are enough of them."""
    values, is_unobserved = view.steps[name], view.steps["observed"] != 1
    return values[is_unobserved] if np.count_nonzero(is_unobserved) >= UNOBSERVED else values


def _batch_size(view: RunView) -> float:
    """Samples per step: known if one model is called once per backward. Batches of a DataLoader are preferred to inputs of the model."""
    models = {site.model for site in view.sites.values() if site.kind == "output"}
    inputs = sorted((site.path, site.id) for site in view.sites.values() if site.kind == "input")  # "batch.…" comes before "input.…"
    forwards, backwards = view.steps["forwards"], view.steps["backwards"]
    if len(models) > 1 or not inputs or not len(forwards) or not np.array_equal(forwards, backwards):
        return float("nan")
    sizes = [
        float(frame["size"][column[0]])
        for frame in view.process.frames(Kind.BATCH)
        if "size" in frame.fields and len(column := np.flatnonzero(frame.sites == inputs[0][1]))
    ]
    return float(np.mean(sizes) * np.mean(forwards)) if sizes else float("nan")
