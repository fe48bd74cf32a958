"""How far some samples of a batch depart from the others, layer by layer: where does an odd sample become odd?"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from sonde.statistics.tensor_utils import find_tensors

TINY = 1e-30  # where one of them is zero
MAX_LAYERS = 400  # calls of layers in one forward that are looked at


@dataclass(frozen=True, slots=True)
class Sizes:
    """The mean absolute value of each sample in a tensor."""

    name: str
    of_samples: tuple[float, ...]

    def apart(self, samples: Collection[int]) -> tuple[float, float]:
        """The largest of these samples, and the usual size of the others."""
        others = [size for sample, size in enumerate(self.of_samples) if sample not in samples]
        return max(self.of_samples[sample] for sample in samples), median(others) if others else 0.0

    def odd(self, factor: float) -> tuple[int, ...]:
        """Samples that are so many times as large as the usual one."""
        usual = median(self.of_samples)
        return tuple(sample for sample, size in enumerate(self.of_samples) if size > factor * usual > 0)


def sizes_of(name: str, tensor: Tensor, num: int) -> Sizes | None:
    """None where it does not hold one entry per sample, or none that has a size."""
    dim = next((dim for dim in (0, 1) if tensor.dim() > dim and tensor.shape[dim] == num), None)
    if dim is None or not tensor.is_floating_point() or tensor.numel() == 0:
        return None
    with torch.no_grad():
        rows = tensor.detach().movedim(dim, 0).reshape(num, -1)
        return Sizes(name, tuple(rows.abs().to(torch.float64).mean(1).tolist()))


class Layers:
    """Measures what the layers put out while it is entered, in the order in which they ran."""

    def __init__(self, models: Mapping[str, nn.Module], num: int) -> None:
        self.outputs: list[Sizes] = []
        self._num = num
        self._stack = ExitStack()
        self._leaves = [
            (".".join(part for part in (name, path) if part), module)
            for name, model in models.items()
            for path, module in model.named_modules()
            if not module._modules or module._parameters
        ]

    def __enter__(self) -> Layers:
        with ExitStack() as stack:
            for path, module in self._leaves:
                stack.callback(module.register_forward_hook(self._hook(path)).remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def _hook(self, path: str) -> Any:
        def ended(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1 or len(self.outputs) >= MAX_LAYERS:
                return  # in backward: a part of the forward that is computed again
            for _, tensor in find_tensors(output)[:1]:
                sizes = sizes_of(path, tensor, self._num)
                if sizes is not None:
                    self.outputs.append(sizes)

        return ended


def turning_point(layers: Sequence[Sizes], samples: Collection[int], least: float) -> tuple[str, float, float] | None:
    """The layer at which the samples leave the others most: its path, their size and that of the others. None: they never do so."""
    found: tuple[str, float, float] | None = None
    steepest, before = 0.0, 1.0
    for sizes in layers:
        mine, others = sizes.apart(samples)
        if not others > 0:
            continue
        far = apartness(mine, others)
        if far >= least and far / before > steepest:
            steepest, found = far / before, (sizes.name, mine, others)
        before = far
    return found


def apartness(size: float, others: float) -> float:
    """How many times larger or smaller one is than the other, from 1 on."""
    return max(size, others, TINY) / max(min(size, others), TINY)
