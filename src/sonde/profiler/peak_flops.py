"""Measures the peak FLOPs per second of this machine: the fastest of several matrix products, per dtype, device and number of threads."""

from __future__ import annotations

from functools import cache
from time import perf_counter

import torch

SIZES = (256, 512, 1024, 2048)
MAX_PRODUCT_S = 0.15  # a larger product is not tried if it would take longer: on such a machine the smaller ones are accurate enough
REPEATS = 4


def peak_flops_per_s(dtype: torch.dtype, device: torch.device) -> float:
    return _peak(dtype, str(device), torch.get_num_threads())


@cache
def _peak(dtype: torch.dtype, device: str, num_threads: int) -> float:
    """Measured once per process. The fastest of a few repetitions is close to the peak: other programs can only slow them down."""
    best = 0.0
    with torch.no_grad():
        for size in SIZES:
            factor = torch.full((size, size), 0.5, dtype=dtype, device=device)
            result = torch.empty_like(factor)
            flops = 2.0 * size**3
            durations = [_duration_s(factor, result) for _ in range(REPEATS)]
            best = max(best, flops / min(durations[1:]))
            if min(durations) * 8 > MAX_PRODUCT_S:
                break
    return best


def _duration_s(factor: torch.Tensor, result: torch.Tensor) -> float:
    start = perf_counter()
    torch.mm(factor, factor, out=result)
    if factor.device.type != "cpu":  # pragma: no cover - no device here to try it on
        torch.accelerator.synchronize(factor.device)
    return max(perf_counter() - start, 1e-9)
