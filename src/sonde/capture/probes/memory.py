"""The memory of the process, and whether graphs of earlier steps are still alive. Where either grows, an inquest asks who holds it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from sonde.capture import process_memory
from sonde.capture.probes.base import Probe, Tools, is_now_and_then
from sonde.capture.watched_model import Watched
from sonde.incidents.memory_growth_handler import LeakInvestigation
from sonde.memory_trend import Growth
from sonde.statistics.tensor_utils import find_tensors, storage_bytes

MB = 2**20
MAX_TOKENS = 32  # graphs that are remembered; beyond, every second is forgotten
ONE_BY_ONE = 64  # steps that are looked at wherever they are observed; later ones now and then: asking the system takes its time
KEPT_GRAPHS = 8  # of different steps: a variable or two keep the last one or two
KEPT_STEPS = 40  # over which these are spread
GROWN_MB = 24.0  # a growth worth an inquest
ASKED_EVERY = 64  # steps: whether memory grows takes a hundred microseconds to say
MAX_INQUESTS = 2  # in one run: a fraction of a second each


class _Token:
    """Lives as long as the graph that it was put into."""

    __slots__ = ("__weakref__",)


class Memory(Probe):
    name = "memory"

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self.wanted, self._is_logged = tools.measured.memory, tools.measured.memory_logged
        self._growth = Growth()
        self._graphs: list[tuple[int, weakref.ref[_Token]]] = []  # step, and whether its graph lives
        self._inquest: LeakInvestigation | None = None
        self._num_inquests = 0
        self._step = 0
        self._told = False
        self.outside_bytes = 0  # of the heap when the first forward began: what belongs to no model

    def begin(self, step: int, *, with_exponents: bool) -> None:
        self._step = step

    def entered(self, watched: Watched, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.outside_bytes:
            heap = process_memory.heap()
            parameters = storage_bytes(parameter for each in self._tools.models for _, parameter in each.parameters())
            self.outside_bytes = max(1, heap.used - parameters) if heap is not None else 1

    def left(self, watched: Watched, output: Any) -> None:
        for _, tensor in find_tensors(output)[:1]:
            node: Any = tensor.grad_fn
            if node is not None and (not self._graphs or self._graphs[-1][0] != self._step):
                token = node.metadata["sonde"] = _Token()
                self._graphs.append((self._step, weakref.ref(token)))
                if len(self._graphs) > MAX_TOKENS:
                    del self._graphs[1::2]

    def now_and_then(self, step: int) -> None:
        self._look(step)
        if step % ASKED_EVERY == 0 and self._may_ask and self._growth.trend(GROWN_MB) is not None:
            self._ask(step)

    def write(self, step: int) -> None:
        if not self._told:
            self._told = True
            self._tell_limit(step)
        scalars = self._journal.scalars
        if step < ONE_BY_ONE and not is_now_and_then(step):
            self._look(step)
        self._graphs = [one for one in self._graphs if one[1]() is not None]
        kept = [born for born, _ in self._graphs if born < step - 1]
        if self._is_logged:
            scalars["kept_graphs"] = float(len(kept))
        if len(kept) >= KEPT_GRAPHS and step - kept[0] >= KEPT_STEPS and self._may_ask:
            self._ask(step)

    def _look(self, step: int) -> None:
        resident = process_memory.rss()
        if resident is not None:
            if self._is_logged:
                self._journal.scalars["rss_mb"] = resident / MB
            self._growth.see(step, resident / MB)
        if self._is_logged and torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # not tried on a machine with one; no synchronisation is needed
            self._journal.scalars["cuda_mb"] = torch.cuda.memory_allocated() / MB

    @property
    def _may_ask(self) -> bool:
        return self._inquest is None and self._num_inquests < MAX_INQUESTS

    def _ask(self, step: int) -> None:
        self._num_inquests += 1
        self._inquest = LeakInvestigation(self._journal, self._tools.desk, self._tools.faults, self._closed, step)

    def _closed(self, found: bool) -> None:
        self._inquest = None
        self._num_inquests += MAX_INQUESTS if found else 0  # one answer is enough
        self._growth = Growth()  # a second inquest needs a growth of its own

    def _tell_limit(self, step: int) -> None:
        limit = process_memory.limit()
        if limit is not None:
            self._journal.event("memory_limit", step, num_bytes=limit.num_bytes, by=limit.by)

    def rest(self) -> None:
        if self._inquest is not None:
            self._inquest.close()
