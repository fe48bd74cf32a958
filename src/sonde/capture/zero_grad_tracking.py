"""The state of the gradients: were they cleared between updates, and was anything in them when an optimizer used them?

For each optimizer it is known whether its gradients have been seen cleared since its last step, and whether a backward has written to
them. A few parameters are sampled: at the start and end of backward, and at the update.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock, get_ident
from typing import Any

import torch

from sonde.statistics import reductions
from sonde.statistics.batched_device_reads import on_device
from sonde.statistics.private_torch_api import tensor_version

NUM_SAMPLED = 3  # parameters: all of an optimizer's gradients are cleared, or none
TRUST_AFTER = 16  # backwards that wrote gradients: then it is taken for granted, until an update finds none
MAX_ELEMENTS = 4096  # of each sampled gradient: one that was not cleared has a non-zero among so many


@dataclass(slots=True)
class OptimizerGradients:
    """What is known of one optimizer's gradients."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    index: int
    sampled_params: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    num_updates: int = 0
    is_cleared: bool = True  # seen without gradients since its last update
    has_backward: bool = False  # a backward ran since its last update
    is_written: bool = False  # a backward left non-zero gradients since its last update
    is_stale_reported: bool = False
    on_device: bool = False
    versions: list[tuple[int, int]] = field(default_factory=list)  # on a device: which tensors the gradients were, and how often written
    num_doubts: int = TRUST_AFTER  # backwards whose gradients are read before it is taken for granted that they write some
    thread: int = 0  # that cleared or used its gradients last

    def gradients(self) -> list[torch.Tensor]:
        """Of the sampled parameters."""
        alive = (ref() for ref in self.sampled_params)
        return [p.grad for p in alive if p is not None and p.grad is not None]

    def has_nonzero(self) -> bool:
        """Whether anything is in the gradients. On a device nobody waits for the answer: there they count as cleared once they are other
        tensors than at the last `remember_versions`, or have been written to."""
        gradients = self.gradients()
        if self.on_device and gradients:
            return _versions(gradients) == self.versions
        return reductions.any_nonzero(gradients, MAX_ELEMENTS)

    def remember_versions(self) -> None:
        self.versions = _versions(self.gradients())

    def sample(self, parameters: list[torch.Tensor]) -> None:
        """Choose evenly spaced parameters that have a gradient now: an auxiliary head or a frozen layer says nothing."""
        candidates = [p for p in parameters if p.grad is not None]
        stride = max(1, len(candidates) // NUM_SAMPLED)
        self.sampled_params = [weakref.ref(p) for p in candidates[::stride][:NUM_SAMPLED]]
        self.on_device = any(on_device(p) for p in candidates)


class GradientState:
    """The gradients of all optimizers of a training."""

    def __init__(self) -> None:
        self._entries: dict[int, OptimizerGradients] = {}
        self.num_registered = 0
        self.has_update = False  # an optimizer has stepped
        # Held while gradients are read: the first backward of a second thread waits for it; from then on each thread reads its own only.
        self._lock = Lock()
        self._thread = 0  # of the first backward
        self.in_threads = False  # other threads run backwards too: then no thread may read the gradients of all

    def register(self, optimizer: torch.optim.Optimizer) -> OptimizerGradients:
        """The optimizer's entry; a new one where the optimizer is new."""
        entry = self._entries.get(id(optimizer))
        if entry is None or entry.optimizer() is not optimizer:
            # Some programs construct a new optimizer for every step: the entries of dead ones are dropped.
            self._entries = {key: other for key, other in self._entries.items() if other.optimizer() is not None}
            entry = self._entries[id(optimizer)] = OptimizerGradients(weakref.ref(optimizer), index=self.num_registered)
            self.num_registered += 1
        return entry

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that are alive."""
        return [optimizer for entry in list(self._entries.values()) if (optimizer := entry.optimizer()) is not None]

    def _of_this_thread(self) -> list[OptimizerGradients]:
        """Entries whose gradients may be read in this thread: backward releases the GIL, and reading a gradient while another thread writes
        it ends the process."""
        thread = get_ident()
        if thread != self._thread:
            self.in_threads = self.in_threads or self._thread != 0
            self._thread = self._thread or thread
        return [entry for entry in list(self._entries.values()) if not self.in_threads or entry.thread == thread]

    @contextmanager
    def reading_all(self) -> Iterator[bool]:
        """Whether the gradients of all optimizers may be read inside: no second thread runs backwards, and none begins with that."""
        with self._lock:
            yield not self.in_threads

    def on_backward_start(self) -> bool:
        """True: gradients that an earlier backward wrote have been cleared since."""
        has_cleared = False
        with self._lock:
            for entry in self._of_this_thread():
                if entry.is_written or not entry.is_cleared:
                    if not entry.sampled_params:
                        self._sample(entry)
                    if not entry.has_nonzero():
                        entry.is_cleared = True
                        has_cleared = has_cleared or entry.is_written
                        entry.is_written = False
                entry.has_backward = True
        return has_cleared

    def on_backward_end(self) -> None:
        with self._lock:
            for entry in self._of_this_thread():
                is_doubted = not entry.is_written and entry.num_doubts > 0
                if is_doubted and not entry.gradients():
                    self._sample(entry)
                if entry.on_device:
                    entry.remember_versions()
                entry.is_written = entry.has_nonzero() if is_doubted else True
                entry.num_doubts -= is_doubted and entry.is_written

    @staticmethod
    def _sample(entry: OptimizerGradients) -> None:
        optimizer = entry.optimizer()
        if optimizer is not None:
            entry.sample(optimizer_parameters(optimizer))

    def on_zero_grad(self, owner: Any) -> None:
        entry = self._entries.get(id(owner))
        if entry is not None:
            entry.is_cleared = True
            entry.thread = get_ident()

    def on_update(self, entry: OptimizerGradients, *, is_empty: bool) -> tuple[bool, bool]:
        """An optimizer uses its gradients now. Returns whether they are stale, and whether they were cleared after a backward."""
        is_stale = entry.num_updates > 0 and not entry.is_cleared and entry.has_backward and not is_empty
        is_lost = is_empty and entry.is_written and entry.num_doubts > 0  # what was only taken for granted is no evidence
        if is_empty:
            entry.num_doubts = TRUST_AFTER
        self.has_update = True
        entry.thread = get_ident()
        entry.num_updates += 1
        entry.is_cleared = False
        if entry.on_device:
            entry.remember_versions()
        entry.has_backward = False
        entry.is_written = False
        return is_stale, is_lost


def _versions(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    return [(id(tensor), tensor_version(tensor)) for tensor in tensors]


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
