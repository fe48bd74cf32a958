"""Reads settings from their sources. Later sources win: defaults, then `sonde.toml`, `sonde.json` or `[tool.sonde]` in pyproject.toml, then
`SONDE_*` environment variables, then the command line, then keyword arguments."""

import difflib
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from sonde.config.settings import ALIASES, NAMES, PRESET, DebugConfig, as_config, resolve_names
from sonde.errors import ConfigError

_OTHERS = frozenset({"SONDE_NATIVE"})  # variables of Sonde that are not settings
_FILES = (("sonde.toml", ()), ("sonde.json", ()), ("pyproject.toml", ("tool", "sonde")))


def load_config(base: DebugConfig | Mapping[str, Any] | None = None, /, **given: Any) -> DebugConfig:
    """The effective configuration. `base` (or settings by name) replaces files and environment; keyword arguments that are not None
    override everything."""
    base = as_config(base)
    values: dict[str, Any] = {}
    if base is None:
        values |= resolve_names(next(filter(None, (_content(Path.cwd() / name, table) for name, table in _FILES)), {}))
        values |= _from_environment(os.environ)
    values |= resolve_names({name: value for name, value in given.items() if value is not None})
    return replace(base or DebugConfig(), **values)


def read_config(path: str | Path) -> DebugConfig:
    """The settings of one file, TOML or JSON by its ending; of a pyproject.toml, its `[tool.sonde]`."""
    path = Path(path)
    content = _content(path, ("tool", "sonde") if path.name == "pyproject.toml" else ())
    if content is None:
        raise ConfigError(f"there is no {path}, or it cannot be read.")
    return DebugConfig(**content)


def setting_from_text(assignment: str) -> tuple[str, Any]:
    """Name and value of a setting on the command line, such as `level=expert`."""
    name, sign, text = assignment.partition("=")
    if not sign:
        raise ConfigError(f"a setting is written as NAME=VALUE, for instance level=expert, not {assignment!r}.")
    plain = name.strip().replace("-", "_")
    first = PRESET if plain == PRESET else next(iter(resolve_names({plain: text})))
    return first, _parse(first, first, text.strip())


def _content(path: Path, table: tuple[str, ...]) -> dict[str, Any] | None:
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = path.read_text(encoding="utf-8")
        content: Any = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except OSError:
        return None
    except (ValueError, RecursionError) as error:
        if table:  # other tools report a broken pyproject.toml
            return {}
        raise ConfigError(f"{path} is not valid {kind}: {error}.") from error
    for key in table:
        content = content.get(key, {}) if isinstance(content, dict) else {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold settings by name, not a {type(content).__name__}.")
    return content


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    names = {f"SONDE_{name.upper()}": name for name in (*NAMES, *ALIASES, PRESET)}
    for variable, text in environment.items():
        name = names.get(variable)
        if name is not None:
            values[name] = _parse(name, variable, text)
        elif variable.startswith("SONDE_") and variable not in _OTHERS:
            # A variable of another program may have this prefix; one letter off is a typing mistake.
            near = difflib.get_close_matches(variable, names, n=1, cutoff=0.85)
            if near:
                raise ConfigError(f"the environment has {variable}={text}, which is not a setting. Did you mean {near[0]}?")
    return resolve_names(values)


def _parse(name: str, shown_name: str, text: str) -> Any:
    """A text as a value of the setting's type; `shown_name` is the name in error messages."""
    if name == PRESET:
        return text
    name = ALIASES.get(name, name)
    setting = next(each for each in fields(DebugConfig) if each.name == name)
    default = setting.default
    if isinstance(default, str):
        return text
    if isinstance(default, tuple):
        return _parse_list(shown_name, text)
    if isinstance(default, bool):
        if text.lower() in {"1", "true", "yes", "on"}:
            return True
        if text.lower() in {"0", "false", "no", "off"}:
            return False
        raise ConfigError(f"{shown_name} must be 1 or 0, not {text!r}.")
    if default is None and text.lower() in {"", "none"}:
        return None
    try:
        return int(text) if setting.metadata["whole"] else float(text)
    except ValueError:
        raise ConfigError(f"{shown_name} must be a number, not {text!r}.") from None


def _parse_list(shown_name: str, text: str) -> list[str]:
    """Texts that are separated by commas, or a JSON list, where a comma is part of one."""
    if not text.startswith('["'):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        parts: list[str] = json.loads(text)
        return parts
    except ValueError as error:
        raise ConfigError(f"{shown_name} is not a JSON list of texts: {error}.") from None
