"""DebugConfig: what it accepts, what it refuses and how it says so, and which source wins."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from sonde.config import PRESETS, SWITCH_SETTINGS, DebugConfig, DebugLevel, DebugMode, load_config, read_config, setting_from_text
from sonde.errors import ConfigError, SondeError
from sonde.runlog.switch_file import SWITCHES

MISSION = {
    "mode": DebugMode.FULL_DEBUG, "level": DebugLevel.INTERMEDIATE, "anomaly_detection_mode": "warn", "max_tracked_tensors": 1000,
    "max_gradient_history": 200, "sampling_rate": 1.0, "gradient_checking_frequency": 100, "memory_profiling_frequency": 50,
    "performance_profiling_frequency": 10, "save_debug_info": False, "output_dir": "runs", "overhead_budget": 0.02,
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_defaults_are_those_that_are_promised() -> None:
    config = DebugConfig()
    assert {name: getattr(config, name) for name in MISSION} == MISSION


def test_a_setting_with_two_names_has_one_value() -> None:
    config = DebugConfig(debug_output_dir="there", enable_gradient_checking=False)  # type: ignore[call-arg]
    assert config.output_dir == config.debug_output_dir == "there"
    assert config.enable_gradient_debugging is config.enable_gradient_checking is False
    assert replace(config, output_dir="elsewhere").debug_output_dir == "elsewhere"


@pytest.mark.parametrize("said", ["EXPERT", "expert", DebugLevel.EXPERT], ids=["upper", "lower", "enum"])
def test_a_level_may_be_given_by_name(said: Any) -> None:
    assert DebugConfig(level=said).level is DebugLevel.EXPERT


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown mode": ({"mode": "memory_profilng"}, ["mode", "memory_profilng", "Nearest: memory_profiling"]),
    "None, which is not the mode none": ({"mode": None}, ["mode is one of none, anomaly_detection", "not None"]),
    "unknown level": ({"level": "expart"}, ["level", "expart", "Nearest: expert"]),
    "unknown setting": ({"gradient_checking_freqency": 3}, ["gradient_checking_freqency", "Did you mean gradient_checking_frequency"]),
    "unknown choice": ({"anomaly_detection_mode": "rais"}, ["anomaly_detection_mode", "rais", "Nearest: raise"]),
    "too small": ({"every": 0}, ["every", "not 0", "Nearest: 1"]),
    "not whole": ({"max_gradient_history": 2.6}, ["max_gradient_history", "2.6", "Nearest: 3"]),
    "too large": ({"overhead_budget": 5}, ["overhead_budget", "not 5", "Nearest: 1"]),
    "zero share": ({"sampling_rate": 0}, ["sampling_rate", "above 0"]),
    "no number": ({"sampling_rate": float("nan")}, ["sampling_rate", "nan"]),
    "negative": ({"max_capsule_mb": -1}, ["max_capsule_mb", "-1", "Nearest: 0"]),
    "text for a number": ({"overhead_budget": "2%"}, ["overhead_budget", "'2%'"]),
    "true for a number": ({"every": True}, ["every", "True"]),
    "text for a truth": ({"log_memory": "no"}, ["log_memory", "'no'", "Nearest: False"]),
    "no path": ({"output_dir": 3}, ["output_dir", "3"]),
    "two names, two values": ({"output_dir": "a", "debug_output_dir": "b"}, ["output_dir", "debug_output_dir", "'a'", "'b'"]),
    "two ways to choose steps": ({"every": 5, "sampling_rate": 0.5}, ["every=5", "sampling_rate=0.5", "every=2"]),
    "a mode without its aspect": (
        {"mode": "memory_profiling", "enable_memory_profiling": False}, ["mode=memory_profiling", "enable_memory_profiling"]
    ),
    "stopping at what is not looked at": (
        {"mode": "gradient_checking", "anomaly_detection_mode": "raise"}, ["raise", "mode=gradient_checking"]
    ),
    "capsules of what is not looked at": (
        {"enable_anomaly_detection": False, "save_debug_info": True}, ["save_debug_info", "enable_anomaly_detection"]
    ),
    "two values, the alias last": (
        {"enable_gradient_debugging": True, "enable_gradient_checking": False},
        ["enable_gradient_checking is another name of enable_gradient_debugging", "False and True"],
    ),
    "two values, the alias first": (
        {"enable_gradient_checking": False, "enable_gradient_debugging": True},
        ["enable_gradient_checking is another name of enable_gradient_debugging", "False and True"],
    ),
    "unknown preset": ({"preset": "prodction"}, ["preset", "prodction", "Nearest: production"]),
    "layers that are none": ({"layers": 3}, ["layers", "['encoder.*', 'head']", "not 3"]),
    "a broken pattern": ({"layers": ["(encoder"]}, ["layers", "(encoder", "not valid"]),
    "an empty pattern": ({"layers": ["head", ""]}, ["layers", "''"]),
    "a threshold of nothing": ({"memory_threshold_mb": 0}, ["memory_threshold_mb", "above 0"]),
    "switches of nothing": ({"mode": "none", "debug_memory_usage": True}, ["debug_memory_usage", "mode=none"]),
    "pictures of nothing": ({"mode": "none", "enable_visualization": True}, ["enable_visualization", "mode=none"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused_with_its_name_its_value_and_the_way_out(case: str) -> None:
    given, words = REFUSED[case]
    with pytest.raises(ConfigError) as refused:
        DebugConfig(**given)
    assert [word for word in words if word not in str(refused.value)] == []


def test_later_sources_win(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "pyproject.toml").write_text('[tool.sonde]\nevery = 2\nlevel = "basic"\n')
    assert (load_config().every, load_config().level) == (2, DebugLevel.BASIC)
    (here / "sonde.json").write_text(json.dumps({"every": 3, "log_memory": False}))
    assert (load_config().every, load_config().level, load_config().log_memory) == (3, DebugLevel.INTERMEDIATE, False)
    (here / "sonde.toml").write_text("every = 4\nmax_gradient_history = 7\n")
    assert (load_config().every, load_config().max_gradient_history) == (4, 7)
    monkeypatch.setenv("SONDE_EVERY", "5")
    monkeypatch.setenv("SONDE_DEBUG_OUTPUT_DIR", "there")
    assert (load_config().every, load_config().output_dir, load_config().max_gradient_history) == (5, "there", 7)
    assert load_config(every=6).every == 6


@pytest.mark.parametrize("name", [each.name for each in fields(DebugConfig)])
def test_every_setting_can_be_given_in_the_environment_and_on_the_command_line(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = getattr(DebugConfig(), name)
    texts: dict[str, tuple[str, Any]] = {
        "mode": ("ANOMALY_DETECTION", DebugMode.ANOMALY_DETECTION), "level": ("basic", DebugLevel.BASIC), "output_dir": ("there", "there"),
        "anomaly_detection_mode": ("raise", "raise"), "replay": ("in_process", "in_process"),
        "overhead_budget": ("0.5", 0.5), "sampling_rate": ("0.5", 0.5), "memory_threshold_share": ("0.5", 0.5),
        "layers": ("encoder.*, head", ("encoder.*", "head")),
    }  # fmt: skip
    text, value = texts.get(name, (str(not default), not default) if isinstance(default, bool) else ("7", 7))
    monkeypatch.setenv(f"SONDE_{name.upper()}", text)
    assert getattr(load_config(), name) == value != default
    first, parsed = setting_from_text(f"{name.replace('_', '-')}={text}")
    assert getattr(DebugConfig(**{first: parsed}), name) == value


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [("SONDE_EVRY", "2", "SONDE_EVERY"), ("SONDE_EVERY", "often", "number"), ("SONDE_LOG_MEMORY", "maybe", "1 or 0")],
    ids=["a letter off", "no number", "no truth"],
)
def test_a_wrong_variable_is_refused_by_name(variable: str, text: str, says: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=variable) as refused:
        load_config()
    assert says in str(refused.value)


def test_variables_of_others_are_theirs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONDE_SOMETHING_ELSE_ENTIRELY", "x")
    assert load_config() == DebugConfig()


@pytest.mark.parametrize(("name", "text"), [("a.json", "{"), ("a.json", "[1]"), ("a.toml", "every ="), ("a.json", '{"evry": 2}')])
def test_a_wrong_file_is_refused_with_its_name(name: str, text: str, here: Path) -> None:
    (here / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"{name}|evry"):
        read_config(here / name)


def test_a_file_can_be_read_by_name(here: Path) -> None:
    (here / "deep.toml").write_text('level = "expert"\nenable_gradient_checking = false\n')
    assert read_config("deep.toml") == DebugConfig(level=DebugLevel.EXPERT, enable_gradient_debugging=False)
    with pytest.raises(SondeError, match=r"no missing\.toml"):
        read_config("missing.toml")


@pytest.mark.parametrize("text", ["every", "evry=2", "every=often"])
def test_a_wrong_assignment_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"every|evry"):
        setting_from_text(text)


# -- presets, switches, mappings --------------------------------------------------------------------


def test_a_preset_sets_what_its_table_says_and_single_settings_override_it() -> None:
    assert DebugConfig.preset("production") == DebugConfig(**PRESETS["production"]) != DebugConfig()
    assert DebugConfig.preset("Basic") == DebugConfig(level=DebugLevel.BASIC)
    config = DebugConfig.preset("advanced", overhead_budget=0.5)
    assert (config.level, config.overhead_budget, config.save_debug_info) == (DebugLevel.ADVANCED, 0.5, True)
    assert "memory_usage" in config.switches


def test_a_preset_has_the_rank_of_its_source(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "sonde.toml").write_text('preset = "advanced"\noverhead_budget = 0.3\n')
    assert load_config() == DebugConfig.preset("advanced", overhead_budget=0.3)
    monkeypatch.setenv("SONDE_PRESET", "production")
    monkeypatch.setenv("SONDE_LEVEL", "expert")
    config = load_config()
    assert (config.overhead_budget, config.log_json, config.level, config.save_debug_info) == (0.005, True, DebugLevel.EXPERT, True)
    assert load_config(preset="basic").level is DebugLevel.BASIC
    assert load_config(**dict([setting_from_text("preset=basic")])).level is DebugLevel.BASIC


def test_each_switch_has_a_setting() -> None:
    assert set(SWITCH_SETTINGS.values()) == set(SWITCHES)
    for name, switch in SWITCH_SETTINGS.items():
        assert DebugConfig(**{name: True}).switches == (switch,)


def test_settings_may_be_a_mapping_and_anything_else_is_refused_with_an_example() -> None:
    assert load_config({"level": "expert", "layers": "head"}) == DebugConfig(level=DebugLevel.EXPERT, layers=("head",))
    with pytest.raises(ConfigError, match="no setting 'levl'"):
        load_config({"levl": "expert"})
    with pytest.raises(ConfigError, match=r"passed by name, for instance DebugConfig\(level='expert'\), not \{'level'"):
        DebugConfig({"level": "expert"})  # type: ignore[call-arg]
    assert DebugConfig(layers=None).layers == ()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"not a int\. For instance: config=sonde\.DebugConfig"):
        load_config(3)  # type: ignore[arg-type]


def test_a_list_of_patterns_in_a_text_may_contain_commas() -> None:
    assert setting_from_text('layers=["layer.{1,2}", "head"]') == ("layers", ["layer.{1,2}", "head"])
    with pytest.raises(ConfigError, match="not a JSON list"):
        setting_from_text('layers=["layer')
