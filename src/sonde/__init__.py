"""Sonde: a debugger for PyTorch training. Importing it does nothing and costs nothing; every public name is loaded when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sonde.capture.session import DebugSession as DebugSession
    from sonde.capture.session import debug_session as debug_session
    from sonde.capture.session import watch as watch
    from sonde.config import DebugConfig as DebugConfig
    from sonde.errors import SondeError as SondeError
    from sonde.record import Finding as Finding
    from sonde.record import Severity as Severity
    from sonde.report import Report as Report
    from sonde.report import judge as judge
    from sonde.run.reader import Run as Run

_HOMES = {
    "watch": "sonde.capture.session",
    "DebugSession": "sonde.capture.session",
    "debug_session": "sonde.capture.session",
    "DebugConfig": "sonde.config",
    "Run": "sonde.run.reader",
    "judge": "sonde.report",
    "Report": "sonde.report",
    "Finding": "sonde.record",
    "Severity": "sonde.record",
    "SondeError": "sonde.errors",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sonde' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
