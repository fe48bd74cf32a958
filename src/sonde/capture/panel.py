"""The panel of probes: tells each of them what it wants to hear of, and keeps their errors apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sonde.capture.far import Use
from sonde.capture.kernel import Rows
from sonde.capture.probes import PROBES
from sonde.capture.probes.memory import Memory
from sonde.capture.probes.probe import Probe, Tools
from sonde.capture.probes.weights import Weights

MAX_TOLD = 50  # reasons: some name the tensor, and there are many tensors
_MOMENTS = [name for name in vars(Probe) if not name.startswith("_") and name != "name"]


class Panel:
    def __init__(self, tools: Tools) -> None:
        self._faults, self._journal = tools.faults, tools.journal
        self._tables: list[tuple[str, Rows]] = []  # of the step that is being written
        self._told: set[tuple[str, str]] = set()
        probes = [probe(tools) for probe in PROBES]
        wanted = [each for each in probes if each.wanted]
        self._listening = {
            moment: [each for each in wanted if getattr(type(each), moment) is not getattr(Probe, moment)] for moment in _MOMENTS
        }
        self._weights = next(each for each in probes if isinstance(each, Weights))
        self._memory = next(each for each in probes if isinstance(each, Memory))

    def each(self, moment: str, *args: Any, **kwargs: Any) -> None:
        """Tells every probe of a moment of the observed step. One that fails does not keep the others from it."""
        retired = self._faults.retired
        for probe in self._listening[moment]:
            if not retired or (probe.name, "") not in retired:
                try:
                    getattr(probe, moment)(*args, **kwargs)
                except Exception as error:
                    self._faults.caught(probe.name, "", error)
        if moment == "write":
            self._tell_unmeasured(*args)

    def pending(self) -> Iterator[tuple[torch.Tensor, Use]]:
        """What the probes have measured and is still on a device."""
        self._tables.clear()
        for probe in self._listening["tables"]:
            if (probe.name, "") not in self._faults.retired:
                try:
                    tables = list(probe.tables())
                    self._tables += [(probe.name, table) for table in tables]
                    yield from [pending for table in tables for pending in table.pending()]
                except Exception as error:
                    self._faults.caught(probe.name, "", error)

    def _tell_unmeasured(self, step: int) -> None:
        """A tensor that could not be measured leaves zeros, as one that is not there: why is said, once for each probe and reason."""
        try:
            for told in [(name, why) for name, table in self._tables if table.unsupported for why in table.unsupported.values()]:
                if told not in self._told and len(self._told) < MAX_TOLD:
                    self._told.add(told)
                    reason = f"some tensors could not be measured: {told[1]}"
                    self._journal.event("unobserved", step, probe=told[0], where="", reason=reason)
        except Exception as error:
            self._faults.caught("panel", "", error)

    def guarded(self, optimizer: torch.optim.Optimizer) -> tuple[float, int] | None:
        """What the guard would find, where the gradients of this optimizer have just been read."""
        return self._weights.guarded(optimizer)

    @property
    def outside_bytes(self) -> int:
        """Of the heap, what belonged to no model when the first forward began."""
        return self._memory.outside_bytes
