"""Numbers on a device: whoever reads one waits for all the work before it. So they are gathered, and brought over together when an observed
step ends, in one transfer. (With a real device this is untested here: our tests declare the CPU to be far.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

CPU_IS_NEAR = True  # it computes while it is asked: nothing is waited for
MOST_WAITING = 64  # steps that go without an observed one: then what waits is fetched all the same, so that news is not too old

Use = Callable[[Sequence[float] | Exception], None]  # takes the numbers, or why they cannot be had


def on_device(tensor: Tensor) -> bool:
    return not (tensor.is_cpu and CPU_IS_NEAR)


class DeferredReads:
    """What waits on devices, in the order in which it came."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, Use]] = []
        self._num_steps = 0

    def add(self, numbers: Tensor, use: Use) -> None:
        self.waiting.append((numbers, use))

    def is_overdue(self) -> bool:
        """Asked once in a step that fetches nothing: has it been so many?"""
        self._num_steps += 1
        return self._num_steps >= MOST_WAITING

    def fetch(self, more: Iterable[tuple[Tensor, Use]] = ()) -> None:
        """Everything that waits, and `more`, in one transfer per device."""
        wanted, self.waiting, self._num_steps = [*self.waiting, *more], [], 0
        if wanted:
            self.waiting = fetch_all(wanted)


def fetch_all(wanted: Sequence[tuple[Tensor, Use]]) -> list[tuple[Tensor, Use]]:
    """Hands each its numbers. Answers with those that cannot be had now: a transfer would break a CUDA graph that is being captured."""
    by_device: dict[torch.device, list[tuple[Tensor, Use]]] = {}
    for numbers, use in wanted:
        by_device.setdefault(numbers.device, []).append((numbers, use))
    left: list[tuple[Tensor, Use]] = []
    for device, group in by_device.items():
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            left += group
            continue
        try:
            with torch.no_grad():
                together = torch.cat([numbers.reshape(-1) for numbers, _ in group])
                values = (together.cpu() if on_device(together) else together).tolist()
        except Exception as error:
            for _, use in group:
                use(error)
            continue
        start = 0
        for numbers, use in group:
            use(values[start : start + numbers.numel()])
            start += numbers.numel()
    return left
