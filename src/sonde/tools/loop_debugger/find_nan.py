"""Why a step of a loop went bad: it is run once more with every operation looked at, and everything is then as it was."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sonde.capture import patches
from sonde.errors import SondeError
from sonde.nonfinite.find_origin import find_origin
from sonde.nonfinite.origin import Origin
from sonde.nonfinite.tracer import compile_disabled
from sonde.replay import distributed
from sonde.replay.restore_state import state_restored
from sonde.tools.loop_debugger.measurements import has_cuda

MOST = 3  # bad steps that are run again in one loop: further ones follow from these, or are alike


class Generators:
    """The random state before a step, so that it can be run again with the same numbers."""

    __slots__ = ("_cpu", "_cuda")

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if has_cuda() else None

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


def search(model: nn.Module, others: list[nn.Module], generators: Generators, loss_of: Callable[[], Tensor]) -> Origin | str:
    """The operation that made the bad number, or why it could not be found. `loss_of` runs the step up to its loss."""
    if patches.subscribers():
        return "a session watches this training, and looks for it too: see its report"
    try:
        with state_restored([model, *others]), distributed.without_ddp([model]), compile_disabled():
            generators.restore()
            for parameter in model.parameters():
                parameter.grad = None  # what is there stays as it is, and comes back afterwards
            with find_origin(model) as found, distributed.forbid_collectives():
                loss = loss_of()
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
        return found.origin or "run again, the step makes no bad number"
    except SondeError as error:
        return str(error)
    except Exception as error:  # the training must not suffer from what was meant to explain it
        return f"running the step again failed ({type(error).__name__}: {error})"[:500]
