"""The memory of a training: which tensors use it, by category and module. The values exported here need no torch."""

from __future__ import annotations

from sonde.memory_profiler.memory_report import (
    CATEGORIES,
    AccumulatedTensors,
    DeviceMemory,
    MemoryForecast,
    MemoryReport,
    Peak,
    ProcessMemory,
    Snapshot,
    TimelinePoint,
    Usage,
    from_dict,
    to_dict,
)

__all__ = [
    "CATEGORIES", "AccumulatedTensors", "DeviceMemory", "MemoryForecast", "MemoryReport", "Peak", "ProcessMemory", "Snapshot",
    "TimelinePoint", "Usage", "from_dict", "to_dict",
]  # fmt: skip
