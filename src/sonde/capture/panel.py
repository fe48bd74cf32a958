"""The panel of probes: tells each of them what it wants to hear of, and keeps their errors apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sonde.capture.probes import PROBES
from sonde.capture.probes.base import Probe, Tools
from sonde.capture.probes.memory import Memory
from sonde.capture.probes.parameters import Weights
from sonde.statistics.deferred_reads import Use
from sonde.statistics.table import StatisticsTable

MAX_TOLD = 50  # reasons: some name the tensor, and there are many tensors
_MOMENTS = [name for name in vars(Probe) if not name.startswith("_") and name != "name"]


class Panel:
    def __init__(self, tools: Tools) -> None:
        self._faults, self._journal = tools.faults, tools.journal
        self._tables: list[tuple[str, StatisticsTable]] = []  # of the step that is written: not all measured
        self._told: set[tuple[str, str]] = set()
        probes = [probe(tools) for probe in PROBES]
        wanted = [each for each in probes if each.wanted]
        self._listening: dict[str, list[tuple[str, Callable[..., Any]]]] = {
            moment: [(each.name, getattr(each, moment)) for each in wanted if getattr(type(each), moment) is not getattr(Probe, moment)]
            for moment in _MOMENTS
        }
        self._weights = next(each for each in probes if isinstance(each, Weights))
        self._memory = next(each for each in probes if isinstance(each, Memory))

    def each(self, moment: str, *args: Any, **kwargs: Any) -> None:
        """Tells every probe of a moment of the observed step. One that fails does not keep the others from it."""
        retired = self._faults.retired
        for name, tell in self._listening[moment]:
            if not retired or (name, "") not in retired:
                try:
                    tell(*args, **kwargs)
                except Exception as error:
                    self._faults.caught(name, "", error)
        if moment == "write" and self._tables:
            self._tell_unmeasured(*args)

    def pending(self) -> list[tuple[torch.Tensor, Use]]:
        """What the probes have measured and is still on a device."""
        self._tables.clear()
        pending: list[tuple[torch.Tensor, Use]] = []
        retired = self._faults.retired
        for name, tables in self._listening["tables"]:
            if not retired or (name, "") not in retired:
                try:
                    for table in tables():
                        if table.deferred or table.unsupported:
                            self._tables.append((name, table))
                            pending += table.pending()
                except Exception as error:
                    self._faults.caught(name, "", error)
        return pending

    def _tell_unmeasured(self, step: int) -> None:
        """A tensor that could not be measured leaves zeros, as one that is not there: why is said, once for each probe and reason."""
        try:
            for told in [(name, why) for name, table in self._tables for why in table.unsupported.values()]:
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
