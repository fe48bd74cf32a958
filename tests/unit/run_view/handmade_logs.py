"""Logs made record by record, also such as no training writes: steps that repeat, frames that change, events that come late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sonde.events import Kind, Site
from sonde.run_view import RunView, newest_views
from sonde.runlog import record_format as f
from sonde.runlog.run_reader import Run

SCALARS = {name: Site(1 + index, "scalar", name) for index, name in enumerate(("loss", "backwards", "lr"))}
WEIGHTS = {100 + index: Site(100 + index, "parameter", f"layer{index}.weight", type="Linear") for index in range(4)}
FIELDS = ("num", "l2")


class HandmadeLog:
    """A log of one process. What is written becomes part of `view()` at once, and of an older view at its `refresh`."""

    def __init__(self, directory: Path, *, sites: Sequence[Site] = (*SCALARS.values(), *WEIGHTS.values())) -> None:
        self.directory = directory
        self.write(f.header(), f.manifest_record({"rank": 0}), *f.sites_records(list(sites)))

    @property
    def path(self) -> Path:
        return self.directory / "rank0-hand-001.sonde"

    def write(self, *records: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(b"".join(records))

    def step(self, number: int, scalars: Mapping[str, float] | None = None) -> None:
        """Complete a step."""
        values = {"loss": 1.0} if scalars is None else scalars
        plan = f.FramePlan(Kind.STEP, ("value",), [SCALARS[name].id for name in values], exact=True)
        self.write(plan.encode_column(number, 0, [float(value) for value in values.values()]))

    def frame(self, step: int, norms: Mapping[int, float], kind: str = Kind.GRADIENT) -> None:
        """Statistics of these sites: their L2 norm."""
        plan = f.FramePlan(kind, FIELDS, list(norms), exact=False)
        self.write(plan.encode(step, 0, np.array([[10.0, norm] for norm in norms.values()])))

    def event(self, kind: str, step: int, **data: Any) -> None:
        self.write(f.event_record(kind, step, 0, data))

    def run(self) -> Run:
        return Run(self.directory)

    def view(self) -> RunView:
        (view,) = newest_views(self.run()).values()
        return view
