"""Numbers that the user logged under the same name in both runs, at the end of each. They are not judged: more may be better or worse."""

from dataclasses import dataclass

import numpy as np

from sonde.comparison.loss_curves import Level, level_of
from sonde.events import Kind
from sonde.run_view import RunView

MAX_NAMES = 32  # a program that logs under ever new names is not compared by them
FEW = 20  # values: of so few (one per epoch, say) the last one counts, of more the median of the last ones


@dataclass(frozen=True, slots=True)
class UserMetricComparison:
    """One name under which both runs logged numbers."""

    name: str
    a: Level
    b: Level


def compare_user_metrics(a: RunView, b: RunView) -> tuple[UserMetricComparison, ...]:
    in_a, in_b = _last_levels(a), _last_levels(b)
    return tuple(UserMetricComparison(name, in_a[name], in_b[name]) for name in in_a if name in in_b)


def _last_levels(view: RunView) -> dict[str, Level]:
    series: dict[str, list[tuple[int, float]]] = {}
    for frame in view.process.frames(Kind.LOG):
        for site, value in zip(frame.sites.tolist(), frame.values[0].tolist() if frame.fields else ()):
            name = view.sites[site].path if site in view.sites else ""
            if name and (name in series or len(series) < MAX_NAMES):
                series.setdefault(name, []).append((frame.step, value))
    return {name: Level(*points[-1]) if len(points) < FEW else level_of(*map(np.array, zip(*points))) for name, points in series.items()}
