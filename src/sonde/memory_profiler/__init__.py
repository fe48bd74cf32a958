"""The memory of a training: which tensors use it, by category and module. The values exported here need no torch."""

from sonde.memory_profiler.memory_report import CATEGORIES as CATEGORIES
from sonde.memory_profiler.memory_report import MemoryForecast as MemoryForecast
from sonde.memory_profiler.memory_report import MemoryReport as MemoryReport
from sonde.memory_profiler.memory_report import from_dict as from_dict
