"""`sonde switch`: a training that runs is told, one that does not is not, and the state is shown."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sonde.cli import main
from sonde.events import Event
from sonde.runlog.run_directory import write_run_json
from sonde.runlog.switch_file import SWITCHES, SWITCHES_FILE, read_switch_requests
from sonde.runlog.writer import Writer


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose process lives: this one."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "base"
    path.mkdir(parents=True)
    write_run_json(path, {"name": "base"})
    writer = Writer(path)
    writer.event("start", 0, {})
    writer.event("switch", 7, {"switch": "validation", "on": True, "by": "session"})
    writer.flush()
    return path


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["switch", *words])
    return int(left.value.code or 0)


def test_switches_are_asked_for_in_the_file_of_the_run(running: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("runs/base", "+gradient_norms", "-lr_scheduling") == 0
    assert read_switch_requests(running) == {"gradient_norms": True, "lr_scheduling": False}
    assert call("-gradient_norms", "+memory_usage") == 0  # the newest run, added to what was asked for
    assert read_switch_requests(running) == {"gradient_norms": False, "lr_scheduling": False, "memory_usage": True}
    shown = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert shown["validation"][:3] == ["on", "step", "7"]
    assert shown["memory_usage"] == ["off", "on"]
    assert shown["early_stopping"] == ["off"]


def test_the_state_fits_a_terminal_and_names_every_switch(running: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [name for name in SWITCHES if not any(line.split()[:1] == [name] for line in lines)] == []
    assert not (running / SWITCHES_FILE).exists()


def test_all_means_all(running: Path) -> None:
    assert call("+all", "-autograd-profiler") == 0
    assert read_switch_requests(running) == dict.fromkeys(SWITCHES, True) | {"autograd_profiler": False}


@pytest.mark.parametrize(
    ("words", "says"),
    [(("+gradient_norm",), "gradient_norms"), (("runs/base", "gradient_norms"), "+gradient_norms"), (("+",), "'+'")],
    ids=["unknown", "no sign", "no name"],
)
def test_a_wrong_word_is_refused_and_nothing_is_written(
    words: tuple[str, ...], says: str, running: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*words) == 2
    assert says in capsys.readouterr().err
    assert not (running / SWITCHES_FILE).exists()


def test_a_run_that_has_ended_is_shown_and_not_told(
    sample_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = sample_run("over", [1.0, 0.5], events=[Event("switch", 1, {"switch": "validation", "on": False, "by": "the end"})])
    assert call(str(path), "+validation") == 2
    assert "does not run any more" in capsys.readouterr().err
    assert not (path / SWITCHES_FILE).exists()
    assert call(str(path)) == 0
    assert "the end" in capsys.readouterr().out


def test_a_file_that_is_not_ours_is_replaced(running: Path) -> None:
    (running / SWITCHES_FILE).write_text('{"rm": "-rf"}')
    assert call("+validation") == 0
    assert json.loads((running / SWITCHES_FILE).read_text()) == {"validation": True}


def test_a_file_that_cannot_be_written_is_said(running: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (running / SWITCHES_FILE).mkdir()
    assert call("+validation") == 2
    assert "cannot be written" in capsys.readouterr().err
    assert sorted(path.name for path in running.iterdir() if path.name.startswith(".")) == []


@pytest.mark.torch
def test_sonde_run_takes_mode_level_and_any_setting(
    tmp_path: Path, forked_sonde: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nmodel = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(4):\n    optimizer.zero_grad()\n    model(torch.ones(1, 2)).sum().backward()\n    optimizer.step()\n"
    )
    done = forked_sonde("run", "--mode", "gradient-checking", "--level", "basic", "--set", "every=2", "--to", "run", "train.py")
    assert done.returncode == 0, done.stderr
    from sonde.runlog.run_reader import Run

    run = Run(tmp_path / "run")
    assert run.kinds == ["gradient", "step"] or set(run.kinds) == {"gradient", "gradient_exponents", "step"}
    assert sum(1 for _ in run.frames("gradient")) == 2
    (start,) = run.events("start")
    assert (start.data["mode"], start.data["level"], start.data["every"]) == ("gradient_checking", "basic", 2)
    wrong = forked_sonde("run", "--level", "exprt", "train.py")
    assert wrong.returncode == 2
    assert "Nearest: expert" in wrong.stderr
