"""DebugConfig: the settings of a session, and where their values may come from.

Later sources win: defaults, then `sonde.toml` or `[tool.sonde]` in pyproject.toml, then `SONDE_*` environment variables, then the command
line, then keyword arguments.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from sonde.errors import ConfigError

ANOMALY_MODES = ("warn", "raise")


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """What a session measures, how often, and where it writes. Every field acts; an unknown or impossible value is refused by name."""

    output_dir: str = "runs"  # new runs are directories in here
    overhead_budget: float = 0.02  # share of the training's own time that Sonde may take
    every: int | None = None  # observe every n-th step whatever it costs; None: as often as the budget allows
    log_activations: bool = True  # statistics of module outputs and their gradients
    log_gradients: bool = True  # statistics of parameter gradients
    log_weights: bool = True  # statistics of parameters and their updates
    max_update_memory_mb: float = 1024.0  # copies of parameters kept to measure updates; above it updates are not measured
    anomaly_detection_mode: str = "warn"  # what a bad number does once it is explained: "warn" goes on, "raise" stops before the update
    save_debug_info: bool = False  # keep a capsule of a step in which a bad number was made
    max_capsule_mb: float = 512.0  # of one capsule; what does not fit is left out, and said

    def __post_init__(self) -> None:
        if not isinstance(self.output_dir, str) or not self.output_dir:
            raise ConfigError(f"output_dir must be a path, not {self.output_dir!r}.")
        if not _is_number(self.overhead_budget) or not 0 < self.overhead_budget <= 1:
            raise ConfigError(
                f"overhead_budget is a share of the training time between 0 and 1, not {self.overhead_budget!r}. "
                "For 2 % write 0.02."
            )
        if self.every is not None and (not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1):
            raise ConfigError(f"every must be a whole number of steps from 1 on, or left out; not {self.every!r}.")
        for name in ("log_activations", "log_gradients", "log_weights", "save_debug_info"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, not {getattr(self, name)!r}.")
        if self.anomaly_detection_mode not in ANOMALY_MODES:
            raise ConfigError(f"anomaly_detection_mode is {' or '.join(map(repr, ANOMALY_MODES))}, not {self.anomaly_detection_mode!r}.")
        for name in ("max_update_memory_mb", "max_capsule_mb"):
            value = getattr(self, name)
            if not _is_number(value) or not value >= 0:
                raise ConfigError(f"{name} must be 0 or more, not {value!r}.")


def load_config(base: DebugConfig | None = None, /, **given: Any) -> DebugConfig:
    """The configuration in force here. `base` replaces files and environment; keyword arguments that are not None win over all."""
    values: dict[str, Any] = {}
    if base is None:
        values |= _from_files(Path.cwd())
        values |= _from_environment(os.environ)
    values |= {name: value for name, value in given.items() if value is not None}
    _refuse_unknown(values)
    return replace(base or DebugConfig(), **values)


def _from_files(directory: Path) -> dict[str, Any]:
    for name, table in (("sonde.toml", ()), ("pyproject.toml", ("tool", "sonde"))):
        path = directory / name
        try:
            content: Any = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError:
            continue
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            if table:  # a broken pyproject.toml is not ours to report
                continue
            raise ConfigError(f"{path} is not valid TOML: {error}.") from error
        for key in table:
            content = content.get(key, {}) if isinstance(content, dict) else {}
        if isinstance(content, dict) and content:
            return content
    return {}


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in fields(DebugConfig):
        text = environment.get(f"SONDE_{field.name.upper()}")
        if text is not None:
            values[field.name] = _parse(field.name, text)
    return values


def _parse(name: str, text: str) -> Any:
    kind = type(getattr(DebugConfig(), name))
    if kind is str:
        return text
    if kind is bool:
        if text.lower() in {"1", "true", "yes", "on"}:
            return True
        if text.lower() in {"0", "false", "no", "off"}:
            return False
        raise ConfigError(f"SONDE_{name.upper()} must be 1 or 0, not {text!r}.")
    try:
        return float(text) if kind is float else int(text)
    except ValueError:
        raise ConfigError(f"SONDE_{name.upper()} must be a number, not {text!r}.") from None


def _refuse_unknown(values: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(DebugConfig)]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else f" Known settings: {', '.join(known)}."
            raise ConfigError(f"Sonde has no setting {name!r}.{hint}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
