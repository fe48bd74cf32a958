"""DebugConfig: the settings of a session, what they mean together, and where their values may come from."""

from __future__ import annotations

from sonde.config.modes import DebugLevel, DebugMode, MeasuredParts
from sonde.config.settings import DebugConfig
from sonde.config.sources import load_config, read_config, setting_from_text

__all__ = ["DebugConfig", "DebugLevel", "DebugMode", "MeasuredParts", "load_config", "read_config", "setting_from_text"]
