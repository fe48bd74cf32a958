"""The ledger of gradients: were they cleared between updates, and was anything there when an optimizer used them?

Exact relations, not thresholds. For each optimizer it remembers whether its gradients have been seen cleared since its last step, and
whether a backward has written to them. It looks at a handful of parameters, at the moments where it matters: entering and leaving
backward, and at the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch

from sonde.statistics import reductions
from sonde.statistics.deferred_reads import on_device

NUM_WITNESSES = 3  # parameters looked at: clearing is done to all of an optimizer's gradients or to none
TRUST_AFTER = 16  # backwards that wrote gradients: then it goes without saying, until an update finds none
FEW = 4096  # elements of each witness: a gradient that was not cleared has a non-zero among so many


@dataclass(slots=True)
class Account:
    """What is known of one optimizer's gradients."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    index: int
    witnesses: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    num_steps: int = 0
    cleared: bool = True  # seen without gradients since its last step
    backward_since: bool = False  # a backward ran since its last step
    written: bool = False  # a backward left non-zero gradients since its last step
    stale_told: bool = False
    far: bool = False  # the gradients are on a device
    marks: list[tuple[int, int]] = field(default_factory=list)  # then: which tensors they were, and how often written
    doubts: int = TRUST_AFTER  # backwards whose gradients are looked at before it is believed that they write some
    thread: int = 0  # that cleared or used its gradients last

    def gradients(self) -> list[torch.Tensor]:
        alive = (ref() for ref in self.witnesses)
        return [p.grad for p in alive if p is not None and p.grad is not None]

    def holds_any(self) -> bool:
        """Is there anything in the gradients? On a device nobody waits for the answer: there they count as cleared once they are other
        tensors than at the last `mark`, or have been written to."""
        gradients = self.gradients()
        return _versions(gradients) == self.marks if self.far and gradients else reductions.any_nonzero(gradients, FEW)

    def mark(self) -> None:
        if self.far:
            self.marks = _versions(self.gradients())

    def choose_witnesses(self, parameters: list[torch.Tensor]) -> None:
        """Evenly spaced parameters that have a gradient now; an aux head or a frozen layer would tell nothing."""
        candidates = [p for p in parameters if p.grad is not None]
        stride = max(1, len(candidates) // NUM_WITNESSES)
        self.witnesses = [weakref.ref(p) for p in candidates[::stride][:NUM_WITNESSES]]
        self.far = any(on_device(p) for p in candidates)


class Ledger:
    __slots__ = ("__dict__", "__weakref__", "accounts", "ever_used")  # see beat.py

    def __init__(self) -> None:
        self.accounts: dict[int, Account] = {}
        self.num_opened = 0
        self.ever_used = False  # an optimizer has stepped
        self._thread = 0  # of the first backward
        self.in_threads = False  # others run backwards too: then nobody may read the gradients of all

    def open(self, optimizer: torch.optim.Optimizer) -> Account:
        """The optimizer's account; a new one where the optimizer is new."""
        account = self.accounts.get(id(optimizer))
        if account is None or account.optimizer() is not optimizer:
            # Some programs make a new optimizer for every step: the accounts of the dead are closed.
            self.accounts = {key: other for key, other in self.accounts.items() if other.optimizer() is not None}
            account = self.accounts[id(optimizer)] = Account(weakref.ref(optimizer), index=self.num_opened)
            self.num_opened += 1
        return account

    def optimizers(self) -> Iterable[tuple[Account, torch.optim.Optimizer]]:
        for account in self.accounts.values():
            optimizer = account.optimizer()
            if optimizer is not None:
                yield account, optimizer

    def _ours(self) -> list[Account]:
        """Those whose gradients may be read in this thread: backward lets go of the GIL, and reading a gradient while it is being written
        by another thread ends the process."""
        thread = get_ident()
        if thread != self._thread:
            self.in_threads = self.in_threads or self._thread != 0
            self._thread = self._thread or thread
        return [account for account in self.accounts.values() if not self.in_threads or account.thread == thread]

    def backward_begins(self) -> bool:
        """True: gradients that an earlier backward wrote have been cleared since."""
        cleared_now = False
        for account in self._ours():
            if account.written or not account.cleared:
                if not account.witnesses:
                    self._find_witnesses(account)
                if not account.holds_any():
                    account.cleared = True
                    cleared_now = cleared_now or account.written
                    account.written = False
            account.backward_since = True
        return cleared_now

    def backward_ended(self) -> None:
        for account in self._ours():
            if account.written or not account.doubts:
                account.written = True
            else:
                if not account.gradients():
                    self._find_witnesses(account)
                account.mark()
                account.written = account.holds_any()
                account.doubts -= account.written
            account.mark()

    @staticmethod
    def _find_witnesses(account: Account) -> None:
        optimizer = account.optimizer()
        if optimizer is not None:
            account.choose_witnesses(optimizer_parameters(optimizer))

    def zeroed(self, optimizer: Any) -> None:
        account = self.accounts.get(id(optimizer))
        if account is not None:
            account.cleared = True
            account.thread = get_ident()

    def used(self, account: Account, *, empty: bool) -> tuple[bool, bool]:
        """An optimizer uses its gradients now. Answers (they are stale, they were cleared after a backward wrote them)."""
        stale = account.num_steps > 0 and not account.cleared and account.backward_since and not empty
        lost = empty and account.written and account.doubts > 0  # what was only believed is no evidence
        if empty:
            account.doubts = TRUST_AFTER
        self.ever_used = True
        account.thread = get_ident()
        account.num_steps += 1
        account.cleared = False
        account.mark()
        account.backward_since = False
        account.written = False
        return stale, lost


def _versions(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    return [(id(tensor), tensor._version) for tensor in tensors]


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
