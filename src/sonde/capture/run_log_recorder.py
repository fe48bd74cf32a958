"""Numbers the sites, collects the scalars of a step, and passes whole steps to the writer of the run log."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sonde.events import STEP_SCALARS, Kind, Site, TypedEvent
from sonde.runlog.record_format import FramePlan
from sonde.runlog.writer import Writer
from sonde.statistics import native_extension

_COUNTS = frozenset(STEP_SCALARS) - {"loss", "grad_norm", "lr", "loss_scale"}  # start at 0; the others are unknown until given
MAX_SITES = 200_000  # a program that makes models without end must not fill the disk with names


class StepRecorder:
    """Writes sites, events, frames and steps of one process."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self._started_ns = time.monotonic_ns()
        self._num_sites = 0
        self._new_sites: list[Site] = []
        self._scalar_sites: dict[str, Site] = {}
        self._log_plans: dict[tuple[str, ...], FramePlan] = {}
        self._step_plan: FramePlan | None = None
        self._waiting: dict[int, tuple[dict[str, float], int]] = {}  # ended steps that are incomplete: their scalars, and when
        self._fresh = {name: 0.0 if name in _COUNTS else math.nan for name in STEP_SCALARS}
        self.scalars = dict(self._fresh)  # of the step under way: plain, since every step touches most of them
        for name in STEP_SCALARS:
            self._scalar_site(name)

    def site(self, **fields: Any) -> Site | None:
        """A new site; None when there are more than a run should hold."""
        if self._num_sites >= MAX_SITES:
            return None
        site = Site(id=self._num_sites, **fields)
        self._num_sites += 1
        self._new_sites.append(site)
        return site

    def _write_sites(self) -> None:
        """New sites are written together, before the first frame that may measure them."""
        if self._new_sites:
            sites, self._new_sites = self._new_sites, []
            self.writer.sites(sites)

    def emit(self, event: TypedEvent, step: int) -> None:
        """Write an event; it reaches the disk with the step, or with `flush`."""
        self.writer.emit(event, step)

    def plan(self, kind: str, fields: Sequence[str], site_ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> FramePlan:
        return self.writer.plan(kind, fields, site_ids)

    def frame(self, plan: FramePlan, step: int, rows: npt.NDArray[np.float64]) -> None:
        """`rows` has one row per site of the plan."""
        if self._new_sites:
            self._write_sites()
        time_ns = self._now()
        record = native_extension.encode_frame(plan, step, time_ns, rows)
        if record is None:
            self.writer.frame(plan, step, rows, time_ns)
        else:
            self.writer.put(record)

    def end_step(self, step: int, *, is_incomplete: bool = False) -> None:
        """Write the step frame, last of its step, and everything before it, in one call of the system. A step that is incomplete, because
        some of its numbers are still on a device, is written with the next one that is complete."""
        if is_incomplete:
            self._waiting[step] = (dict(self.scalars), self._now())
        else:
            if self._waiting:
                self.release()
            self._write_step(step, self.scalars, self._now(), flush=True)
        self.scalars.update(self._fresh)

    def release(self) -> None:
        """Write the incomplete steps, as far as they are known."""
        waiting, self._waiting = self._waiting, {}
        for step, (scalars, time_ns) in waiting.items():
            self._write_step(step, {**self._fresh, **scalars}, time_ns)

    def scalars_of(self, step: int) -> dict[str, float]:
        """The scalars of a step, which may have ended already and be incomplete."""
        return self._waiting[step][0] if step in self._waiting else self.scalars

    def _write_step(self, step: int, scalars: dict[str, float], time_ns: int, *, flush: bool = False) -> None:
        if self._step_plan is None or len(scalars) != len(self._fresh):
            for name in scalars:
                self._fresh.setdefault(name, math.nan)
            self._step_plan = self.writer.plan(Kind.STEP, ("value",), [self._scalar_site(name).id for name in self._fresh])
            scalars = {**self._fresh, **scalars}
        if self._new_sites:
            self._write_sites()
        self.writer.column(self._step_plan, step, [*scalars.values()], time_ns, flush=flush)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Values that the user logs; they may come after their step ended, so they have frames of their own."""
        names = tuple(values)
        plan = self._log_plans.get(names)
        if plan is None:
            plan = self.plan(Kind.LOG, ("value",), [self._scalar_site(name).id for name in names])
            if len(self._log_plans) < 256:  # names made anew every step are not kept
                self._log_plans[names] = plan
        self._write_sites()
        self.writer.column(plan, step, list(values.values()), self._now())

    def flush(self) -> None:
        if self._waiting:
            self.release()
        self._write_sites()
        self.writer.flush()

    def _scalar_site(self, name: str) -> Site:
        if name not in self._scalar_sites:
            self._scalar_sites[name] = self.site(kind="scalar", path=name) or Site(id=0, kind="scalar", path=name)
        return self._scalar_sites[name]

    def _now(self) -> int:
        return time.monotonic_ns() - self._started_ns
