"""DebugConfig: every setting of a session, validated. An invalid value is refused with the name of the setting."""

import difflib
import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import PurePath
from typing import Any, Self, TypeVar

from sonde.config.debug_modes_and_levels import DebugLevel, DebugMode, MeasuredParts
from sonde.errors import ConfigError, SondeError
from sonde.layer_name_patterns import LayerPatterns

ANOMALY_MODES = ("warn", "raise")
REPLAY_MODES = ("child", "in_process")
ALIASES = {"debug_output_dir": "output_dir", "enable_gradient_checking": "enable_gradient_debugging"}  # second names of settings

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "basic": {"level": DebugLevel.BASIC},
    "advanced": {
        "level": DebugLevel.ADVANCED, "overhead_budget": 0.1, "save_debug_info": True, "debug_gradient_norms": True,
        "debug_memory_usage": True, "debug_lr_scheduling": True,
    },
    "production": {"level": DebugLevel.BASIC, "overhead_budget": 0.005, "enable_performance_profiling": False, "log_json": True},
}  # fmt: skip
"""What each preset sets; everything else has its default. The table of docs/guide/configuration.md."""

PRESET = "preset"  # its name among the settings of a file, of the environment and of DebugConfig(…)

_Kind = TypeVar("_Kind", bound=StrEnum)


def _number(default: Any, *, least: float, most: float = math.inf, whole: bool = False, above: bool = False) -> Any:
    """`above`: more than `least`, not `least` itself."""
    return field(default=default, metadata={"least": least, "most": most, "whole": whole, "above": above})


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """What a session measures, how often, and where it writes. Unknown settings and invalid values raise ConfigError."""

    mode: DebugMode = DebugMode.FULL_DEBUG  # which aspects
    level: DebugLevel = DebugLevel.INTERMEDIATE  # how detailed
    output_dir: str = "runs"  # parent directory of new runs
    overhead_budget: float = _number(0.02, least=0, most=1, above=True)  # share of the training's own time that Sonde may take
    every: int | None = _number(None, least=1, whole=True)  # observe every n-th step at any cost; None: within the budget
    sampling_rate: float = _number(1.0, least=0, most=1, above=True)  # share of all steps that are observed, if the budget allows it
    layers: tuple[str, ...] = ()  # names or patterns: outputs and parameters of these layers are measured; empty: of all

    enable_tensor_inspection: bool = True  # outputs of layers, and batches
    enable_gradient_debugging: bool = True  # gradients of parameters
    enable_model_diagnostics: bool = True  # parameters and their updates
    enable_anomaly_detection: bool = True  # find the origin of non-finite values, spikes and skipped updates
    enable_memory_profiling: bool = True  # memory growth, and the owners of leaked tensors
    enable_performance_profiling: bool = True  # occasional profiles of a step by line
    enable_visualization: bool = False  # plots beside the run when it ends

    log_activations: bool = True  # statistics of module outputs and their gradients
    log_gradients: bool = True  # statistics of parameter gradients
    log_weights: bool = True  # statistics of parameters and their updates
    log_memory: bool = True  # memory of the process, with the steps
    log_performance: bool = True  # durations of the phases of each step
    log_json: bool = False  # output of switches as JSON

    # Switches that are on from the start; sonde.runlog.switch_file says what each prints.
    enable_autograd_anomaly: bool = False
    enable_autograd_profiler: bool = False
    enable_tensorboard_profiler: bool = False
    debug_memory_usage: bool = False
    debug_gradient_norms: bool = False
    debug_forward_pass: bool = False
    debug_backward_pass: bool = False
    debug_device_placement: bool = False
    debug_mixed_precision: bool = False
    debug_data_loading: bool = False
    debug_validation: bool = False
    debug_early_stopping: bool = False
    debug_lr_scheduling: bool = False

    gradient_checking_frequency: int = _number(100, least=1, whole=True)  # steps; see `MeasuredParts`, as for the next two
    memory_profiling_frequency: int = _number(50, least=1, whole=True)
    performance_profiling_frequency: int = _number(10, least=1, whole=True)

    max_tracked_tensors: int = _number(1000, least=1, whole=True)  # stored by session.tensor_inspector
    max_gradient_history: int = _number(200, least=1, whole=True)  # steps stored by session.gradient_debugger
    max_update_memory_mb: float = _number(1024.0, least=0)  # for copies of parameters; models that need more have no update statistics
    anomaly_detection_mode: str = "warn"  # after a non-finite value: "warn" continues, "raise" stops before the update
    replay: str = "child"  # where a bad step runs again: "child" (a copy of the process), "in_process" (which may alter the training)
    save_debug_info: bool = False  # save a capsule of a step that created a non-finite value
    memory_threshold_mb: float | None = _number(None, least=0, above=True)  # of the process: more is a finding
    memory_threshold_share: float | None = _number(None, least=0, most=1, above=True)  # the same, of what the process may use
    max_capsule_mb: float = _number(512.0, least=0)  # of one capsule; parts that do not fit are omitted, which is reported

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", _chosen("mode", self.mode, DebugMode))
        object.__setattr__(self, "level", _chosen("level", self.level, DebugLevel))
        directory: object = self.output_dir
        if isinstance(directory, PurePath):
            object.__setattr__(self, "output_dir", str(directory))
        elif not isinstance(directory, str) or not directory:
            raise ConfigError(f"output_dir must be a path, not {self.output_dir!r}. The default is 'runs'.")
        object.__setattr__(self, "layers", _checked_layers(self.layers))
        for name, modes in (("anomaly_detection_mode", ANOMALY_MODES), ("replay", REPLAY_MODES)):
            if getattr(self, name) not in modes:
                raise _no_choice(name, getattr(self, name), modes)
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(each.default, bool) and not isinstance(value, bool):
                nearest = str(value).lower() not in ("", "0", "no", "off", "false", "none")
                raise ConfigError(f"{each.name} must be true or false, not {value!r}. Nearest: {nearest}.")
            if each.metadata and not (value is None and each.default is None):
                _check_number(each.name, value, **each.metadata)
        _refuse_contradictions(self)

    @classmethod
    def preset(cls, name: str, /, **settings: Any) -> Self:
        """The settings of a preset ("basic", "advanced" or "production"), with these instead of its own."""
        return cls(**{PRESET: name, **settings})

    @property
    def switches(self) -> tuple[str, ...]:
        """The switches that are on from the start."""
        return tuple(switch for name, switch in SWITCH_SETTINGS.items() if getattr(self, name))

    @property
    def measured(self) -> MeasuredParts:
        """The parts that are measured, from all settings together."""
        return MeasuredParts.from_config(self)

    @property
    def debug_output_dir(self) -> str:
        """The second name of `output_dir`."""
        return self.output_dir

    @property
    def enable_gradient_checking(self) -> bool:
        """The second name of `enable_gradient_debugging`."""
        return self.enable_gradient_debugging


NAMES = tuple(each.name for each in fields(DebugConfig))

_TORCH_SWITCHES = ("enable_autograd_anomaly", "enable_autograd_profiler", "enable_tensorboard_profiler")
SWITCH_SETTINGS = {name: name.partition("_")[2] for name in NAMES if name in _TORCH_SWITCHES or name.startswith("debug_")}
"""The settings that turn switches on, and the names of the switches."""


def _accept_aliases(config: type[DebugConfig]) -> None:
    """The generated `__init__` accepts no aliases and does not suggest names."""
    plain = config.__init__

    @functools.wraps(plain)
    def init(self: DebugConfig, *args: Any, **values: Any) -> None:
        if args:
            raise ConfigError(f"settings are passed by name, for instance DebugConfig(level='expert'), not {args[0]!r}.")
        plain(self, **resolve_names(values))

    config.__init__ = init  # type: ignore[method-assign]


def resolve_names(given: dict[str, Any]) -> dict[str, Any]:
    """Replaces aliases by names and a preset by its settings. Unknown names and an alias that contradicts its name raise ConfigError."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        first = ALIASES.get(name, name)
        if first not in NAMES and name != PRESET:
            near = difflib.get_close_matches(str(name).lower(), [*NAMES, *ALIASES, PRESET], n=1)
            hint = f" Did you mean {near[0]}?" if near else f" Known settings: {', '.join(NAMES)}."
            raise ConfigError(f"Sonde has no setting {name!r}.{hint}")
        if first in values and values[first] != value:
            alias = next(each for each, target in ALIASES.items() if target == first)
            both = f"{given[alias]!r} and {given[first]!r}"
            raise ConfigError(f"{alias} is another name of {first}, and they have two values: {both}. Leave one of them out.")
        values[first] = value
    return dict(_preset_settings(values.pop(PRESET))) | values if PRESET in values else values


def _preset_settings(name: object) -> Mapping[str, Any]:
    if not isinstance(name, str) or name.lower() not in PRESETS:
        raise _no_choice(PRESET, name, PRESETS)
    return PRESETS[name.lower()]


def as_config(config: object) -> DebugConfig | None:
    """A DebugConfig from one, or from a mapping with settings by name; None stays None. Anything else raises ConfigError."""
    if config is None or isinstance(config, DebugConfig):
        return config
    if isinstance(config, Mapping):
        return DebugConfig(**{str(name): value for name, value in config.items()})
    raise ConfigError(
        f"config must be a DebugConfig or settings by name, not a {type(config).__name__}. For instance: "
        "config=sonde.DebugConfig(level='expert'), or config={'level': 'expert'}. Files: sonde.config.read_config(path)."
    )


_accept_aliases(DebugConfig)


def _checked_layers(layers: object) -> tuple[str, ...]:
    given = () if layers is None else (layers,) if isinstance(layers, str) else layers
    try:
        if isinstance(given, Iterable) and not isinstance(given, Mapping):
            patterns = tuple(given)
            return LayerPatterns(patterns).patterns if patterns else ()
    except SondeError as error:
        raise ConfigError(f"layers: {error}") from None
    raise ConfigError(f"layers is a list of names or patterns, for instance ['encoder.*', 'head'], not {layers!r}.")


def _chosen(name: str, value: object, kind: type[_Kind]) -> _Kind:
    text: object = getattr(value, "value", value)
    try:
        if isinstance(text, str):  # str(None) would be a mode
            return kind(text.lower().replace("-", "_"))
    except ValueError:
        pass
    raise _no_choice(name, value, list(kind))


def _no_choice(name: str, value: object, choices: Iterable[str]) -> ConfigError:
    known = [str(each) for each in choices]
    near = difflib.get_close_matches(value.lower(), known, n=1, cutoff=0.4) if isinstance(value, str) else []
    return ConfigError(f"{name} is one of {', '.join(known)}, not {value!r}." + (f" Nearest: {near[0]}." if near else ""))


def _check_number(name: str, value: Any, *, least: float, most: float, whole: bool, above: bool) -> None:
    kind = "a whole number" if whole else "a number"
    from_least = f"above {least:g}" if above else f"from {least:g} on"
    span = from_least if most == math.inf else f"between {least:g} and {most:g}{f', above {least:g}' if above else ''}"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and least <= value <= most and not (above and value == least) and (not whole or isinstance(value, int)):
        return
    near = ""
    if is_number and not math.isnan(value):
        nearest = min(max(value, least), most)
        if math.isfinite(nearest):
            hint = " For 2 % write 0.02." if most == 1 else ""
            near = f" Nearest: {round(nearest) if whole else f'{nearest:g}'}." if nearest > least or not above else hint
    raise ConfigError(f"{name} must be {kind} {span}, not {value!r}.{near}")


def _refuse_contradictions(config: DebugConfig) -> None:
    """Refuses settings that contradict each other; the message names both and which to change."""
    owners = {
        DebugMode.ANOMALY_DETECTION: "enable_anomaly_detection", DebugMode.GRADIENT_CHECKING: "enable_gradient_debugging",
        DebugMode.MEMORY_PROFILING: "enable_memory_profiling", DebugMode.PERFORMANCE_PROFILING: "enable_performance_profiling",
    }  # fmt: skip
    owner = owners.get(config.mode)
    if owner is not None and not getattr(config, owner):
        raise ConfigError(f"mode={config.mode} measures the part that {owner}=False turns off. Leave {owner} out, or choose another mode.")
    if config.every is not None and config.sampling_rate != 1:
        raise ConfigError(
            f"every={config.every} and sampling_rate={config.sampling_rate:g} both select the observed steps. Leave one of them out: "
            f"every={round(1 / config.sampling_rate)} observes the same share of the steps at any cost."
        )
    raises = "anomaly_detection_mode='raise'" if config.anomaly_detection_mode == "raise" else ""
    for name in (raises, "save_debug_info=True" if config.save_debug_info else ""):
        if name and not config.measured.explains_incidents:
            why = "enable_anomaly_detection=False" if not config.enable_anomaly_detection else f"mode={config.mode}"
            raise ConfigError(f"{name} needs anomaly detection, which {why} switches off. Use mode=anomaly_detection or full_debug.")
    if config.switches and config.mode is DebugMode.NONE:
        name = next(name for name in SWITCH_SETTINGS if getattr(config, name))
        raise ConfigError(f"{name}=True prints what is measured, and mode=none measures nothing. Choose another mode.")
    if config.enable_visualization and config.mode is DebugMode.NONE:
        raise ConfigError("enable_visualization=True plots measurements, and mode=none measures nothing. Choose another mode.")
