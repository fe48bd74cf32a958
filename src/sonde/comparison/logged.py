"""What users logged by name in both runs, where it stood at the end. Whether more of it is better, Sonde cannot know."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from sonde.comparison.curves import Level, level_of
from sonde.events import Frame, Kind
from sonde.run_view import RunView
from sonde.runlog.format import FRAME

MAX_NAMES = 32  # a program that logs under ever new names is not compared by them
FEW = 20  # values: of so few (one per epoch, say) the last one counts, of more the median of the last ones


@dataclass(frozen=True, slots=True)
class LoggedComparison:
    """One name under which both runs logged numbers."""

    name: str
    a: Level
    b: Level


def compare_logged(a: RunView, b: RunView) -> tuple[LoggedComparison, ...]:
    left, right = _logged(a), _logged(b)
    return tuple(LoggedComparison(name, left[name], right[name]) for name in left if name in right)


def _logged(view: RunView) -> dict[str, Level]:
    series: dict[str, tuple[array[int], array[float]]] = {}
    for frame in view.process.contents(FRAME, Kind.LOG):
        assert isinstance(frame, Frame)
        for site, value in zip(frame.sites.tolist(), frame.values[0].tolist() if frame.fields else ()):
            name = view.sites[site].path if site in view.sites else ""
            if name and (name in series or len(series) < MAX_NAMES):
                steps, values = series.setdefault(name, (array("q"), array("d")))
                steps.append(frame.step)
                values.append(value)
    return {name: _last(np.array(steps), np.array(values)) for name, (steps, values) in series.items()}


def _last(steps: np.ndarray[tuple[int], np.dtype[np.int64]], values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Level:
    return Level(int(steps[-1]), float(values[-1])) if len(values) < FEW else level_of(steps, values)
