"""Runs the searches of incident handlers that need the user's code to run again: in a forked child, one at a time.

The training waits for a short time, then it goes on; an answer that comes later is taken at the end of a step, and belongs to the step of
its incident. Where no child can be started the search says why.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from threading import Lock
from time import perf_counter_ns

from torch import nn
from torch.optim import Optimizer

from sonde.capture.save_and_restore_model import state_restored
from sonde.capture.step_inputs_for_replay import ForwardCall
from sonde.errors import CannotReplay
from sonde.replay.forked_child import LIMIT_S, ChildAnswer, ReplayChild, Work, check_memory
from sonde.replay.prevent_side_effects import describe_failure
from sonde.statistics.batched_device_reads import on_device
from sonde.statistics.find_tensors import find_tensors, materialized_tensors, optimizer_state_tensors

WAIT_S = 0.3  # seconds that the training waits for an answer: most come within a tenth of that

_log = logging.getLogger("sonde")


@dataclass(frozen=True, slots=True)
class Search:
    """One search. `on_answer` is called once, in the training process, with the answer and the milliseconds that it took."""

    name: str  # for messages: "the origin of the NaN in the loss of step 41"
    work: Work
    on_answer: Callable[[ChildAnswer, float], None]
    is_urgent: bool = False  # it ends a running search that is not
    waits: bool = False  # for the answer, however long it takes
    keep: Collection[int] = ()  # descriptors that the child may write to


class ReplaySearches:
    """Starts searches, and takes their answers."""

    def __init__(
        self, models: Callable[[], Mapping[str, nn.Module]], optimizers: Callable[[], Iterable[Optimizer]], *, in_process: bool
    ) -> None:
        """`in_process`: run the searches in this process, which may alter the training."""
        self._models, self._optimizers, self._in_process = models, optimizers, in_process
        self._lock = Lock()  # several threads may train
        self._running: tuple[Search, ReplayChild, int] | None = None

    def start(self, search: Search, calls: Iterable[ForwardCall] = ()) -> bool:
        """Search now. `calls`: the forwards that would run again. False: another search is running, so this one was not started."""
        with self._lock:
            self._take_answer(0.0)
            if self._running is not None and (self._running[0].is_urgent or not search.is_urgent):
                search.on_answer(ChildAnswer(None, f"it was not run again: {self._running[0].name} was still searched"), 0.0)
                return False
            if self._running is not None:
                self._give_up(f"it was given up for {search.name}")
            began = perf_counter_ns()
            try:
                if self._in_process:
                    search.on_answer(self._run_here(search.work), _ms_since(began))
                    return True
                self._check_possible(calls)
                child = ReplayChild(search.work, keep=search.keep)
            except CannotReplay as error:
                search.on_answer(ChildAnswer(None, str(error)), _ms_since(began))
                return True
            # Without the work, which refers to the graph of the loss and to the variables of the step.
            self._running = (replace(search, work=lambda preliminary: {}), child, began)
            self._take_answer(LIMIT_S + 1 if search.waits else WAIT_S)
            return True

    def poll(self) -> None:
        """At the end of a step: take an answer that has come."""
        if self._running is not None and self._lock.acquire(blocking=False):
            try:
                self._take_answer(0.0)
            finally:
                self._lock.release()

    def close(self) -> None:
        """The training is over: wait for a running search; Ctrl-C skips it."""
        with self._lock:
            if self._running is None:
                return
            search = self._running[0]
            try:
                if not self._take_answer(WAIT_S):
                    _log.warning("sonde: still searching for %s; Ctrl-C skips it.", search.name)
                    self._take_answer(LIMIT_S + 1)
            except KeyboardInterrupt:
                self._give_up("it was skipped by Ctrl-C")

    def _take_answer(self, timeout_s: float) -> bool:
        """Whether no search is running any more."""
        if self._running is None:
            return True
        search, child, began = self._running
        answer = child.poll(timeout_s)
        if answer is None:
            return False
        self._running = None
        search.on_answer(answer, _ms_since(began))
        return True

    def _give_up(self, reason: str) -> None:
        assert self._running is not None
        search, child, began = self._running
        self._running = None
        child.kill()
        search.on_answer(ChildAnswer(None, reason), _ms_since(began))

    def _check_possible(self, calls: Iterable[ForwardCall]) -> None:
        """Raises `CannotReplay` where a child could not run the step."""
        tensors = materialized_tensors(self._models())
        inputs = [tensor for call in calls for _, tensor in find_tensors((call.args, call.kwargs))]
        if any(on_device(tensor) for tensor in (*tensors, *inputs)):
            raise CannotReplay("the step runs on a device, which a second process must not use")
        copied = (*tensors, *tensors, *optimizer_state_tensors(self._optimizers()))
        check_memory(sum(tensor.numel() * tensor.element_size() for tensor in copied))

    def _run_here(self, work: Work) -> ChildAnswer:
        with state_restored(self._models().values()):
            try:
                return ChildAnswer(work(lambda data: None))
            except Exception as error:
                return ChildAnswer(None, describe_failure(error))


def _ms_since(began_ns: int) -> float:
    return round((perf_counter_ns() - began_ns) / 1e6, 3)
