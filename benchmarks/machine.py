"""The machine in one line, without its name: what a reader needs to compare numbers."""

from __future__ import annotations

import os
import platform

import torch

from sonde.statistics import native_extension


def facts() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    kernel = "native kernel" if native_extension.ENABLED else "no native kernel"
    return (
        f"{cores} cores, {platform.machine()}, {platform.system()}, Python {platform.python_version()}, "
        f"torch {torch.__version__.partition('+')[0]} CPU, {torch.get_num_threads()} threads, {kernel}"
    )
