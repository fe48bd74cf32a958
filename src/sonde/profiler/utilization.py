"""Processor and GPU utilization while steps run: this process by its own clock, other programs by psutil, GPUs by NVML, if installed."""

from time import perf_counter, process_time
from typing import Any

import torch

from sonde.capture.step_profiler.cpu_usage import num_cores

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


class UtilizationMeter:
    """Measures over the intervals between `start` and `pause`, which may alternate."""

    def __init__(self) -> None:
        self._cpu_s = self._wall_s = 0.0
        self._started = (0.0, 0.0)
        self._gpu: list[float] = []

    def start(self) -> None:
        self._started = process_time(), perf_counter()

    def pause(self) -> None:
        self._cpu_s += process_time() - self._started[0]
        self._wall_s += perf_counter() - self._started[1]
        if (gpu := gpu_share()) is not None:
            self._gpu.append(gpu)

    def result(self) -> dict[str, float | str]:
        """busy_cores, cpu_share, num_cores and num_threads; others_busy_cores and gpu_share if they can be measured."""
        cores, threads = num_cores(), float(torch.get_num_threads())
        busy = self._cpu_s / self._wall_s if self._wall_s > 0 else float("nan")
        found: dict[str, float | str] = {"busy_cores": busy, "cpu_share": busy / cores, "num_cores": cores, "num_threads": threads}
        if (others := cores_used_by_others()) is not None:
            found["others_busy_cores"] = others
        if self._gpu:
            found["gpu_share"] = sum(self._gpu) / len(self._gpu)
        return found


def num_preemptions() -> int:
    """How often the system took the processor from this process for another one; 0 if the system does not count it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource is not None else 0


def cores_used_by_others() -> float | None:
    """Cores that other programs use right now; measured times vary if it is much. None: psutil is not installed."""
    try:
        import psutil
    except ImportError:
        return None
    share = psutil.cpu_percent(interval=0.05) / 100  # during this interval the own process sleeps
    return float(share * (psutil.cpu_count() or 1))


def gpu_share() -> float | None:
    """Utilization of the current CUDA device by NVML (pip install nvidia-ml-py). None: no device, or NVML is not installed."""
    if not torch.cuda.is_available():
        return None
    try:  # pragma: no cover - no device here to try it on
        import pynvml

        pynvml.nvmlInit()
        handle: Any = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except Exception:
        return None
