"""The panel of probes: tells each of them what it wants to hear of, and keeps their errors apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sonde.capture.far import Use
from sonde.capture.probes import PROBES
from sonde.capture.probes.memory import Memory
from sonde.capture.probes.probe import Probe, Tools
from sonde.capture.probes.weights import Weights

_MOMENTS = [name for name in vars(Probe) if not name.startswith("_") and name != "name"]


class Panel:
    def __init__(self, tools: Tools) -> None:
        self._faults = tools.faults
        probes = [probe(tools) for probe in PROBES]
        self._listening = {
            moment: [each for each in probes if getattr(type(each), moment) is not getattr(Probe, moment)] for moment in _MOMENTS
        }
        self._weights = next(each for each in probes if isinstance(each, Weights))
        self._memory = next(each for each in probes if isinstance(each, Memory))

    def each(self, moment: str, *args: Any, **kwargs: Any) -> None:
        """Tells every probe of a moment of the observed step. One that fails does not keep the others from it."""
        for probe in self._listening[moment]:
            if (probe.name, "") not in self._faults.retired:
                try:
                    getattr(probe, moment)(*args, **kwargs)
                except Exception as error:
                    self._faults.caught(probe.name, "", error)

    def pending(self) -> Iterator[tuple[torch.Tensor, Use]]:
        """What the probes have measured and is still on a device."""
        for probe in self._listening["tables"]:
            if (probe.name, "") not in self._faults.retired:
                try:
                    yield from [pending for table in probe.tables() for pending in table.pending()]
                except Exception as error:
                    self._faults.caught(probe.name, "", error)

    def guarded(self, optimizer: torch.optim.Optimizer) -> tuple[float, int] | None:
        """What the guard would find, where the gradients of this optimizer have just been read."""
        return self._weights.guarded(optimizer)

    @property
    def outside_bytes(self) -> int:
        """Of the heap, what belonged to no model when the first forward began."""
        return self._memory.outside_bytes
