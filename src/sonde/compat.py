"""Aliases kept for old code: former public names, each resolved to its present home when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sonde.leaks.leak_detector import LeakDetector
    from sonde.report import diagnose

    LeakWatch = LeakDetector
    judge = diagnose

_ALIASES = {"LeakWatch": ("sonde.leaks.leak_detector", "LeakDetector"), "judge": ("sonde.report", "diagnose")}


def __getattr__(name: str) -> Any:
    if name not in _ALIASES:
        raise AttributeError(f"module 'sonde.compat' has no attribute {name!r}")
    module, present_name = _ALIASES[name]
    return getattr(import_module(module), present_name)
