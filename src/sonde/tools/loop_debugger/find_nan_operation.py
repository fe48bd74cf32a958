"""Finds the operation that produced a NaN or Inf: runs the step again under the tracer in a child process, or uses torch's anomaly mode."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sonde.capture.step_tracker import StepTracker
from sonde.capture.training_callbacks import subscribers
from sonde.nonfinite.find_origin_context_manager import find_origin
from sonde.nonfinite.operation_tracer import compile_disabled
from sonde.nonfinite.origin_types import Origin
from sonde.replay import replay_without_other_ranks
from sonde.replay.forked_child import run_in_child
from sonde.tools.loop_debugger.measure_loop_operation import has_cuda


@contextmanager
def anomaly_mode(*, check_nan: bool) -> Iterator[None]:
    """Switch torch's anomaly mode on. On exit, also by an exception, it is as before, unless the block itself has changed it."""
    before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    inside = True, check_nan or (before[0] and before[1])
    torch.autograd.set_detect_anomaly(*inside)
    try:
        yield
    finally:
        if (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) == inside:
            torch.autograd.set_detect_anomaly(*before)


MAX_SEARCHES = 3  # in one loop: later NaNs follow from the first ones


class RandomState:
    """The random generators of torch before a step, so that a replay draws the same numbers."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if has_cuda() else None

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


def find_cause(modules: Sequence[nn.Module], random_state: RandomState, run: Callable[[], Any]) -> Origin | str:
    """Runs `run` again: a forward pass, or a step up to its loss, whose backward pass then follows. `modules`: the model, and other modules
    whose state `run` may change. Returns the operation that produced the value, or a sentence with the reason why it is unknown."""
    if any(isinstance(each, StepTracker) for each in subscribers()):
        return "a session watches this training and finds the cause: see its report"
    model = modules[0]

    def work(preliminary: Any) -> dict[str, Any]:
        with replay_without_other_ranks.without_ddp([model]), compile_disabled():
            random_state.restore()
            for parameter in model.parameters():
                parameter.grad = None
            with find_origin(model) as found, replay_without_other_ranks.forbid_collectives():
                result = run()
                if isinstance(result, Tensor) and result.numel() == 1 and result.requires_grad:
                    result.backward()  # type: ignore[no-untyped-call]
        return {"origin": found.origin.to_dict() if found.origin else None}

    answer = run_in_child(work)
    if answer.failure or answer.data is None:
        return answer.failure
    origin = answer.data["origin"]
    return Origin.from_dict(origin) if origin else "the step does not produce it when it is run again"
