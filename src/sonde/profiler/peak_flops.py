"""What this machine can do at most: the fastest of several matrix products, once per process, dtype, device and number of threads."""

from __future__ import annotations

from functools import cache
from time import perf_counter

import torch

SIZES = (256, 512, 1024, 2048)
LONGEST_S = 0.15  # of one product: a larger one is not tried. A machine that is slow at it is known well enough by then
REPEATS = 4


def peak_flops_per_s(dtype: torch.dtype, device: torch.device) -> float:
    return _peak(dtype, str(device), torch.get_num_threads())


@cache
def _peak(dtype: torch.dtype, device: str, num_threads: int) -> float:
    """Infinite patience is not needed: the best of a few is close, and what disturbs can only make it slower."""
    best = 0.0
    with torch.no_grad():
        for size in SIZES:
            factor = torch.full((size, size), 0.5, dtype=dtype, device=device)
            result = torch.empty_like(factor)
            flops = 2.0 * size**3
            times = [_time(factor, result) for _ in range(REPEATS)]
            best = max(best, flops / min(times[1:]))
            if min(times) * 8 > LONGEST_S:
                break
    return best


def _time(factor: torch.Tensor, result: torch.Tensor) -> float:
    began = perf_counter()
    torch.mm(factor, factor, out=result)
    if factor.device.type != "cpu":  # pragma: no cover - no device here to try it on
        torch.accelerator.synchronize(factor.device)
    return max(perf_counter() - began, 1e-9)
