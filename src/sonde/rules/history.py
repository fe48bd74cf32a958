"""How large a tensor was over the last observed steps: for rules that show how a number came to be what it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sonde.events import Frame, Kind, Site, Step
from sonde.rules.words import number

KEPT = 8  # observed steps: a line that a person takes in at a glance
GREW = 10.0  # times: less is the ordinary life of a tensor

_CALLED = {Kind.ACTIVATION: "output of {}", Kind.PARAMETER: "{}", Kind.GRADIENT: "gradient of {}"}


class Point(NamedTuple):
    step: int
    largest: float  # absolute value, of the finite elements
    bad: str  # "", "NaN" or "Inf"

    def __str__(self) -> str:
        return f"{number(self.largest)} and {self.bad}" if self.bad and self.largest else self.bad or number(self.largest)


@dataclass(frozen=True, slots=True)
class Course:
    """One tensor over the last observed steps."""

    name: str  # "output of fc1"
    points: Sequence[Point]

    def __str__(self) -> str:
        """`output of fc1: 3.1, 8.9, 40, 2.1e+03 at steps 4, 6, 8, 12`."""
        steps = ", ".join(str(point.step) for point in self.points)
        plural = "s" if len(self.points) > 1 else ""
        return f"{self.name}: {', '.join(map(str, self.points))} at step{plural} {steps}"

    @property
    def growth(self) -> str:
        """What to say of it where it has grown; else ""."""
        sizes = [point.largest for point in self.points]
        smallest = min(sizes[: len(sizes) // 2], default=0.0)
        if not smallest or sizes[-1] < GREW * smallest or sizes[-1] < max(sizes) / 2:
            return ""
        first, last = self.points[sizes.index(smallest)], self.points[-1]
        return f"the largest number in the {self.name} went from {first} at step {first.step} to {last} at step {last.step}"


@dataclass(slots=True)
class MagnitudeHistory:
    """A fold: the last few frames of each kind."""

    frames: dict[str, deque[Frame]] = field(default_factory=lambda: {kind: deque(maxlen=KEPT) for kind in _CALLED})
    sites: Mapping[int, Site] = field(default_factory=dict)

    def see(self, step: Step) -> None:
        if not step.frames:
            return
        self.sites = step.sites
        for kind, kept in self.frames.items():
            frame = step.frames.get(kind)
            if frame is not None:
                kept.append(frame)

    def course(self, kind: str, name: str, *, now: Mapping[str, float], at: int) -> Course | None:
        """How large the tensor of that name was; None where it was not measured. A module that is called several times is one. Of some
        outputs it is known how large they are `now`, `at` a step that may not have been observed."""
        wanted = [number for number, site in self.sites.items() if site.name == name]
        points = [point for frame in self.frames[kind] if (point := _point(frame, wanted)) is not None]
        if kind == Kind.ACTIVATION and name in now and not (points and points[-1].step >= at):
            points = [*points, Point(at, now[name], "")][-KEPT:]
        return Course(_CALLED[kind].format(name), points) if points else None


def _point(frame: Frame, wanted: Sequence[int]) -> Point | None:
    chosen = np.isin(frame.sites, wanted)
    if not chosen.any() or not frame["num"][chosen].any():
        return None
    sizes = np.abs([frame["min"][chosen], frame["max"][chosen]])
    bad = "NaN" if frame["nan"][chosen].any() else "Inf" if frame["inf"][chosen].any() else ""
    return Point(frame.step, float(np.nan_to_num(sizes).max()), bad)
