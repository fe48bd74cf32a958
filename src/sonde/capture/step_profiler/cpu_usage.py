"""Cores, threads, load and preemptions of this process."""

import os
from functools import cache
from pathlib import Path
from time import monotonic, process_time
from typing import Any

import torch

resource: Any
try:
    import resource
except ImportError:  # not Unix: preemptions are not available
    resource = None

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "200000 100000": two cores' worth of time


@cache
def num_cores() -> float:
    """Cores that this process may run on, or the quota of the container if that is less."""
    try:
        cores = float(len(os.sched_getaffinity(0)))
    except (AttributeError, OSError):
        cores = float(os.cpu_count() or 1)
    try:
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        return min(cores, max(float(quota) / float(period), 0.1))
    except (OSError, ValueError):
        return cores  # no quota: "max", or no such file


class CpuUsage:
    """Threads, load and preemptions of this process since the last call."""

    def __init__(self) -> None:
        self._last = self._usage()

    def since_last(self) -> dict[str, Any]:
        now, then = self._usage(), self._last
        self._last = now
        wall_s = max(now[0] - then[0], 1e-9)
        try:
            load = os.getloadavg()[0]
        except (AttributeError, OSError):
            load = 0.0
        return {
            "threads": torch.get_num_threads(), "cores": num_cores(), "load": round(load, 2),
            "cpu_share": round((now[1] - then[1]) / wall_s, 3), "pushed_off_per_s": round((now[2] - then[2]) / wall_s, 1),
        }  # fmt: skip

    @staticmethod
    def _usage() -> tuple[float, float, float]:
        preemptions = 0.0 if resource is None else float(resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw)
        return monotonic(), process_time(), preemptions
