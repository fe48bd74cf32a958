"""`sonde profile`: times the layers of a script, then ends it cleanly or lets it continue."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

import fork_server  # noqa: E402
from chrome_traces import events_of  # noqa: E402
from fork_server import SHELL  # noqa: E402
from sonde.cli import main  # noqa: E402
from sonde.profiler import load  # noqa: E402

SCRIPT = """
import atexit, hashlib, sys
import torch
from torch import nn
atexit.register(lambda: print("left"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters())
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8 * {steps}, 16)), 8, shuffle=True)
step = 0
try:
    for (x,) in data:
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        step += 1
finally:
    print("arguments", sys.argv[1:], "training", step == {steps})
print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
"""


def profile(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return fork_server.python("-m", "sonde", "profile", *arguments, cwd=folder, env=os.environ | SHELL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profiled")
    (path / "train.py").write_text(SCRIPT.format(steps=60))
    (path / "short.py").write_text(SCRIPT.format(steps=4))
    return path


@pytest.fixture(scope="module")
def stopped(folder: Path) -> subprocess.CompletedProcess[str]:
    outputs = ["-o", "p.html", "-o", "p.json", "-o", "p.json.gz"]
    return profile(folder, "--steps", "3", "--warmup", "2", *outputs, "train.py", "--lr", "0.1", "--steps", "7")


def test_the_script_ends_when_its_profile_is_complete_and_cleans_up(stopped: subprocess.CompletedProcess[str]) -> None:
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stdout == "arguments ['--lr', '0.1', '--steps', '7'] training False\nleft\n"


def test_the_profile_is_printed_to_stderr(stopped: subprocess.CompletedProcess[str]) -> None:
    assert stopped.stderr.startswith("profile     train.py, batch float32 [8, 16]")
    for name in ("0 Linear", "1 Dropout", "2 Linear"):
        assert re.search(rf"[├└]─ {name} +[\d.]+ +[\d.]+ +[\d.]+", stopped.stderr), stopped.stderr
    assert "optimizer" in stopped.stderr


def test_the_saved_profile_can_be_loaded(stopped: subprocess.CompletedProcess[str], folder: Path) -> None:
    report = load(folder / "p.json")
    assert [layer.path for layer in report.layers] == ["", "0", "1", "2"]
    assert report.step.num == 3
    assert report.layer("0").flops_forward == 2 * 8 * 16 * 32


def test_flame_chart_and_trace_are_written(stopped: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert '"name":"1","path":"1","kind":"Dropout"' in (folder / "p.html").read_text(encoding="utf-8")
    events = events_of(folder / "p.json.gz")
    directions = {event["cat"] for event in events if event["ph"] == "X" and event["name"].startswith("2")}
    assert directions == {"forward", "backward"}


def test_with_json_stdout_is_one_document_that_includes_the_comparison(stopped: subprocess.CompletedProcess[str], folder: Path) -> None:
    child = profile(folder, "--steps", "2", "--json", "--against", "p.json", "train.py")
    document = json.loads(child.stdout)
    verdicts = {row["path"]: row["verdict"] for row in document["comparison"]["rows"]}
    assert {"(step)", "", "0", "1", "2"} <= verdicts.keys()
    assert child.returncode == (1 if verdicts["(step)"] == "slower" else 0)
    assert re.search(r"^arguments \[\] .*^left$", child.stderr, re.DOTALL | re.MULTILINE)  # including the output at exit


def test_with_keep_going_the_results_of_the_script_are_unchanged(folder: Path) -> None:
    bare = fork_server.python("train.py", cwd=folder, env=os.environ | SHELL)
    child = profile(folder, "--steps", "2", "--keep-going", "train.py")
    assert child.returncode == 0, child.stderr
    assert child.stdout == bare.stdout
    assert "training True" in child.stdout
    assert child.stderr.startswith("profile ")


def test_a_module_is_profiled_as_python_m_would_run_it(folder: Path) -> None:
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").touch()
    (folder / "pkg" / "train.py").write_text(SCRIPT.format(steps=60))
    child = profile(folder, "--steps", "1", "-m", "pkg.train", "--lr", "1")
    assert child.returncode == 0, child.stderr
    assert "arguments ['--lr', '1']" in child.stdout
    assert child.stderr.startswith("profile     pkg.train")


def test_if_one_file_cannot_be_written_the_others_and_the_output_are_complete(folder: Path) -> None:
    (folder / "elsewhere.json").symlink_to(folder / "nowhere" / "p.json")
    child = profile(folder, "--steps", "1", "-o", "elsewhere.json", "-o", "kept.json", "train.py")
    assert (child.returncode, child.stderr.startswith("profile     train.py")) == (2, True)
    assert "\nkept.json\nsonde: elsewhere.json is a symbolic link" in child.stderr
    assert load(folder / "kept.json").layers


def test_with_too_few_steps_the_error_names_the_required_number(folder: Path) -> None:
    child = profile(folder, "short.py")
    assert child.returncode == 2
    assert child.stderr.startswith("sonde: short.py gave no profile: the training ended after 4 steps")
    assert child.stdout.endswith("left\n")


@pytest.mark.parametrize(
    ("ending", "code", "message"),
    [
        ("print('hello')", 2, "sonde: other.py gave no profile: no training step was found"),
        ("raise ValueError('bad')", 1, "ValueError: bad\nsonde: other.py ended with"),
    ],
    ids=["trains-nothing", "raises"],
)
def test_a_script_that_never_trains_gets_an_explanation_and_an_error_keeps_its_exit_code(
    folder: Path, ending: str, code: int, message: str
) -> None:
    (folder / "other.py").write_text(ending)
    child = profile(folder, "other.py")
    assert child.returncode == code
    assert message in child.stderr
    assert "sonde/" not in child.stderr  # no frame of ours in the traceback


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "x.pdf", "train.py"], "x.pdf ends in none of .json, .html"),
        (["-o", "train.json", "train.py"], "train.json exists already"),
        (["-o", "nowhere/x.html", "train.py"], "there is no directory nowhere"),
        (["trian.py"], "Nearest: train.py"),
        (["--against", "none.json", "train.py"], "no profile can be read from none.json"),
        (["--steps", "0", "train.py"], "0 is not in the range"),
    ],
    ids=["suffix", "exists", "directory", "script", "against", "steps"],
)
def test_wrong_usage_is_rejected_before_the_script_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('started')")
    (tmp_path / "train.json").write_text("{}")
    with pytest.raises(SystemExit) as exited:
        main(["profile", *arguments])
    output = capsys.readouterr()
    assert (exited.value.code, output.out) == (2, "")
    assert output.err.startswith("sonde: ")
    assert message in output.err
