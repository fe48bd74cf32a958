"""Reading numbers from a device without waiting for it at every step.

Reading one number waits for all the work that was queued on the device before it. So numbers are collected, and copied to the host together
when an observed step ends. The tests treat the CPU as such a device; this module has not run on real hardware yet.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

TREAT_CPU_AS_DEVICE = False  # for tests: CPU tensors are then deferred too
MAX_STEPS_WAITING = 64  # steps without an observed one; then the numbers are fetched all the same, so that they are not reported too late

Use = Callable[[Sequence[float] | Exception], None]  # receives the numbers, or the error if they cannot be read


def on_device(tensor: Tensor) -> bool:
    """Whether reading this tensor waits for a device."""
    return not tensor.is_cpu or TREAT_CPU_AS_DEVICE


class DeferredReads:
    """Collects numbers on devices and the functions that use them, until they are fetched together."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, Use]] = []
        self._num_steps = 0

    def add(self, numbers: Tensor, use: Use) -> None:
        """Call `use` with these numbers at the next `fetch`."""
        self.waiting.append((numbers, use))

    def is_overdue(self) -> bool:
        """Count a step without a fetch; return whether there were `MAX_STEPS_WAITING` of them in a row."""
        self._num_steps += 1
        return self._num_steps >= MAX_STEPS_WAITING

    def fetch(self, more: Iterable[tuple[Tensor, Use]] = ()) -> None:
        """Read everything that waits, and `more`, in one transfer per device."""
        requests, self.waiting, self._num_steps = [*self.waiting, *more], [], 0
        if requests:
            self.waiting = fetch_all(requests)


def fetch_all(requests: Sequence[tuple[Tensor, Use]]) -> list[tuple[Tensor, Use]]:
    """Read all these numbers, in one transfer per device and class of tensors, and pass them to their functions. Returns the requests that
    cannot be read now: those of a device on which a CUDA graph is being captured, which a transfer would break."""
    groups: dict[tuple[torch.device, type[Tensor]], list[tuple[Tensor, Use]]] = {}
    for numbers, use in requests:  # the results of a user's class of tensors may fail: they are read apart from the others
        groups.setdefault((numbers.device, type(numbers)), []).append((numbers, use))
    postponed: list[tuple[Tensor, Use]] = []
    for (device, kind), group in groups.items():
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            postponed += group
            continue
        try:
            with torch.no_grad():
                together = torch.cat([numbers.reshape(-1) for numbers, _ in group])
                together = together.cpu() if on_device(together) else together
                # `tolist` reads the memory, which a class with `__torch_dispatch__` need not have.
                values = together.tolist() if kind is Tensor or type(together) is Tensor else [one.item() for one in together.unbind()]
        except Exception as error:
            for _, use in group:
                use(error)
            continue
        start = 0
        for numbers, use in group:
            use(values[start : start + numbers.numel()])
            start += numbers.numel()
    return postponed
