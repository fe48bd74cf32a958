"""What the memory of a training is taken by: the data of `MemoryProfiler` and of `sonde memory`. Nothing here imports torch."""

from __future__ import annotations

from sonde.memory_profiler.memory_report import (
    CATEGORIES,
    DeviceMemory,
    Forecast,
    Kept,
    MemoryReport,
    Peak,
    Point,
    Process,
    Snapshot,
    Usage,
)
from sonde.memory_profiler.memory_report_file import from_dict, to_dict

__all__ = [
    "CATEGORIES", "DeviceMemory", "Forecast", "Kept", "MemoryReport", "Peak", "Point", "Process", "Snapshot", "Usage",
    "from_dict", "to_dict",
]  # fmt: skip
