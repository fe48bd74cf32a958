"""DebugConfig: the settings of a session, what they mean together, and where their values may come from."""

from sonde.config.debug_modes_and_levels import DebugLevel, DebugMode, MeasuredParts
from sonde.config.load_settings import load_config, read_config, setting_from_text
from sonde.config.settings import PRESETS, SWITCH_SETTINGS, DebugConfig, as_config

__all__ = [
    "PRESETS", "SWITCH_SETTINGS", "DebugConfig", "DebugLevel", "DebugMode", "MeasuredParts", "as_config", "load_config", "read_config",
    "setting_from_text",
]  # fmt: skip
