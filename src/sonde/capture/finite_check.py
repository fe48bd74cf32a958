"""The guard: on every step, are the loss, the inputs and the gradients finite, and in which state did an optimizer find its gradients?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from sonde.capture.gradient_state import Account, Ledger, optimizer_parameters
from sonde.capture.model_registry import Models
from sonde.capture.recorder import Journal
from sonde.events import STATISTICS
from sonde.statistics import reductions, torch_ops
from sonde.statistics.deferred_reads import Far, on_device
from sonde.statistics.table import StatisticsTable
from sonde.statistics.tensor_utils import find_tensors, read_scalar

_NUM, _NAN, _INF = (STATISTICS.index(name) for name in ("num", "nan", "inf"))


class Guard:
    __slots__ = ("__dict__", "__weakref__", "_said", "_sum_of_squares")  # see beat.py

    def __init__(
        self, journal: Journal, models: Models, ledger: Ledger, far: Far, on_bad: Callable[[str, str, torch.Tensor], None]
    ) -> None:
        self._on_bad = on_bad  # (what, where, tensor): the loss or a gradient, before anything has used it
        self._journal, self._models, self._ledger, self._far = journal, models, ledger, far
        self._said: set[str] = set()  # what was reported in this step
        self._sum_of_squares: float | None = None

    def bad_number(self, what: str, where: str, step: int, tensor: Any) -> None:
        """Reports a tensor that holds NaN or Inf, once per step and kind."""
        if what in self._said:
            return
        self._said.add(what)
        rows = StatisticsTable(1)
        rows.measure_one(0, tensor)
        rows.synchronize()
        num, nan, inf = (float(rows.values[0, field]) for field in (_NUM, _NAN, _INF))
        self._journal.event("nonfinite", step, what=what, where=where, num_elements=num, num_nan=nan, num_inf=inf)
        if what in ("loss", "gradient"):
            self._on_bad(what, where, tensor)

    @property
    def said_bad(self) -> bool:
        """Something in this step was not finite."""
        return bool(self._said)

    def inputs(self, args: Any, kwargs: Any, step: int) -> None:
        """A model is about to use these."""
        if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:
            floating = [("0", args[0])] if args[0].is_floating_point() and not on_device(args[0]) else []
        else:
            given = find_tensors((args, kwargs))
            floating = [(place.partition(".")[2], x) for place, x in given if x.is_floating_point() and not on_device(x)]
        _, bad = reductions.check_finite([tensor for _, tensor in floating]) if floating else (0.0, -1)
        if bad >= 0:
            self.bad_number("input", f"input.{floating[bad][0]}", step, floating[bad][1])

    def gradients(
        self,
        account: Account,
        optimizer: torch.optim.Optimizer,
        parameters: list[torch.Tensor],
        step: int,
        known: tuple[float, int] | None = None,
    ) -> float:
        """An optimizer uses its gradients: one read of them all, unless the answer is `known`. Answers the sum of their squares, as far as
        they are here."""
        gradients = [] if known else [p.grad for p in parameters]
        away = [p for p, gradient in zip(parameters, gradients) if gradient is not None and on_device(gradient)] if account.far else []
        if away:
            self._ask_later(away, step)
            gradients = [None if gradient is None or on_device(gradient) else gradient for gradient in gradients]
        sum_of_squares, bad = known or reductions.check_finite(gradients)
        empty = sum_of_squares == 0 and bad < 0 and not away
        stale, lost = self._ledger.used(account, empty=empty)
        if account.num_steps == 1 or not account.witnesses:
            account.choose_witnesses(parameters)
        if stale:
            self._journal.scalars["stale_updates"] += 1
            if not account.stale_told:
                account.stale_told = True
                self._journal.event("stale_update", step, optimizer=account.index)
        if empty:
            self._journal.scalars["empty_updates"] += 1
        if lost:
            self._journal.scalars["cleared_updates"] += 1
        self._sum_of_squares = (self._sum_of_squares or 0.0) + sum_of_squares
        if bad >= 0 and not skipped_by_scaler(optimizer):
            site = self._models.parameter_site(parameters[bad])
            self.bad_number("gradient", site.name if site else "", step, parameters[bad].grad)
        return math.nan if bad >= 0 else sum_of_squares if not away else 0.0

    def unguarded(self, step: int, optimizer: torch.optim.Optimizer | None) -> None:
        """Gradients that nobody will ask about before they are used: in the closure of an optimizer, or where the user moves the weights by
        hand."""
        held = optimizer_parameters(optimizer) if optimizer else [p for watched in self._models for _, p in watched.parameters()]
        parameters = [p for p in held if p.grad is not None and not on_device(p.grad)]
        _, bad = reductions.check_finite([p.grad for p in parameters])
        if bad >= 0:
            site = self._models.parameter_site(parameters[bad])
            self.bad_number("gradient", site.name if site else "", step, parameters[bad].grad)

    def write(self) -> None:
        if self._sum_of_squares is not None:
            self._journal.scalars["grad_norm"] = math.sqrt(self._sum_of_squares)

    def _ask_later(self, parameters: list[torch.Tensor], step: int) -> None:
        """Gradients on devices: their norms are computed there, and the answer comes with the next transfer."""
        named: dict[torch.device, tuple[list[str], list[torch.Tensor]]] = {}
        for p in parameters:
            if p.grad is not None and torch_ops.unsupported_reason(p.grad) is None:
                site = self._models.parameter_site(p)
                names, gradients = named.setdefault(p.grad.device, ([], []))
                names.append(site.name if site else "")
                gradients.append(p.grad)
        for names, gradients in named.values():
            self._far.later(reductions.norms(gradients), partial(self._answer, step, names))

    def _answer(self, step: int, names: list[str], norms: Sequence[float] | Exception) -> None:
        if isinstance(norms, Exception):
            return  # the step's norm stays unknown
        scalars = self._journal.scalars_of(step)
        known = scalars["grad_norm"]
        scalars["grad_norm"] = total = math.hypot(*norms, 0.0 if math.isnan(known) else known)
        bad = next((name for name, norm in zip(names, norms) if not math.isfinite(norm)), None)
        if bad is not None:
            self._journal.event("nonfinite", step, what="gradient", where=bad)
        elif total == 0:
            scalars["empty_updates"] += 1

    def clear(self) -> None:
        self._said.clear()
        self._sum_of_squares = None


def skipped_by_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """GradScaler hands fused optimizers what it found; their step then runs, hooks and all, and changes nothing."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(read_scalar(found_inf))
